"""`coalmine compare` on runs that differ in more than their noise."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest

from coalmine.cli import main as cli

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from runs import make_run


def compared(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *map(str, arguments)])
    assert stop.value.code == 0
    return capsys.readouterr()


@pytest.fixture
def runs(tmp_path):
    return [
        make_run(tmp_path / "groups", canaries=121, presentations=(1, 2, 4), more={"presentations": 1}),
        make_run(tmp_path / "alike", more={"presentations": 1}),
    ]


def test_groups_that_came_differently_often_are_told_apart(runs, capsys):
    table = compared(capsys, *runs).out
    assert "1, 2, 4" in table
    rows = list(csv.DictReader(io.StringIO(compared(capsys, "--csv", *runs).out)))
    assert [row["presented"] for row in rows] == ["1 2 4", "1"]
    found = json.loads(compared(capsys, "--json", *runs).out)
    assert [run["presented"] for run in found] == [[1, 2, 4], [1]]
    assert [run["presentations"] for run in found] == [1, 1]


def test_different_deltas_are_said(runs, capsys):
    assert "delta ┃" not in compared(capsys, *runs).out
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"delta": 0.01}))
    found = compared(capsys, *runs)
    assert "delta ┃" in found.out
    assert "0.01" in found.out
    assert "not to be compared" in " ".join(found.err.split())


@pytest.mark.parametrize("damage", [{"adversaries": []}, {"adversaries": {"final": 5}}])
def test_a_result_of_another_shape_is_one_line(runs, capsys, damage):
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | damage))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *map(str, runs)])
    assert stop.value.code == 2
    assert f"{result} is not a result" in " ".join(capsys.readouterr().err.split())


def test_one_way_to_print(runs, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", "--csv", "--json", *map(str, runs)])
    assert stop.value.code == 2
    assert "--csv and --json are two ways" in capsys.readouterr().err
