"""`python -m reproduction` as a user calls it."""

import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from coalmine import mechanism_epsilon
from coalmine.cli.program import run_program
from reproduction import appendix_c_normality as normality
from reproduction import appendix_d_multirun as multirun
from reproduction import beyond_the_paper as beyond
from reproduction import command, epsilon_table, table_2
from reproduction import figures_1_to_3_presentations as presentations
from reproduction import table_3_accuracy as accuracy
from reproduction import table_5_emnist as emnist
from reproduction.experiment import load_experiment
from reproduction.experiment_options import Options
from reproduction.paper import EMNIST
from reproduction.run_numbers import read_json
from reproduction.training_configs import characters

ROOT = Path(__file__).parents[2]
EXPERIMENTS = {module.EXPERIMENT.name: module.EXPERIMENT for module in (accuracy, presentations, normality)}


def reproduction(capsys, *arguments):
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as stop:
        run_program(command.reproduce, "reproduction", [str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_a_table_can_be_made_piece_by_piece(capsys, tmp_path):
    """One noise level, then the plan, then all: every summary includes finished runs, and nothing is trained twice."""
    out = ("--out", tmp_path, "--rounds", 12)
    code, text, _ = reproduction(capsys, "emnist", *out, "--only", "0.16")
    assert code == 0
    assert "not finished: 5 of the runs" in text
    code, text, _ = reproduction(capsys, "emnist", *out, "--plan", "--json")
    assert [row["done"] for row in json.loads(text)] == [0, "finished", 0, 0, 0, 0]
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*/result.json")}
    code, text, _ = reproduction(capsys, "-q", "emnist", *out, "--only", "0.16,0.315", "--json")
    assert code == 0
    found = json.loads(text)
    assert [reading["noise_multiplier"] for reading in found["readings"]] == [0.16, 0.315]
    assert all(path.stat().st_mtime_ns == before for path, before in made.items())
    assert read_json(tmp_path / "emnist-small-12-rounds.json")["checks"] == found["checks"]
    assert (tmp_path / "emnist-small-12-rounds.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob(".*.new"))


def test_the_time_limit_stops_at_a_checkpoint_and_the_same_command_resumes(capsys, tmp_path, monkeypatch):
    often = replace(characters(Options(out=tmp_path, rounds=6)), checkpoint_every=2)
    changed = epsilon_table.experiment("emnist", "EMNIST", lambda _: often, EMNIST, original="EMNIST")
    monkeypatch.setattr(emnist, "EXPERIMENT", changed)
    asked = ("-q", "emnist", "--out", tmp_path, "--only", "0.16", "--json")
    code, text, err = reproduction(capsys, *asked, "--minutes", 1e-9)
    assert code == 0
    assert "stopped after round 2; the same command continues from there" in err
    assert json.loads(text)["readings"] == []
    code, text, err = reproduction(capsys, *asked, "--minutes", 5)
    assert (code, err) == (0, "")
    assert [reading["rounds"] for reading in json.loads(text)["readings"]] == [6]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("emnist", "--only", "a"), "must be noise multipliers"),
        (("emnist", "--originals"), "--originals needs --scale paper"),
        (("cost", "--max-examples", "4"), "--max-examples needs --scale paper"),
        (("emnist", "--seeds", "2"), "emnist does not use --seeds"),
        (("beyond", "--jobs", "2"), "beyond does not use --jobs"),
        (("multirun", "--rounds", "2"), "multirun does not use --rounds"),
        (("canife", "--minutes", "2"), "canife does not use --minutes"),
        (("errata", "--rounds", "3", "--seeds", "9"), "errata does not use --rounds"),
        (("errata", "--device", "cuda"), "errata does not use --device"),
        (("errata", "--originals"), "errata does not use --originals"),
        (("table-2", "--seed", "-1"), "seed must be at least 0, got -1\n"),
        (("table-2", "--device", "cuda"), "cuda"),
        (("emnist", "--scale", "huge"), "huge"),
        (("emnist", "--rounds", "0"), "--rounds"),
        (("emnist", "--device", "abacus", "--rounds", "2"), "abacus"),
        (("nothing",), "The commands are accuracy, amplification, audit-gaussian-mechanism, beyond, canife"),
    ],
)
def test_invalid_options_are_rejected_with_one_line(capsys, tmp_path, arguments, words):
    extra = () if arguments == ("nothing",) else ("--out", tmp_path)
    code, _, err = reproduction(capsys, *arguments, *extra)
    assert code == 2
    assert words in err
    assert len(err.strip().splitlines()) == 1


