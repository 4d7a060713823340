"""`coalmine statement`: what a run guarantees, what was measured, and what nobody states."""

from pathlib import Path

import click

from coalmine.cli.options import Command, argument
from coalmine.cli.output import print_line, print_lines
from coalmine.log.files import write_atomically
from coalmine.report.document import is_own_file
from coalmine.report.statement import read_statement
from coalmine.report.statement_facts import NO_FACTS, read_facts, template
from coalmine.report.statement_formats import Format, statement_text


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path), required=False, help="Run directory.")
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with facts that the run does not know.",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["md", "html", "json", "yaml", "card"]),
    default="md",
    show_default=True,
    help="Format: text, a page, JSON, a record of the OpenDP registry, or a section of a Hugging Face model card.",
)
@click.option(
    "--out",
    "--output",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: print]",
)
@click.option("--template", "wants_template", is_flag=True, help="Print a facts file to fill in, and nothing else.")
def statement(
    directory: Path | None, facts_file: Path | None, kind: Format, out: Path | None, wants_template: bool
) -> None:
    """Write a privacy statement of a finished run.

    The statement has five parts: the guarantee, its accounting, the mechanism, the evidence, and what is not stated. The
    run fills in what it knows; a facts file adds the rest. A fact that contradicts the run is an error. `coalmine verify
    --statement` checks a statement against its run.
    """
    if wants_template:
        if directory is not None or facts_file is not None:
            raise click.UsageError("--template takes no directory and no facts")
        text = template()
    elif directory is None:
        raise click.UsageError("give a run directory, or --template")
    else:
        facts = NO_FACTS if facts_file is None else read_facts(facts_file)
        text = statement_text(read_statement(directory, facts), kind)
    if out is None:
        print_lines(text)
        return
    if directory is not None and is_own_file(directory, out):
        raise ValueError(f"{out} is a file of the run itself; name another file with --out")
    write_atomically(out, text.encode())
    print_line(f"written to {out}")
