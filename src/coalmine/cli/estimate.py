"""`coalmine estimate`: epsilon from a file of scores, with interval, lower bound and noise floor."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import get_args

import click
import numpy as np
from rich.console import Console

from coalmine.argument_checks import Floats, unit_interval, whole_number
from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.options import COUNT, JSON, Command, argument
from coalmine.cli.output import print_json, print_table, shown_number, shows_bars
from coalmine.estimators.bounds import METHODS
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.literature.all_estimators import compare_estimators, literature_rows
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.null import CosineNull
from coalmine.estimators.variance import Variance
from coalmine.log.score_files import STDIN, read_scores
from coalmine.verdict.claim import Claim
from coalmine.verdict.findings.power import PossiblyHidden
from coalmine.verdict.scored_records import BLACK_BOX, RecordRung, RecordsResult, ScoredRecords
from coalmine.verdict.scores_estimate import (
    LARGEST,
    SMALLEST,
    ScoredCanaries,
    ScoresEstimate,
    checked_scores,
    estimate_from_scores,
)

POINTWISE = ("paper", "clopper-pearson")  # methods that are valid at one threshold, but not at the best of many
CANARY_SHARE = 0.04  # share of the vector's squared length that lowers the mean score by 2 %
CHOSEN = "chosen on the same data, "
HIDDEN = "judged as if real updates could hide canaries; if they were subtracted, give --known-others"
FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


@click.command(cls=Command)
@argument(
    "scores",
    type=FILE,
    help="File (.csv, .npy, .npz or .parquet) with one score per canary, at least 10; - reads standard input.",
)
@click.option(
    "--dim", type=COUNT, metavar="D", help="Dimension, if the scores are cosines with vectors of this length."
)
@click.option("--unobserved", type=FILE, metavar="FILE", help="File with the scores of unobserved canaries.")
@click.option("--null-std", type=float, metavar="S", help="Standard deviation of unobserved scores that are N(0, S²).")
@click.option(
    "--null-dof",
    type=float,
    default=math.inf,
    metavar="N",
    help="Degrees of freedom from which --null-std was estimated.  [default: inf, exactly known]",
)
@click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1).")
@click.option("--claim", type=float, metavar="E", help="Claimed epsilon of one participation; prints a verdict.")
@click.option(
    "--known-others",
    is_flag=True,
    help="Judge the claim for scores from which the other clients' updates were subtracted.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="Method of the lower bound.  [default: ranks against unobserved scores, or else simultaneous]",
)
@click.option(
    "--variance",
    type=click.Choice(get_args(Variance)),
    default="auto",
    show_default=True,
    help="Standard deviation of the alternative: fitted to the scores, the null's, or chosen by an F test.",
)
@click.option(
    "--confidence",
    type=float,
    default=0.95,
    show_default=True,
    metavar="C",
    help="Confidence level of the interval and of the lower bound.",
)
@click.option(
    "--one-run",
    is_flag=True,
    help="The scores are of data canaries, which share one model: bounds that hold however scores depend on each other.",
)
@click.option("--all", "every", is_flag=True, help="Also apply every published estimator to the same scores.")
@JSON
def estimate(
    scores: str,
    dim: int | None,
    unobserved: str | None,
    null_std: float | None,
    null_dof: float,
    delta: float,
    claim: float | None,
    known_others: bool,
    method: str | None,
    variance: Variance,
    confidence: float,
    one_run: bool,
    every: bool,
    as_json: bool,
) -> int:
    """Estimate epsilon from a file of canary scores.

    Prints the estimate with an interval, a lower bound and the noise floor. A high score means that the canary took
    part. SCORES may hold unobserved scores too, in a column or array named "unobserved", or with that label.

    Give one of --dim, --null-std and --unobserved to say how unobserved canaries score. With --all, --unobserved may be
    added to the other two: most published estimators need both kinds of scores.

    Exit codes with --claim: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED.
    """
    if one_run:
        if dim is not None or null_std is not None or known_others:
            raise click.UsageError(
                "--one-run compares with unobserved scores: omit --dim, --null-std and --known-others"
            )
        return _one_run(scores, unobserved, delta=delta, claim=claim, every=every, as_json=as_json)
    if null_std is None and not math.isinf(null_dof):
        raise click.UsageError("--null-dof needs --null-std")
    if known_others and claim is None:
        raise click.UsageError("--known-others needs --claim")
    canaries = _canaries(scores, dim, unobserved, null_std, null_dof, every=every)
    result = estimate_from_scores(
        canaries,
        delta=delta,
        claim=None if claim is None else Claim(epsilon=claim),
        known_others=known_others,
        method=method,
        variance=variance,
        confidence=confidence,
    )
    if result.verdict is not None and isinstance(result.verdict.finding, PossiblyHidden):
        result = replace(result, warnings=(*result.warnings, HIDDEN))
    rows: Sequence[LiteratureRow] = ()
    if every:
        console = Console(stderr=True)
        with console.status("applying every published estimator") if shows_bars(console) else nullcontext():
            rows = _every_row(result)
    if as_json:
        print_json(result.to_dict() | ({"estimators": [vars(row) for row in rows]} if every else {}))
    else:
        _print(result)
        if every:
            _print_rows(rows)
    return 0 if result.verdict is None else VERDICT_CODES[result.verdict.outcome]


def _one_run(
    source: str, unobserved: str | None, *, delta: float, claim: float | None, every: bool, as_json: bool
) -> int:
    """Print what scores of data canaries tell, and return the exit code."""
    held = read_scores(source)
    outside = _unobserved_null(held.unobserved, unobserved)
    assert held.observed is not None
    rung = RecordRung.of(BLACK_BOX, held.observed, outside, unit_interval("delta", delta))
    scored = ScoredRecords(kind="records", score="these scores", rungs=(rung,))
    result = RecordsResult.of(scored, Claim.of(claim))
    rows = literature_rows(held.observed, outside, delta=delta) if every else ()
    if as_json:
        print_json(result.to_dict() | ({"estimators": [vars(row) for row in rows]} if every else {}))
    else:
        click.echo(str(result))
        if every:
            _print_rows(rows)
    return 0 if result.verdict is None else VERDICT_CODES[result.verdict.outcome]


def _canaries(
    source: str, dim: int | None, unobserved: str | None, null_std: float | None, null_dof: float, *, every: bool
) -> ScoredCanaries:
    nulls = (dim, null_std) if every else (dim, null_std, unobserved)
    if sum(option is not None for option in nulls) > 1:
        raise click.UsageError("give one of --dim, --unobserved and --null-std")
    if source == unobserved == STDIN:
        raise click.UsageError("SCORES and --unobserved cannot both be standard input")
    held = read_scores(source)
    observed = checked_scores("observed", held.observed)
    null: CosineNull | Gaussian | Floats
    notes: tuple[str, ...] = ()
    if held.unobserved is not None and unobserved is not None:
        raise click.UsageError(f"{source} holds unobserved scores already: leave out --unobserved")
    if held.unobserved is not None and (dim is not None or null_std is not None) and not every:
        notes = (
            f"the {held.unobserved.size:,} unobserved scores were not used, because --dim or --null-std was given",
        )
    if dim is not None:
        null = _cosine_null(observed, dim)
        described = f"the law of cosines in {dim:,} dimensions"
        notes += _dilution_note(observed, dim)
    elif null_std is not None:
        null = _normal_null(null_std)
        described = f"a normal null with std {null_std:g}"
    else:
        null = _unobserved_null(held.unobserved, unobserved)
        described = f"{null.size:,} unobserved scores"
    others = null if isinstance(null, np.ndarray) else None
    if every and others is None and (held.unobserved is not None or unobserved is not None):
        others = _unobserved_null(held.unobserved, unobserved)
    return ScoredCanaries(
        observed=observed, null=null, null_dof=null_dof, described=described, unobserved=others, notes=notes
    )


def _cosine_null(observed: Floats, dim: int) -> CosineNull:
    null, farthest = CosineNull(whole_number("--dim", dim, minimum=2)), float(np.abs(observed).max())
    if farthest > 1 + 1e-6:  # single precision
        raise ValueError(
            f"with --dim, scores are cosines in [-1, 1], got one of size {farthest:.4g}; for other scores give --null-std"
        )
    return null


def _normal_null(null_std: float) -> Gaussian:
    if not SMALLEST <= null_std <= LARGEST:
        raise ValueError(f"--null-std must lie in [{SMALLEST:g}, {LARGEST:g}], got {null_std:g}")
    return Gaussian(0.0, null_std)


def _unobserved_null(held: Floats | None, source: str | None) -> Floats:
    scores = held if source is None else read_scores(source, role="unobserved").unobserved
    if scores is None:
        raise click.UsageError("the scores of unobserved canaries are unknown: give --dim, --unobserved or --null-std")
    return checked_scores("unobserved", scores)


def _dilution_note(observed: Floats, dim: int) -> tuple[str, ...]:
    """A note if canaries make up much of the vector that they are compared with."""
    free = dim - observed.size
    rest = 1 - float(observed @ observed)
    share = 1 - rest * dim / free if free >= 2 else 0.0
    if rest <= 0 or share < CANARY_SHARE:
        return ()
    return (
        f"if all cosines are with the same vector, {share:.0%} of it is canaries. --dim then assumes too wide a null, and "
        "epsilon is wrong: too low from the mean, too high from a fitted std. For orthonormal canaries replace --dim by "
        f"--null-std {math.sqrt(rest / free):.6g} --null-dof {free}",
    )


def _print(result: ScoresEstimate) -> None:
    found, level = result.estimate, f"{result.confidence * 100:g} %"
    assert found.interval is not None
    bound = f"lower bound for any law, {level}"
    gaussian, law = result.gaussian, _law(result)
    normal = math.nan if gaussian.lower_bound is None else gaussian.lower_bound
    if result.method not in ("simultaneous", "ranks"):
        bound += f", {result.method}" + " (not a bound)" * (result.method in POINTWISE)
    rows = [
        ["estimate", shown_number(found.epsilon)],
        [f"interval, {level}", f"{shown_number(found.interval.low)} … {shown_number(found.interval.high)}"],
        [f"lower bound if scores are {law}, {level}", shown_number(normal)],
        [f"interval if scores are {law}, {level}", _ends(gaussian.interval)],
        [bound, shown_number(result.lower_bound)],
        ["largest attainable lower bound", shown_number(result.ceiling)],
        ["noise floor: half of all estimates when nothing leaks", f"≤ {shown_number(found.floor.median)}"],
        ["noise floor: 95 % of all estimates when nothing leaks", f"≤ {shown_number(found.floor.q95)}"],
        ["the paper's estimate (not a bound)", shown_number(result.paper_epsilon)],
        ["the paper's ε_lo (not a bound)", shown_number(result.paper_lower_bound)],
    ]
    title = f"{result.canaries.observed.size:,} scores against {result.canaries.described}, delta {result.delta:.4g}"
    print_table(["", "epsilon"], rows, title=title)
    for line in _lines(result):
        click.echo(line)


def _law(result: ScoresEstimate) -> str:
    """What the second bound assumes of the scores."""
    return "nearly normal" if isinstance(result.canaries.null, np.ndarray) else "normal"


def _ends(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{shown_number(interval[0])} … {shown_number(interval[1])}"


def _every_row(result: ScoresEstimate) -> tuple[LiteratureRow, ...]:
    canaries = result.canaries
    return compare_estimators(
        canaries.observed,
        canaries.unobserved,
        null=canaries.null,
        null_dof=canaries.null_dof,
        delta=result.delta,
        confidence=result.confidence,
    )


def _print_rows(rows: Sequence[LiteratureRow]) -> None:
    cells = [
        [row.name, shown_number(row.value), row.kind, row.threshold.removeprefix(CHOSEN), row.assumptions]
        for row in rows
        if row.value is not None
    ]
    heads = ["estimator", "epsilon", "kind", "threshold", "assumes"]
    print_table(heads, cells, title="Every estimator on the same scores", left=(0, 2, 3, 4))
    click.echo(
        "threshold: whether the method corrects for choosing it on the same scores; --json adds what each auditor controls"
    )
    for needs in dict.fromkeys(row.needs for row in rows if row.needs is not None):
        names = "; ".join(row.name for row in rows if row.needs == needs)
        click.echo(f"not applicable: {names}: {needs}")


def _lines(result: ScoresEstimate) -> list[str]:
    """The lines below the table."""
    found = result.estimate
    mean = (found.mean - found.null_mean) / found.null_std
    normality = found.anderson_darling
    lines = [
        f"scores: mean {shown_number(mean)} and std {shown_number(found.std / found.null_std)} in units of the null's std",
        f"variance: {found.variance.used} ({found.variance.reason})",
        f"Anderson-Darling: {shown_number(normality.statistic)}, p = {normality.p_value:.2g}",
        *(
            [f"not offered if scores are {_law(result)}: {result.gaussian.withheld}"]
            if result.gaussian.withheld
            else []
        ),
        *(f"note: {warning}" for warning in result.warnings),
    ]
    if result.claim is not None and result.verdict is not None:
        lines.append(f"claimed epsilon {shown_number(result.claim.epsilon)}: {result.verdict.outcome}")
        lines.append(result.verdict.reason)
    return lines
