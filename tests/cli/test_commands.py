import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
import pytest
from rich.console import Console

from coalmine import __version__, mechanism_epsilon
from coalmine.cli import main as cli
from coalmine.cli.output import shows_bars


def coalmine(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "coalmine", *arguments], capture_output=True, text=True, env=env)


def test_version_and_help():
    assert coalmine("--version").stdout == f"coalmine {__version__}\n"
    assert "mechanism" in coalmine("--help").stdout


def test_mechanism_prints_the_papers_noise_levels():
    done = coalmine(
        "mechanism", "--noise-multiplier", "0.0496", "--noise-multiplier", "0", "--delta", "8.2e-7", "--json"
    )
    rows = json.loads(done.stdout)
    assert done.returncode == 0
    assert [row["epsilon"] for row in rows] == [mechanism_epsilon(0.0496, delta=8.2e-7), "inf"]


def test_mechanism_inverse_as_a_table_without_colour():
    done = coalmine("mechanism", "--epsilon", "10", "--delta", "1e-6")
    assert "0.5411" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mechanism", "--noise-multiplier", "1", "--delta", "2"], "delta must lie in (0, 1), got 2.0"),
        (["mechanism", "--noise-multiplier", "nan", "--delta", "0.1"], "noise_multiplier must be finite, got nan"),
        (["mechanism", "--noise-multiplier", "1", "--epsilon", "1", "--delta", "0.1"], "give either"),
        (["mechanism", "--delta", "0.1"], "give either --noise-multiplier or --epsilon"),
        (["mechanism", "--noise-multiplier", "one", "--delta", "0.1"], "'one' is not a valid float"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: Sequence[str], message: str):
    done = coalmine(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("x"), ZeroDivisionError()])
def test_an_internal_error_is_70_and_says_how_to_report_it(error, monkeypatch, capsys):
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setitem(cli.app.commands, "broken", broken)
    with pytest.raises(SystemExit) as stop:
        cli.main(["broken"])
    assert stop.value.code == 70
    assert "please report it" in capsys.readouterr().err


def test_silent_by_default():
    code = "import logging, coalmine; logging.getLogger('coalmine').warning('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == ""


@pytest.mark.parametrize("output", ["", "--json"])
@pytest.mark.parametrize(("claim", "code"), [("100 --known-others", 0), ("0.1 --known-others", 1), ("100", 3)])
def test_a_closed_pipe_changes_no_exit_code(tmp_path, claim, code, output):
    """`… | head` is no error, and no verdict either."""
    scores = np.random.default_rng(1).normal(1.0, 0.5, size=400)
    (tmp_path / "scores.csv").write_text("\n".join(map(str, scores)))
    estimate = f"-m coalmine estimate {tmp_path}/scores.csv --null-std 0.5 --delta 1e-6 --claim {claim} {output}"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {estimate} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    command = f"{sys.executable} -m coalmine mechanism --epsilon 1 --delta 1e-6 > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "coalmine: the output: No space left on device\n")


def test_closed_streams_are_no_error():
    command = f"{sys.executable} -m coalmine mechanism --epsilon 1 --delta 1e-6 >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nonsense", "There are compare, data, estimate"),
        ("reproduce nonsense", "There are accuracy, beyond, canife"),
        ("data get stackexchange --data-dir nowhere", "docs/data.md there (nowhere/stackexchange)"),
        ("verify . --seed-file missing", "must be the one that the audit was begun with"),
        ("watch .", "holds no run, nor the beginning of one"),
        ("gaussian --noise-multiplier 1 --delta 1e-6 --dim 1000 --canaries 20 --signal-norm 1e300", "at most 1e+100"),
    ],
)
def test_one_line_says_what_to_do(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(("variable", "shown"), [("NO_COLOR", False), ("OTHER", True)])
def test_bars_move_in_a_terminal_unless_plain_text_is_asked_for(variable, shown, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    assert shows_bars(Console(file=io.StringIO(), force_terminal=True)) == shown
    assert not shows_bars(Console(file=io.StringIO()))
