"""`coalmine estimate`: epsilon from a file of scores, with interval, lower bound and noise floor."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import click
import numpy as np
from rich.console import Console

from coalmine.audit.claim import Claim
from coalmine.audit.ladder import Scores
from coalmine.audit.verdict import BOUND_CONFIDENCE, Evidence, Outcome, Verdict, judge
from coalmine.checks import Floats, whole_number
from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.options import JSON, Command, argument
from coalmine.cli.output import print_json, print_table, shown_number, shows_bars
from coalmine.cli.scores import STDIN, read_scores
from coalmine.estimators.bounds import METHODS, epsilon_lower_bound, lower_bound_ceiling, score_array
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate, equal_scores
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature.all_estimators import compare_estimators
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.null import CosineNull
from coalmine.estimators.variance import Variance

POINTWISE = ("paper", "clopper-pearson")  # methods that are valid at one threshold, but not at the best of many
SMALLEST, LARGEST = 1e-60, 1e60  # limits of stds and scores: squares of their ratios do not overflow
CANARY_SHARE = 0.04  # share of the vector's squared length that lowers the mean score by 2 %
CHOSEN = "chosen on the same data, "
FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)


@dataclass(frozen=True, kw_only=True)
class ScoredCanaries:
    """Observed scores and their null: a law, or the scores of unobserved canaries."""

    observed: Floats
    null: CosineNull | Gaussian | Floats
    null_dof: float
    described: str
    unobserved: Floats | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All numbers that the command prints."""

    canaries: ScoredCanaries
    delta: float
    estimate: EpsilonEstimate
    method: str
    confidence: float
    lower_bound: float
    ceiling: float
    paper_epsilon: float
    paper_lower_bound: float
    claim: Claim | None
    verdict: Verdict | None
    warnings: tuple[str, ...]


@click.command(cls=Command)
@argument(
    "scores",
    type=FILE,
    help="File (.csv, .npy, .npz or .parquet) with one score per canary, at least 10; - reads standard input.",
)
@click.option("--dim", type=int, metavar="D", help="Dimension, if the scores are cosines with vectors of this length.")
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
    "--method", type=click.Choice(METHODS), default="simultaneous", show_default=True, help="Method of the lower bound."
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
    method: str,
    variance: Variance,
    confidence: float,
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
    if null_std is None and not math.isinf(null_dof):
        raise click.UsageError("--null-dof needs --null-std")
    if known_others and claim is None:
        raise click.UsageError("--known-others needs --claim")
    canaries = _canaries(scores, dim, unobserved, null_std, null_dof, every=every)
    reading = read_canaries(
        canaries,
        delta=delta,
        claim=None if claim is None else Claim(epsilon=claim),
        known_others=known_others,
        method=method,
        variance=variance,
        confidence=confidence,
    )
    rows: Sequence[LiteratureRow] = ()
    if every:
        console = Console(stderr=True)
        with console.status("applying every published estimator") if shows_bars(console) else nullcontext():
            rows = _every_row(reading)
    if as_json:
        print_json(as_dict(reading) | ({"estimators": [vars(row) for row in rows]} if every else {}))
    else:
        _print(reading)
        if every:
            _print_rows(rows)
    return 0 if reading.verdict is None else VERDICT_CODES[reading.verdict.outcome]


def read_canaries(
    canaries: ScoredCanaries,
    *,
    delta: float,
    claim: Claim | None,
    known_others: bool,
    method: str,
    variance: Variance,
    confidence: float,
) -> Reading:
    """All numbers, and the verdict if there is a claim."""
    observed, null = canaries.observed, canaries.null
    found = epsilon_estimate(
        observed, null=null, delta=delta, variance=variance, confidence=confidence, null_dof=canaries.null_dof
    )
    settings = {"delta": delta, "confidence": confidence}
    fitted_null, fitted = Gaussian(found.null_mean, found.null_std), Gaussian(found.mean, found.std)
    verdict, notes = None, canaries.notes
    if claim is not None:
        verdict = judge_scores(canaries, found, claim, delta=delta, known_others=known_others)
        if verdict.outcome == "UNDERPOWERED" and not known_others and _unobserved(null) is None:
            verdict = Verdict(outcome=Outcome.UNDERPOWERED, code="hidden")
            notes += ("judged as if real updates could hide canaries; if they were subtracted, give --known-others",)
    return Reading(
        canaries=canaries,
        delta=delta,
        estimate=found,
        method=method,
        confidence=confidence,
        lower_bound=epsilon_lower_bound(observed, null=null, method=method, **settings),
        ceiling=lower_bound_ceiling(observed.size, unobserved=_unobserved(null), method=method, **settings),
        paper_epsilon=gaussian_epsilon(fitted_null, fitted, delta=delta),
        paper_lower_bound=epsilon_lower_bound(observed, null=null, method="paper", **settings),
        claim=claim,
        verdict=verdict,
        warnings=(*notes, *_warnings(found, observed.size, claim, verdict)),
    )


