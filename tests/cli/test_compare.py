"""`coalmine compare` on runs that differ in more than their noise."""

import json
import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from runs import make_run
from training import train

from coalmine.cli import main as cli
from coalmine.report import plots, read_run
from coalmine.report.figures import comparison_pictures
from coalmine.report.table_rows import table_rows


def compared(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *map(str, arguments)])
    assert stop.value.code == 0
    return capsys.readouterr()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    home = tmp_path_factory.mktemp("made")
    make_run(home / "groups", canaries=121, presentations=(1, 2, 4), more={"presentations": 1})
    make_run(home / "alike", more={"presentations": 1})
    return home


@pytest.fixture
def runs(made, tmp_path):
    return [Path(shutil.copytree(made / name, tmp_path / name)) for name in ("groups", "alike")]


def test_groups_with_different_presentations_are_listed(runs, capsys):
    table = compared(capsys, *runs).out
    assert "1, 2, 4" in table
    found = json.loads(compared(capsys, "--json", *runs).out)
    assert [run["presented"] for run in found] == [[1, 2, 4], [1]]
    assert [run["presentations"] for run in found] == [1, 1]


def test_different_deltas_are_noted(runs, capsys):
    assert "delta ┃" not in compared(capsys, *runs).out
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"delta": 0.01}))
    found = compared(capsys, *runs)
    assert "delta ┃" in found.out
    assert "0.01" in found.out
    assert "do not compare their epsilons" in " ".join(found.err.split())


@pytest.mark.parametrize("damage", [{"adversaries": []}, {"adversaries": {"final": 5}}])
def test_a_malformed_result_is_a_one_line_error(runs, capsys, damage):
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | damage))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *map(str, runs)])
    assert stop.value.code == 2
    assert f"{result} is not a result" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def stopped(tmp_path):
    train(dim=2_000, canaries=50, rounds=4, directory=tmp_path / "stopped").directory.close()
    return tmp_path / "stopped"


@pytest.mark.parametrize("style", [[], ["--json"]])
def test_an_unfinished_run_and_a_file_do_not_stop_the_comparison(runs, stopped, tmp_path, capsys, style):
    notes = tmp_path / "notes.txt"
    notes.write_text("keep")
    found = compared(capsys, *style, *runs, stopped, notes)
    assert found.err.splitlines() == [
        f"coalmine: {stopped} is not finished and is left out: wait for it, or run its training script to the end",
        f"coalmine: {notes} is a file, not the directory of a run: left out",
    ]
    assert found.out == compared(capsys, *style, *runs).out


def test_an_unfinished_run_is_listed_with_its_resume_command(runs, stopped, capsys):
    (stopped / "config.toml").write_text('schema_version = 1\n[task]\nname = "digits"\n')
    assert f"continue it with `coalmine run --resume {stopped}`" in compared(capsys, *runs, stopped).err


def test_a_directory_of_runs_lists_the_unfinished_ones(runs, stopped, capsys):
    found = compared(capsys, "--json", runs[0].parent)
    assert [run["run"] for run in json.loads(found.out)] == [str(runs[1]), str(runs[0])]
    assert f"{stopped} is not finished" in found.err


def broken(path, text):
    path.mkdir()
    (path / "result.json").write_text(text)
    return path


@pytest.mark.parametrize("kind", ["stopped", "nowhere", "file", "empty", "damaged", "result.json"])
@pytest.mark.parametrize("alone", [True, False])
def test_a_path_without_a_readable_run_is_one_line_and_exit_code_2(runs, stopped, tmp_path, capsys, kind, alone):
    """Next to other runs, those are still shown, and an unfinished run or a file is not an error."""
    bad = {
        "stopped": stopped,
        "nowhere": tmp_path / "nowhere",
        "file": tmp_path / "file",
        "empty": tmp_path / "empty",
        "damaged": broken(tmp_path / "damaged", "{"),
        "result.json": runs[0] / "result.json",
    }[kind]
    (tmp_path / "file").write_text("no run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", "--json", *([] if alone else map(str, runs)), str(bad)])
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert str(bad) in err
    assert stop.value.code == (0 if kind in ("stopped", "file") and not alone else 2)
    assert len(json.loads(out or "[]")) == (0 if alone else 2)


WITHOUT_LIMITS = {"verdict": "VIOLATION", "reason_code": "gauge", "decided_by": None, "facts": {"gauge": "noise"}}


@pytest.mark.parametrize(
    "damage", [{"verdict": ["PASS"]}, {"adversaries": {"final": {"interval": [1]}}}, WITHOUT_LIMITS]
)
@pytest.mark.parametrize("style", [[], ["--json"]])
def test_a_result_with_wrong_types_is_a_one_line_error(runs, capsys, damage, style):
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | damage))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *style, *map(str, runs)])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert err == f"coalmine: {result} is not a result as an audit writes it; restore it from a copy\n"
    assert out.count("digits") == 1  # the other run


def test_a_number_outside_json_is_a_one_line_error(runs, capsys):
    result = runs[0] / "result.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"analytical_epsilon": float("nan")}))
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *map(str, runs)])
    assert stop.value.code == 2
    assert "is not JSON (a number in it is not finite)" in capsys.readouterr().err


def test_a_report_of_several_runs_has_the_ladder_of_each_on_one_axis(runs):
    runs_read = [read_run(run) for run in runs]
    (picture,) = [each for each in comparison_pictures(runs_read) if each.name == "ladders"]
    for place, run in enumerate(runs_read, start=1):
        assert f"{place} {run.name}" in picture.svg
        for row in table_rows(run.result):
            assert f"{row.rung} {row.epsilon:.3g}" in picture.alt
    axes = [
        plots.ladder(Figure().subplots(), run.result, beside=[each.result for each in runs_read]) for run in runs_read
    ]
    assert axes[0].get_xlim() == axes[1].get_xlim()
    assert axes[0].get_xlim()[1] >= max(row.epsilon for run in runs_read for row in table_rows(run.result))
