"""A result in plain words: what epsilon means, what the verdict says, what to do next, and what each term means."""

import importlib
import math
import re
from collections.abc import Mapping
from typing import Any

from coalmine.report.findings import Finding, Findings
from coalmine.report.run import Run

ATTACKERS = {
    "final": "sees the final model",
    "final-update": "sees the final model and knows the initial one",
    "all-iterates": "sees every model delta",
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
    "adversary": "An attacker, named for what he gets to see. Each in the list sees more than the one before.",
    "score": "How strongly a canary is present in what the attacker sees: its cosine with it, in units of the spread that "
    "an absent canary would have.",
    "estimate": "The most likely ε, from a normal law fitted to the scores. It may lie above or below the true one: an "
    "estimate is never a bound.",
    "heuristic": "A number with a name that promises more than it keeps. Shown for comparison with the literature.",
    "valid bound": "The true ε of this attack is at least as large, with the stated confidence, if what stands beside it "
    "is so.",
    "interval": "Where the true ε lies with 95 % confidence, if the scores are normal.",
    "lower bound": "The true ε of this attack is at least as large, with 95 % confidence, whatever law the scores follow.",
    "floor": "What as many canaries read in 95 of 100 runs when nothing leaks at all. An estimate below it detects "
    "nothing.",
    "ceiling": "The most that the lower bound could have said with as many canaries.",
    "analytical ε": "What the mathematics of the noise promises: no attack on a correct implementation finds more.",
    "claimed ε": "The ε that somebody promises, which the audit is to test.",
    "paper's ε": "The estimate as One-shot Empirical Privacy Estimation for Federated Learning defines it.",
    "paper's ε_lo": "The lower end as the paper defines it. The best threshold is chosen after the fact, so it is above "
    "the true ε more often than the 5 % that it promises.",
    "Anderson–Darling": "A test of whether scores are normal. A p-value below 1 % says they are not: then trust the "
    "bound, not the interval.",
    "true positive rate": "Of the canaries that took part, how many the attacker recognises.",
    "false positive rate": "Of the canaries that took no part, how many the attacker accuses.",
    "gauge": "A direct reading of the noise in each round, beside the canaries.",
    "limits": "What an honest run keeps to, but for one in 10,000.",
    "commitment": "A fingerprint of the secret seed, published before round 1. It lets others check afterwards that the "
    "canaries were not chosen to please.",
    "PASS": "Nothing contradicts the claim, and this audit would have caught twice the claimed ε.",
    "VIOLATION": "The claim is refuted: the training gives away more than was promised.",
    "UNDERPOWERED": "Nothing contradicts the claim, but this audit could not have caught twice the claimed ε either.",
    "noise multiplier": "How much noise is added: its standard deviation over the largest size that one client's update "
    "may have.",
    "accuracy": "How often the trained model is right on examples that it has not seen.",
}

RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
GAUGE_ADVICE = {
    "noise": "the noise added is smaller than claimed",
    "residual": "what is left without the clients is not the claimed noise",
    "difference": "the noise is too small, or the same noise is used in every round",
    "repeat": "noise of one round comes back in the next",
    "repeat of any": "noise of earlier rounds comes back",
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
    return prior / (prior + (1 - prior) * math.exp(-epsilon))


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
    findings, strongest = run.findings, run.findings.strongest
    claim = shown(findings.claimed)
    if findings.verdict == "PASS":
        return f"PASS: nothing contradicts the claimed ε = {claim}, and twice as much would have been caught."
    if findings.verdict == "VIOLATION":
        return f"VIOLATION: this training gives away more than the claimed ε = {claim}."
    if findings.verdict == "UNDERPOWERED":
        return f"UNDERPOWERED: nothing contradicts the claimed ε = {claim}, but this audit is too weak to confirm it."
    if strongest is None:
        return "Nothing was claimed, and no attacker could be tried: there is no result."
    start = "Nothing was claimed, so there is no verdict" if run.finished else _why_unfinished(run)
    if not strongest.detected:
        return (
            f"{start}: nothing was detected, and {strongest.canaries:,} canaries cannot see below ε = "
            f"{shown(strongest.floor)}."
        )
    most = findings.most_presented
    whom = "" if most is None else f" off the canaries that came {strongest.presentations}×"
    return (
        f"{start}: the strongest attacker, {strongest.rung}, reads ε = {shown(strongest.epsilon)}"
        f"{interval_words(strongest)}{whom}; it is at least {shown(strongest.lower_bound)}.{_of_the_most(most)}"
    )


def _of_the_most(row: Finding | None) -> str:
    """What those who came most often give away, where the headline is of others."""
    if row is None:
        return ""
    return (
        f" Off those that came {row.presentations}× it reads ε = {shown(row.epsilon)}{interval_words(row)}, at least "
        f"{shown(row.lower_bound)}."
    )


def interval_words(row: Finding) -> str:
    """The interval in brackets, or nothing."""
    if row.interval is None:
        return ""
    low, high = row.interval
    return f" (95 % interval {shown(low)} to {shown(high)})"


def _why_unfinished(run: Run) -> str:
    return "Its result.json cannot be read" if run.has_result_file else "The run is not finished"


def _to_finish(run: Run) -> str:
    if run.has_result_file:
        return (
            f"Its result.json cannot be read: restore it from a copy, or remove it and see what {run.path} still holds."
        )
    if "task" in run.config:
        return f"The run is not finished: `coalmine resume {run.path}` goes on with it."
    return "The run is not finished: its own trainer goes on with it, where it left off or from the beginning."


def next_steps(run: Run) -> list[str]:
    """What to do next, most pressing first."""
    findings = run.findings
    steps = [] if run.finished else [_to_finish(run)]
    if findings.verdict == "VIOLATION":
        steps += _after_violation(findings)
    elif findings.verdict == "UNDERPOWERED":
        steps.append(_after_underpowered(findings))
    elif findings.verdict == "PASS":
        steps.append(
            "Keep this report with the model. PASS speaks of the noise and the clip of this run; an ε that sampling "
            "amplifies rests on the accountant."
        )
    elif findings.verdict is None and run.finished:
        steps.append(_after_no_claim(findings))
    strongest = findings.strongest
    if strongest is not None and not strongest.detected:
        steps.append(
            f"Nothing was detected by {strongest.rung}; this k = {strongest.canaries:,} cannot see below ε = "
            f"{shown(strongest.floor)}. More canaries lower that floor: `coalmine plan --detect` says how many."
        )
    if strongest is not None and strongest.rung != "known-others":
        steps.append(
            f"The strongest attacker here is {strongest.rung}. Give the audit the real clients' sum (`others`) as well: "
            "then known-others shows what differential privacy is about."
        )
    rounds, shown_times = findings.raw.get("client_rounds"), findings.raw.get("presentations")
    client_epsilon = findings.raw.get("client_epsilon")
    if (
        isinstance(rounds, int)
        and isinstance(shown_times, int)
        and isinstance(client_epsilon, float)
        and rounds > shown_times
    ):
        exact = findings.raw.get("client_exposure") == "most exposed"
        who = "The client who comes most often takes part in" if exact else "A client takes part in about"
        steps.append(
            f"{who} {rounds} rounds of this run, a canary in {shown_times}: the client's analytical ε is "
            f"{shown(client_epsilon)}."
        )
    if findings.raw.get("secret_seed") is False:
        steps.append(
            "The canaries' seed is the demo's and no secret. An audit that others are to trust needs its own: "
            "`coalmine seed FILE`, then `--seed-file FILE`."
        )
    steps += [
        f"The {gauge.name} gauge left its limits in {len(gauge.flagged)} rounds: more noise than claimed, or another "
        "signal in what was taken for noise. Privacy does not suffer; accuracy may."
        for gauge in findings.gauges
        if gauge.status == "warning"
    ]
    return steps


def _after_violation(findings: Findings) -> list[str]:
    rungs = [rung for rung, verdict in findings.verdicts.items() if verdict == "VIOLATION"]
    low = [gauge for gauge in findings.gauges if gauge.status == "low"]
    seen = []
    if rungs:
        seen.append(f"by {', '.join(rungs)}")
    if low:
        seen.append(f"by the gauge{'s' * (len(low) > 1)} {', '.join(gauge.name for gauge in low)}")
    steps = [
        f"Do not release this model under the claimed ε. The claim is refuted {' and '.join(seen)}." if seen else ""
    ]
    faults = likely_faults(findings.raw)
    if faults:
        steps += [f"Likely: {fault}" for fault in faults]
    else:
        advice = dict.fromkeys(_gauge_advice(gauge.name) for gauge in low)
        steps += [f"Likely: {text}." for text in advice if text]
        steps.append(
            "Look where noise and clip meet: is every update clipped before the average, is the noise's std the noise "
            "multiplier times the clip norm in the units in which it is added, is it new in every round and on every "
            "coordinate, and is it added before the server's optimiser?"
        )
    return [step for step in steps if step]


def _gauge_advice(name: str) -> str:
    if name.startswith("layer "):
        return f"the noise is missing or too small in {name}"
    return GAUGE_ADVICE.get(name, "")


def likely_faults(result: Mapping[str, Any]) -> list[str]:
    """What is likely wrong, by the signatures of known faults; none where no signatures are at hand."""
    try:
        signatures = importlib.import_module("coalmine.audit.signatures")
        return [f"{fault.title}. {fault.meaning} {fault.mend}" for fault in signatures.likely_faults(result)]
    except (ImportError, AttributeError, KeyError):
        return []


def _after_underpowered(findings: Findings) -> str:
    decides = re.search(r"([\d,]+) canaries would decide", findings.reason)
    if decides:
        return (
            f"Audit again with {decides[1]} canaries: so many would decide the claim (this run had "
            f"{findings.canaries:,})."
        )
    if findings.reason.startswith("the mean score"):  # then more of them would not help
        return f"Find out first why the canaries are not heard: {findings.reason}."
    return f"What would decide: {findings.reason}."


def _after_no_claim(findings: Findings) -> str:
    if findings.raw.get("if_analytical_were_claimed"):
        hypothetical = findings.raw["if_analytical_were_claimed"]
        if isinstance(hypothetical, Mapping):
            return (
                f"Had the analytical ε = {shown(findings.analytical)} been claimed, the verdict were "
                f"{hypothetical.get('verdict')}: {hypothetical.get('reason')}. Claim it with `--claim analytical`."
            )
    return "Give the ε that you promise as a claim (`--claim`, or `audit.result(claim=…)`) to get a verdict on it."
