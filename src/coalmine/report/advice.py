"""What to do about a result: the next steps after a verdict, and what each gauge points to."""

from collections.abc import Mapping, Sequence

from coalmine.audit.gauge import LAYER, Gauge
from coalmine.audit.result import AuditResult
from coalmine.audit.signatures import likely_faults
from coalmine.audit.verdict import Verdict
from coalmine.report.sentences import shortened, shown
from coalmine.report.stored_run import Run
from coalmine.report.table_rows import strongest_row, top_row

LESS_NOISE = (
    "There is less noise than stated. Compare the standard deviation of the noise that is drawn with the noise multiplier "
    "times the clip norm, in the units of the released sum."
)
LONG_RESIDUAL = (
    "The residual is longer than the stated noise: `others` is incomplete, or there is more noise than stated. Check that "
    "`others` holds every real client of the round, with the weights and the server learning rate of the round. A client "
    "who is missing from it could stand in for missing noise, so this bars a PASS."
)
NOT_GAUSSIAN = (
    "The noise is not Gaussian. Find out which sampler draws it. Look for uniform or Laplace noise, for draws that are "
    "truncated, and for sums of too few uniform numbers."
)
ONE_DRAW = (
    "One draw is used for several coordinates. Look for a PRNG key or a seed that is used twice, for example one key for "
    "all layers, and for noise that is tiled or broadcast."
)
FOLLOWS = (
    "The noise is larger where updates are larger, so it tells of them and protects small values less. Look for noise that "
    "is multiplied by the updates, or scaled coordinate by coordinate after it is drawn."
)
COMES_BACK = (
    "What is left in one round resembles another round. Look for a generator that is seeded again in every round, or a PRNG "
    "key that is not split. If `others` leaves out clients, their updates look the same."
)
GAUGE_ADVICE = {
    "noise": LESS_NOISE,
    "residual": LESS_NOISE,
    "pooled residual": LESS_NOISE,
    "difference": "Rounds differ by less than fresh noise would make them. Look for noise that is too small, or for a "
    "generator that is seeded again in every round.",
    "dilution": "The real updates are far longer than the noise and hide the canaries from known-round. Pass `others`.",
    "repeat": COMES_BACK,
    "repeat of any": COMES_BACK,
    "rank": "The noise lives in a subspace, so some directions get none. Look for noise that is drawn in fewer dimensions "
    "and then projected, and for one draw that is repeated over many coordinates.",
    "others": "`others` is not what the round summed. Pass the clipped sum of the real clients, divided by the same n and "
    "multiplied by the same server learning rate as model_delta.",
    "shape": NOT_GAUSSIAN,
    "distribution": NOT_GAUSSIAN,
    "tails": NOT_GAUSSIAN,
    "noise follows others": FOLLOWS,
    "noise follows canaries": FOLLOWS,
    "bare coordinates": "Some coordinates get next to no noise. Look for a mask, for frozen or padded parameters, and for "
    "tensors that skip the step that adds noise.",
    "grid": "The noise takes few values, and the release lies on a finer grid, so an attacker can subtract the noise. Look "
    "for noise that is rounded, quantised or drawn as integers before it is added.",
    "spectrum": ONE_DRAW,
    "neighbours": ONE_DRAW,
    "shared draws": ONE_DRAW,
    "repeated values": ONE_DRAW,
    "shifted repeat": "The same noise stands in two rounds at different places. Look for noise that is cut from a "
    "buffer that was drawn once, and draw fresh noise in every round. Clients that `others` leaves out look the same.",
    "parts of blocks": "The noise is not as strong in every part of the model. Look for a rank or a tensor that adds noise "
    "of another size, or none, and check that each rank scales its noise alike.",
    "shared blocks": "Two parts of the model get the same noise, or noise of the round before. Seed each rank's generator "
    "differently, and draw fresh noise for every shard.",
    "layers moved": "Some weights are what they were before training. Check that the optimizer holds the parameters of "
    "this model, that they require gradients, and that the learning rate is above 0.",
    "layers with a gradient": "Some layers received noise and no gradient. Check that the loss depends on them. To keep "
    "them fixed, freeze them before the training is made private.",
    "signal by layer": "Some layers were updated by noise alone. Check that their gradients do not vanish, and that the "
    "clip norm is not far above the gradients' lengths.",
    "rounding": "The release is rounded too coarsely to see the noise. Pass model_delta as it was before it was rounded.",
}
LOW_LAYERS = "The noise is missing or too small there. Add noise to every tensor that is released, buffers included."
LONG_LAYERS = (
    "The residual is longer than the stated noise there: `others` is incomplete in these tensors, or they get more noise "
    "than stated. A missing part of `others` could stand in for missing noise, so this bars a PASS."
)
RESTATE = "Account for the sampling scheme that was seen, or mend the sampler, and claim that ε."
LEG_ADVICE = {  # by the code of the verdict on an amplified claim
    "accounting": "Run the accountant again with the noise multiplier, the sampling scheme and the number of rounds of this "
    "training, and claim what it gives. Or add noise until it gives the claimed ε.",
    "range": "Use Poisson sampling or random allocation, whose ε is known well, or claim the upper end of the range.",
    "sampler": RESTATE,
    "sampler not observed": "Let each canary take part exactly when the pipeline's own sampler picks it, and say "
    "`sampler_observed=True` in the claim. Until then, claim the mechanism's ε.",
    "unobserved": "Observe every round that the claim speaks of. If training ended early, account for the rounds there were "
    "and claim that ε.",
    "divisor": "Divide every round's sum by the same number, such as the expected number of participants.",
    "picks": "Audit again with more canaries: `coalmine plan --sampling` says how many decide the claim.",
    "sampled power": "Audit again with more canaries: `coalmine plan --sampling` says how many decide the claim.",
}
NAMED = 6  # tensors that are named in one step


