"""`coalmine receipt`: a signed statement of what an audit found, for somebody who holds the model."""

import json
from pathlib import Path

import click

from coalmine.cli.options import Command, argument
from coalmine.cli.output import print_line, print_lines
from coalmine.log.files import write_atomically
from coalmine.report.document import is_own_file
from coalmine.report.receipt import receipt as receipt_of


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Run directory.")
@click.option(
    "--key",
    "key_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Private key (PEM, Ed25519 or P-256) to sign with. Without it, the statement is printed unsigned, for sigstore.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Training data, a file or a folder, whose digest the receipt shall hold.",
)
@click.option(
    "--out", "--output", "out", type=click.Path(path_type=Path, dir_okay=False), help="File to write.  [default: print]"
)
def receipt(directory: Path, key_file: Path | None, data: Path | None, out: Path | None) -> None:
    """Write a receipt of a finished run: an in-toto statement about its model, signed with a key.

    It holds the digest of the model, the claim, the verdict with its error rates, what was not checked, the commitment, the
    digest of the log, and digests of the code that trained. `coalmine verify --receipt` checks it.
    """
    text = json.dumps(receipt_of(directory, data=data), indent=1, ensure_ascii=False) + "\n"
    if key_file is not None:
        from coalmine.report.envelope import signed  # needs an extra

        text = signed(text.encode(), key_file).decode()
    if out is None:
        print_lines(text)
        return
    if is_own_file(directory, out):
        raise ValueError(f"{out} is a file of the run itself; name another file with --out")
    write_atomically(out, text.encode())
    print_line(f"written to {out}")
