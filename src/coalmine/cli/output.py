"""Printing: tables for people, JSON for programs, progress bars."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coalmine.argument_checks import one_line, printable
from coalmine.log.files import json_ready
from coalmine.result.audit_result import AuditResult


def print_line(text: str) -> None:
    """Print one line to stdout, without control characters, which the name of a run may contain."""
    click.echo(printable(text))


def print_lines(text: str) -> None:
    """Print several lines to stdout like `print_line`."""
    for line in text.splitlines():
        print_line(line)


def print_result(result: AuditResult, *, details: bool = False, as_json: bool = False) -> None:
    """Print a result: in at most ten lines, in full, or as JSON."""
    if as_json:
        print_json(result.to_dict())
    else:
        print_lines(f"{result}\n\n{result.details()}" if details else str(result))


def print_error(text: str) -> None:
    """Print one line to stderr, starting with the program's name."""
    click.echo(f"coalmine: {one_line(text)}", err=True)


def print_json(value: Any) -> None:
    """Print `value` as JSON to stdout."""
    click.echo(json.dumps(json_ready(value), indent=2, allow_nan=False))


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    left: Sequence[int] = (),
) -> None:
    """Print a table to stdout. Columns are aligned to the right, except those in `left`; colour only in a terminal."""
    table = Table()
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number in left else "right"
        table.add_column(Text(printable(column)), justify=justify, overflow="fold")  # nothing is truncated
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if title:
        print_title(title)
    _console().print(table)


def print_title(title: str) -> None:
    """Print a line above a table; bold in a terminal."""
    _console().print(printable(title), style="bold", highlight=False, markup=False, soft_wrap=True)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 250  # a file or a pipe has no width of its own
    return console


def print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print one line per row, cells aligned to the left; never wrapped, so that scripts can read it line by line."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def shown_number(value: float, digits: int = 4) -> str:
    """A number for a table."""
    return "inf" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.{digits}g}"


def shows_bars(console: Console) -> bool:
    """Whether progress bars are shown: in a terminal, unless NO_COLOR is set."""
    return console.is_terminal and not console.no_color


class PlainColumn(TextColumn):
    """A column of a progress bar with plain text: the name of a run may look like markup."""

    def __init__(self, text_format: str) -> None:
        super().__init__(text_format, markup=False)

    def render(self, task: Task) -> Text:
        return Text(printable(super().render(task).plain))


@contextmanager
def bar(*columns: ProgressColumn, hidden: bool) -> Iterator[Progress]:
    """A progress line on stderr; shown in a terminal only."""
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=hidden or not shows_bars(console)) as progress:
        yield progress


@contextmanager
def progress_of(label: str, *, total: int | None = None, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that the yielded function sets to a number of a total; shown in a terminal only."""
    columns = (PlainColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar(*columns, hidden=hidden) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def progress_bar(label: str, *, total: int, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr that the yielded function advances by one; shown in a terminal only."""
    done = itertools.count(1)
    with progress_of(label, total=total, hidden=hidden) as update:
        yield lambda: update(next(done), total)
