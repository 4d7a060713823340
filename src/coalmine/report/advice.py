"""Advice on a result: the next steps after a verdict, and the likely cause behind each gauge outside its limits."""

from collections.abc import Sequence

from coalmine.evidence.gauges.gauge import LAYER, Gauge
from coalmine.known_faults import likely_faults
from coalmine.report.brief import CLAIM_FIRST
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import strongest_row, top_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_number
from coalmine.verdict.findings.amplified import AccountedAboveClaim, SamplerAboveClaim
from coalmine.verdict.findings.missing import NothingClaimed
from coalmine.verdict.findings.noise import StatedTooLittle
from coalmine.verdict.verdict import Verdict

LESS_NOISE = (
    "There is less noise than stated. Compare the standard deviation of the sampled noise with the noise multiplier "
    "times the clip norm, in the units of the released sum."
)
LONG_RESIDUAL = (
    "The residual is longer than the stated noise: `others` is incomplete, or there is more noise than stated, or a clip "
    "does not bound every update. Check that `others` holds every real client of the round, with the weights and the "
    "server learning rate of the round. A client missing from `others` could hide missing noise, so this rules out a PASS."
)
NOT_GAUSSIAN = (
    "The noise is not Gaussian. Find out which sampler produces it. Look for uniform or Laplace noise, for truncated "
    "draws, and for sums of too few uniform numbers."
)
ONE_DRAW = (
    "One draw is used for several coordinates. Look for a PRNG key or a seed that is used twice, for example one key for "
    "all layers, and for noise that is tiled or broadcast."
)
FOLLOWS = (
    "The noise is larger where updates are larger, so it reveals them and protects small values less. Look for noise that "
    "is multiplied by the updates, or scaled coordinate by coordinate after it is drawn."
)
COMES_BACK = (
    "The residual of one round resembles that of another. Look for a generator that is seeded again in every round, or a "
    "PRNG key that is not split. Clients that are missing from `others` have the same effect."
)
WEAK = (
    "Some coordinates get less noise than the rest of their tensor, round after round. Look for a mask, for rows or columns "
    "that are scaled, and for noise that is drawn for a part of a tensor. A note of the result names the tensor."
)
GAUGE_ADVICE = {
    "noise": LESS_NOISE,
    "residual": LESS_NOISE,
    "pooled residual": LESS_NOISE,
    "difference": "Rounds differ less than they would with fresh noise. Look for noise that is too small, or for a "
    "generator that is seeded again in every round.",
    "dilution": "The real updates are far longer than the noise and hide the canaries from known-round. Pass `others`.",
    "repeat": COMES_BACK,
    "repeat of any": COMES_BACK,
    "rank": "The noise lies in a subspace, so some directions get none. Look for noise that is drawn in fewer dimensions "
    "and then projected, and for one draw that is repeated over many coordinates.",
    "others": "`others` is not what the round summed. Pass the clipped sum of the real clients, divided by the same n and "
    "multiplied by the same server learning rate as model_delta.",
    "shape": NOT_GAUSSIAN,
    "distribution": NOT_GAUSSIAN,
    "tails": NOT_GAUSSIAN,
    "noise follows others": FOLLOWS,
    "noise follows canaries": FOLLOWS,
    "coordinates": WEAK,
    "weak coordinates": WEAK,
    "bare coordinates": "Some coordinates get next to no noise. Look for a mask, for frozen or padded parameters, and for "
    "tensors that skip the step that adds noise.",
    "grid": "The noise takes few values, and the release lies on a finer grid, so an attacker can subtract the noise. Look "
    "for noise that is rounded, quantised or drawn as integers before it is added.",
    "spectrum": ONE_DRAW,
    "neighbours": ONE_DRAW,
    "shared draws": ONE_DRAW,
    "repeated values": ONE_DRAW,
    "canaries in the release": "The release does not hold the canaries that `others` leaves out. Check that every canary "
    "that is reported as present is added to the sum once, and that `others` is the real clients' sum.",
    "shifted repeat": "The same noise appears in two rounds at different positions. Look for noise that is cut from a "
    "buffer that was filled once, and draw fresh noise in every round. Clients that are missing from `others` have the "
    "same effect.",
    "parts of blocks": "The noise is not equally strong in all parts of the model. Look for a rank or a tensor that adds "
    "noise of another size, or none, and check that all ranks scale their noise in the same way.",
    "shared blocks": "Two parts of the model get the same noise, or noise from the round before. Seed each rank's generator "
    "differently, and draw fresh noise for every shard.",
    "layers moved": "Some weights did not change during training. Check that the optimizer holds the parameters of this "
    "model, that they require gradients, and that the learning rate is above 0.",
    "layers with a gradient": "Some layers received noise but no gradient. Check that the loss depends on them. To keep "
    "them fixed, freeze them before the training is made private.",
    "signal by layer": "Some layers were updated by noise alone. Check that their gradients do not vanish, and that the "
    "clip norm is not far above the gradients' lengths.",
    "rounding": "The release is rounded too coarsely to see the noise. Pass model_delta before it is rounded.",
}
LOW_LAYERS = "The noise is missing or too small there. Add noise to every released tensor, including buffers."
LONG_LAYERS = (
    "The residual is longer than the stated noise there: `others` is incomplete in these tensors, or they get more noise "
    "than stated. A missing part of `others` could hide missing noise, so this rules out a PASS."
)
MOST_NAMED = 6  # tensors or gauges in one step


