"""`coalmine watch` on a live run: the alarm, its exit code and command, and the page in a browser."""

import json
import os
import subprocess
import sys
import time

import pytest
from chromium import Chromium
from in_process import called

from coalmine import Audit, mechanism_epsilon

DIM, CANARIES, DELTA = 3_000, 200, 1e-6
CLAIM = mechanism_epsilon(1.0, delta=DELTA)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
TRAINER = """
import sys, time
from pathlib import Path
import numpy as np
from coalmine import Audit

directory, noise, rounds, pause = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
seen = Path(directory).with_name("seen")
settings = dict(canaries={canaries}, seed=b"a secret of this test", delta={delta}, rounds=40, directory=directory)
with Audit({dim}, **settings) as audit:
    rng = np.random.default_rng(1)
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        release = audit.updates(present, 1.0) + noise * rng.normal(size={dim})
        audit.observe_round(number, release, present=present, others=np.zeros({dim}), clip_norm=1.0)
        time.sleep(pause)
        waits = 8_000 if pause and number == rounds - 1 else 0
        while waits and not seen.exists():
            time.sleep(0.05)
            waits -= 1
    audit.finish(claim={claim})
"""


def trainer(directory, *, noise, rounds=40, pause=0.0):
    """A training run in its own process. With pauses, the last round waits for a file `seen` beside the directory."""
    script = TRAINER.format(dim=DIM, canaries=CANARIES, delta=DELTA, claim=CLAIM)
    command = [sys.executable, "-c", script, str(directory), str(noise), str(rounds), str(pause)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)


def watch(*arguments):
    return called("watch", *arguments)


def wait_for(path):
    for _ in range(4_000):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} never came")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    home = tmp_path_factory.mktemp("honest") / "run"
    assert trainer(home, noise=1.0).wait(400) == 0
    return home


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A run that stopped in the middle and left no result."""
    home = tmp_path_factory.mktemp("broken") / "run"
    assert trainer(home, noise=0.5, rounds=10).wait(400) == 0
    (home / "result.json").unlink()
    return home


@pytest.mark.full
def test_an_alarm_ends_watching_with_exit_code_1_and_runs_the_command(tmp_path):
    process = trainer(tmp_path / "run", noise=0.5, pause=0.1)
    try:
        wait_for(tmp_path / "run" / "audit" / "rounds.log")
        command = f"kill -TERM {process.pid}; echo \"$COALMINE_ALARM\" > '{tmp_path}/alarm'"
        done = watch(
            tmp_path / "run", "--claim", CLAIM, "--stop-on-violation", "--on-violation", command, "--every", 0.2
        )
        assert done.returncode == 1, done.stderr
        assert "Alarm in round" in done.stdout
        assert (tmp_path / "alarm").read_text().startswith("alarm in round ")
        assert process.wait(60) == -15  # the command stopped the training
    finally:
        process.kill()
        process.wait()
    rounds = Audit(
        DIM, canaries=CANARIES, seed=b"a secret of this test", delta=DELTA, rounds=40, directory=tmp_path / "run"
    ).log.numbers
    assert len(rounds) < 40


def test_watching_an_honest_run_ends_with_the_run(honest):
    done = watch(honest, "--claim", CLAIM, "--stop-on-violation")
    assert (done.returncode, done.stderr) == (0, "")
    assert "No alarm after round 40" in done.stdout
    assert "500 raises the alarm" in done.stdout


def test_watch_shows_evidence_instead_of_a_verdict(broken):
    done = watch(broken, "--claim", CLAIM)
    assert done.returncode == 0  # --stop-on-violation was not given
    assert "Alarm in round" in done.stdout
    assert "VIOLATION" not in done.stdout


def test_a_failed_command_is_reported_and_changes_nothing(broken):
    done = watch(broken, "--claim", CLAIM, "--stop-on-violation", "--on-violation", "exit 7")
    assert done.returncode == 1
    assert "the command of --on-violation ended with exit code 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stop-on-violation"], "an alarm needs a claim"),
        (["--participations", "2"], "--participations belongs to a --claim"),
        (["--claim", "0"], "--claim"),
        (["--claim", "nan"], "--claim"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(honest, arguments, said):
    done = watch(honest, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_cannot_stop_at_alarms_without_a_claim(tmp_path):
    done = called("run", "--stop-on-violation", "--out", tmp_path / "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "coalmine: claim.stop_on_violation needs a claim that a round can refute: give claim.epsilon too\n"
    )
    assert not (tmp_path / "run").exists()


def test_the_page_must_not_be_a_file_of_the_run(honest):
    pytest.importorskip("matplotlib")
    done = watch(honest, "--html", honest / "result.json")
    assert done.returncode == 2
    assert "is a file of the run itself" in done.stderr
    assert json.loads((honest / "result.json").read_text())


def alarm_text(browser):
    """The text at the top of the page; empty while the page reloads."""
    try:
        return browser.evaluate("document.querySelector('#alarm').innerText")
    except AssertionError:
        return ""


@pytest.mark.full
def test_a_browser_shows_the_live_run(tmp_path):
    pytest.importorskip("matplotlib")
    home, page = tmp_path / "run", tmp_path / "live.html"
    process = trainer(home, noise=1.0, pause=0.05)
    watching = None
    browser = Chromium()
    try:
        wait_for(home / "audit" / "rounds.log")
        command = [sys.executable, "-m", "coalmine", "watch", str(home), "--claim", str(CLAIM), "--html", str(page)]
        watching = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
        wait_for(page)
        browser.open(page)
        assert browser.requests == [page.as_uri()]  # no server, nothing fetched
        first = last = alarm_text(browser)
        assert "The run is in progress" in first
        assert browser.evaluate("document.querySelector('#alarm').getBoundingClientRect().top") < 200  # on top
        (tmp_path / "seen").touch()
        deadline = time.monotonic() + 400
        while "in progress" in last and time.monotonic() < deadline:  # the page reloads itself
            time.sleep(0.2)
            last = alarm_text(browser) or last
        assert "No alarm after round 40" in last
        assert browser.complaints == []
        assert (process.wait(400), watching.wait(400)) == (0, 0)
        assert 'http-equiv="refresh"' not in page.read_text()  # the final page does not reload
    finally:
        for running in (process, watching):
            if running is not None and running.poll() is None:
                running.kill()
                running.wait()
        browser.close()