def test_without_the_data_the_error_names_what_to_fetch(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COALMINE_DATA_DIR", str(tmp_path / "no data"))
    code, _, err = reproduction(capsys, "stackoverflow", "--scale", "paper", "--device", "cpu", "--out", tmp_path)
    assert code == 2
    assert "does not exist" in err
    code, text, _ = reproduction(capsys, "stackoverflow", "--scale", "paper", "--plan", "--out", tmp_path)
    assert code == 0
    assert "4 runs, 8,192 rounds" in text


def test_the_errata_need_no_training(capsys, tmp_path):
    code, text, _ = reproduction(capsys, "errata", "--out", tmp_path)
    assert code == 0
    assert "does not hold" not in text
    assert "39.6%" in text


@pytest.mark.parametrize(
    ("name", "noise", "runs", "more"),
    [
        ("accuracy", "0.064", 2, ("--seeds", 1)),
        ("presentations", "0.16", 1, ()),
        ("normality", "0.1023", 1, ()),
    ],
)
def test_every_experiment_writes_numbers_a_plot_and_a_summary(capsys, tmp_path, name, noise, runs, more):
    code, text, _ = reproduction(capsys, "-q", name, "--out", tmp_path, "--rounds", 24, "--only", noise, *more)
    assert code == 0
    assert "holds: " in text or "not decided: " in text
    assert len(list((tmp_path / "runs").glob("*/result.json"))) == runs
    assert (tmp_path / f"{name}-small-24-rounds.png").stat().st_size > 1000
    assert f"{name}-small" not in make_page(tmp_path)  # the page skips runs with another number of rounds
    (tmp_path / f"{name}-small-24-rounds.json").rename(tmp_path / f"{name}-small.json")
    page = make_page(tmp_path)
    assert f"`python -m reproduction {name} --scale small`" in page
    assert f"![{EXPERIMENTS[name].title}](reproduction/{name}-small.png)" in page


def make_page(folder):
    """Build docs/evidence/reproduction.md from a folder, in another place."""
    spec = importlib.util.spec_from_file_location("make_reproduction", ROOT / "docs/evidence/make_reproduction.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.HERE, module.FOLDER = folder, folder / "reproduction"  # type: ignore[attr-defined]
    module.make(folder)
    return (folder / "reproduction.md").read_text()


def test_markdown_tables_have_equally_many_cells_in_every_line(tmp_path):
    (tmp_path / "table-2.json").write_text((ROOT / "docs/evidence/reproduction/table-2.json").read_text())
    blocks = itertools.groupby(make_page(tmp_path).splitlines(), key=lambda line: line.startswith("|"))
    tables = [list(lines) for is_table, lines in blocks if is_table]
    summary, table_2, signal, claims = (len(table) - 2 for table in tables)
    assert (summary, table_2, signal, claims) == (1 + len(command.EXPERIMENTS), 12, 6, 1)
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("cost", "--minutes", "nan"), "nan is not a finite number"),
        (("accuracy", "--only", "5"), "must be among 0, 0.064, 0.102, 0.184, 0.234, got 5"),
        (("canife", "--only", "0.2"), "canife does not use --only"),
    ],
)
def test_noise_levels_unknown_to_an_experiment_are_rejected(tmp_path, capsys, words, said):
    code, _, err = reproduction(capsys, *words, "--out", tmp_path / "out")
    assert code == 2
    assert said in err
    assert not (tmp_path / "out").exists()


