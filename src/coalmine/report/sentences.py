"""Sentences on epsilon and the verdict, and a glossary."""

import math

from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.report.brief import headline
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import TableRow, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_interval, format_number, format_rounds

ATTACKERS = {
    "final": "sees the final model",
    "final-update": "sees the final model and knows the initial one",
    "all-iterates": "sees every model delta",
    "unknown-round": "sees every release and knows everybody else's updates, but not in which rounds the target took part: "
    "the attacker whose ε accountants compute",
    "known-round": "sees every model delta and knows in which rounds the target took part",
    "known-others": "also knows everybody else's updates: the attacker that differential privacy protects against",
}

GLOSSARY = {
    "ε": "Epsilon, the privacy loss: how far one person's data can move what an attacker believes. 0 means not at "
    "all; each unit multiplies the odds by at most 2.7.",
    "δ": "Delta, the small probability with which the guarantee of ε may fail.",
    "canary": "A random direction that takes part in training as if it were a client. Whether it can be recognised "
    "afterwards shows what an attacker could learn about a real client.",
    "observed": "Canaries that took part in training.",
    "unobserved": "Canaries that took no part. They show which scores an absent canary gets.",
    "presentations": "The number of rounds in which a canary took part. More rounds give more away.",
    "adversary": "An attacker, named for what they get to see. The list goes from weak to strong.",
    "score": "How strongly a canary is present in what the attacker sees: the cosine between the two, in "
    "standard deviations of an absent canary's cosine.",
    "estimate": "The most likely ε, from a normal law fitted to the scores. It may lie above or below the true ε: an "
    "estimate is never a bound. For unknown-round it is the accountant's ε at the measured noise.",
    "heuristic": "A number that does not have its stated coverage. Shown for comparison with the literature.",
    "valid bound": "The true ε of this attack is at least as large, with the stated confidence, under the assumptions "
    "stated beside it.",
    "interval": "The range that contains the true ε with 95 % confidence, if the scores are normal.",
    "lower bound": "The true ε of this attack is at least as large, with 95 % confidence, whatever law the scores follow.",
    "bound if Gaussian": "The true ε of this attack is at least as large, with 95 % confidence, if the noise is Gaussian. "
    "It is withheld where a measurement of the noise contradicts that, or where its law was not measured.",
    "floor": "95 % of estimates fall below this when nothing leaks. An estimate below it detects nothing.",
    "ceiling": "The largest lower bound that this audit could have reported.",
    "measured ε": "The estimate of the attacker on whom the verdict rests.",
    "analytical ε": "The ε that theory guarantees for the stated noise: no attack on a correct implementation finds more.",
    "client's ε": "The analytical ε of a real client. It differs from the canaries' where clients take part more often or "
    "less often than canaries do.",
    "claimed ε": "The promised ε, which the audit tests.",
    "accountant's ε": "The ε that the trainer's own accountant computed. It relies on sampling to hide who takes part in "
    "which round, so it is smaller than the ε of an attacker who knows the rounds.",
    "amplified": "Made smaller by sampling: nobody outside knows in which rounds a person took part. An amplified ε holds "
    "only against attackers who do not know these rounds.",
    "accounting": "One part of an amplified claim: does the accountant give the claimed ε for the claimed noise and "
    "sampling?",
    "noise": "One part of an amplified claim: did the rounds have the noise that the accountant assumed?",
    "sampling": "One part of an amplified claim: did the pipeline pick people as the accountant assumed?",
    "adjacency": "Which two data sets the promise compares: with and without one person, with one person replaced by "
    "another, or with one person's update set to zero.",
    "upper bound": "The accountant's ε is at least the true ε. Here the accountant is tight.",
    "range": "No tight accountant is known: the true ε lies between two numbers, and nobody knows where.",
    "privacy loss": "How much more likely the releases are if a person took part than if they did not, as a logarithm. An "
    "accountant computes ε from its two laws: for a person who takes part and for an absent one.",
    "paper's ε": "The estimate as One-shot Empirical Privacy Estimation for Federated Learning defines it.",
    "paper's ε_lo": "The lower end as the paper defines it. The best threshold is chosen after the fact, so it exceeds "
    "the true ε more often than the stated 5 %.",
    "Anderson–Darling": "A test of whether scores are normal. A p-value below 1 % says they are not: then trust the "
    "bound, not the interval.",
    "true positive rate": "The share of the canaries that took part which the attacker recognises.",
    "false positive rate": "The share of the canaries that took no part which the attacker mistakes for participants.",
    "gauge": "A direct measurement of the noise or of sampling, beside the canaries.",
    "limits": "The range in which a gauge stays in an honest run. At most one honest run in 10,000 leaves it.",
    "noise left": "At most this share of the stated noise protects a client; computed where a gauge shows that noise is "
    "missing.",
    "checked": "The audit looked at this, and the verdict rests on it. Not checked: it could have been, and the last column "
    "says how. Cannot be checked: this audit has no way to see it. Failed: the trainer's integration saw that it "
    "is not as claimed.",
    "commitment": "A fingerprint of the secret seed, published before round 1. It lets others check afterwards that the "
    "canaries were not chosen to get a good result.",
    "PASS": "Nothing contradicts the claim, no gauge is outside its limits, and this audit would have detected twice the "
    "claimed ε. It covers only what was checked.",
    "VIOLATION": "The claim is refuted: the training gives away more than was promised.",
    "UNDERPOWERED": "Nothing refutes the claim, but nothing confirms it either: the audit is too weak, a gauge is outside "
    "its limits, or something that the audit needs was not given.",
    "noise multiplier": "The amount of noise: its standard deviation divided by the largest norm that one client's "
    "update may have.",
    "accuracy": "How often the trained model is right on examples that it has not seen.",
    "residual": "A round's release minus the real clients and the canaries: the noise.",
}

