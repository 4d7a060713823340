"""`coalmine report`: a run, or several beside each other, as one file that people look at."""

import webbrowser
from pathlib import Path
from typing import Literal

import click

from coalmine.report.document import report_text, write_report


@click.command()
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file; default: report.html in DIR.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "md", "json"]),
    default="html",
    show_default=True,
    help="What to make.",
)
@click.option("--open", "show", is_flag=True, help="Open it in the browser.")
def report(directories: tuple[Path, ...], out: Path | None, kind: Literal["html", "md", "json"], show: bool) -> None:
    """A report of the run in DIRECTORY, or of several beside each other: one file that needs no network.

    HTML is written into the run's directory (for several runs: into the current one); Markdown and JSON are printed,
    unless --out names a file. A run that is not finished is reported as far as it went.
    """
    if kind != "html" and out is None:
        if show:
            raise click.UsageError("--open needs a file: give --out")
        click.echo(report_text(directories, kind=kind), nl=False)
        return
    path = write_report(directories, out, kind=kind)
    click.echo(f"written to {path}")
    if show:
        webbrowser.open(path.absolute().as_uri())
