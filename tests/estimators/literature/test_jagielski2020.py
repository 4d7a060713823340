import math

import numpy as np
import pytest
from scipy.stats import binomtest

from coalmine.estimators.literature.jagielski2020 import jagielski2020_row, jagielski2020_split_row


def brute_force(observed, unobserved, delta, confidence):
    """Every threshold in a loop with scipy's Clopper-Pearson, each of the two rates at √confidence."""
    one_sided = 2 * math.sqrt(confidence) - 1  # scipy's intervals have two sides
    best = 0.0
    for t in [*observed, *unobserved]:
        errors = [(int(np.sum(observed < t)), len(observed)), (int(np.sum(unobserved >= t)), len(unobserved))]
        fnr, fpr = (binomtest(k, n).proportion_ci(one_sided, method="exact").high for k, n in errors)
        for a, b in ((fnr, fpr), (fpr, fnr)):
            if 1 - delta - a > 0:
                best = max(best, math.log((1 - delta - a) / b))
    return best


@pytest.mark.parametrize("shift", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("sizes", [(20, 20), (15, 60)])
def test_the_best_threshold_equals_brute_force(shift, sizes):
    rng = np.random.default_rng(1)
    observed, unobserved = rng.normal(shift, 1, sizes[0]).round(1), rng.normal(0, 1, sizes[1]).round(1)
    row = jagielski2020_row(observed, unobserved, delta=1e-3, confidence=0.9)
    assert row.value == pytest.approx(brute_force(observed, unobserved, 1e-3, 0.9), abs=1e-9)
    assert (row.kind, row.confidence) == ("heuristic", 0.9)


def test_splitting_has_its_stated_coverage_and_the_best_threshold_does_not():
    """How often each exceeds 0 in 400 runs without any leak."""
    rng = np.random.default_rng(2)
    above = {"best": 0, "split": 0}
    for _ in range(400):
        observed, unobserved = rng.normal(size=(2, 300))
        above["best"] += jagielski2020_row(observed, unobserved, delta=1e-6).value > 0
        above["split"] += jagielski2020_split_row(observed, unobserved, delta=1e-6).value > 0
    assert above["split"] <= 400 * 0.05 + 4 * math.sqrt(400 * 0.05 * 0.95)
    assert above["best"] > above["split"]
    assert jagielski2020_split_row(observed, unobserved, delta=1e-6).kind == "valid bound"
