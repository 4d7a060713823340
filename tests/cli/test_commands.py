import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import numpy as np
import pytest
from in_process import called
from rich.console import Console

from coalmine import __version__, mechanism_epsilon
from coalmine.argument_checks import whole_number
from coalmine.cli import main as cli
from coalmine.cli.output import shows_bars


def coalmine(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "coalmine", *arguments], capture_output=True, text=True)


def test_version_and_help():
    assert coalmine("--version").stdout == f"coalmine {__version__}\n"
    assert "epsilon" in called("--help").stdout


@pytest.mark.full
@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra_the_command_says_what_to_install(missing):
    code = f"import sys; sys.modules['{missing}'] = None; from coalmine.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "run"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "coalmine: the commands need: pip install 'coalmine[cli]'" in done.stderr


def test_mechanism_prints_the_papers_noise_levels():
    done = called("epsilon", "--noise-multiplier", "0.0496", "--noise-multiplier", "0", "--delta", "8.2e-7", "--json")
    rows = json.loads(done.stdout)
    assert done.returncode == 0
    assert [row["epsilon"] for row in rows] == [mechanism_epsilon(0.0496, delta=8.2e-7), "inf"]


def test_epsilon_with_sampling_prints_its_range_and_accountant():
    words = ("epsilon", "--delta", "1e-5", "--sampling", "shuffled,rounds=100")
    told = json.loads(called(*words, "--noise-multiplier", "1", "--json").stdout)
    assert told["epsilon"] == pytest.approx(4.377, abs=1e-3)
    assert told["low"] == pytest.approx(4.063, abs=1e-3)
    assert (told["kind"], told["adjacency"], told["sampling"]["rounds"]) == ("range", "zero out one", 100)
    back = json.loads(called(*words, "--epsilon", str(told["epsilon"]), "--json").stdout)
    assert back["noise_multiplier"] == pytest.approx(1.0)
    assert "zero out one" in called(*words, "--noise-multiplier", "1").stdout
    for wrong, message in (
        ((), "give either --noise-multiplier or --epsilon"),
        (("--noise-multiplier", "1", "--participations", "3"), "omit --participations"),
        (("--noise-multiplier", "1", "--noise-multiplier", "2"), "--sampling takes one --noise-multiplier"),
        (("--noise-multiplier", "-1"), "noise_multiplier must be at least 0"),
    ):
        done = called(*words, *wrong)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


def test_mechanism_prints_noise_levels_as_a_table_without_colour():
    done = coalmine("epsilon", "--epsilon", "10", "--delta", "1e-6")
    assert "0.5411" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epsilon", "--noise-multiplier", "1", "--delta", "2"], "delta must lie in (0, 1), got 2.0"),
        (
            ["epsilon", "--noise-multiplier", "nan", "--delta", "0.1"],
            "noise_multiplier must be finite, got nan",
        ),
        (["epsilon", "--noise-multiplier", "1", "--epsilon", "1", "--delta", "0.1"], "give either"),
        (["epsilon", "--delta", "0.1"], "give either --noise-multiplier or --epsilon"),
        (["epsilon", "--noise-multiplier", "one", "--delta", "0.1"], "'one' is not a valid float"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: Sequence[str], message: str):
    done = called(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("x"), ZeroDivisionError()])
def test_an_internal_error_exits_70_and_explains_how_to_report_it(error, monkeypatch, capsys):
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setitem(cli.app.commands, "broken", broken)
    with pytest.raises(SystemExit) as stop:
        cli.main(["broken"])
    assert stop.value.code == 70
    assert "please report it" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["-v {}", "--verbose {}", "{} -v", "{} --verbose", "-vv {}", "{} -vv"])
def test_verbose_prints_the_traceback_in_any_position(arguments):
    done = called(*arguments.format("epsilon --noise-multiplier 1 --delta 2").split())
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("\ncoalmine: delta must lie in (0, 1), got 2.0\n")


@pytest.mark.parametrize("arguments", ["-q {}", "{} --quiet", "{}"])
def test_without_verbose_there_is_no_traceback(arguments):
    done = called(*arguments.format("epsilon --noise-multiplier 1 --delta 2").split())
    assert (done.returncode, done.stderr) == (2, "coalmine: delta must lie in (0, 1), got 2.0\n")


