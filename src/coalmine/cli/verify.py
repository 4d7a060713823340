"""`coalmine verify` and `coalmine seed`: the record of an audit, and the secret it commits to."""

from pathlib import Path

import click

from coalmine.audit.seeds import read_seed, write_seed
from coalmine.audit.verify import verify_run
from coalmine.cli.output import print_json, print_table


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--seed-file", type=click.Path(path_type=Path), required=True, help="The seed that was secret.")
@click.option(
    "--model", type=click.Path(path_type=Path), help="The final model as one .npy row: its cosines are recomputed."
)
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def verify(directory: Path, seed_file: Path, model: Path | None, as_json: bool) -> int:
    """Check a finished audit against the seed it committed to.

    Exit code 1 if anything does not hold.
    """
    if not seed_file.is_file():
        raise ValueError(f"{seed_file} does not exist: --seed-file must be the one that the audit was begun with")
    checks = verify_run(directory, read_seed(seed_file), model=model)
    words = {True: "holds", False: "DOES NOT HOLD", None: "not checked"}
    if as_json:
        print_json({check.name: {"held": check.held, "detail": check.detail} for check in checks})
    else:
        print_table(["check", "", "detail"], [[check.name, words[check.held], check.detail] for check in checks])
    return int(any(check.held is False for check in checks))


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def seed(file: Path) -> None:
    """Write a new secret seed of 128 bits to FILE, which must not exist yet."""
    write_seed(file)
    click.echo(f"wrote a new seed to {file}: keep it secret until the audit is over")
