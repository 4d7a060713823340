"""`coalmine verdict`: one line for each run, and the worst verdict as the exit code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs import make_run, make_sampled_run
from training import train

from coalmine import Audit, mechanism_epsilon
from coalmine.cli import main as cli

HONEST = mechanism_epsilon(1.0, delta=1e-6)  # the epsilon of every run here


def judged_run(path, claim, *, canaries=100):
    """A finished run with noise multiplier 1, judged against `claim`."""
    audit = train(dim=2_000, canaries=canaries, rounds=12, directory=path)
    audit.directory.write_config({"trainer": "numpy"})
    audit.directory.write_result(audit.result(claim=claim))
    audit.directory.close()
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One run of each kind; tests that change a run work on a copy."""
    home = tmp_path_factory.mktemp("verdict") / "runs"
    judged_run(home / "pass", HONEST)
    judged_run(home / "violation", HONEST / 3)
    judged_run(home / "underpowered", HONEST, canaries=10)
    make_run(home / "no-claim", claim=False)
    audit = train(dim=2_000, canaries=50, rounds=4, directory=home / "stopped")
    audit.directory.write_config({"task": {"name": "digits"}, "rounds": 100})
    audit.directory.close()
    train(dim=2_000, canaries=50, rounds=4, directory=home / "other-trainer").directory.close()
    return home