QUESTIONS = {  # by audited item
    "noise level": "Is there as much noise as stated?",
    "noise law": "Is it fresh Gaussian noise, in every coordinate and every round?",
    "clipping": "Is every update clipped to the clip norm?",
    "weights": "Does any client count for more than a canary?",
    "tensors": "Does every tensor get its noise?",
    "sampler": "Are clients sampled as the accountant assumes?",
    "participations": "Did the canaries take part as often as the claim says a client does?",
    "others": "Does others match the sum of the real clients in each round?",
    "rows": "Does a real client move the sum by at most the clip norm, and nothing else?",
    "records": "Do the model's outputs tell which records were in its training data?",
}

LEGS = {  # the question of each part of an amplified claim
    "accounting": "Does the accountant give the claimed ε for the claimed noise and sampling?",
    "noise": "Did the rounds have the noise that the accountant assumed?",
    "sampling": "Did the pipeline pick people as the accountant assumed?",
}


def percent(share: float) -> str:
    """A probability in per cent. It says 0 % and 100 % only if they are exact.

    >>> percent(0.943), percent(0.99996), percent(0.00001)
    ('94 %', 'more than 99.9 %', 'less than 0.1 %')
    """
    if 0.999 < share < 1:
        return "more than 99.9 %"
    if 0 < share < 0.001:
        return "less than 0.1 %"
    digits = 1 if 0 < share < 0.01 or 0.99 < share < 1 else 0
    return f"{share * 100:.{digits}f} %"


def posterior(prior: float, epsilon: float) -> float:
    """The largest posterior probability that an attacker with this prior can reach: epsilon multiplies the odds by e^ε.

    >>> percent(posterior(0.1, 5.0))
    '94 %'
    """
    belief = prior / (prior + (1 - prior) * math.exp(-epsilon))
    return belief if math.isinf(epsilon) else min(belief, math.nextafter(1, 0))  # only an infinite ε gives certainty


def meaning(epsilon: float, delta: float) -> str:
    """The meaning of epsilon in plain words."""
    if math.isnan(epsilon):
        return "No ε could be measured."
    if math.isinf(epsilon):
        return "ε is infinite: an attacker can be certain who took part."
    return (
        f"ε = {format_number(epsilon)} means: an attacker who suspects with 10 % probability that somebody took part can "
        f"end up with {percent(posterior(0.1, epsilon))}. One who starts at 50 % can end up with "
        f"{percent(posterior(0.5, epsilon))}. This may fail with probability δ = {format_number(delta)}."
    )


def run_sentence(run: Run) -> str:
    """The outcome of a run in one sentence: its verdict, or why there is none and what was measured so far."""
    words, top = Words.of(run.result), top_row(run.result)
    if run.finished:
        return words.say(headline(run.result))
    start = "Its result.json cannot be read" if run.has_result_file else "The run is not finished"
    if top is None:
        return f"{start}, and no attack could be evaluated."
    if not top.detected:
        floor = format_number(top.floor)
        return f"{start}: nothing was detected, and {top.canaries:,} canaries cannot see below ε = {floor}."
    return words.say(f"{start}: {top.rung} measures ε = {format_number(top.epsilon)}{participation_words(top)}.")


def participation_words(row: TableRow) -> str:
    """For how many rounds the ε of a row holds, as words that follow the number; empty if it is not known."""
    if row.presentations is None:
        return ""
    return f" for somebody who takes part in {format_rounds(row.presentations)}"


def scope_sentence(result: AuditResult) -> str:
    """The items that a PASS covers, and those that it does not; empty without a PASS or without audited items."""
    passed = result.verdict is not None and result.verdict.outcome == "PASS"
    return result.scope if passed and result.audited else ""


def shorten(text: str, most: int = 300) -> str:
    """The text, cut between two words if it is longer than `most` characters; an ellipsis marks the cut.

    >>> shorten("so do the gauges noise, residual and repeat", 30)
    'so do the gauges noise, …'
    """
    if len(text) <= most:
        return text
    return f"{text[:most].rpartition(' ')[0]} …"


def assumptions(row: LiteratureRow) -> str:
    """The assumptions of a published estimator, or why it does not apply."""
    return row.assumptions if row.needs is None else f"not applicable: {row.needs}"


def interval_words(row: TableRow) -> str:
    """The interval in brackets; empty without one."""
    return "" if row.interval is None else f" (95 % interval {format_interval(row.interval)})"