def next_steps(run: Run) -> list[str]:
    """What to do next, most pressing first."""
    result = run.result
    steps = [] if run.finished else [_to_finish(run)]
    if result.verdict is not None:
        steps += _after_verdict(result, result.verdict)
    elif run.finished:
        steps.append(_after_no_claim(result))
    steps += gauge_steps(result)
    steps += _stronger_audit(result)
    if result.extra.get("secret_seed") is not False and run.demonstration:
        steps.append(
            "This audit is a demonstration: its seed is so short that others could guess it. An audit that others are to "
            "trust needs a long one: `coalmine seed FILE`."
        )
    if result.extra.get("secret_seed") is False:
        steps.append(
            "The canaries' seed is the public demo seed. An audit that others are to trust needs a secret one: "
            "`coalmine seed FILE`, then `--seed-file FILE`."
        )
    return steps


def gauge_steps(result: AuditResult) -> list[str]:
    """What each gauge outside its limits means and where to look, gauges with the same meaning in one step."""
    grouped: dict[str, list[Gauge]] = {}
    for gauge in result.gauges:
        if gauge.status != "ok":
            grouped.setdefault(gauge_advice(gauge), []).append(gauge)
    return [f"{_names(gauges)}: {advice}" for advice, gauges in grouped.items()]


def gauge_advice(gauge: Gauge) -> str:
    """What one gauge outside its limits means, and where to look."""
    if gauge.name.startswith(LAYER):
        return LOW_LAYERS if gauge.status == "low" else LONG_LAYERS
    if gauge.name in ("residual", "pooled residual") and gauge.status == "warning":
        return LONG_RESIDUAL
    return GAUGE_ADVICE.get(gauge.name, f"It measures: {gauge.meaning}. An honest run stays within its limits.")


def _names(gauges: Sequence[Gauge]) -> str:
    layers = [gauge.name.removeprefix(LAYER) for gauge in gauges if gauge.name.startswith(LAYER)]
    if layers:
        more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
        return f"Tensor{'s' * (len(layers) > 1)} {', '.join(layers[:NAMED])}{more}"
    names = [gauge.name for gauge in gauges]
    return f"Gauge {names[0]}" if len(names) == 1 else f"Gauges {', '.join(names[:-1])} and {names[-1]}"


def _to_finish(run: Run) -> str:
    if run.has_result_file:
        return (
            f"Its result.json cannot be read: restore it from a copy, or remove it and see what {run.path} still holds."
        )
    if "task" in run.config:
        return f"The run is not finished: `coalmine resume {run.path}` continues it."
    return "The run is not finished: continue it with its own trainer."


