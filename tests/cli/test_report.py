"""`coalmine report` and `coalmine watch` as a user calls them."""

import json
import subprocess
import sys

import pytest
from runs import make_run

from coalmine.cli import main as cli
from coalmine.cli.report import report
from coalmine.cli.watch import watch


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("cli") / "run")


@pytest.fixture
def coalmine(capsys, monkeypatch):
    """The exit code, stdout and stderr of a command."""
    for command in (report, watch):
        monkeypatch.setitem(cli.app.commands, command.name, command)

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return call


def test_a_page_is_written_into_the_run(coalmine, run):
    code, out, err = coalmine("report", run)
    assert (code, out, err) == (0, f"written to {run / 'report.html'}\n", "")
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_several_runs_go_into_the_named_file(coalmine, run, tmp_path):
    code, out, _ = coalmine("report", run, run, "--out", tmp_path / "both.html")
    assert (code, out) == (0, f"written to {tmp_path / 'both.html'}\n")
    assert "2 runs" in (tmp_path / "both.html").read_text()


def test_json_and_markdown_go_to_stdout(coalmine, run):
    code, out, _ = coalmine("report", run, "--format", "json")
    assert code == 0
    assert json.loads(out)["runs"][0]["result"]["verdict"] == "PASS"
    code, out, _ = coalmine("report", run, "--format", "md")
    assert code == 0
    assert out.startswith("## run\n")


def test_open_opens_the_file_in_a_browser(coalmine, run, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    coalmine("report", run, "--open", "--format", "md", "--out", tmp_path / "page.md")
    assert opened == [(tmp_path / "page.md").as_uri()]


@pytest.mark.parametrize("command", ["report", "watch"])
def test_a_missing_directory_is_one_line_and_exit_code_2(coalmine, tmp_path, command):
    code, out, err = coalmine(command, tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "is not a run directory" in err
    assert err.count("\n") == 1


def test_an_unwritable_file_is_one_line_and_exit_code_2(coalmine, run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = coalmine("report", run, "--format", "md", "--out", tmp_path / "file" / "page.md")
    assert code == 2
    assert "name another file with --out" in err


def test_watch_outside_a_terminal_prints_one_frame(coalmine, run):
    code, out, err = coalmine("watch", run)
    assert (code, err) == (0, "")
    assert "known-others" in out
    assert "\x1b" not in out


@pytest.mark.full
def test_without_jinja2_markdown_works_and_a_page_names_its_extra(run):
    code = "import sys; sys.modules['jinja2'] = None; from coalmine.cli.main import main; main(sys.argv[1:])"
    report = [sys.executable, "-c", code, "report", str(run)]
    page = subprocess.run(report, capture_output=True, text=True)
    assert (page.returncode, page.stderr) == (2, "coalmine: an HTML page needs: pip install 'coalmine[report]'\n")
    markdown = subprocess.run([*report, "--format", "md"], capture_output=True, text=True)
    assert (markdown.returncode, markdown.stdout[:7]) == (0, "## run\n")
