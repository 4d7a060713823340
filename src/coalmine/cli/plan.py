"""`coalmine plan`: before training, what a number of canaries can tell, and how many a wanted answer takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from coalmine.audit.verdict import POWER, TEST_LEVEL
from coalmine.checks import one_number, unit_interval, whole_number
from coalmine.cli.output import print_json, print_table, progress_bar, shown_number
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.planning import (
    Plan,
    canaries_for_power,
    canaries_to_detect,
    plan_audit,
    power_against_claim,
)

USUAL = (100, 300, 1_000, 3_000, 10_000)
USUAL_EPSILON = 3.0  # the interval is shown at this one, where nothing else is asked for


@click.command()
@click.option("--dim", type=int, required=True, metavar="D", help="Dimension of the model.")
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option("--canaries", type=int, multiple=True, metavar="K", help="What so many can tell; repeatable.")
@click.option("--detect", type=float, metavar="E", help="Instead: how many tell this epsilon from 0.")
@click.option("--claim", type=float, metavar="E", help="Also: how many decide a claimed epsilon.")
@click.option(
    "--at",
    type=float,
    metavar="E",
    help="Show the interval at this epsilon.  [default: that of the claim, to detect, or 3]",
)
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Also a picture: .png, .svg or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
@click.pass_obj
def plan(
    settings: dict[str, bool],
    dim: int,
    delta: float,
    canaries: tuple[int, ...],
    detect: float | None,
    claim: float | None,
    at: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """How many canaries an audit needs, or what a given number of them can tell.

    An epsilon is told from 0 where its estimate lies above 95 % of those that are read when nothing leaks, in 90 % of the
    runs. A claim is decided where noise too small by so much that epsilon doubles is caught in 90 % of the runs, by an
    attacker who knows everybody else's updates.
    """
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
    with progress_bar("planning", total=len(counts), hidden=settings["quiet"]) as advance:
        plans = []
        for count in counts:
            plans.append(plan_audit(count, dim=dim, delta=delta, power=POWER))
            advance()
    if plot is not None:
        from coalmine.report.pictures import save_plot
        from coalmine.report.plots import plan as plan_plot

        save_plot(plot, plan_plot, plans)
    deciding = None if claim is None else canaries_to_decide(claim, dim=dim, delta=delta)
    if as_json:
        print_json(_as_dict(plans, shown_at, detect, claim, deciding))
        return
    _print(plans, shown_at, claim)
    if detect is not None:
        click.echo(f"{counts[0]:,} canaries tell an epsilon of {detect:g} from 0")
    if claim is not None:
        many = "no number of canaries decides" if deciding is None else f"{deciding:,} canaries decide"
        click.echo(f"{many} a claimed epsilon of {claim:g}" + " in this dimension" * (deciding is None))


def canaries_to_decide(claim: float, *, dim: int, delta: float) -> int | None:
    """The fewest canaries with 90 % power against a claim, the null's std learnt from the directions they leave free."""
    count = FEWEST
    while count <= dim - 2:
        needed = canaries_for_power(claim, delta=delta, level=TEST_LEVEL, power=POWER, null_dof=float(dim - count))
        if needed is None or needed <= count:
            return None if needed is None else count
        count = needed  # leaves fewer directions, which may take more canaries again
    return None


def _power(plan: Plan, claim: float) -> float:
    dof = float(plan.dim - plan.canaries)
    return power_against_claim(plan.canaries, claim, delta=plan.delta, level=TEST_LEVEL, null_dof=dof)


def _print(plans: Sequence[Plan], shown_at: float, claim: float | None) -> None:
    heads = [
        "canaries",
        "smallest ε told from 0",
        f"95 % interval at ε = {shown_at:g}",
        "floor",
        "unobserved",
        "ceiling",
    ]
    rows = []
    for each in plans:
        low, high = each.interval_at(shown_at)
        row = [
            f"{each.canaries:,}",
            shown_number(each.detectable, 3),
            f"{shown_number(low, 3)} … {shown_number(high, 3)}",
            shown_number(each.floor.q95, 3),
            f"{each.unobserved:,}",
            shown_number(each.ceiling, 3),
        ]
        rows.append(row if claim is None else [*row, f"{_power(each, claim):.1%}"])
    if claim is not None:
        heads.append(f"power against claim {claim:g}")
    print_table(heads, rows, title=f"An audit in {plans[0].dim:,} dimensions, delta {plans[0].delta:.4g}")
    click.echo("floor: 95 % of estimates lie below it when nothing leaks")
    click.echo(
        "ceiling: the most that the lower bound can say against so many unobserved canaries; in closed form, inf"
    )


def _as_dict(
    plans: Sequence[Plan], shown_at: float, detect: float | None, claim: float | None, deciding: int | None
) -> dict[str, Any]:
    return {
        "dim": plans[0].dim,
        "delta": plans[0].delta,
        "power": POWER,
        "plans": [_plan_dict(each, shown_at, claim) for each in plans],
        "detect": None if detect is None else {"epsilon": detect, "canaries": plans[0].canaries},
        "claim": None if claim is None else {"epsilon": claim, "canaries": deciding},
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