def _after_verdict(result: AuditResult, verdict: Verdict) -> list[str]:
    if verdict.outcome == "VIOLATION":
        return _after_violation(result)
    return [_after_pass(result) if verdict.outcome == "PASS" else _after_underpowered(result, verdict)]


def _after_pass(result: AuditResult) -> str:
    rest = [item.name for item in result.audited if item.status != "checked"]
    named = f" Whoever quotes the verdict should add what was not checked: {', '.join(rest)}." if rest else ""
    return f"Keep this report with the model.{named}"


def _after_violation(result: AuditResult) -> list[str]:
    rungs = [each.name for each in result.adversaries.values() if each.verdict and each.verdict.outcome == "VIOLATION"]
    low = [gauge.name for gauge in result.gauges if gauge.status == "low"]
    seen = []
    if rungs:
        seen.append(f"The claim is refuted by {', '.join(rungs)}.")
    if low:
        named = f"{', '.join(low[:NAMED])}{f' and {len(low) - NAMED} more' if len(low) > NAMED else ''}"
        seen.append(f"Noise is missing by the gauge{'s' * (len(low) > 1)} {named}.")
    steps = [" ".join(["Do not release this model under the claimed ε.", *seen])]
    code = result.verdict.code if result.verdict else ""
    if code in ("accounting", "sampler"):
        return [*steps, _restated(result) if code == "sampler" else LEG_ADVICE[code]]
    faults = likely_faults(result)
    steps += [f"Likely: {fault.title}. {fault.meaning} {fault.mend}" for fault in faults]
    if not faults and not low:
        steps.append(
            "Look at clip and noise: is every update clipped before the average? Is the standard deviation of the noise the "
            "noise multiplier times the clip norm, in the units in which it is added? Is the noise new in every round and "
            "on every coordinate, and is it added before the server's optimiser?"
        )
    return steps


def _restated(result: AuditResult) -> str:
    """What to do about a sampler that does something else than claimed, with the scheme that was seen."""
    seen = result.legs["sampling"].seen_scheme if "sampling" in result.legs else None
    return RESTATE if seen is None else f"{RESTATE} It looks like {seen}."


def _after_underpowered(result: AuditResult, verdict: Verdict) -> str:
    if verdict.code == "sampler":
        return _restated(result)
    if verdict.code == "power" and verdict.canaries_needed is not None:
        return (
            f"Audit again with {verdict.canaries_needed:,} canaries: so many would decide the claim (this run had "
            f"{verdict.canaries:,})."
        )
    if verdict.code == "undetected":  # more of them would not help
        return f"Find out first why the canaries are not detected: {shortened(verdict.reason)}."
    if verdict.code in LEG_ADVICE:
        return LEG_ADVICE[verdict.code]
    if verdict.code == "gauge":
        return "Find out why the gauges named here left their limits, mend it or the stated noise, and audit again."
    return f"What would decide: {verdict.reason.rstrip('.')}."


def _after_no_claim(result: AuditResult) -> str:
    hypothetical = result.extra.get("if_analytical_were_claimed")
    if hypothetical and isinstance(hypothetical, Mapping):
        return (
            f"If the analytical ε = {shown(result.analytical_epsilon)} were claimed, the verdict would be "
            f"{hypothetical.get('verdict')}: {hypothetical.get('reason')}. Claim it with `--claim analytical`."
        )
    return "Give the ε that you promise as a claim (`--claim`, or `audit.result(claim=…)`) to get a verdict on it."


def _stronger_audit(result: AuditResult) -> list[str]:
    """What would let the audit see more."""
    steps, top, strongest = [], top_row(result), strongest_row(result)
    if top is not None and not top.detected:
        steps.append(
            f"{top.rung} detected nothing: {top.canaries:,} canaries cannot see below ε = {shown(top.floor)}. More canaries "
            "lower that floor: `coalmine plan --detect` says how many."
        )
    if strongest is not None and strongest.rung != "known-others":
        steps.append(
            f"The strongest attacker here is {strongest.rung}. Give the audit the real clients' sum (`others`) as well: "
            "then known-others shows what differential privacy is about."
        )
    return steps
