"""A small part of studies/literature_calibration.py, the study behind docs/evidence/estimators.md."""

import copy
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coalmine import compare_estimators

ROOT = Path(__file__).parents[3]
if not (ROOT / "studies" / "literature_calibration.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
study = importlib.import_module("studies.literature_calibration")
packages = importlib.import_module("studies.literature_packages")
GAUSSIAN_ONLY = ("Mahloujifar", "Xiang", "Nasr", "Agrawal")


@pytest.fixture(scope="module")
def results():
    """A few runs of every cell, enough to reveal gross errors."""
    return {name: study.run_cell(name, 25 if "2.3" in name else 2) for name in study.all_cells()}


def compared(**changes):
    """A comparison as the study stores it, without calling the packages."""
    shared = {"tolerance": 1e-5, "ours": 1.5, "theirs": 1.5, "digest": ""}
    rows = [
        {"row": f"{name}, ROC hull", "method": "theirs", "scores": f"{packages.QUANTILES} {shift}"} | shared
        for name in ("Steinke 2023", "Mahloujifar 2024")
        for shift in packages.FIGURES
    ]
    rows[-1] |= changes
    return {"packages": list(packages.PINS), "rows": rows}


def kinds(results, mechanism):
    return dict(study.methods(results, mechanism))


@pytest.mark.full
def test_every_estimator_is_in_the_study(results):
    every = {row.name for row in compare_estimators(np.arange(20.0), np.arange(20.0), delta=1e-6)}
    known = {f"{name}, null known" for name in study.KNOWN}
    assert set(results["gaussian/eps=2.3"]["rows"]) == every | known


@pytest.mark.full
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_valid_bounds_hold_under_their_assumptions(results, mechanism):
    cell = results[f"{mechanism}/eps=2.3"]
    allowed = 0.05 + 4 * math.sqrt(0.05 * 0.95 / cell["runs"])
    for name, kind in kinds(results, mechanism).items():
        if kind == "valid bound" and not (mechanism == "laplace" and name.startswith(GAUSSIAN_ONLY)):
            assert cell["rows"][name]["above"] <= allowed, name


@pytest.mark.full
def test_bounds_that_assume_gaussian_noise_fail_on_laplace_noise(results):
    names = (
        "Xiang 2025",
        "Nasr 2023, all thresholds",
        "Mahloujifar 2024, fixed guesses",
        "Agrawal 2026, Bonferroni box",
    )
    for name in names:
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


@pytest.mark.full
def test_the_page_has_a_value_for_every_estimator(results):
    page = study.page(results, compared())
    for name in kinds(results, "gaussian"):
        assert page.count(f"| {name} |") >= 2, name
    assert "{" not in page.replace("{runs}", "")
    assert "nan" not in page


def test_methods_without_their_stated_coverage_are_bold(results):
    cell = {"runs": 1_000, "rows": {"a": {"above": 0.09}, "b": {"above": 0.06}}}
    assert study.shown_rate(cell, "a", "heuristic") == "**9.0 %**"
    assert study.shown_rate(cell, "a", "estimate") == "9.0 %"
    assert study.shown_rate(cell, "b", "valid bound") == "6.0 %"


@pytest.mark.full
@pytest.mark.parametrize(
    ("cell", "method", "rate", "found"),
    [
        ("gaussian/eps=2.3", "Xiang 2025", 0.075, True),
        ("gaussian/eps=2.3", "Xiang 2025", 0.073, False),
        ("gaussian/eps=0.0", "coalmine's lower bound, null known", 0.5, True),
        ("laplace/eps=2.3", "Steinke 2023, fixed guesses", 0.075, True),
        ("laplace/eps=2.3", "Jagielski 2020, split", math.nan, True),
        ("laplace/eps=2.3", "Xiang 2025", 1.0, False),
        ("gaussian/eps=4.9", "Agrawal 2026, Bonferroni box", 0.075, True),
        ("laplace/eps=2.3", "Agrawal 2026, Bonferroni box", 1.0, False),
        ("gaussian/eps=2.3", "Nasr 2023, best threshold", 0.5, False),
    ],
)
def test_a_bound_without_its_stated_coverage_fails_the_study(results, cell, method, rate, found):
    """Only where its assumptions hold; heuristics have no stated coverage."""
    changed = copy.deepcopy(results)
    for each in changed.values():
        each["runs"] = 1_000
        for row in each["rows"].values():
            row["above"] = 0.05
    assert study.failures(changed) == []
    changed[cell]["rows"][method]["above"] = rate
    lines = study.failures(changed)
    assert len(lines) == found
    assert all(line.startswith(f"{cell}: {method} lies above the truth in") for line in lines)


def test_the_limit_is_a_binomial_tail():
    def more_than(count):
        return sum(math.comb(1_000, i) * 0.05**i * 0.95 ** (1_000 - i) for i in range(count + 1, 1_001))

    most = round(1_000 * study.allowed_rate(1_000))
    assert more_than(most) <= 1e-3 < more_than(most - 1)


def test_the_study_fails_if_a_limit_is_exceeded(results, monkeypatch, tmp_path, capsys):
    changed = copy.deepcopy(results)
    for cell in changed.values():
        cell["runs"] = 1_000
        for row in cell["rows"].values():
            row["above"] = 0.0
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(study, "RESULTS", kept)
    monkeypatch.setattr(sys, "argv", ["study"])
    ends = []
    for rate, packages_say in ((0.0, 0), (0.0, 1), (0.08, 0)):
        changed["laplace/eps=4.9"]["rows"]["coalmine's lower bound"]["above"] = rate
        kept.write_text("".join(json.dumps(cell) + "\n" for cell in changed.values()))
        monkeypatch.setattr(packages, "main", lambda said=packages_say: said)
        ends.append(study.main())
    assert ends == [0, 1, 1]
    assert "laplace/eps=4.9: coalmine's lower bound lies above the truth in 8.0 % of runs" in capsys.readouterr().out


@pytest.mark.parametrize("theirs", [1.5 + 2e-5, math.nan, math.inf])
def test_a_package_that_differs_fails_the_study(theirs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packages, "FOUND", tmp_path / "found.json")
    for found, end in ((compared(), 0), (compared(theirs=theirs), 1)):
        monkeypatch.setattr(packages, "compare", lambda found=found: found)
        assert packages.main() == end
    assert "differ: Mahloujifar 2024, ROC hull reads 1.5, theirs " in capsys.readouterr().out


def test_a_missing_package_fails_the_study(monkeypatch, tmp_path, capsys):
    def refused(home, *pins):
        raise subprocess.CalledProcessError(1, ["pip", "install", *pins])

    monkeypatch.setattr(packages, "FOUND", tmp_path / "found.json")
    monkeypatch.setattr(packages, "make_environment", refused)
    monkeypatch.setattr(packages, "cases", lambda: iter([next(packages._count_cases())]))
    assert packages.main() == 1
    assert "nothing was compared" in capsys.readouterr().out
    assert not (tmp_path / "found.json").exists()


def test_a_package_is_called_once_for_the_same_scores(monkeypatch, tmp_path):
    first, second = list(packages._count_cases())[:2]
    asked = []

    def answers(cases):
        asked.append([case.name for case in cases])
        return {case.name: case.ours for case in cases}

    monkeypatch.setattr(packages, "FOUND", tmp_path / "found.json")
    monkeypatch.setattr(packages, "_answers", answers)
    for these in ([first], [first, second]):
        monkeypatch.setattr(packages, "cases", lambda these=these: iter(these))
        assert packages.main() == 0
    assert asked == [[first.name], [second.name]]
