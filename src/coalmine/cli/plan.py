"""`coalmine plan`: the number of canaries that an audit needs, before training."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from coalmine.argument_checks import one_number, unit_interval, whole_number
from coalmine.cli.options import COUNT, JSON, Command, Verbosity
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number
from coalmine.cli.sampling_option import SAMPLING
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.intervals import Interval
from coalmine.estimators.planning import (
    Plan,
    SampledPlan,
    canaries_for_precision,
    canaries_to_decide,
    canaries_to_detect,
    expected_interval,
    is_precise,
    plan_audit,
    plan_sampled,
    power_against_claim,
)
from coalmine.estimators.sampling import Sampling, sampling_to_dict
from coalmine.report import plots
from coalmine.report.svg import save_plot
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.rung_claim import POWER, TEST_LEVEL

USUAL = (100, 300, 1_000, 3_000, 10_000)
USUAL_EPSILON = 3.0  # the interval is shown at this epsilon unless the user names one
PRECISION = 0.25  # both ends of a useful interval lie within this share of epsilon


@click.command(cls=Command)
@click.option("--dim", type=COUNT, required=True, metavar="D", help="Dimension of the model.")
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option("--canaries", type=COUNT, multiple=True, metavar="K", help="Number of canaries to plan for; repeatable.")
@click.option("--detect", type=float, metavar="E", help="Find the fewest canaries that detect this epsilon.")
@click.option(
    "--claim", type=float, metavar="E", help="Find the fewest canaries that would detect twice this claimed epsilon."
)
@click.option(
    "--at",
    type=float,
    metavar="E",
    help="Show the interval for a true epsilon of E.  [default: that of --claim or --detect, else 3]",
)
@click.option(
    "--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also plot the plan into a .png, .svg or .pdf file."
)
@SAMPLING
@click.option(
    "--noise-multiplier",
    type=float,
    metavar="Z",
    help="Noise multiplier of a claim amplified by sampling.  [default: the one that gives the claim]",
)
@JSON
@click.pass_obj
def plan(
    verbosity: Verbosity,
    /,
    dim: int,
    delta: float,
    canaries: tuple[int, ...],
    detect: float | None,
    claim: float | None,
    at: float | None,
    plot: Path | None,
    noise_multiplier: float | None,
    as_json: bool,
    sampling: Sampling | None,
) -> None:
    """Plan the number of canaries of an audit.

    The table lists what each number of canaries can show. Three questions take different numbers of canaries:

    Detecting an epsilon: in 90 % of runs its estimate lies above the noise floor, the 95 % quantile of estimates when
    nothing leaks.

    Checking a claim: if the true epsilon were twice the claim, 90 % of runs would end in VIOLATION, for an attacker who
    knows all other updates. This takes far fewer canaries than measuring epsilon.

    Measuring an epsilon: the 95 % interval lies within ±25 % of it.

    With --sampling the claim is amplified: the attacker does not know in which rounds a client takes part. The answer
    is the number of canaries that decide the claim, and the leg of the verdict (noise or sampling) that needs the most.
    How often the sampler picks canaries is random: with that number, at most 10 % of honest runs are UNDERPOWERED because
    of too few picks. With --canaries it also prints the share of honest runs that K canaries decide.
    """
    if sampling is not None:
        if claim is None:
            raise click.UsageError("--sampling needs a claim: give --claim too")
        if detect is not None or at is not None or plot is not None:
            raise click.UsageError("--sampling only plans for a claim: omit --detect, --at and --plot")
        _plan_amplified(
            claim, sampling, canaries, dim=dim, delta=delta, noise_multiplier=noise_multiplier, as_json=as_json
        )
        return
    if noise_multiplier is not None:
        raise click.UsageError("--noise-multiplier belongs to a claim amplified by sampling: give --sampling too")
    if canaries and detect is not None:
        raise click.UsageError("give either --canaries or --detect")
    dim, delta = whole_number("--dim", dim, minimum=FEWEST + 2), unit_interval("--delta", delta)
    for name, epsilon in (("--detect", detect), ("--claim", claim), ("--at", at)):
        if epsilon is not None and one_number(name, epsilon) <= 0:
            raise ValueError(f"{name} must be above 0, got {epsilon:g}")
    if detect is not None:
        canaries = (canaries_to_detect(detect, dim=dim, delta=delta, power=POWER),)
    counts = canaries or [count for count in USUAL if count <= dim // 2] or [FEWEST]
    shown_at = next(epsilon for epsilon in (at, claim, detect, USUAL_EPSILON) if epsilon is not None)
    with progress_bar("planning", total=len(counts), hidden=verbosity.quiet) as advance:
        plans = []
        for count in counts:
            plans.append(plan_audit(count, dim=dim, delta=delta, power=POWER))
            advance()
    if plot is not None:
        save_plot(plot, plots.plan, plans)
    deciding = None if claim is None else canaries_to_decide(claim, dim=dim, delta=delta, level=TEST_LEVEL, power=POWER)
    precise = canaries_for_precision(shown_at, dim=dim, delta=delta, within=PRECISION)
    if as_json:
        print_json(_as_dict(plans, shown_at, detect, claim, deciding, precise))
        return
    _print(plans, shown_at, claim)
    click.echo(_precision_line(shown_at, precise, dim=dim, delta=delta))
    if detect is not None:
        click.echo(f"{counts[0]:,} canaries detect an epsilon of {detect:g} in {_percent(POWER)} of runs")
    if claim is not None:
        click.echo(_claim_line(claim, deciding, dim=dim, delta=delta))


def _plan_amplified(
    claim: float,
    sampling: Sampling,
    canaries: Sequence[int],
    *,
    dim: int,
    delta: float,
    noise_multiplier: float | None,
    as_json: bool,
) -> None:
    """Print how many canaries decide an amplified claim, which leg needs the most, and what other numbers decide."""
    dim, delta = whole_number("--dim", dim, minimum=FEWEST + 2), unit_interval("--delta", delta)
    for name, value in (("--claim", claim), ("--noise-multiplier", noise_multiplier)):
        if value is not None and one_number(name, value) <= 0:
            raise ValueError(f"{name} must be above 0, got {value:g}")
    found = plan_sampled(
        claim,
        sampling,
        dim=dim,
        delta=delta,
        level=TEST_LEVEL,
        noise_multiplier=noise_multiplier,
        power=POWER,
        rounded=ROUNDED,
        canaries=canaries,
    )
    chances = [0.0 if found.exceeds else chance.both for chance in found.chances]
    if as_json:
        told = {"epsilon": claim, "sampling": sampling_to_dict(sampling), "noise_multiplier": found.noise_multiplier}
        legs = {"noise": found.noise, "sampling": found.sampling}
        plans = [asdict(each) | {"decided": share} for each, share in zip(found.chances, chances, strict=True)]
        answer = {"claim": told, "accounted": found.accounted.to_dict(), "legs": legs, "plans": plans}
        print_json({"dim": dim, "delta": delta, "power": POWER, **answer, "canaries": found.canaries, "leg": found.leg})
        return
    accounted = found.accounted
    low = "" if accounted.kind == "upper bound" else f" (between {shown_number(accounted.low, 3)} and that)"
    rows = [[name, _needed(count), asks] for name, count, asks in _legs(found)]
    print_table(["leg", "canaries", "detects"], rows, title=f"A claim of {claim:g} for {sampling}")
    click.echo(
        f"noise multiplier {shown_number(found.noise_multiplier)}: {accounted.accountant} gives epsilon "
        f"{shown_number(accounted.high, 4)}{low}, adjacency {accounted.adjacency}"
    )
    for each, share in zip(found.chances, chances, strict=True):
        click.echo(
            f"{each.canaries:,} canaries are picked about {each.picks:,.0f} times and decide the claim in {share:.1%} of "
            "honest runs"
        )
    click.echo(_amplified_line(claim, found))


def _legs(found: SampledPlan) -> list[tuple[str, int | None, str]]:
    caught = f"twice the claimed epsilon, in {_percent(POWER)} of runs:"
    return [
        ("noise", found.noise, f"{caught} less noise"),
        ("sampling", found.sampling, f"{caught} clients sampled more often"),
    ]


def _needed(canaries: int | None) -> str:
    return "no number" if canaries is None else f"{canaries:,}"


def _amplified_line(claim: float, found: SampledPlan) -> str:
    if found.exceeds:
        return f"no number of canaries confirms {claim:g}: the accountant gives more. Claim what it gives, or add noise"
    if found.canaries is None:
        return f"no number of canaries decides the claimed epsilon of {claim:g} in this dimension: the {found.leg} leg"
    asks = f"the {found.leg} leg needs the most" if found.noise != found.sampling else "both legs need as many"
    decided = f"decide the claimed epsilon of {claim:g} in at least {_percent(POWER)} of honest runs"
    return f"{found.canaries:,} canaries {decided}; {asks}"


def _claim_line(claim: float, canaries: int | None, *, dim: int, delta: float) -> str:
    caught = f"would detect twice the claimed epsilon of {claim:g} in {_percent(POWER)} of runs"
    if canaries is None:
        return f"no number of canaries {caught} in this dimension"
    interval = expected_interval(claim, canaries, dim=dim, delta=delta)
    width = "" if is_precise(interval, claim, within=PRECISION) else "still wide: "
    return f"{canaries:,} canaries {caught}; their 95 % interval is {width}{_shown_interval(interval)}"


def _precision_line(epsilon: float, canaries: int | None, *, dim: int, delta: float) -> str:
    precise = f"a 95 % interval within ±{_percent(PRECISION)} of epsilon {epsilon:g}"
    if canaries is None:
        return f"no number of canaries up to half the dimension gives {precise}"
    interval = expected_interval(epsilon, canaries, dim=dim, delta=delta)
    return f"{canaries:,} canaries give {precise}: {_shown_interval(interval)}"


def _percent(share: float) -> str:
    return f"{share * 100:g} %"


def _shown_interval(interval: Interval) -> str:
    return f"{shown_number(interval.low, 3)} … {shown_number(interval.high, 3)}"


def _power(plan: Plan, claim: float) -> float:
    dof = float(plan.dim - plan.canaries)
    return power_against_claim(plan.canaries, claim, delta=plan.delta, level=TEST_LEVEL, null_dof=dof)


def _print(plans: Sequence[Plan], shown_at: float, claim: float | None) -> None:
    heads = [
        "canaries",
        "smallest detectable ε",
        f"95 % interval at ε = {shown_at:g}",
        "noise floor",
        "unobserved",
        "ceiling",
    ]
    rows = []
    for each in plans:
        row = [
            f"{each.canaries:,}",
            shown_number(each.detectable, 3),
            _shown_interval(each.interval_at(shown_at)),
            shown_number(each.floor.q95, 3),
            f"{each.unobserved:,}",
            shown_number(each.ceiling, 3),
        ]
        rows.append(row if claim is None else [*row, f"{_power(each, claim):.1%}"])
    if claim is not None:
        heads.append(f"power against claim {claim:g}")
    print_table(heads, rows, title=f"An audit in {plans[0].dim:,} dimensions, delta {plans[0].delta:.4g}")
    click.echo("noise floor: 95 % of estimates fall below this when nothing leaks")
    click.echo(
        "ceiling: largest attainable lower bound with that many unobserved canaries; unlimited when the null is known in "
        "closed form"
    )
    if claim is not None:
        click.echo(f"power: probability of VIOLATION if the true epsilon is {2 * claim:g}, twice the claim")


def _as_dict(
    plans: Sequence[Plan],
    shown_at: float,
    detect: float | None,
    claim: float | None,
    deciding: int | None,
    precise: int | None,
) -> dict[str, Any]:
    return {
        "dim": plans[0].dim,
        "delta": plans[0].delta,
        "power": POWER,
        "plans": [_plan_dict(each, shown_at, claim) for each in plans],
        "detect": None if detect is None else {"epsilon": detect, "canaries": plans[0].canaries},
        "claim": None if claim is None else {"epsilon": claim, "canaries": deciding},
        "precision": {"epsilon": shown_at, "within": PRECISION, "canaries": precise},
    }


def _plan_dict(plan: Plan, shown_at: float, claim: float | None) -> dict[str, Any]:
    low, high = plan.interval_at(shown_at)
    return {
        "canaries": plan.canaries,
        "unobserved": plan.unobserved,
        "detectable": plan.detectable,
        "floor": {"median": plan.floor.median, "q95": plan.floor.q95},
        "ceiling": plan.ceiling,
        "interval": {"epsilon": shown_at, "low": low, "high": high, "width": high - low},
        "power_against_claim": None if claim is None else _power(plan, claim),
    }
