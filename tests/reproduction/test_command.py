"""`coalmine reproduce` as a user meets it."""

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from coalmine.cli import main as cli
from coalmine.cli import reproduce as command
from coalmine.reproduction import accuracy, emnist, normality, presentations
from coalmine.reproduction.readings import read_json
from coalmine.reproduction.setting import Setting

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {module.EXPERIMENT.name: module.EXPERIMENT for module in (accuracy, presentations, normality)}


def coalmine(capsys, *arguments):
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_table_piece_by_piece(capsys, tmp_path):
    """One noise level, then the plan, then all: what was finished is in every summary, and nothing is trained twice."""
    out = ("--out", tmp_path, "--rounds", 12)
    code, text, _ = coalmine(capsys, "reproduce", "emnist", *out, "--only", "0.16")
    assert code == 0
    assert "not finished: 5 of the runs" in text
    code, text, _ = coalmine(capsys, "reproduce", "emnist", *out, "--plan", "--json")
    assert [row["done"] for row in json.loads(text)] == [0, "finished", 0, 0, 0, 0]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/result.json")}
    code, text, _ = coalmine(capsys, "-q", "reproduce", "emnist", *out, "--only", "0.16,0.315", "--json")
    assert code == 0
    found = json.loads(text)
    assert [reading["noise_multiplier"] for reading in found["readings"]] == [0.16, 0.315]
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    assert read_json(tmp_path / "emnist-small.json")["checks"] == found["checks"]
    assert (tmp_path / "emnist-small.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*.new"))


def test_time_that_is_over_stops_at_a_checkpoint_and_the_same_command_goes_on(capsys, tmp_path, monkeypatch):
    often = replace(emnist.characters(Setting(out=tmp_path, rounds=6)), checkpoint_every=2)
    monkeypatch.setattr(emnist, "characters", lambda _: often)
    command = ("-q", "reproduce", "emnist", "--out", tmp_path, "--only", "0.16", "--json")
    code, text, err = coalmine(capsys, *command, "--minutes", 1e-9)
    assert code == 0
    assert "stopped after round 2; the same command goes on from there" in err
    assert json.loads(text)["readings"] == []
    code, text, err = coalmine(capsys, *command, "--minutes", 5)
    assert (code, err) == (0, "")
    assert [reading["rounds"] for reading in json.loads(text)["readings"]] == [6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("emnist", "--only", "a"), "must be noise multipliers"),
        (("emnist", "--originals"), "originals are read at scale paper only"),
        (("emnist", "--scale", "huge"), "huge"),
        (("emnist", "--rounds", "0"), "--rounds"),
        (("emnist", "--device", "abacus", "--rounds", "2"), "abacus"),
        (("nothing",), "nothing"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(capsys, tmp_path, arguments, words):
    extra = () if arguments == ("nothing",) else ("--out", tmp_path)
    code, _, err = coalmine(capsys, "reproduce", *arguments, *extra)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_without_the_data_it_says_what_to_fetch(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COALMINE_DATA_DIR", str(tmp_path / "no data"))
    code, _, err = coalmine(
        capsys, "reproduce", "stackoverflow", "--scale", "paper", "--device", "cpu", "--out", tmp_path
    )
    assert code == 2
    assert "is not there" in err
    code, text, _ = coalmine(capsys, "reproduce", "stackoverflow", "--scale", "paper", "--plan", "--out", tmp_path)
    assert code == 0
    assert "4 runs, 8,192 rounds" in text


def test_the_oddities_need_no_training(capsys, tmp_path):
    code, text, _ = coalmine(capsys, "reproduce", "oddities", "--out", tmp_path)
    assert code == 0
    assert "does not hold" not in text
    assert "39.6%" in text


@pytest.mark.parametrize(
    ("name", "noise", "runs"), [("accuracy", "0.064", 2), ("presentations", "0.16", 1), ("normality", "0.1023", 1)]
)
def test_every_experiment_ends_in_numbers_a_picture_and_words(capsys, tmp_path, name, noise, runs):
    code, text, _ = coalmine(
        capsys, "-q", "reproduce", name, "--out", tmp_path, "--rounds", 24, "--seeds", 1, "--only", noise
    )
    assert code == 0
    assert "holds: " in text or "not decided: " in text
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == runs
    assert (tmp_path / f"{name}-small.png").stat().st_size > 1000
    page = make_page(tmp_path)
    assert f"`coalmine reproduce {name} --scale small`" in page
    assert f"![{EXPERIMENTS[name].title}](reproduction/{name}-small.png)" in page


def make_page(folder):
    """docs/reproduction.md as it would be made of a folder, elsewhere."""
    spec = importlib.util.spec_from_file_location("make_reproduction", ROOT / "docs/make_reproduction.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HERE, module.FOLDER = folder, folder / "reproduction"
    module.make(folder)
    return (folder / "reproduction.md").read_text()


def test_markdown_tables_have_as_many_cells_in_every_line(tmp_path):
    (tmp_path / "gaussian.json").write_text((ROOT / "docs/reproduction/gaussian.json").read_text())
    blocks = itertools.groupby(make_page(tmp_path).splitlines(), key=lambda line: line.startswith("|"))
    tables = [list(lines) for is_table, lines in blocks if is_table]
    summary, table_2, signal = (len(table) - 2 for table in tables)
    assert (summary, table_2, signal) == (len(command.EXPERIMENTS), 12, 6)
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cost", "--minutes", "nan"), "nan is not a finite number"),
        (("accuracy", "--only", "5"), "must be among 0, 0.064, 0.102, 0.184, 0.234, got 5"),
        (("canife", "--only", "0.2"), "keeps no runs by their noise: leave out --only"),
    ],
)
def test_noises_that_an_experiment_does_not_have_are_refused(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", *words, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_was_trained_on_a_gpu_and_is_read_elsewhere_names_the_gpu():
    assert command._machine("cuda", "NVIDIA H200") == "NVIDIA H200"
    assert command._machine("cpu", "cpu").startswith("CPU, ")
