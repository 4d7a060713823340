"""Turns a verdict's facts into a sentence."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from coalmine.estimators.sampler_tests import MEANING
from coalmine.evidence.gauges.gauge import MOVED, TRAINED, meaning_of

if TYPE_CHECKING:
    from coalmine.verdict.verdict import Verdict

NAMED = 4  # most gauges and rungs that a reason lists
CLOSE = 10.0  # a p-value this many times below its level is close to it
FLIPPED = -4.0  # standard deviations below which no noise explains the mean score


def reason(verdict: "Verdict") -> str:
    """The reason for a verdict in one sentence; the deciding rung comes first."""
    start = f"{verdict.rung}: " if verdict.rung and verdict.outcome != "UNDERPOWERED" else ""
    if verdict.outcome == "VIOLATION":
        also = verdict.evidence
        more = f" and {len(also) - NAMED} more" if len(also) > NAMED else ""
        also_refuted = f"; also {', '.join(also[:NAMED])}{more}" if also else ""
        return start + _refuted(verdict) + also_refuted + _close_call(verdict)
    return start + _undecided(verdict) if verdict.outcome == "UNDERPOWERED" else start + _passed(verdict)


def _close_call(v: "Verdict") -> str:
    """Advice if p lies within a factor of 10 of its level, as it does in the rare honest runs that are called VIOLATION."""
    if v.p_value is None or v.level is None or not v.level / CLOSE <= v.p_value < v.level:
        return ""
    return f". p lies just under its level of {v.level:.1g}: repeat with another seed to exclude chance"


def times_of(number: int) -> str:
    """How often, in words."""
    return "once" if number == 1 else f"{number} times"


def _passed(v: "Verdict") -> str:
    if v.code in PASSED:
        return PASSED[v.code](v)
    if v.detectable_epsilon is not None:
        return f"the attack measures no more than claimed, and {_detectable(v)}"
    times = "" if v.participations is None else f" for a client that takes part {times_of(v.participations)}"
    return f"no excess{times}, and twice the claim would have been detected with probability {v.power:.1%}"


def _detectable(v: "Verdict") -> str:
    return f"an epsilon of {v.detectable_epsilon:.3g} or more would have been detected with probability {v.power:.0%}"


def _refuted(v: "Verdict") -> str:
    if v.code == "less noise":
        inner = _refuted(replace(v, code=v.detail or ""))
        return f"nothing was claimed, but there is less noise than the rounds state: {inner}"
    if v.code in REFUTED:
        return REFUTED[v.code].format(v=v)
    if v.code == "accounting":
        return f"{_accounted(v)}, more than the claimed {v.claimed_epsilon:.4g}"
    if v.code == "sampler":
        low, _ = v.epsilon_range or (0.0, 0.0)
        return f"{_sampler(v)}. That has an epsilon of at least {low:.3g}, above the claimed {v.claimed_epsilon:.4g}"
    if v.code == "bound":
        compared = f"lies above the claimed {v.claimed_epsilon:.3g}"
        if v.participations is not None:  # the claim's own client may take part more or less often
            client = f"a client that takes part {times_of(v.participations)}"
            compared = f"lies above the {v.claimed_epsilon:.3g} that the claim implies for {client}"
        return f"the lower bound {v.lower_bound:.3g} at {min(v.confidence or 0, 0.9999):.2%} confidence {compared}"
    if v.code == "evidence":
        measured = (
            ""
            if v.measured_noise is None
            else f" (noise multiplier about {v.measured_noise:.3g}, not {v.claimed_noise:.3g})"
        )
        return (
            f"the scores so far are {_many(v.odds or 0.0)} times likelier with less noise than claimed{measured}; a true "
            f"claim reaches {1 / (v.level or 1):.0f} times in at most {v.level:.1%} of runs, however often it is checked"
        )
    if v.code == "mean":
        compared = f"above the {v.claimed_score:.3f} that the claim implies"
        return f"mean score per presentation {v.score:.3f}, {compared} (p = {v.p_value:.1g})"
    if v.code == "round":
        return (
            f"mean score {v.score:.3f} in round {v.first_round}, above the {v.claimed_score:.3f} that its noise implies "
            f"(p = {v.p_value:.1g}; the level is {v.level:.1g}, since many rounds are tested)"
        )
    if v.code == "composed":
        return (
            f"with the most noise that the scores allow in each round, epsilon is at least {v.epsilon:.3g}, above the "
            f"claimed {v.claimed_epsilon:.4g}"
        )
    if v.code == "stated":
        return _stated(v)
    where = f" in {v.rounds} rounds, first in round {v.first_round}" if v.rounds else ""
    text = f"the {_gauge(v)} left {_limits(v)}{where}"
    if v.noise_left is None:
        return f"{text}: the attacker can remove the noise"
    return (
        f"{text}: at most {v.noise_left:.3g} of the stated noise protects a client, which means an epsilon of at least "
        f"{v.epsilon:.3g}"
    )


def _stated(v: "Verdict") -> str:
    if v.scheme is not None:
        return (
            f"the noise that the rounds state composes to an epsilon of {v.epsilon:.4g} for {v.scheme}, above the claimed "
            f"{v.claimed_epsilon:.4g}"
        )
    return (
        f"the stated noise multiplier is {v.measured_noise:.4g} in the rounds with the least noise, where the claim "
        f"needs {v.claimed_noise:.4g}: a client in those rounds has an epsilon of {v.epsilon:.3g}"
    )


def _many(times: float) -> str:
    return f"{times:,.0f}" if times < 1e6 else f"{times:.0e}".replace("e+", "e")


def _gauge(v: "Verdict") -> str:
    return f"{v.gauge} gauge ({meaning_of(v.gauge or '')})"


def _limits(v: "Verdict") -> str:
    if v.limits is None:
        raise ValueError("a gauge that decides has a reading and limits")
    return f"{v.limits[0]:.4g} … {v.limits[1]:.4g}"


def _told_apart(reading: tuple[float, float], limits: tuple[float, float]) -> tuple[str, str]:
    """A reading and its limits in as many digits as it takes to see that the reading lies outside."""
    for digits in (4, 6, 9, 17):
        (smallest, largest), (low, high) = ([f"{value:.{digits}g}" for value in ends] for ends in (reading, limits))
        if float(smallest) < float(low) or float(largest) > float(high):
            break
    return smallest if smallest == largest else f"{smallest} … {largest}", f"{low} … {high}"


def _undecided(v: "Verdict") -> str:
    if v.code in SENTENCES:
        return SENTENCES[v.code].format(v=v)
    return {
        "gauge": _alarm,
        "training": _untrained,
        "pipeline": _failed,
        "others": _others,
        "noise_std": _noise_std,
        "power": _too_weak,
        "undetected": _undetected,
        "constant": _constant,
        "no closed form": _no_closed_form,
        "range": _range,
        "sampler": _unclear_sampler,
        "picks": _few_picks,
        "sampled power": _weak_noise,
    }[v.code](v)


REFUTED = {
    "silent": "{v.factor:.0%} of the coordinates to which no client contributes are released without noise: any other value "
    "there shows that a client contributed (p = {v.p_value:.1g})",
    "client": "one client contributes {v.score:.3g} standard deviations of the noise, more than the {v.claimed_score:.3f} "
    "that the claim implies (p = {v.p_value:.1g}, corrected for the number of clients)",
}
SENTENCES = {
    "sampler not observed": "the pipeline's own sampler was not observed, so the rounds of clients are unknown: let the "
    "canaries take part when the sampler picks them, and pass sampler_observed=True in the claim",
    "divisor": "a client's contribution shrinks as more take part, so the sum is divided by their number: the accounting of "
    "{v.scheme} holds for a fixed divisor, such as the expected number",
    "unobserved": "{v.rounds} of the rounds that the claim speaks of were not observed, and nothing is known of noise and "
    "sampling in them: observe every round, or claim for the number of rounds that there were",
    "noise follows data": "the noise is {v.factor:.3g} times as large when the clients' updates have other norms: it "
    "depends on the data, and the accounting assumes that it does not",
    "shrunk": "updates within the clip norm arrive at {v.length:.2g} of their norm when others are long: one client decides "
    "how much the others count, so one client's effect is not bounded by the clip norm",
    "no claim": "nothing was claimed, so nothing can pass: state the epsilon before training, for example claim=3.0",
    "no canaries": "no round with a canary in it was observed, so the noise is unknown",
    "hidden": "nothing refutes the claim, but real updates could hide missing noise, so these scores cannot confirm it",
    "weak": "nothing refutes the claim, but this attacker is too weak to confirm it",
    "participations": "the claim does not say how often a client takes part, and neither does the audit's schedule, as the "
    "pattern is your own or rounds were not observed (at most {v.participations} presentations were): claim with "
    "Claim(epsilon={v.claimed_epsilon:.4g}, participations=…)",
    "stated": "the stated noise varies: a client in the rounds with the least noise has a noise multiplier of "
    "{v.measured_noise:.3g}, where the claim needs {v.claimed_noise:.3g}. Pass clip_norm in the units of model_delta to "
    "decide this",
    "weak rounds": "the scores show less noise than stated in {v.rounds} rounds, first in round {v.first_round} (p = "
    "{v.p_value:.1g}; the level is {v.level:.1g}). With the noise that they measure, epsilon is {v.epsilon:.3g}, and the "
    "claim is {v.claimed_epsilon:.4g}",
    "uneven": "the canaries' scores spread {v.spread:.3g} times as much as if all canaries counted equally (limit "
    "{v.most_spread:.3g}): some were lost or count for more. If the others are complete, about {v.canaries_lost} of "
    "{v.canaries} did not arrive",
    "short": "the canaries arrive at {v.length:.3g} of the declared clip norm (standard error {v.length_error:.2g}): they "
    "were lost or shortened on the way, or clip_norm is not in the units of model_delta",
}


def _alarm(v: "Verdict") -> str:
    if v.reading is None:
        raise ValueError("a gauge that decides has a reading and limits")
    smallest, largest = v.reading
    if v.gauge == "rounding":
        return (
            f"rounding the release makes up {largest:.0%} of the residual's variance, so the law of the noise cannot be "
            "measured: pass model_delta before rounding"
        )
    if v.length is not None:
        return (
            f"the residual is {v.length:.3g} times as long as the stated noise: there is more noise than stated, or the "
            "rounds summed more than the canaries and `others`, as where a clip does not bound every update. What "
            "`others` lacks could hide missing noise, so this is not a PASS"
        )
    where = f", first in round {v.first_round}" if v.first_round is not None else ""
    span, limits = _told_apart((smallest, largest), v.limits or (0.0, 0.0))
    more = f" and {len(v.evidence) - NAMED} more" if len(v.evidence) > NAMED else ""
    also = f" Also outside their limits: {', '.join(v.evidence[:NAMED])}{more}." if v.evidence else ""
    return (
        f"the {_gauge(v)} reads {span}, outside {limits}{where}: the residual is not independent Gaussian noise of the "
        f"stated level.{also}"
    )


def _untrained(v: "Verdict") -> str:
    if v.gauge == MOVED:
        return (
            "nothing refutes the claim, but no weight moved from the first round to the last: nothing was trained, so this "
            "is not a PASS for a trained model. Check that the optimizer holds this model's parameters, that they require "
            "gradients, and that the learning rate is above 0"
        )
    if v.gauge == TRAINED:
        return (
            "nothing refutes the claim, but the layers that received a gradient never moved, and noise alone moved the "
            "others, so this is not a PASS for a trained model. Check the learning rate of each group of parameters"
        )
    return (
        "nothing refutes the claim, but no layer received a gradient in any round: noise alone moved the weights, so this "
        "is not a PASS for a trained model. Check that the loss depends on the parameters that the optimizer holds"
    )


def _failed(v: "Verdict") -> str:
    return f"nothing refutes the claim, but the pipeline differs from it ({v.item}): {v.detail}"


def _others(v: "Verdict") -> str:
    if v.factor is not None:
        scale = f"{1 / v.factor:.3g} times" if v.factor > 0 else "unlike"
        return (
            f"`others` is not what the rounds summed: it is {scale} the real clients' part, so no verdict can be based on "
            "it. If you pass `others`, pass the clipped sum of the real clients, divided by the same n and scaled by the "
            "same server learning rate as model_delta; if the pipeline computes it, its clip is not the stated one"
        )
    if v.rounds is not None:
        return _lacking(v.rounds, "`others`")
    if v.correlated:
        return (
            "nothing refutes the claim, but this attacker does not undo the noise's correlation: known-others (pass "
            "`others`) can confirm it"
        )
    return (
        "nothing refutes the claim, but real updates could hide missing noise: pass `others`, or the largest number "
        "of `clients` in a round"
    )


def _noise_std(v: "Verdict") -> str:
    if v.rounds is not None:
        return _lacking(v.rounds, "noise_std")
    return (
        "nothing refutes the claim, but updates missing from `others` could hide missing noise: pass noise_std in "
        "every round"
    )


def _lacking(rounds: int, name: str) -> str:
    return (
        f"{rounds} observed rounds lack {name}: the noise in them is unknown. Pass both in every round, also in "
        "rounds without canaries"
    )


def _too_weak(v: "Verdict") -> str:
    if v.detectable_epsilon is not None:
        return (
            f"only {_detectable(v)}"
            if v.detectable_epsilon < math.inf
            else "the scores are too few to detect any epsilon"
        )
    detected = f"twice the claim would have been detected with probability {v.power:.1%} only"
    if v.canaries_needed is not None:
        return f"{detected}; {v.canaries_needed:,} canaries would decide, {v.canaries:,} took part"
    if v.rung == "known-round":
        return (
            f"{detected}; no number of canaries would, real updates can hide too much; known-others (pass `others`) can"
        )
    return f"{detected}; no number of canaries would in this dimension"


def _undetected(v: "Verdict") -> str:
    if v.stds is not None and v.stds <= FLIPPED:
        return f"the mean score {v.score:.3g} lies far below 0, which no noise explains: is the sign of the updates flipped?"
    return (
        f"the mean score per presentation {v.score:.3g} is no more than chance, where the claim implies "
        f"{v.claimed_score:.3g}: either there is far more noise than claimed, or the canaries were not in the rounds (made "
        "from another seed, lost on their way, or among the `others`)"
    )


def _constant(v: "Verdict") -> str:
    first = "one canary's score alone proves nothing" if v.canaries == 1 else f"all {v.canaries} scores are equal"
    return f"{first}; at least {v.canaries_needed} canaries must take part"


def _no_closed_form(v: "Verdict") -> str:
    reach = "" if v.ceiling is None else f" (it is {v.ceiling:.3g} at most with so few scores)"
    return (
        f"the lower bound at {(v.confidence or 0) * 100:g} % does not refute the claim{reach}, and unobserved scores alone "
        "cannot confirm a claim: give a null in closed form, --dim or --null-std"
    )


def _accounted(v: "Verdict") -> str:
    low, high = v.epsilon_range or (0.0, 0.0)
    between = "" if math.isclose(low, high, rel_tol=0.05) else f" (at least {low:.4g})"
    return (
        f"{v.accountant} gives an epsilon of {v.epsilon:.4g}{between} for noise multiplier {v.claimed_noise:.4g} and "
        f"{v.scheme}"
    )


def _range(v: "Verdict") -> str:
    low, high = v.epsilon_range or (0.0, 0.0)
    return (
        f"the epsilon of {v.scheme} at noise multiplier {v.claimed_noise:.4g} lies between {low:.4g} and {high:.4g}, but "
        f"its exact value is unknown: a claim of {v.claimed_epsilon:.4g} can be neither confirmed nor refuted"
    )


def _observed_sampler(v: "Verdict") -> str:
    return {str(name): meaning for name, meaning in MEANING.items()}[v.seen or ""]


def _sampler(v: "Verdict") -> str:
    p_value = v.p_value or 0.0
    chance = "p < 1e-99" if p_value < 1e-99 else f"p = {p_value:.1g}"
    like = f", as in {v.seen_scheme}" if v.seen_scheme else ""
    return f"the sampler does not do what is claimed: {_observed_sampler(v)}{like} ({chance})"


def _unclear_sampler(v: "Verdict") -> str:
    low, high = v.epsilon_range or (0.0, 0.0)
    text = f"{_sampler(v)}. The epsilon of the observed sampler lies between {low:.3g} and {high:.3g}"
    advice = f"account for {v.seen_scheme}" if v.seen_scheme else "no accountant covers that"
    return f"{text}, the claim is {v.claimed_epsilon:.4g}: {advice}"


def _few_picks(v: "Verdict") -> str:
    text = f"the sampler picked canaries {v.picks} times"
    if v.detectable_rate is None:
        return f"{text}, too few to measure how often it picks them: use more canaries"
    return (
        f"{text}, too few: only a rate of {v.detectable_rate:.3g} would have been detected with probability {v.power:.0%}, "
        f"and its epsilon is {v.detectable_epsilon:.3g}. Use more canaries"
    )


def _weak_noise(v: "Verdict") -> str:
    if math.isinf(v.detectable_epsilon or math.inf):
        return (
            f"the scores are too few: twice the claimed {v.claimed_epsilon:.4g} would not have been caught with probability "
            f"{v.power:.0%}. Use more canaries"
        )
    return (
        f"the scores are too few: only noise with an epsilon of {v.detectable_epsilon:.3g} would have been caught with "
        f"probability {v.power:.0%}, more than twice the claimed {v.claimed_epsilon:.4g}. Use more canaries"
    )


def _three_legs(v: "Verdict") -> str:
    sampler = "picked canaries as the scheme says" if v.seen is None else f"is harmless ({_observed_sampler(v)})"
    return (
        f"accounting, noise and sampling support the claim for {v.scheme}: the accountant's epsilon is no more than the "
        f"claimed one, the rounds had the noise that it needs, and the pipeline's own sampler {sampler}"
    )


def _noise_as_claimed(v: "Verdict") -> str:
    return (
        f"the rounds had the noise that the claim needs, a multiplier of {v.claimed_noise:.4g}; noise with an epsilon of "
        f"{v.detectable_epsilon:.3g} or more would have been detected with probability {v.power:.0%}"
    )


def _sampled_as_claimed(v: "Verdict") -> str:
    text = f"the sampler picked canaries {v.picks} times, as {v.scheme} would"
    if v.detectable_rate is not None:
        text += f"; a rate of {v.detectable_rate:.3g} for all would have been detected with probability {v.power:.0%}"
    return text if v.cohorts_known else f"{text}. Cohort sizes were not given, so fixed cohorts cannot be excluded"


def _harmless_sampler(v: "Verdict") -> str:
    _, high = v.epsilon_range or (0.0, 0.0)
    return (
        f"{_sampler(v)}. That is harmless: its epsilon is at most {high:.3g}, and the claim is {v.claimed_epsilon:.4g}"
    )


PASSED = {
    "legs": _three_legs,
    "accounted": lambda v: f"{_accounted(v)}, and the claim is {v.claimed_epsilon:.4g}",
    "sampled power": _noise_as_claimed,
    "sampled": _sampled_as_claimed,
    "sampler allowed": _harmless_sampler,
}
