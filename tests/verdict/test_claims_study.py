"""The bars of studies/claims.py: every one can fail, and a few rows are run."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "studies" / "claims.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
study, results, every = (importlib.import_module(f"studies.{name}") for name in ("claims", "results", "__main__"))
ROWS, FEW = study.rows(), 10
QUICK = [
    "schedule, z 1.5 → 0.7, T = 5, k = 30",
    "schedule, z 1.5 → 0.7, T = 5, k = 30: noise over 1.4",
    "one coordinate bare, d = 4,000, T = 8 (power 100%)",
    "sampled, q = 0.1, T = 60, claim for z = 1, three rounds state 0.6, k = 40",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_run_meets_the_bars_of_its_row(name):
    row = ROWS[name]
    record = row.record(10_000)  # a seed that the study does not use
    assert row.bars
    assert all(bar.right(record) for bar in row.bars)


def records(**changes):
    """Perfect runs of every row; `changes` are made in each run of the row with that name."""
    found = []
    for name, row in ROWS.items():
        good = {"row": name, "outcome": "VIOLATION", "code": "stated", "alarm": False, "covers": True}
        if any(not bar.right(good) for bar in row.bars):
            good |= {"outcome": "PASS"}
        if any(not bar.right(good) for bar in row.bars):
            good |= {"outcome": "UNDERPOWERED"}
        found += [good | {"seed": seed} | changes.get(name, {}) for seed in range(FEW)]
    return found


def failures(monkeypatch, found, names=ROWS):
    monkeypatch.setattr(study, "read", lambda: found)
    return study.failures(names, FEW)


def test_every_bar_can_be_missed(monkeypatch):
    assert failures(monkeypatch, records()) == []
    wrong = {"outcome": "UNDERPOWERED", "code": "", "alarm": True, "covers": False}
    for name, row in ROWS.items():
        for bar in row.bars:
            outcomes = ({"outcome": outcome} for outcome in study.OUTCOMES)
            worst = next(wrong | each for each in outcomes if not bar.right({"row": name} | wrong | each))
            missed = failures(monkeypatch, records(**{name: worst}), [name])
            assert any(line.startswith(f"{name}: {bar.name} in 0 of {FEW} runs") for line in missed)


def test_missing_runs_fail_the_study_unless_the_package_is_missing(monkeypatch):
    short = [record for record in records() if record["row"] != QUICK[0]]
    assert failures(monkeypatch, short) == [f"{QUICK[0]}: 0 of {FEW} runs were made"]
    framework = next(row for row in ROWS.values() if row.needs == "opacus")
    short = [record for record in records() if record["row"] != framework.name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert failures(monkeypatch, short) == []


def test_chance_is_allowed_for_where_a_share_of_errors_is():
    runs = [{"outcome": "VIOLATION"}] * 5 + [{"outcome": "PASS"}] * 95
    assert study.NOT_REFUTED.counts(runs) == (95, 95)
    assert study.NEVER_REFUTED.counts(runs) == (95, 100)
    assert study.REFUTED.counts(runs) == (5, 95)


def test_the_page_has_a_place_for_every_table():
    text = study.DOCS.read_text()
    for name in {row.table for row in ROWS.values()}:
        assert results.put_between_markers(text, name, "x").count(f"<!-- {name} -->\nx\n<!-- end of {name} -->") == 1


def test_the_study_is_in_the_list_of_studies():
    assert "studies.claims" in [word for line in every.STUDIES for word in line]
