"""`coalmine replay`: what replayed rows moved, step by step, with the witness of each."""

from pathlib import Path

import click

from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.named_runs import how_to_finish, is_finished, read_result
from coalmine.cli.options import Command, argument
from coalmine.cli.output import print_line
from coalmine.result.words import Words
from coalmine.verdict.outcome import PASS, UNDERPOWERED, VIOLATION


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True), help="Run directory.")
def replay(directory: Path) -> int:
    """Show what one row moved in the steps that were run again without it.

    For each replayed step: how many rows were tried, the row that moved the sum furthest, the tensors that it moved, and
    whatever moved outside of the release. The audit has measured this during training; nothing is trained here, and
    `coalmine verify` checks that it is what the log holds.

    Exit codes: 0 if no row moved more than it may, 1 if one did, 3 if no step was replayed.
    """
    if not is_finished(directory):
        raise click.UsageError(f"the run is not finished: {how_to_finish(directory)}")
    result = read_result(directory)
    item = next((item for item in result.audited if item.name == "rows"), None)
    replayed = None if item is None else item.replayed
    words = Words.of(result)
    if item is not None:
        print_line(words.say(f"rows: {item.status}. {item.detail[0].upper()}{item.detail[1:]}"))
        for step in () if replayed is None else replayed.steps:
            for line in str(step).splitlines():
                print_line(words.say(f"  {line}"))
        if replayed is not None and result.verdict is not None and result.verdict.outcome == VIOLATION:
            print_line(words.say(f"the run is a {VIOLATION}: {result.verdict.reason}"))
    if replayed is None or not replayed.shown:
        return VERDICT_CODES[UNDERPOWERED]
    return VERDICT_CODES[PASS if replayed.holds else VIOLATION]
