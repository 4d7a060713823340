"""The best threshold of a test, found without trying every one.

A threshold at a higher score has more false negatives and fewer false positives. So between two thresholds no value exceeds
the one that would have the false negative rate of the lower and the false positive rate of the higher one. Ranges whose
limit is below the best value so far are skipped; the others are divided further. Of 10^7 thresholds this tries a few
thousand.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats

Counts = npt.NDArray[np.int64]
EXHAUSTIVE = 20_000  # with at most this many thresholds, every one is tried
RANGES = 1_024  # number of ranges into which the thresholds are first divided
PARTS = 8  # number of parts into which a range is then divided
ROUNDING = 1e-10  # relative error of a rate: a range is skipped only if it is worse by more than this


def best_threshold(
    value: Callable[[Floats, Floats], Floats],
    thresholds: Floats,
    *,
    log_fpr: Callable[[Floats], Floats],
    log_fnr: Callable[[Floats], Floats],
) -> tuple[float, int]:
    """The largest value over the sorted `thresholds`, and the index of a threshold that attains it.

    `log_fpr` and `log_fnr` give the rates at thresholds; the first never rises with the threshold, the second never falls.
    `value` takes both, is at least 0 and never rises with either rate. The answer is that of trying every threshold.
    """
    size = thresholds.size
    if size <= EXHAUSTIVE:
        values = value(log_fpr(thresholds), log_fnr(thresholds))
        index = int(values.argmax())
        return float(values[index]), index
    edges = np.linspace(0, size - 1, RANGES + 1).astype(np.int64)
    fpr, fnr = log_fpr(thresholds[edges]), log_fnr(thresholds[edges])
    best, index = _update_best(value(fpr, fnr), edges, 0.0, 0)
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
        best, index = _update_best(value(fpr, fnr), flat, best, index)
        low, high = np.column_stack([low, inner]).ravel(), np.column_stack([inner, high]).ravel()
        high_fpr = np.column_stack([fpr.reshape(inner.shape), high_fpr]).ravel()
        low_fnr = np.column_stack([low_fnr, fnr.reshape(inner.shape)]).ravel()
    return best, index


def _update_best(values: Floats, indices: Counts, best: float, index: int) -> tuple[float, int]:
    first = int(values.argmax())
    if values[first] > best:
        return float(values[first]), int(indices[first])
    return best, index
