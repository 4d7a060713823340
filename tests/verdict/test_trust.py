"""A few seeds of every row of the study studies/trust.py."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "studies" / "trust.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
study, results, every = (importlib.import_module(f"studies.{name}") for name in ("trust", "results", "__main__"))
ROWS = study.rows()
BROKEN = [name for name, row in ROWS.items() if row.kind == "broken"]
HONEST = [name for name, row in ROWS.items() if row.kind in ("honest", "plain")]
LARGE = ("d = 100,000", "T = 500")
RUNS = [(1_000, True), (1_001, False)]  # seeds that the study does not use, with the clip norm declared and without


@pytest.mark.full
@pytest.mark.parametrize("name", BROKEN)
def test_broken_pipelines_do_not_pass(name):
    assert all(ROWS[name].run(seed, declared=declared)["outcome"] != "PASS" for seed, declared in RUNS)


@pytest.mark.full
@pytest.mark.parametrize("name", HONEST)
def test_honest_pipelines_are_not_violations(name):
    """Each run errs with probability at most 1 %; these seeds do not. The rank gauge prevents a PASS in 0.2 % of runs."""
    runs = RUNS[:1] if name in LARGE else RUNS
    records = [ROWS[name].run(seed, declared=declared) for seed, declared in runs]
    assert "VIOLATION" not in [record["outcome"] for record in records]
    if ROWS[name].kind == "plain" and ROWS[name].passes:
        assert {record["outcome"] for record in records if record["gauges"] != ["rank"]} <= {"PASS"}


@pytest.mark.parametrize("canaries", study.COUNTS)
def test_five_percent_less_noise_than_stated_is_detected(canaries):
    """The pooled residual gauge detects it without a declared clip norm; the mean score hardly changes."""
    row = ROWS[study._power_name(0.95, canaries)]
    assert "pooled residual" in row.run(1_000, declared=False)["gauges"]
    assert row.run(1_000, declared=True)["outcome"] == "VIOLATION"


def records(**changes):
    """Records of a study in which every run is right; `changes` maps a kind of row to changes of its records."""
    usual = {"broken": "UNDERPOWERED", "honest": "UNDERPOWERED", "plain": "PASS", "power": "VIOLATION"}
    found = []
    for name, row in ROWS.items():
        common = {"row": name, "outcome": usual[row.kind], "code": "", "known-others": None, "gauges": []}
        common |= {"gauges": ["pooled residual"]} if row.kind == "power" else {}
        common |= changes.get(row.kind, {})
        for declared in (True, False):
            found += [common | {"declared": declared, "seed": seed} for seed in row.numbers(declared=declared)]
    return found


def failures(monkeypatch, found):
    monkeypatch.setattr(study, "read", lambda: found)
    return study.failures(ROWS)


def test_every_criterion_can_fail(monkeypatch):
    assert failures(monkeypatch, records()) == []
    one = records()
    one[0]["outcome"] = "PASS"
    assert failures(monkeypatch, one) == [f"{BROKEN[0]} (clip norm declared): PASS in 1 of 100 runs, none may be"]
    assert len(failures(monkeypatch, records(honest={"outcome": "VIOLATION"}))) > 2 * 10
    many = records()
    for record in [record for record in many if ROWS[record["row"]].kind == "plain"][::50]:
        record["outcome"] = "VIOLATION"  # 2 % of the runs of every row: no row exceeds chance, the total does
    found = failures(monkeypatch, many)
    assert len(found) == 1
    assert found[0].endswith("1% may be")
    assert all("PASS" in line for line in failures(monkeypatch, records(plain={"outcome": "UNDERPOWERED"})))
    assert len(failures(monkeypatch, records(power={"gauges": []}))) == len(study.COUNTS)


def test_missing_rows_fail_the_study(monkeypatch):
    short = [record for record in records() if record["row"] != BROKEN[0]]
    assert failures(monkeypatch, short) == [f"{BROKEN[0]}: 0 of 200 runs were made"]


def test_tables_replace_the_text_between_their_markers():
    text = study.DOCS.read_text()
    for name in ("broken", "honest", "plain", "power", "total"):
        assert results.put_between_markers(text, name, "x").count(f"<!-- {name} -->\nx\n<!-- end of {name} -->") == 1
    with pytest.raises(ValueError, match="must hold"):
        results.put_between_markers(text, "nothing", "x")


@pytest.mark.full
def test_finished_runs_are_not_run_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(study, "RESULTS", tmp_path / "trust.jsonl")
    (tmp_path / "trust.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    monkeypatch.setattr(sys, "argv", ["trust", "--jobs", "1"])
    assert study.main() == 0
    assert "every bar met" in capsys.readouterr().out


def test_the_study_is_in_the_list_of_studies():
    assert "studies.trust" in [word for line in every.STUDIES for word in line]


@pytest.mark.slow
def test_the_whole_study_meets_its_criteria(monkeypatch):
    """Makes the runs that `python -m studies.trust` has not made yet."""
    monkeypatch.setattr(sys, "argv", ["trust"])
    assert study.main() == 0