def test_a_wrong_type_is_bad_input_and_not_an_internal_error(monkeypatch, capsys):
    @click.command()
    def wrong() -> None:
        whole_number("rounds", "abc", minimum=1)  # type: ignore[arg-type]

    monkeypatch.setitem(cli.app.commands, "wrong", wrong)
    with pytest.raises(SystemExit) as stop:
        cli.main(["wrong"])
    assert (stop.value.code, capsys.readouterr().err) == (2, "coalmine: rounds must be a whole number, got 'abc'\n")


def every_command(group: click.Group = cli.app) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from every_command(command)


@pytest.mark.parametrize("command", list(every_command()), ids=lambda command: command.name)
def test_every_option_and_argument_has_a_help_text(command):
    texts = {param.name: getattr(param, "help", None) for param in command.params}
    assert [name for name, text in texts.items() if not text] == []
    assert all(text[0].isupper() and text.split("  [")[0].endswith(".") for text in texts.values())
    assert {"-v", "-q"} <= {option for param in command.params for option in param.opts}


def test_the_options_of_run_are_listed_by_topic():
    text = called("run", "--help").stdout
    topics = ["Task and model", "Participation", "Privacy", "Canaries", "Claim", "Hardware", "Output"]
    places = [text.index(f"\n{topic}:\n") for topic in topics]
    assert places == sorted(places)
    assert text.index("\nPrivacy:") < text.index("--noise-multiplier Z") < text.index("\nCanaries:")


def test_the_help_of_run_has_the_choices_and_defaults_of_the_config():
    config = pytest.importorskip("coalmine.simulation.config")
    text = " ".join(called("run", "--help").stdout.split())
    for choices in (config.TASKS, config.LEVELS, config.PARTICIPATIONS, config.PATTERNS):
        assert f"One of {', '.join(choices)}." in text
    for value in (config.RunConfig().rounds, config.RunConfig().privacy.delta, config.RunConfig().canaries.count):
        assert f"[default: {value}]" in text


def test_there_are_20_commands_with_some_160_options():
    commands = list(every_command())
    options = [param for command in commands for param in command.params if isinstance(param, click.Option)]
    assert len(commands) == 20
    assert len(options) <= 160, "add a setting to a config file or to a function, not to a command"


@pytest.mark.full
def test_the_library_does_not_log_by_default():
    code = "import logging, coalmine; logging.getLogger('coalmine').warning('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "unheard" not in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("claim", "code", "output"), [("100 --known-others", 0, "--json"), ("0.1 --known-others", 1, ""), ("100", 3, "")]
)
def test_a_closed_pipe_does_not_change_the_exit_code(tmp_path, claim, code, output):
    """`… | head` is neither an error nor a verdict."""
    scores = np.random.default_rng(1).normal(1.0, 0.5, size=400)
    (tmp_path / "scores.csv").write_text("\n".join(map(str, scores)))
    estimate = f"-m coalmine estimate {tmp_path}/scores.csv --null-std 0.5 --delta 1e-6 --claim {claim} {output}"
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {estimate} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_one_line():
    command = f"{sys.executable} -m coalmine epsilon --epsilon 1 --delta 1e-6 > /dev/full"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "coalmine: the output: No space left on device\n")


@pytest.mark.full
def test_closed_streams_are_not_an_error():
    command = f"{sys.executable} -m coalmine epsilon --epsilon 1 --delta 1e-6 >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nonsense", "The commands are audit, canaries, check, compare, data, epsilon, estimate, plan"),
        ("data stackexchange --data-dir nowhere", "docs/how-to/data.md there (nowhere/stackexchange)"),
        ("verify . --seed-file missing", "must be the one that the audit started with"),
        ("watch .", "holds no run, not even an unfinished one"),
    ],
)
def test_errors_are_one_line_with_a_remedy(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (stop.value.code, out, err.count("\n")) == (2, "", 1)
    assert said in err


@pytest.mark.parametrize(("variable", "shown"), [("NO_COLOR", False), ("OTHER", True)])
def test_progress_bars_are_shown_in_a_terminal_unless_no_color_is_set(variable, shown, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    assert shows_bars(Console(file=io.StringIO(), force_terminal=True)) == shown
    assert not shows_bars(Console(file=io.StringIO()))
