"""Pillutla et al. 2023 (arXiv 2305.18447): many canaries in each of several runs, with correlated outcomes within a run.

The tests of one run's canaries are exchangeable, not independent. The variance of a run's share of detected canaries
follows from moments of that exchangeable law, μ_j = Pr(j given canaries are all detected). They are estimated from the
same outcomes: the weaker the correlation, the more informative each run. Wilson's interval then uses the variance at the
bound itself. Order 1 takes the largest possible variance, order 2 bounds μ₂, and order 4 tightens that bound by μ₃ and μ₄.
"""

import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coalmine.argument_checks import Floats, finite_array, one_of, unit_interval
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import score_tables
from coalmine.estimators.rates import epsilon_from_rates

ORDERS = (1, 2, 4)
FEWEST_RUNS = 10  # fewer are too few for a normal approximation
THRESHOLDS = 500  # thresholds tried on the runs that choose one

Trials = tuple[npt.ArrayLike, npt.ArrayLike]


def pillutla_rows(trials: Trials | None, *, delta: float, confidence: float = 0.95) -> tuple[LiteratureRow, ...]:
    """Epsilon from Wilson intervals of order 1, 2 and 4 over several runs, one row each.

    `trials` holds two tables, observed and unobserved scores, with a row for each run. The first half of the runs chooses
    the threshold, the second tests it.
    """
    failing, delta = 1 - unit_interval("confidence", confidence), unit_interval("delta", delta)
    tables = None if trials is None else score_tables("trials", trials)
    rows = []
    for order in ORDERS:
        needs = _needs(tables, order)
        rows.append(
            LiteratureRow(
                name=f"Pillutla 2023, order {order}",
                reference="Pillutla et al. 2023, arXiv 2305.18447",
                value=None if tables is None or needs else _epsilon(*tables, order, delta, failing),
                kind="heuristic",
                confidence=confidence,
                assumptions="independent runs, exchangeable canaries; intervals valid for a large number of runs",
                threshold="fixed in advance",
                needs=needs,
            )
        )
    return tuple(rows)


def xbern_bounds(outcomes: npt.ArrayLike, *, order: int, failing: float) -> tuple[Floats, Floats]:
    """A lower and an upper bound on the rate of exchangeable outcomes, each failing with probability about `failing`.

    `outcomes` are 0 or 1, a row for each run and a column for each canary; further axes are kept.
    """
    table = finite_array("outcomes", outcomes)
    if table.ndim < 2 or not np.isin(table, (0.0, 1.0)).all():
        raise ValueError(f"outcomes must be a table of 0 and 1, a row for each run, got shape {table.shape}")
    one_of("order", order, ORDERS)
    if table.shape[1] < order:
        raise ValueError(f"order {order} needs at least {order} canaries per run, got {table.shape[1]}")
    return _bounds(table.mean(axis=1), table.shape[1], order, unit_interval("failing", failing))


def _bounds(shares: Floats, canaries: int, order: int, failing: float) -> tuple[Floats, Floats]:
    """From each run's share of detected canaries; runs along the first axis."""
    runs, failing = shares.shape[0], failing / order
    if order == 1:
        return wilson(shares.mean(axis=0), runs, 1.0, 0.0, failing)
    second = shares * (canaries * shares - 1) / (canaries - 1)
    if order == 2:
        mu2 = wilson(second.mean(axis=0), runs, 1.0, 0.0, failing)[1]
    else:
        third = second * (canaries * shares - 2) / (canaries - 2)
        fourth = third * (canaries * shares - 3) / (canaries - 3)
        mu3, mu4 = (wilson(moment.mean(axis=0), runs, 1.0, 0.0, failing)[1] for moment in (third, fourth))
        pairs = canaries * (canaries - 1)
        constant = (4 * (canaries - 2) * mu3 + (canaries - 2) * (canaries - 3) * mu4) / pairs
        mu2 = wilson(second.mean(axis=0), runs, 2 / pairs, constant, failing)[1]
    return wilson(shares.mean(axis=0), runs, 1 / canaries, (1 - 1 / canaries) * mu2, failing)


def wilson(
    mean: npt.ArrayLike, runs: int, linear: float, constant: npt.ArrayLike, failing: float
) -> tuple[Floats, Floats]:
    """The two μ at which (mean - μ)² is z²/runs times the variance linear·μ + constant - μ², or 1/4 if that is smaller."""
    centre, constant = np.asarray(mean, dtype=np.float64), np.asarray(constant, dtype=np.float64)
    z = -float(ndtri(failing))
    a, b, c = runs + z * z, runs * centre + z * z * linear / 2, runs * centre**2 - z * z * constant
    root = np.sqrt(np.maximum(b * b - a * c, 0.0))
    widest = z * math.sqrt(0.25 / runs)
    low, high = np.maximum((b - root) / a, centre - widest), np.minimum((b + root) / a, centre + widest)
    return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)


def _needs(tables: tuple[Floats, Floats] | None, order: int) -> str | None:
    if tables is None:
        return "needs scores of several runs (trials=)"
    runs, canaries = tables[0].shape[0], min(table.shape[1] for table in tables)
    if runs < 2 * FEWEST_RUNS:
        return f"needs at least {2 * FEWEST_RUNS} runs, half of them to choose the threshold, got {runs}"
    if canaries < order:
        return f"needs at least {order} canaries per run on each side, got {canaries}"
    return None


def _epsilon(observed: Floats, unobserved: Floats, order: int, delta: float, failing: float) -> float:
    half = observed.shape[0] // 2
    tried = np.quantile(observed[:half], (np.arange(THRESHOLDS) + 0.5) / THRESHOLDS)
    epsilons = _epsilons(observed[:half], unobserved[:half], tried, order, delta, failing)
    threshold = tried[[epsilons.argmax()]]
    return float(_epsilons(observed[half:], unobserved[half:], threshold, order, delta, failing)[0])


def _epsilons(
    observed: Floats, unobserved: Floats, thresholds: Floats, order: int, delta: float, failing: float
) -> Floats:
    detected, alarms = (
        _bounds(_shares(table, thresholds), table.shape[1], order, failing / 2) for table in (observed, unobserved)
    )
    with np.errstate(divide="ignore"):
        epsilons: Floats = epsilon_from_rates(np.log(alarms[1]), np.log1p(-detected[0]), delta=delta)
    return epsilons


def _shares(table: Floats, thresholds: Floats) -> Floats:
    """Each run's share of scores at or above each threshold."""
    below = np.stack([np.searchsorted(np.sort(row), thresholds) for row in table])
    return np.asarray(1 - below / table.shape[1])