def judge_scores(
    canaries: ScoredCanaries, found: EpsilonEstimate, claim: Claim, *, delta: float, known_others: bool
) -> Verdict:
    """The verdict on a mechanism claim, for canaries that were presented once.

    Unless the other updates are known, it is unclear how much they hide. Power is then judged as on the known-round rung,
    by how far the mean score lies below that of the claim. Unobserved scores give no null exact enough for a test of the
    mean, so only the lower bound can refute the claim.
    """
    evidence = Evidence(delta=delta, planned=1, shown=1, vouched=known_others)
    if isinstance(canaries.null, np.ndarray):
        scores = Scores(rung="two-sample", observed=canaries.observed, unobserved=canaries.null)
        verdict = judge(claim, [scores], [], evidence)[1]["two-sample"]
        return verdict if verdict.outcome == "VIOLATION" else _undecided(canaries, claim, delta)
    rung = "known-others" if known_others else "known-round"
    unit: CosineNull | Gaussian = Gaussian(0.0, 1.0)
    if isinstance(canaries.null, CosineNull):
        unit = CosineNull(canaries.null.dim, scale=1 / found.null_std)
    scores = Scores(
        rung=rung,
        observed=canaries.observed / found.null_std,
        unobserved=np.zeros(0),  # the bound has its null in closed form
        null=unit,
        bound_null=unit,
        null_dof=canaries.null_dof,
        presentations=1,
    )
    return replace(judge(claim, [scores], [], evidence)[1][rung], rung=None)


def _undecided(canaries: ScoredCanaries, claim: Claim, delta: float) -> Verdict:
    highest = lower_bound_ceiling(
        canaries.observed.size, unobserved=_unobserved(canaries.null), delta=delta, confidence=BOUND_CONFIDENCE
    )
    return Verdict(
        outcome=Outcome.UNDERPOWERED,
        code="no closed form",
        confidence=BOUND_CONFIDENCE,
        ceiling=None if highest > claim.epsilon else highest,
    )


def _canaries(
    source: str, dim: int | None, unobserved: str | None, null_std: float | None, null_dof: float, *, every: bool
) -> ScoredCanaries:
    nulls = (dim, null_std) if every else (dim, null_std, unobserved)
    if sum(option is not None for option in nulls) > 1:
        raise click.UsageError("give one of --dim, --unobserved and --null-std")
    if source == unobserved == STDIN:
        raise click.UsageError("SCORES and --unobserved cannot both be standard input")
    held = read_scores(source)
    observed = _checked("observed", held.observed)
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


def _checked(name: str, scores: Floats | None) -> Floats:
    """Scores from a file, rejected if they are equal up to rounding, or so large that their squares overflow."""
    array = score_array(name, scores)
    farthest = float(np.abs(array).max())
    if farthest > LARGEST:
        raise ValueError(f"{name} scores must be at most {LARGEST:g} in size, got {farthest:.4g}")
    apart = float(np.ptp(array))
    if apart <= 1e-12 * farthest:
        raise ValueError(equal_scores(name, array))
    if apart < SMALLEST:
        raise ValueError(
            f"{name} scores must differ by at least {SMALLEST:g}, got {apart:.4g}; give them in other units"
        )
    return array


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
    return _checked("unobserved", scores)


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


def _unobserved(null: CosineNull | Gaussian | Floats) -> int | None:
    return null.size if isinstance(null, np.ndarray) else None


