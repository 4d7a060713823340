"""The best threshold of a test: the largest value over all of them, found without trying each one.

A threshold at a higher score has more false negatives and fewer false positives. So between two thresholds no value exceeds
the one that would have the false negative rate of the lower and the false positive rate of the higher one. Stretches whose
limit is below the best value so far are left out; the others are divided further. Among 10^7 thresholds this tries a few
thousand.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats

Counts = npt.NDArray[np.int64]
EVERY = 20_000  # up to so many thresholds each one is tried
STRETCHES = 1_024  # into which the thresholds are first divided
PARTS = 8  # into which a stretch is then divided
ROUNDING = 1e-10  # relative error of a rate: a stretch must be worse by more than that to be left out


def best_threshold(
    value: Callable[[Floats, Floats], Floats],
    thresholds: Floats,
    *,
    log_fpr: Callable[[Floats], Floats],
    log_fnr: Callable[[Floats], Floats],
) -> tuple[float, int]:
    """The largest value over the sorted `thresholds`, and the place of a threshold that has it.

    `log_fpr` and `log_fnr` give the rates at thresholds; the first never rises with the threshold, the second never falls.
    `value` takes both, is at least 0 and never rises with either rate. The answer is that of trying every threshold.
    """
    size = thresholds.size
    if size <= EVERY:
        values = value(log_fpr(thresholds), log_fnr(thresholds))
        place = int(values.argmax())
        return float(values[place]), place
    edges = np.linspace(0, size - 1, STRETCHES + 1).astype(np.int64)
    fpr, fnr = log_fpr(thresholds[edges]), log_fnr(thresholds[edges])
    best, place = _better(value(fpr, fnr), edges, 0.0, 0)
    low, high, high_fpr, low_fnr = edges[:-1], edges[1:], fpr[1:], fnr[:-1]
    while not np.isinf(best):
        open_ends = (high - low > 1) & (thresholds[low] < thresholds[high])
        promising = value(high_fpr, low_fnr) > max(best - ROUNDING * max(best, 1.0), 0.0)
        kept = np.flatnonzero(open_ends & promising)
        if not kept.size:
            break
        low, high, high_fpr, low_fnr = low[kept], high[kept], high_fpr[kept], low_fnr[kept]
        inner = low[:, None] + (high - low)[:, None] * np.arange(1, PARTS) // PARTS
        inner = np.maximum(inner, low[:, None] + 1)
        flat = inner.ravel()
        fpr, fnr = log_fpr(thresholds[flat]), log_fnr(thresholds[flat])
        best, place = _better(value(fpr, fnr), flat, best, place)
        low, high = np.column_stack([low, inner]).ravel(), np.column_stack([inner, high]).ravel()
        high_fpr = np.column_stack([fpr.reshape(inner.shape), high_fpr]).ravel()
        low_fnr = np.column_stack([low_fnr, fnr.reshape(inner.shape)]).ravel()
    return best, place


def _better(values: Floats, places: Counts, best: float, place: int) -> tuple[float, int]:
    first = int(values.argmax())
    if values[first] > best:
        return float(values[first]), int(places[first])
    return best, place
