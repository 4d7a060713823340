"""What GitHub shows of a command in a workflow: a summary of the job in Markdown, and annotations of files."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from coalmine.argument_checks import one_line

SUMMARY = "GITHUB_STEP_SUMMARY"
MARKS = {"PASS": "✅", "VIOLATION": "❌"}
GITHUB = click.option(
    "--github",
    is_flag=True,
    help="In a GitHub workflow, also write the job's summary, and annotate what did not pass.",
)


def summary_file() -> Path:
    """The file of the job's summary; ValueError outside of a workflow."""
    if not os.environ.get(SUMMARY):
        raise ValueError(f"--github needs {SUMMARY}, the file that GitHub Actions names: omit it elsewhere")
    return Path(os.environ[SUMMARY])


def add_summary(title: str, verdicts: dict[str, str]) -> None:
    """Add each name's printout to the summary of the job, the verdict first."""
    with summary_file().open("a", encoding="utf-8") as file:
        file.write(f"### {title}\n\n")
        for name, text in verdicts.items():
            head, _, rest = text.partition("\n")
            mark = MARKS.get(head.partition(":")[0], "⚠️")
            file.write(f"{mark} **{_plain(name)}**: {_plain(head)}\n\n")
            if rest:
                file.write(f"```text\n{rest.replace('```', '')}\n```\n\n")


def annotate(verdict: str, message: str, *, file: str = "", line: int = 0) -> None:
    """Print a workflow command on stderr: an error for a VIOLATION, else a warning. A PASS has none."""
    if verdict == "PASS":
        return
    kind = "error" if verdict == "VIOLATION" else "warning"
    place = [f"file={_property(file)}", f"line={line}"] if file else []
    text = one_line(message).replace("%", "%25")
    click.echo(f"::{kind} {','.join([*place, f'title={_property(verdict)}'])}::{text}", err=True)


def source_of(function: Callable[..., Any]) -> tuple[str, int]:
    """File and line of a function, relative to the current directory; nothing for a function without Python source."""
    try:
        found = inspect.unwrap(function)
        path, line = inspect.getsourcefile(found) or "", inspect.getsourcelines(found)[1]
    except (TypeError, OSError):
        return "", 0
    return (os.path.relpath(path) if path else ""), line


def _plain(text: str) -> str:
    """One line without Markdown or HTML of its own."""
    return "".join(f"\\{char}" if char in "\\`*_[]<>|" else char for char in one_line(text))


def _property(text: str) -> str:
    for char, code in (("%", "%25"), (":", "%3A"), (",", "%2C")):
        text = text.replace(char, code)
    return one_line(text)
