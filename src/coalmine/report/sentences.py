"""A result in plain words: what epsilon means, what the verdict says and covers, and what each term means."""

import math

from coalmine.audit.result import AuditResult
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import TableRow, top_row

ATTACKERS = {
    "final": "sees the final model",
    "final-update": "sees the final model and knows the initial one",
    "all-iterates": "sees every model delta",
    "unknown-round": "sees every release and knows everybody else, but not when the target took part: the adversary of the "
    "ε that accountants print",
    "known-round": "sees every model delta and knows in which rounds the target took part",
    "known-others": "also knows everybody else's updates: the attacker that differential privacy is about",
}

GLOSSARY = {
    "ε": "Epsilon, the privacy loss: how far one person's data can move what an attacker believes. 0 is nothing; each "
    "unit multiplies the odds by at most 2.7.",
    "δ": "Delta, the small chance with which the promise of ε may fail.",
    "canary": "A random direction that takes part in training as if it were a client. Whether it can be recognised "
    "afterwards shows what an attacker could learn of a real client.",
    "observed": "Canaries that took part in training.",
    "unobserved": "Canaries that took no part: they show what an absent one scores.",
    "presentations": "In how many rounds a canary took part. More rounds give more away.",
    "adversary": "An attacker, named for what they get to see. The list goes from weak to strong.",
    "score": "How strongly a canary is present in what the attacker sees: its cosine with it, in units of the spread that "
    "an absent canary would have.",
    "estimate": "The most likely ε, from a normal law fitted to the scores. It may lie above or below the true one: an "
    "estimate is never a bound. That of unknown-round is the accountant's ε at the measured noise.",
    "heuristic": "A number that does not have its stated coverage. Shown for comparison with the literature.",
    "valid bound": "The true ε of this attack is at least as large, with the stated confidence, under the assumptions "
    "stated beside it.",
    "interval": "Where the true ε lies with 95 % confidence, if the scores are normal.",
    "lower bound": "The true ε of this attack is at least as large, with 95 % confidence, whatever law the scores follow.",
    "floor": "95 % of estimates fall below this when nothing leaks. An estimate below it detects nothing.",
    "ceiling": "The largest lower bound that this audit could have reported.",
    "measured ε": "The estimate of the attacker on whom the verdict rests.",
    "analytical ε": "What the mathematics of the noise promises: no attack on a correct implementation finds more.",
    "client's ε": "The analytical ε of a real client. It differs from the canaries' where clients take part more often or "
    "less often than canaries do.",
    "claimed ε": "The ε that somebody promises, which the audit is to test.",
    "accountant's ε": "The ε that the trainer's own accountant computed. It counts on sampling to hide who takes part "
    "when, so it is smaller than the ε of an attacker who knows the rounds.",
    "amplified": "Made smaller by sampling: nobody outside knows in which rounds a person took part. An amplified ε holds "
    "for attackers who do not know it either.",
    "accounting": "One leg of an amplified claim: does the accountant give the claimed ε for the claimed noise and "
    "sampling?",
    "noise": "One leg of an amplified claim: did the rounds have the noise that the accountant counted on?",
    "sampling": "One leg of an amplified claim: did the pipeline pick people as the accountant assumed?",
    "adjacency": "Which two data sets the promise compares: with and without one person, with one person replaced by "
    "another, or with one person's update set to zero.",
    "upper bound": "The accountant's ε is at least the true one. Here the accountant is tight.",
    "range": "No tight accountant is known: the true ε lies between two numbers, and nobody knows where.",
    "privacy loss": "How much more likely the releases are if the person took part than if not, as a logarithm. An "
    "accountant computes ε from its two laws, for somebody who takes part and for somebody absent.",
    "paper's ε": "The estimate as One-shot Empirical Privacy Estimation for Federated Learning defines it.",
    "paper's ε_lo": "The lower end as the paper defines it. The best threshold is chosen after the fact, so it exceeds "
    "the true ε more often than the stated 5 %.",
    "Anderson–Darling": "A test of whether scores are normal. A p-value below 1 % says they are not: then trust the "
    "bound, not the interval.",
    "true positive rate": "Of the canaries that took part, how many the attacker recognises.",
    "false positive rate": "Of the canaries that took no part, how many the attacker accuses.",
    "gauge": "A direct measurement of the noise or of sampling, beside the canaries.",
    "limits": "An honest run stays within them, except for one in 10,000.",
    "noise left": "At most this share of the stated noise protects a client; computed where a gauge shows that noise is "
    "missing.",
    "checked": "The audit looked at this, and the verdict rests on it. Not checked: it could have been, and the last column "
    "says how. Cannot be checked: this audit has no way to see it.",
    "commitment": "A fingerprint of the secret seed, published before round 1. It lets others check afterwards that the "
    "canaries were not chosen to please.",
    "PASS": "Nothing contradicts the claim, no gauge is outside its limits, and this audit would have caught twice the "
    "claimed ε. It covers only what was checked.",
    "VIOLATION": "The claim is refuted: the training gives away more than was promised.",
    "UNDERPOWERED": "Nothing refutes the claim, but nothing confirms it either: the audit is too weak, a gauge is outside "
    "its limits, or something that the audit needs was not given.",
    "noise multiplier": "How much noise is added: its standard deviation over the largest size that one client's update "
    "may have.",
    "accuracy": "How often the trained model is right on examples that it has not seen.",
    "residual": "What is left of a round's release without the real clients and the canaries: the noise.",
}

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

