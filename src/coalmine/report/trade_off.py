"""The trade-off curve of a result: how rarely an attacker errs, beside the least that the claimed (ε, δ) allows."""

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr, ndtri

from coalmine.argument_checks import Floats
from coalmine.report.plots import ANALYTICAL, CLAIM, OBSERVED
from coalmine.report.table_rows import TableRow, main_rows
from coalmine.result.audit_result import AuditResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMALLEST_RATE, SMALLEST_DELTA = 1e-6, 1e-12


def curve(ax: "Axes", result: AuditResult) -> "Axes":
    """False negatives against false positives of the strongest attacker with normal scores, and of the claim."""
    row = _normal_row(result)
    if row is None:
        raise ValueError("a curve needs an attacker whose scores are normal, such as known-others: pass `others`")
    rates = np.geomspace(SMALLEST_RATE, 1.0, 400)
    ax.plot(rates, false_negatives(row, rates), color=OBSERVED, lw=2, label=f"{row.name}, measured")
    if row.gaussian.interval is not None:
        band = result.tradeoff(rates)
        ax.fill_between(rates, band.low, band.high, color=OBSERVED, alpha=0.25, lw=0, label="95 % band if Gaussian")
    if result.claim is not None:
        allowed = least_false_negatives(rates, result.claim.epsilon, result.settings.delta)
        ax.plot(rates, allowed, color=CLAIM, lw=1.5, ls="--", label="least that the claim allows")
    ax.set_xscale("log")
    ax.set_xlabel("false positive rate")
    ax.set_ylabel("false negative rate")
    ax.set_ylim(-0.02, 1.02)
    return ax


def profile(ax: "Axes", result: AuditResult) -> "Axes":
    """δ(ε) with its band, beside that of the stated noise."""
    found = result.privacy_profile()
    ax.fill_between(found.epsilons, found.low, found.high, color=OBSERVED, alpha=0.25, lw=0, label="95 % band")
    ax.plot(found.epsilons, found.deltas, color=OBSERVED, lw=2, label="measured")
    if found.analytical is not None:
        ax.plot(found.epsilons, found.analytical, color=ANALYTICAL, lw=1.5, ls="--", label="analytical")
    if result.claim is not None and not result.claim.amplified:
        ax.plot([result.claim.epsilon], [result.settings.delta], "D", ms=6, color=CLAIM, label="claimed")
    ax.set_yscale("log")
    ax.set_ylim(SMALLEST_DELTA, 1.0)
    marks = 10.0 ** np.arange(round(math.log10(SMALLEST_DELTA)), 1, 3)
    ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
    ax.set_xlabel("ε")
    ax.set_ylabel("δ")
    return ax


def false_negatives(row: TableRow, rates: Floats) -> Floats:
    """The rate of false negatives at each rate of false positives, for the normal laws fitted to a row's scores."""
    assert row.row is not None
    fit = row.row.estimate
    thresholds = fit.null_mean - fit.null_std * ndtri(rates)
    return np.asarray(ndtr((thresholds - fit.mean) / fit.std))


def least_false_negatives(rates: Floats, epsilon: float, delta: float) -> Floats:
    """The smallest rate of false negatives that (ε, δ) allows: max(0, 1 - δ - e^ε·α, e^-ε·(1 - δ - α))."""
    with np.errstate(over="ignore"):
        steep = 1 - delta - np.exp(epsilon) * rates
    return np.maximum.reduce([np.zeros_like(rates), steep, np.exp(-epsilon) * (1 - delta - rates)])


def _normal_row(result: AuditResult) -> TableRow | None:
    """The last row of the ladder whose scores have normal laws, with a spread of their own."""
    rows = [row for row in main_rows(result) if row.row is not None and row.row.estimate.variance.used != "accountant"]
    return next((row for row in reversed(rows) if row.row is not None and row.row.estimate.std > 0), None)
