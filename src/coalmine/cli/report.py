"""`coalmine report`: an HTML, Markdown or JSON report of one run or several."""

import webbrowser
from pathlib import Path
from typing import Literal

import click

from coalmine.cli.options import Command, run_directories
from coalmine.cli.output import print_line, print_lines
from coalmine.report.document import report_text, write_report


@click.command(cls=Command)
@run_directories("Run directories; several are compared in one report.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: report.html in the run directory]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "md", "json"]),
    default="html",
    show_default=True,
    help="Format of the report.",
)
@click.option("--open", "show", is_flag=True, help="Open the report in the browser.")
def report(directories: tuple[Path, ...], out: Path | None, kind: Literal["html", "md", "json"], show: bool) -> None:
    """Write a report of one or several runs.

    The report is one self-contained file; several runs are shown side by side. HTML is written into the run directory,
    or into the current directory for several runs. Markdown and JSON are printed unless --out names a file. An
    unfinished run is reported up to its last recorded round.
    """
    if kind != "html" and out is None:
        if show:
            raise click.UsageError("--open needs a file: give --out")
        print_lines(report_text(directories, kind=kind))
        return
    path = write_report(directories, out, kind=kind)
    print_line(f"written to {path}")
    if show:
        webbrowser.open(path.absolute().as_uri())