QUESTIONS = {  # what each audited item asks
    "noise level": "Is there as much noise as stated?",
    "noise law": "Is it fresh Gaussian noise, in every coordinate and every round?",
    "clipping": "Is every update cut to the clip norm?",
    "weights": "Does any client count for more than a canary?",
    "tensors": "Does every tensor get its noise?",
    "sampler": "Are clients sampled as the accountant assumes?",
    "participations": "Did the canaries take part as often as the claim says a client does?",
    "others": "Is the given sum of the real clients what the rounds summed?",
}

UNDECIDED = {  # by the code of an UNDERPOWERED verdict
    "power": "this audit is too weak to confirm it",
    "weak": "this audit is too weak to confirm it",
    "gauge": "the noise does not look as stated, so the claim is not confirmed",
    "training": "nothing was trained, so the claim is not confirmed for a trained model",
    "others": "without the right sum of the real clients (`others`) the claim cannot be confirmed",
    "noise_std": "without the stated noise of every round the claim cannot be confirmed",
    "participations": "the claim does not say how often a client takes part",
    "stated": "the stated noise varies, and some rounds may have too little",
    "uneven": "the canaries did not all arrive alike, so the claim is not confirmed",
    "short": "the canaries arrived shorter than declared, so the claim is not confirmed",
    "undetected": "the canaries were not detected, so the claim is not confirmed",
    "constant": "there are too few canaries to judge it by",
    "no canaries": "no round with a canary was observed",
    "range": "nobody knows its exact ε under this sampling scheme",
    "sampler": "the sampler does not do what was claimed, and the ε of what it does is not known well enough",
    "sampler not observed": "nobody observed how the pipeline picks people",
    "unobserved": "some of the rounds that it speaks of were not observed",
    "divisor": "the sum is divided by the number of people who took part, which its accounting does not cover",
    "picks": "the sampler picked too few canaries to judge it by",
    "sampled power": "there are too few canaries to confirm the noise",
}


LEGS = {  # what each leg of an amplified claim asks
    "accounting": "Does the accountant give the claimed ε for the claimed noise and sampling?",
    "noise": "Did the rounds have the noise that the accountant counted on?",
    "sampling": "Did the pipeline pick people as the accountant assumed?",
}
REFUTED = {  # by the leg that refutes an amplified claim
    "accounting": "the claimed noise and sampling give more than the claimed ε = {claim}",
    "noise": "the rounds lack noise, so this training gives away more than the claimed ε = {claim}",
    "sampling": "people are not picked as claimed, so this training gives away more than the claimed ε = {claim}",
}


