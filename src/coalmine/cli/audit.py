"""`coalmine audit` and `coalmine canaries`: a pipeline that runs elsewhere, by the files that it reads and writes."""

from pathlib import Path

import click

from coalmine.cli.interruption import resumable
from coalmine.cli.options import DETAILS, JSON, Command, Commands, Verbosity, argument
from coalmine.cli.output import print_line, progress_of
from coalmine.cli.run import report

PLAN = argument("file", type=click.Path(path_type=Path), help="The audit.toml of docs/how-to/audit-files.md.")
KINDS = ("npy", "safetensors", "parquet")


@click.command(cls=Command)
@PLAN
@DETAILS
@JSON
@click.pass_context
def audit(context: click.Context, file: Path, details: bool, as_json: bool) -> int:
    """Audit a pipeline that runs elsewhere, from its files.

    FILE says what each round released and what the pipeline states about it. The rounds go from disk, or from URLs of
    fsspec, into the same audit as in a training loop. Interrupted, or called before the pipeline is done, the command
    goes on after the last recorded round when it is called again.

    Exit codes: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED, 2 for a missing or damaged file, which the error names.
    """
    from coalmine.integrations.files.audit import FileAudit
    from coalmine.integrations.files.plan import read_plan

    plan = read_plan(file)
    quiet = context.ensure_object(Verbosity).quiet
    with (
        resumable("coalmine audit", file, Path(plan.directory)),
        FileAudit(plan) as found,
        progress_of("auditing", total=plan.rounds, hidden=quiet) as progress,
    ):
        found.observe_all(progress)
        result = found.finish()
    return report(result, Path(plan.directory), page=True, details=details, as_json=as_json)


@click.group(cls=Commands)
def canaries() -> None:
    """Write canaries into files, for clients in any language."""


@canaries.command()
@PLAN
@argument("out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the canaries.")
@click.option(
    "--format", "kind", type=click.Choice(KINDS), default="npy", show_default=True, help="Format of the files."
)
@click.option("--sum", "summed", is_flag=True, help="One vector for each round instead of one for each canary.")
@click.pass_context
def export(context: click.Context, file: Path, out: Path, kind: str, summed: bool) -> None:
    """Write the canaries that FILE plans, and schedule.csv: who sends which file in which round.

    A canary is sent as a client's update. With --sum, a round's vector is added to the sum of the clipped updates, before
    the noise. The files do not lead to the seed. The run directory gets the commitment to seed, settings and claim.
    """
    from coalmine.integrations.files.export import export_canaries

    with progress_of("writing canaries", hidden=context.ensure_object(Verbosity).quiet) as progress:
        schedule = export_canaries(file, out, kind=kind, summed=summed, progress=progress)  # type: ignore[arg-type]
    print_line(f"wrote canaries into {out}; {schedule} says who sends which file in which round")