def _warnings(found: EpsilonEstimate, count: int, claim: Claim | None, verdict: Verdict | None) -> list[str]:
    notes = []
    if found.anderson_darling.p_value < 0.01:
        notes.append("the scores are not normal: trust the lower bound, not the estimate and its interval")
    ratio = found.std / found.null_std
    if not 0.5 <= ratio <= 2 and count >= 50:
        notes.append(
            f"the scores' std is {ratio:.2g} times the null's, but correct noise gives 1: is this the right null?"
        )
    if found.mean < found.null_mean - 4 * found.null_std / math.sqrt(count):
        notes.append(
            "observed scores lie below unobserved ones, but high scores must mean participation: is the sign reversed?"
        )
    if found.epsilon <= found.floor.q95:
        notes.append(
            f"nothing was detected: {count} scores give estimates up to {found.floor.q95:.2g} when nothing leaks"
        )
    passed = verdict is not None and verdict.outcome == "PASS"
    if claim is not None and passed and found.interval is not None and found.interval.low > claim.epsilon:
        notes.append("the mean score passes but the interval lies above the claim: the scores' std is not the null's")
    return notes


def as_dict(reading: Reading) -> dict[str, Any]:
    """All numbers as JSON, under the names of an audit's result."""
    found = reading.estimate
    return {
        "canaries": reading.canaries.observed.size,
        "unobserved": _unobserved(reading.canaries.null),
        "delta": reading.delta,
        "confidence": reading.confidence,
        "epsilon": found.epsilon,
        "interval": None if found.interval is None else [found.interval.low, found.interval.high],
        "lower_bound": reading.lower_bound,
        "method": reading.method,
        "paper": {"epsilon": reading.paper_epsilon, "lower_bound": reading.paper_lower_bound},
        "floor": {"median": found.floor.median, "q95": found.floor.q95},
        "ceiling": reading.ceiling,
        "variance": {"used": found.variance.used, "reason": found.variance.reason},
        "mean": found.mean,
        "std": found.std,
        "null_mean": found.null_mean,
        "null_std": found.null_std,
        "anderson_darling": {"statistic": found.anderson_darling.statistic, "p_value": found.anderson_darling.p_value},
        "claimed_epsilon": None if reading.claim is None else reading.claim.epsilon,
        "verdict": None if reading.verdict is None else reading.verdict.outcome,
        "reason": None if reading.verdict is None else reading.verdict.reason,
        "warnings": list(reading.warnings),
    }


def _print(reading: Reading) -> None:
    found, level = reading.estimate, f"{reading.confidence * 100:g} %"
    assert found.interval is not None
    bound = f"lower bound, {level}"
    if reading.method != "simultaneous":
        bound += f", {reading.method}" + " (not a bound)" * (reading.method in POINTWISE)
    rows = [
        ["estimate", shown_number(found.epsilon)],
        [f"interval, {level}", f"{shown_number(found.interval.low)} … {shown_number(found.interval.high)}"],
        [bound, shown_number(reading.lower_bound)],
        ["largest attainable lower bound", shown_number(reading.ceiling)],
        ["noise floor: half of all estimates when nothing leaks", f"≤ {shown_number(found.floor.median)}"],
        ["noise floor: 95 % of all estimates when nothing leaks", f"≤ {shown_number(found.floor.q95)}"],
        ["the paper's estimate (not a bound)", shown_number(reading.paper_epsilon)],
        ["the paper's ε_lo (not a bound)", shown_number(reading.paper_lower_bound)],
    ]
    title = f"{reading.canaries.observed.size:,} scores against {reading.canaries.described}, delta {reading.delta:.4g}"
    print_table(["", "epsilon"], rows, title=title)
    for line in _lines(reading):
        click.echo(line)


def _every_row(reading: Reading) -> tuple[LiteratureRow, ...]:
    canaries = reading.canaries
    return compare_estimators(
        canaries.observed,
        canaries.unobserved,
        null=canaries.null,
        null_dof=canaries.null_dof,
        delta=reading.delta,
        confidence=reading.confidence,
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


def _lines(reading: Reading) -> list[str]:
    """The lines below the table."""
    found = reading.estimate
    mean = (found.mean - found.null_mean) / found.null_std
    normality = found.anderson_darling
    lines = [
        f"scores: mean {shown_number(mean)} and std {shown_number(found.std / found.null_std)} in units of the null's std",
        f"variance: {found.variance.used} ({found.variance.reason})",
        f"Anderson-Darling: {shown_number(normality.statistic)}, p = {normality.p_value:.2g}",
        *(f"note: {warning}" for warning in reading.warnings),
    ]
    if reading.claim is not None and reading.verdict is not None:
        lines.append(f"claimed epsilon {shown_number(reading.claim.epsilon)}: {reading.verdict.outcome}")
        lines.append(reading.verdict.reason)
    return lines