def next_steps(run: Run) -> list[str]:
    """The next steps, most urgent first."""
    result = run.result
    steps = [] if run.finished else [_unfinished_advice(run)]
    if result.verdict is not None and not isinstance(result.verdict.finding, NothingClaimed):
        steps += _after_verdict(result, result.verdict)
    elif run.finished:
        steps.append(CLAIM_FIRST)
    steps += gauge_steps(result)
    steps += _stronger_audit(result)
    if result.trainer.secret_seed is not False and run.demonstration:
        steps.append(
            "This audit is a demonstration: its seed is so short that others could guess it. An audit that others should "
            "trust needs a long seed: `coalmine seed FILE`."
        )
    if result.trainer.secret_seed is False:
        steps.append(
            "The canaries' seed is the public demo seed. An audit that others should trust needs a secret seed: "
            "`coalmine seed FILE`, then `--seed-file FILE`."
        )
    words = Words.of(result)
    return [words.say(step) for step in steps]


def gauge_steps(result: AuditResult) -> list[str]:
    """One step for each cause: the gauges outside their limits that point to it, and where to look."""
    grouped: dict[str, list[Gauge]] = {}
    for gauge in result.gauges:
        if gauge.status != "ok":
            grouped.setdefault(gauge_advice(gauge), []).append(gauge)
    return [f"{_list_names(gauges)}: {advice}" for advice, gauges in grouped.items()]


def gauge_advice(gauge: Gauge) -> str:
    """The likely cause of a gauge outside its limits, and where to look."""
    if gauge.name.startswith(LAYER):
        return LOW_LAYERS if gauge.status == "low" else LONG_LAYERS
    if gauge.name in ("residual", "pooled residual") and gauge.status == "warning":
        return LONG_RESIDUAL
    return GAUGE_ADVICE.get(gauge.name, f"It measures: {gauge.meaning}. An honest run stays within its limits.")


def _list_names(gauges: Sequence[Gauge]) -> str:
    layers = [gauge.name.removeprefix(LAYER) for gauge in gauges if gauge.name.startswith(LAYER)]
    if layers:
        more = f" and {len(layers) - MOST_NAMED} more" if len(layers) > MOST_NAMED else ""
        return f"Tensor{'s' * (len(layers) > 1)} {', '.join(layers[:MOST_NAMED])}{more}"
    names = [gauge.name for gauge in gauges]
    return f"Gauge {names[0]}" if len(names) == 1 else f"Gauges {', '.join(names[:-1])} and {names[-1]}"


def _unfinished_advice(run: Run) -> str:
    if run.has_result_file:
        return f"Its result.json cannot be read: restore it from a copy, or remove it and check what is left in {run.path}."
    if "task" in run.config:
        return f"The run is not finished: `coalmine run --resume {run.path}` resumes it."
    return "The run is not finished: resume it with its own trainer."


def _after_verdict(result: AuditResult, verdict: Verdict) -> list[str]:
    if verdict.outcome == "VIOLATION":
        return _after_violation(result, verdict)
    if verdict.outcome == "PASS":
        return [_after_pass(result, verdict)]
    return [verdict.finding.advice()]


def _after_pass(result: AuditResult, verdict: Verdict) -> str:
    unchecked = [item.name for item in result.audited if item.is_open]
    caveat = f" When you quote the verdict, also say what was not checked: {', '.join(unchecked)}." if unchecked else ""
    return f"{verdict.finding.advice()}{caveat}"


def _after_violation(result: AuditResult, verdict: Verdict) -> list[str]:
    rungs = [each.name for each in result.adversaries.values() if each.verdict and each.verdict.outcome == "VIOLATION"]
    low = [gauge.name for gauge in result.gauges if gauge.status == "low"]
    evidence = []
    if rungs:
        evidence.append(f"The claim is refuted by {', '.join(rungs)}.")
    if low:
        names = f"{', '.join(low[:MOST_NAMED])}{f' and {len(low) - MOST_NAMED} more' if len(low) > MOST_NAMED else ''}"
        evidence.append(f"Noise is missing according to the gauge{'s' * (len(low) > 1)} {names}.")
    promise = "the claimed ε" if result.claim is not None else "an ε that was computed from the stated noise"
    steps = [" ".join([f"Do not release this model under {promise}.", *evidence])]
    if isinstance(verdict.finding, AccountedAboveClaim | SamplerAboveClaim | StatedTooLittle):
        return [*steps, verdict.finding.advice()]
    faults = likely_faults(result)
    steps += [f"Likely: {fault.title}. {fault.meaning} {fault.mend}" for fault in faults]
    if not faults and not low:
        steps.append(verdict.finding.advice())
    return steps


def _stronger_audit(result: AuditResult) -> list[str]:
    """Ways to make the audit more sensitive."""
    steps, top, strongest = [], top_row(result), strongest_row(result)
    if top is not None and not top.detected:
        steps.append(
            f"{top.rung} detected nothing: {top.canaries:,} canaries cannot see below ε = {format_number(top.floor)}. More "
            "canaries lower that floor: `coalmine plan --detect` prints how many are needed."
        )
    if strongest is not None and strongest.rung != "known-others":
        steps.append(
            f"The strongest attacker here is {strongest.rung}. Also pass the sum of the real clients (`others`): "
            "known-others is the attacker that differential privacy protects against."
        )
    return steps
