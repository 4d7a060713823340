"""`coalmine verify` and `coalmine seed`: check an audit against its commitment, and make the secret seed."""

from pathlib import Path

import click

from coalmine.cli.options import Command, argument
from coalmine.cli.output import print_columns, print_json, print_line
from coalmine.log.seed_file import read_seed, write_seed
from coalmine.report.receipt import check_receipt
from coalmine.report.statement_check import check_statement
from coalmine.report.statement_facts import read_facts
from coalmine.verification import Check, verify_run

UNVERIFIED = Check("run", None, "give --seed-file to verify the run itself: a statement is worth no more than its run")


@click.command(cls=Command)
@argument(
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=False,
    help="Run directory. Only a receipt can be checked without it.",
)
@click.option(
    "--seed-file",
    type=click.Path(path_type=Path),
    help="File with the secret seed of the audit. Without it, only a statement can be checked.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Final model as one .npy row; its cosines with the canaries are recomputed.  [default: the run's own model.npy]",
)
@click.option(
    "--initial-model",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Initial model as one .npy row, from a source that you trust.  [default: the run's own, if it committed to one]",
)
@click.option(
    "--commitment",
    metavar="HEX",
    help="Commitment that was recorded elsewhere before round 1 (statement_sha256 of audit/record.json).",
)
@click.option("--log-digest", metavar="HEX", help="Digest of the log that was recorded elsewhere when the run ended.")
@click.option("--opening", metavar="HEX", help="Digest of the first round that was recorded elsewhere after it.")
@click.option(
    "--statement",
    "statement_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Privacy statement, in any format of `coalmine statement`; it must follow from the run.",
)
@click.option(
    "--facts",
    "facts_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Facts file that the statement was made with.",
)
@click.option(
    "--receipt",
    "receipt_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Signed receipt of `coalmine receipt`; it must follow from the run, if the run is given.",
)
@click.option(
    "--key", "key_file", type=click.Path(path_type=Path, dir_okay=False), help="Public key of the receipt, in PEM."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def verify(
    directory: Path | None,
    seed_file: Path | None,
    model: Path | None,
    initial_model: Path | None,
    commitment: str | None,
    log_digest: str | None,
    opening: str | None,
    statement_file: Path | None,
    facts_file: Path | None,
    receipt_file: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> int:
    """Verify that a result follows from the seed, settings and claim committed to before round 1, and from its rounds.

    A check holds, does not hold, or could not be made. To run every check, give the final model, and the two digests that
    somebody recorded elsewhere when the run began and ended. With --statement, the privacy statement is made again from
    the run and compared, numbers and words. A statement is only as trustworthy as its run. With --receipt and --key, the
    signature of a receipt is checked, and that the receipt follows from the run.

    Exit codes: 0 if every check that can be made holds, 1 if one does not, 3 if none fails but some need more input.
    """
    if seed_file is None and statement_file is None and receipt_file is None:
        raise click.UsageError("give --seed-file, --statement or --receipt")
    if (receipt_file is None) != (key_file is None):
        raise click.UsageError("--receipt and --key belong together: the key must come from a source that you trust")
    if directory is None and (seed_file is not None or statement_file is not None):
        raise click.UsageError("give the run directory: only a receipt can be checked without it")
    if facts_file is not None and statement_file is None:
        raise click.UsageError("--facts belongs to a statement: give --statement too")
    if seed_file is not None and not seed_file.is_file():
        problem = "is not an ordinary file" if seed_file.exists() else "does not exist"
        raise ValueError(f"{seed_file} {problem}: --seed-file must be the one that the audit started with")
    checks = [] if directory is None else [UNVERIFIED]
    if seed_file is not None and directory is not None:
        checks = verify_run(
            directory,
            read_seed(seed_file),
            model=model,
            initial=initial_model,
            commitment=commitment,
            log_digest=log_digest,
            opening=opening,
        )
    if statement_file is not None and directory is not None:
        facts = None if facts_file is None else read_facts(facts_file)
        checks += check_statement(directory, statement_file, facts)
    if receipt_file is not None and key_file is not None:
        checks += _check_receipt(receipt_file, key_file, directory, model)
    words = {True: "holds", False: "DOES NOT HOLD", None: "NOT CHECKED"}
    beyond = "CANNOT BE CHECKED"
    if as_json:
        print_json(
            {check.name: {name: value for name, value in vars(check).items() if name != "name"} for check in checks}
        )
    else:
        print_columns([[check.name, words[check.held] if check.possible else beyond, check.detail] for check in checks])
    held = [check.held for check in checks if check.possible]
    return 1 if False in held else 3 if None in held else 0


def _check_receipt(file: Path, key_file: Path, directory: Path | None, model: Path | None) -> list[Check]:
    from coalmine.report.envelope import is_signed_by, opened  # needs an extra

    payload, signatures = opened(file)
    held = is_signed_by(payload, signatures, key_file)
    signature = Check("signature", held, f"the receipt is {'' if held else 'not '}signed with the given key")
    return [signature, *(check_receipt(payload, directory, model) if held else ())]


@click.command(cls=Command)
@argument("file", type=click.Path(path_type=Path), help="File to create; must not exist yet.")
def seed(file: Path) -> None:
    """Write a new secret 128-bit seed to a file.

    The server and every node that makes canaries read the same file with `coalmine.read_seed`.
    """
    write_seed(file)
    print_line(f"wrote a new seed to {file}: keep it secret until the audit is over")
