"""A small part of the study behind docs/estimators.md; the whole of it is studies/literature_calibration.py."""

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from coalmine import compare_estimators

ROOT = Path(__file__).parents[3]
if not (ROOT / "studies" / "literature_calibration.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
sys.path.insert(0, str(ROOT))
study = importlib.import_module("studies.literature_calibration")
GAUSSIAN_ONLY = ("Mahloujifar", "Xiang", "Nasr")


@pytest.fixture(scope="module")
def results():
    """A few runs of every cell: enough for gross errors."""
    return {name: study.run_cell(name, 25 if "2.3" in name else 2) for name in study.all_cells()}


def kinds(results, mechanism):
    return dict(study.methods(results, mechanism))


def test_every_estimator_is_in_the_study(results):
    every = {row.name for row in compare_estimators(np.arange(20.0), np.arange(20.0), delta=1e-6)}
    known = {f"{name}, null known" for name in study.KNOWN}
    assert set(results["gaussian/eps=2.3"]["rows"]) == every | known


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_valid_bounds_hold_where_what_they_assume_is_so(results, mechanism):
    cell = results[f"{mechanism}/eps=2.3"]
    allowed = 0.05 + 4 * math.sqrt(0.05 * 0.95 / cell["runs"])
    for name, kind in kinds(results, mechanism).items():
        if kind == "valid bound" and not (mechanism == "laplace" and name.startswith(GAUSSIAN_ONLY)):
            assert cell["rows"][name]["above"] <= allowed, name


def test_a_gaussian_reading_of_laplace_noise_is_wrong(results):
    for name in ("Xiang 2025", "Nasr 2023, all thresholds", "Mahloujifar 2024, fixed guesses"):
        assert results["laplace/eps=2.3"]["rows"][name]["above"] > 0.5


def test_the_laplace_scores_have_the_true_epsilon():
    """The hockey-stick divergence of two Laplace laws by a sum over a fine grid."""
    x = np.linspace(-40, 45, 2_000_001)
    shift = 2.3 - 2 * math.log1p(-study.DELTA)
    p, q = np.exp(-np.abs(x - shift)) / 2, np.exp(-np.abs(x)) / 2
    delta = np.maximum(p - math.exp(2.3) * q, 0).sum() * (x[1] - x[0])
    assert delta == pytest.approx(study.DELTA, rel=1e-3)
    rng = np.random.default_rng(0)
    observed, unobserved = study.laplace_scores(rng, 2.3)
    assert observed.mean() - unobserved.mean() == pytest.approx(2.3, abs=4 * 2 / math.sqrt(1_000))


def test_the_page_has_every_estimator_and_no_hole(results):
    page = study.page(results)
    for name in kinds(results, "gaussian"):
        assert page.count(f"| {name} |") >= 2, name
    assert "{" not in page.replace("{runs}", "")
    assert "nan" not in page


def test_bold_is_what_breaks_its_promise(results):
    cell = {"runs": 1_000, "rows": {"a": {"above": 0.09}, "b": {"above": 0.06}}}
    assert study.shown_rate(cell, "a", "heuristic") == "**9.0 %**"
    assert study.shown_rate(cell, "a", "estimate") == "9.0 %"
    assert study.shown_rate(cell, "b", "valid bound") == "6.0 %"