def shown(value: float | None) -> str:
    """A number as the report shows it.

    >>> shown(4.8926), shown(1e-6), shown(8.2e-7), shown(12345.6), shown(math.inf)
    ('4.89', '10⁻⁶', '8.2 · 10⁻⁷', '12,346', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    if 0 < abs(value) < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        factor = f"{float(digits):g}"
        return ("" if factor == "1" else f"{factor} · ") + "10" + str(int(exponent)).translate(RAISED)
    return "0" if value == 0 else f"{value:.3g}"


def percent(share: float) -> str:
    """A probability in words that never says 0 % or 100 % of what is neither.

    >>> percent(0.943), percent(0.99996), percent(0.00001)
    ('94 %', 'more than 99.9 %', 'less than 0.1 %')
    """
    if 0.999 < share < 1:
        return "more than 99.9 %"
    if 0 < share < 0.001:
        return "less than 0.1 %"
    digits = 1 if 0 < share < 0.01 or 0.99 < share < 1 else 0
    return f"{share * 100:.{digits}f} %"


def suspicion(prior: float, epsilon: float) -> float:
    """What a suspicion `prior` can grow to under epsilon: the odds times e^ε.

    >>> percent(suspicion(0.1, 5.0))
    '94 %'
    """
    grown = prior / (prior + (1 - prior) * math.exp(-epsilon))
    return grown if math.isinf(epsilon) else min(grown, math.nextafter(1, 0))  # only an infinite ε makes it certain


def meaning(epsilon: float, delta: float) -> str:
    """Epsilon in one plain sentence."""
    if math.isnan(epsilon):
        return "No ε could be read."
    if math.isinf(epsilon):
        return "ε is infinite: an attacker can be certain who took part."
    return (
        f"ε = {shown(epsilon)} means: an attacker who suspected with 10 % that somebody took part can end up with "
        f"{percent(suspicion(0.1, epsilon))}, and one who thought it even odds with {percent(suspicion(0.5, epsilon))} "
        f"(but for a chance of δ = {shown(delta)})."
    )


def verdict_sentence(run: Run) -> str:
    """What the audit came to, in one sentence."""
    result, top = run.result, top_row(run.result)
    if result.claim is not None and result.verdict is not None:
        claim, outcome = shown(result.claim.epsilon), result.verdict.outcome
        if outcome == "PASS" and result.legs:
            return (
                f"PASS: accounting, noise and sampling all support the claimed ε = {claim}, and this audit would have "
                "caught twice as much."
            )
        if outcome == "PASS":
            return f"PASS: nothing contradicts the claimed ε = {claim}, and this audit would have caught twice as much."
        if outcome == "VIOLATION":
            why = REFUTED.get(result.verdict.leg or "", "this training gives away more than the claimed ε = {claim}")
            return f"VIOLATION: {why.format(claim=claim)}."
        why = UNDECIDED.get(result.verdict.code, "this audit cannot confirm it")
        return f"UNDERPOWERED: nothing refutes the claimed ε = {claim}, but {why}."
    if top is None:
        return "Nothing was claimed, and no attacker could be tried: there is no result."
    start = "Nothing was claimed, so there is no verdict" if run.finished else _why_unfinished(run)
    if not top.detected:
        return f"{start}: nothing was detected, and {top.canaries:,} canaries cannot see below ε = {shown(top.floor)}."
    return f"{start}: {top.rung} measures ε = {shown(top.epsilon)}{whose(top)}."


def whose(row: TableRow) -> str:
    """Whose ε a row is, to be put after the number."""
    if row.presentations is None:
        return ""
    return f" for somebody who takes part in {rounds_of(row.presentations)}"


def rounds_of(count: int) -> str:
    """A number of rounds in words.

    >>> rounds_of(1), rounds_of(1500)
    ('1 round', '1,500 rounds')
    """
    return "1 round" if count == 1 else f"{count:,} rounds"


def scope_sentence(result: AuditResult) -> str:
    """What a PASS covers and what it does not; empty without a PASS, or a list of what was audited."""
    passed = result.verdict is not None and result.verdict.outcome == "PASS"
    return result.scope if passed and result.audited else ""


def shortened(text: str, most: int = 300) -> str:
    """A text that fits a few lines: cut between two of its words, with dots for the rest.

    >>> shortened("so do the gauges noise, residual and repeat", 30)
    'so do the gauges noise, …'
    """
    if len(text) <= most:
        return text
    return f"{text[:most].rpartition(' ')[0]} …"


def assumptions(row: LiteratureRow) -> str:
    """What a published estimator assumes, or why it does not apply."""
    return row.assumptions if row.needs is None else f"not applicable: {row.needs}"


def interval_words(row: TableRow) -> str:
    """The interval in brackets, or nothing."""
    return "" if row.interval is None else f" (95 % interval {interval_text(row.interval)})"


def interval_text(interval: tuple[float, float] | None) -> str:
    """An interval as tables show it."""
    return "none" if interval is None else f"{shown(interval[0])} … {shown(interval[1])}"


def _why_unfinished(run: Run) -> str:
    return "Its result.json cannot be read" if run.has_result_file else "The run is not finished"
