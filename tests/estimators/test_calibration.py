"""A small calibration study; studies/calibration.py is the full one, with figures in docs/evidence/calibration.md."""

import importlib.util
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "studies" / "calibration.py"
if not SCRIPT.exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
SPEC = importlib.util.spec_from_file_location("calibration_study", SCRIPT)
study = importlib.util.module_from_spec(SPEC)
sys.modules["calibration_study"] = study
SPEC.loader.exec_module(study)


def names(pattern):
    return [name for name in study.all_cells() if re.search(pattern, name)]


def error(rate, runs):
    """Four standard deviations of a rate measured in `runs` runs."""
    return 4 * math.sqrt(rate * (1 - rate) / runs)


@pytest.mark.full
@pytest.mark.parametrize("name", names(r"bound/.*/k=(100|1000)/eps=(0\.0|0\.8|4\.9|25\.0)"))
def test_the_simultaneous_bound_is_a_95_percent_bound(name):
    runs = 500
    result = study.run_cell(name, runs)
    assert result["simultaneous"]["above"] <= 0.05 + error(0.05, runs)


@pytest.mark.parametrize("name", names(r"bound/closed/normal/k=1000/eps=0\.0"))
def test_the_papers_bound_is_not_a_95_percent_bound(name):
    assert study.run_cell(name, 200)["paper"]["above"] > 0.5


@pytest.mark.full
@pytest.mark.parametrize(("name", "least"), [
    ("bound/closed/mean/eps=2.28", 0.90), ("bound/closed/mean/eps=4.93", 2.40), ("bound/closed/mean/eps=10.08", 5.85),
    ("bound/two-sample/mean/m=10000/eps=2.25", 0.60), ("bound/two-sample/mean/m=10000/eps=4.89", 1.65),
    ("bound/two-sample/mean/m=10000/eps=11.0", 3.80),
])  # fmt: skip
def test_the_simultaneous_bound_is_tight(name, least):
    """The bound's std over runs is at most a tenth of its mean, so 200 runs give the mean to 1 %."""
    assert study.run_cell(name, 200)["simultaneous"]["mean"] >= 0.98 * least


@pytest.mark.full
@pytest.mark.parametrize(
    "name", names(r"interval/(estimated-null|k=(300|5000)/ratio=(0\.8|1\.0|1\.25)/mean=(0\.0|0\.5|5\.0))")
)
def test_the_interval_covers(name):
    runs = 500
    result = study.run_cell(name, runs)
    assert result["joint"]["covers"] >= 0.94 - error(0.05, runs)
    assert result["joint"]["width"] <= 1.35 * result["profile"]["width"]


@pytest.mark.parametrize("name", names("auto/"))
def test_auto_gains_at_equal_stds_and_loses_little_elsewhere(name):
    result = study.run_cell(name, 2_000)
    assert result["auto"] / result["fitted"] <= (0.75 if "ratio=1.0/" in name else 1.75)


@pytest.mark.parametrize("family", ["normal", "skewed", "mixture"])
def test_the_true_epsilons_are_correct(family):
    """The study's densities integrate to 1 and to their cdf, and its samples follow them."""
    law = study.FAMILIES[family](1.3)
    density = np.exp(law.log_density(study.GRID))
    step = study.GRID[1] - study.GRID[0]
    np.testing.assert_allclose(np.cumsum(density) * step - density * step / 2, law.cdf(study.GRID), atol=1e-6)
    draws = law.draw(np.random.default_rng(0), (100, 200))
    for point in (0.0, 1.3, 3.0):
        assert np.mean(draws < point) == pytest.approx(
            float(law.cdf(np.array(point))), abs=4 * 0.5 / math.sqrt(draws.size)
        )
    if family == "normal":
        from coalmine.estimators.mechanism import mechanism_epsilon

        assert study.true_epsilon(law, 1e-6) == pytest.approx(mechanism_epsilon(1 / 1.3, delta=1e-6), rel=1e-5)