@pytest.fixture
def runs(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return Path("runs")


@pytest.fixture
def coalmine(capsys):
    """The exit code, stdout and stderr of a command."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return call


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (["pass"], 0),
        (["violation"], 1),
        (["underpowered"], 3),
        (["no-claim"], 3),
        (["stopped"], 3),
        (["pass", "underpowered"], 3),
        (["pass", "no-claim"], 3),
        (["pass", "stopped", "violation", "underpowered"], 1),
    ],
)
def test_the_exit_code_is_the_worst_verdict(coalmine, runs, names, code):
    found, out, err = coalmine("verdict", *(runs / name for name in names))
    assert (found, err) == (code, "")
    assert [line.split()[0] for line in out.splitlines()] == [f"runs/{name}" for name in names]


def test_a_line_has_run_claim_verdict_and_reason(coalmine, runs):
    _, out, _ = coalmine("verdict", runs / "violation")
    facts = json.loads((runs / "violation" / "result.json").read_text())["facts"]
    why = "the canaries stand out as with a noise multiplier of"
    noise = f"{why} {facts['measured_noise']:.2g}; the claim needs {facts['claimed_noise']:.2g}"
    assert out == f"runs/violation  claimed ε {HONEST / 3:.4g} (mechanism)  VIOLATION  {noise}\n"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stopped", "not finished: wait for it, or continue it with `coalmine run --resume runs/stopped`"),
        ("other-trainer", "not finished: wait for it, or run its training script to the end"),
    ],
)
def test_a_run_without_a_verdict_has_a_reason_and_a_remedy(coalmine, runs, name, reason):
    code, out, err = coalmine("verdict", runs / name)
    assert (code, out.count("\n"), err) == (3, 1, "")
    assert "no verdict" in out
    assert reason in out


def test_a_run_without_a_claim_is_underpowered_and_says_how_to_claim(coalmine, runs):
    code, out, err = coalmine("verdict", runs / "no-claim")
    assert (code, out.count("\n"), err) == (3, 1, "")
    assert "UNDERPOWERED" in out
    assert "nothing was claimed, so nothing can pass: state the epsilon before training" in out


def test_a_directory_of_runs_means_all_its_runs(coalmine, runs):
    code, out, _ = coalmine("verdict", "runs")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines()] == [str(run) for run in sorted(runs.iterdir())]


def test_a_shell_glob_may_name_ordinary_files(coalmine, runs):
    (runs / "notes.txt").write_text("keep")
    code, out, err = coalmine("verdict", runs / "pass", runs / "notes.txt")
    assert (code, out.count("\n")) == (0, 1)
    assert err == "coalmine: runs/notes.txt is a file, not the directory of a run: left out\n"
    command = f"{sys.executable} -m coalmine verdict runs/*"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("\n"), done.stderr.count("\n")) == (1, 6, 1)


def damage(runs, name):
    """A path without a readable run."""
    if name == "file":
        (runs / "file").write_text("no run")
    elif name == "empty":
        (runs / "empty").mkdir()
    elif name == "result.json":
        return runs / "pass" / "result.json"
    elif name != "nowhere":
        shutil.copytree(runs / "pass", runs / "broken")
        path = runs / "broken" / "result.json"
        if name == "directory":
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(BROKEN[name](path))
        return runs / "broken"
    return runs / name


def changed(**entries):
    return lambda path: json.dumps(json.loads(path.read_text()) | entries).encode()


BROKEN = {
    "torn": lambda path: path.read_bytes()[:100],
    "binary": lambda path: b"\xff\x00",
    "list": lambda path: b"[1]",
    "empty object": lambda path: b'{"schema_version": 1}',
    "deep": lambda path: b"[" * 100_000,
    "version": changed(schema_version=99),
    "word": changed(verdict="pass"),
    "verdict list": changed(verdict=["PASS"]),
    "verdict without claim": changed(claimed_epsilon=None),
    "claim without verdict": changed(verdict=None),
    "no reason": changed(reason=None),
    "claim of text": changed(claimed_epsilon="3"),
    "claim NaN": changed(claimed_epsilon=float("nan")),
    "huge claim": changed(claimed_epsilon=10**400),
    "accounting": changed(claim_accounting=None),
}
BAD_PATHS = ["nowhere", "file", "empty", "result.json", "directory"]


@pytest.mark.parametrize("name", [*BAD_PATHS, *BROKEN])
def test_bad_input_is_one_line_and_exit_code_2(coalmine, runs, name):
    path = damage(runs, name)
    code, out, err = coalmine("verdict", path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(path) in err


@pytest.mark.parametrize("name", ["nowhere", "empty", "torn", "result.json"])
def test_a_bad_path_does_not_hide_the_other_verdicts(coalmine, runs, name):
    path = damage(runs, name)
    code, out, err = coalmine("verdict", runs / "violation", path, runs / "underpowered")
    assert (code, err.count("\n")) == (2, 1)
    assert [line.split()[0] for line in out.splitlines()] == ["runs/violation", "runs/underpowered"]


def test_json_has_an_entry_for_every_run(coalmine, runs):
    code, out, err = coalmine("verdict", "--json", runs / "pass", runs / "stopped", "nowhere")
    passed, stopped, nowhere = json.loads(out)
    assert (code, err.count("\n")) == (2, 1)
    assert passed == {
        "run": "runs/pass",
        "claimed_epsilon": HONEST,
        "claim_accounting": "mechanism",
        "claim_sampling": None,
        "legs": None,
        "verdict": "PASS",
        "summary": passed["summary"],
        "reason": json.loads((runs / "pass" / "result.json").read_text())["reason"],
        "error": None,
    }
    assert passed["summary"] in passed["reason"]
    assert (stopped["verdict"], stopped["error"]) == (None, None)
    assert "coalmine run --resume" in stopped["reason"]
    assert (nowhere["run"], nowhere["verdict"]) == ("nowhere", None)
    assert "does not exist" in nowhere["error"]


def test_a_reason_cannot_break_the_line(coalmine, runs):
    path = runs / "pass" / "result.json"
    path.write_bytes(changed(reason="one\n\x1b[2Jtwo")(path))
    code, out, _ = coalmine("verdict", runs / "pass")
    assert (code, out.count("\n")) == (0, 1)
    assert "\x1b" not in out


def test_quiet_prints_verdicts_and_errors_only(coalmine, runs):
    (runs / "notes.txt").write_text("keep")
    code, out, err = coalmine("-q", "verdict", runs / "pass", runs / "notes.txt", "nowhere")
    assert (code, out.count("\n")) == (2, 1)
    assert err == "coalmine: nowhere does not exist: name the directory of a run\n"


def test_an_audit_in_a_custom_loop_has_a_verdict(coalmine, tmp_path):
    """The directory written by `Audit(directory=…)` in a user's own training loop."""
    audit = train(
        audit=Audit(2_000, canaries=100, seed=1, delta=1e-6, rounds=5, directory=tmp_path), dim=2_000, rounds=5
    )
    audit.directory.write_result(audit.result(claim=2 * HONEST))
    audit.directory.close()
    assert coalmine("verdict", tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("factor", "names", "code"),
    [
        (1.0, ["violation"], 0),  # the run is honest: its own claim of a third was not true
        (0.4, ["pass"], 1),
        (0.4, ["pass", "violation"], 1),
        (1.0, ["underpowered"], 3),
        (1.0, ["no-claim"], 0),
        (0.4, ["no-claim"], 1),
        (1.0, ["stopped"], 3),
    ],
)
def test_max_epsilon_judges_any_run_against_another_number(coalmine, runs, factor, names, code):
    paths = [runs / name for name in names]
    found, out, err = coalmine("verdict", *paths, "--max-epsilon", factor * HONEST)
    assert (found, err) == (code, "")
    if names != ["stopped"]:
        assert out.count(f"claimed ε {factor * HONEST:.4g} (mechanism)") == len(names)


def test_max_epsilon_reads_the_number_as_the_runs_own_claim(coalmine, runs):
    """The run's own epsilon gives its own verdict, reason for reason, and the stored result stays as it was."""
    before = (runs / "pass" / "result.json").read_bytes()
    own = coalmine("verdict", runs / "pass", runs / "violation", "--json")
    for run, verdict in zip(("pass", "violation"), json.loads(own[1]), strict=True):
        arguments = ("verdict", runs / run, "--max-epsilon", verdict["claimed_epsilon"], "--json")
        assert json.loads(coalmine(*arguments)[1]) == [verdict]
    assert (runs / "pass" / "result.json").read_bytes() == before


def test_max_epsilon_keeps_the_sampling_of_an_amplified_claim(coalmine, tmp_path):
    make_sampled_run(tmp_path / "run")
    (own,) = json.loads(coalmine("verdict", tmp_path / "run", "--json")[1])
    code, out, _ = coalmine("verdict", tmp_path / "run", "--json", "--max-epsilon", own["claimed_epsilon"] / 2)
    (half,) = json.loads(out)
    assert (own["verdict"], half["verdict"], code) == ("PASS", "VIOLATION", 1)
    assert half["claim_sampling"] == own["claim_sampling"]
    assert half["legs"]["accounting"] == "VIOLATION"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e200"])
def test_a_bad_max_epsilon_is_one_line_and_exit_code_2(coalmine, runs, value):
    code, out, err = coalmine("verdict", runs / "pass", "--max-epsilon", value)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.strip().endswith(f"got {float(value)}") or err.strip().endswith(f"got {float(value):g}")


def test_max_epsilon_needs_the_recorded_rounds(coalmine, runs):
    """One line says which file is missing; the other runs still have a verdict."""
    (runs / "pass" / "audit" / "rounds.log").unlink()
    code, out, err = coalmine("verdict", runs / "pass", runs / "violation", "--max-epsilon", HONEST)
    assert (code, err.count("\n")) == (2, 1)
    assert "rounds.log is missing" in err
    assert [line.split()[0] for line in out.splitlines()] == ["runs/violation"]


def test_a_junit_report_has_one_test_for_each_run(coalmine, runs):
    """VIOLATION is a failure, no decision is an error of its kind, and PASS passes."""
    names = ("pass", "violation", "underpowered", "no-claim", "stopped")
    code, _, _ = coalmine("verdict", *(runs / name for name in names), "nowhere", "--junit", "out.xml")
    suite = ElementTree.parse("out.xml").getroot()[0]
    cases = {case.get("name"): [(child.tag, child.get("type")) for child in case] for case in suite}
    assert cases == {
        "pass": [],
        "violation": [("failure", "VIOLATION")],
        "underpowered": [("error", "UNDERPOWERED")],
        "no-claim": [("error", "UNDERPOWERED")],
        "stopped": [("error", "no verdict")],
        "nowhere": [("error", "unreadable")],
    }
    counts = {name: int(suite.get(name)) for name in ("tests", "failures", "errors")}
    assert (counts, code) == ({"tests": 6, "failures": 1, "errors": 4}, 2)
    reason = json.loads((runs / "violation" / "result.json").read_text())["reason"]
    assert suite[1][0].get("message") == f"VIOLATION: {reason}"


@pytest.mark.parametrize("file", [".", "nowhere/\0.xml"])
def test_a_junit_report_that_cannot_be_written_leaves_nothing(coalmine, runs, file):
    before = sorted(Path().rglob("*"))
    code, _, err = coalmine("verdict", runs / "pass", "--junit", file)
    assert (code, err.count("\n")) == (2, 1)
    assert sorted(Path().rglob("*")) == before
