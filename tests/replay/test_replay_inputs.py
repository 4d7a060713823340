"""Inputs of `replay` at the edge: complex sums, empty batches, tolerances that are none."""

import math
from typing import Any

import numpy as np
import pytest

from coalmine.testing import replay

BATCH = np.random.default_rng(4).normal(size=(6, 9))


def _clipped(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    total: np.ndarray[Any, Any] = (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)).sum(axis=0)
    return total


def test_a_complex_sum_counts_with_its_imaginary_part() -> None:
    found = replay(lambda rows: 3j * _clipped(rows), BATCH, extremes=False)
    assert found.factor == pytest.approx(3 * min(1.0, np.linalg.norm(BATCH, axis=1).max()))
    assert not found.ok


@pytest.mark.parametrize("tolerance", [-1.0, math.nan])
def test_a_tolerance_that_is_none_is_refused(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be"):
        replay(_clipped, BATCH, tolerance=tolerance)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        replay(_clipped, BATCH[:0])