def test_the_page_includes_runs_with_more_examples(tmp_path):
    for name in ("stackoverflow-paper", "stackoverflow-paper-64-examples"):
        (tmp_path / f"{name}.json").write_bytes((ROOT / f"docs/evidence/reproduction/{name}.json").read_bytes())
    page = make_page(tmp_path)
    assert (tmp_path / "reproduction/stackoverflow-paper-64-examples.json").is_file()
    assert "`python -m reproduction stackoverflow --scale paper --only 0.2317 --max-examples 64`" in page


def test_table_2_has_a_row_a_section_and_a_picture(tmp_path):
    (tmp_path / "table-2.json").write_bytes((ROOT / "docs/evidence/reproduction/table-2.json").read_bytes())
    page = make_page(tmp_path)
    assert "| `table-2` | paper |" in page
    assert "![The Gaussian mechanism (Table 2)](reproduction/table-2.png)" in page
    assert (tmp_path / "reproduction/table-2.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("out", "written"),
    [
        ("here", "here/table-2-small"),  # an existing folder
        ("new", "new/table-2-small"),
        ("table.json", "table"),
    ],
)
def test_table_2_is_written_to_a_folder_or_a_file(capsys, tmp_path, monkeypatch, out, written):
    monkeypatch.setattr(table_2, "PAPER", {(1.54, 10**4): (3.0, 0.46)})
    (tmp_path / "here").mkdir()
    code, text, _ = reproduction(capsys, "table-2", "--scale", "small", "--device", "cpu", "--out", tmp_path / out)
    assert code == 0
    assert "holds: " in text
    found = read_json(tmp_path / f"{written}.json")
    assert (found["scale"], found["table_2"][0]["sphere"]["runs"]) == ("small", table_2.RUNS["small"])
    assert (tmp_path / f"{written}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_table_2_needs_no_torch(tmp_path):
    code = "import sys; sys.modules['torch'] = None; from reproduction.__main__ import main; main()"
    command = [sys.executable, "-c", code, "table-2", "--runs", "1", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / "table-2-paper.json").is_file()


def test_a_wrong_table_2_does_not_pass():
    found = read_json(ROOT / "docs/evidence/reproduction/table-2.json")
    assert [check.holds for check in table_2.checks(found)] == [True]
    found["table_2"][3]["sphere"]["null"]["mean"] += 0.1
    assert table_2.checks(found)[0].holds is False
    assert "noise 0.541, d = 1e+07" in table_2.checks(found)[0].detail


@pytest.mark.parametrize("name", ["presentations", "beyond"])
def test_a_model_that_did_not_learn_is_named(name):
    found = read_json(ROOT / f"docs/evidence/reproduction/{name}-paper.json")
    worst = min(found["readings"], key=lambda reading: reading["accuracy"])
    text = load_experiment(name).account.conclusion(found)
    lost = text.partition("Not every model learnt: ")[2].partition(", where")[0]
    assert lost.startswith(f"{worst['accuracy']:.1%} at noise {worst['noise_multiplier']:g} (clip norm at the end ")
    assert lost.count(" at noise ") == 1  # each task is compared with its own best model


def test_groups_with_fewer_canaries_than_the_papers_are_named():
    found = read_json(ROOT / "docs/evidence/reproduction/presentations-paper.json")
    assert "Groups of handwriting have 250 canaries, fewer than the paper's 1,000." in presentations.conclusion(found)
    assert "Groups of next words" not in presentations.conclusion(found)


def test_the_plan_of_beyond_lists_the_runs_to_train(capsys, tmp_path):
    code, text, _ = reproduction(capsys, "beyond", "--only", beyond.NOISE, "--plan", "--json", "--out", tmp_path)
    assert code == 0
    asked = {row["run"] for row in json.loads(text) if row["asked"]}
    options = Options(out=tmp_path)
    assert {run.name for run in beyond.noise_runs(options).values()} <= asked
    assert len(asked) == len(beyond.plan(options)) - 5  # runs with other noise levels of the table


def fake_repeat(noise, number):
    return {"noise_multiplier": noise, "repeat": number, "one": 1.0 + number, "ten": 1.1 + number}


def test_a_torn_file_affects_only_its_own_repeat(capsys, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(multirun, "repeat", lambda *pair: trained.append(pair) or fake_repeat(*pair))
    kept = [json.dumps(fake_repeat(noise, 0)) for noise in multirun.NOISES]
    (tmp_path / "multirun-small.jsonl").write_text("\n".join(kept)[:-9])
    code, text, _ = reproduction(capsys, "multirun", "--plan", "--json", "--out", tmp_path)
    assert [row["done"] for row in json.loads(text)] == [True] + [False] * 5
    code, text, _ = reproduction(capsys, "-q", "multirun", "--out", tmp_path)
    assert code == 0
    assert "not finished" not in text
    assert len(trained) == 5
    assert len(read_json(tmp_path / "multirun-small.json")["repeats"]) == 6
    reproduction(capsys, "-q", "multirun", "--out", tmp_path)
    assert len(trained) == 5


@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_limit_stops_between_repeats(capsys, tmp_path, monkeypatch, processes):
    monkeypatch.setattr(multirun, "repeat", fake_repeat)
    asked = ("multirun", "--out", tmp_path, "--jobs", processes)
    code, text, err = reproduction(capsys, *asked, "--minutes", 1e-9)
    assert code == 0
    assert f"{6 - processes} repeats were not started; the same command continues from there" in err
    assert f"not finished: {6 - processes} of the repeats; see --plan" in text
    code, text, err = reproduction(capsys, *asked)
    assert (code, err) == (0, "")
    assert "not finished" not in text


def test_the_time_limit_stops_between_small_runs(capsys, tmp_path):
    code, text, err = reproduction(capsys, "-q", "emnist", "--rounds", 4, "--minutes", 1e-9, "--out", tmp_path)
    assert code == 0
    assert "was not started; the same command continues from there" in err
    assert "not finished: 5 of the runs" in text


@pytest.mark.parametrize(
    ("file", "kept"), [("audit/rounds.log", 0.6), ("audit/rounds.log", 0.999), ("metrics.jsonl", 0.5)]
)
def test_a_truncated_file_of_a_finished_run_is_named(capsys, tmp_path, file, kept):
    asked = ("-q", "emnist", "--rounds", 12, "--only", "0.16", "--out", tmp_path)
    reproduction(capsys, *asked)
    path = next((tmp_path / "runs").iterdir()) / file
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    code, text, err = reproduction(capsys, *asked)
    assert (code, text) == (2, "")
    assert f"{path} is damaged" in err
    assert len(err.strip().splitlines()) == 1


def test_runs_trained_on_a_gpu_name_it_when_read_elsewhere():
    assert command._machine("cuda", "NVIDIA H200") == "NVIDIA H200"
    assert command._machine("cpu", "cpu").startswith("CPU, ")


def test_audit_gaussian_mechanism_prints_the_analytical_epsilon_and_every_estimate(capsys):
    asked = ("audit-gaussian-mechanism", "--dim", 5000, "--runs", 5, "--json")
    code, text, _ = reproduction(capsys, *asked)
    found = json.loads(text)
    assert code == 0
    assert found["analytical"] == mechanism_epsilon(0.541, delta=1e-6)
    assert len(found["null"]["values"]) == found["runs"] == 5


@pytest.mark.parametrize("arguments", [("--signal-norm", 1e300), ("--noise-multiplier", 1e200)])
def test_audit_gaussian_mechanism_rejects_huge_numbers_with_one_line(capsys, arguments):
    code, out, err = reproduction(capsys, "audit-gaussian-mechanism", "--dim", 1000, "--canaries", 20, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "at most 1e+100" in err
