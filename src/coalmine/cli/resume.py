"""`coalmine resume`: continue a run that was interrupted."""

from pathlib import Path

import click

from coalmine.argument_checks import shown
from coalmine.cli.interruption import resumable
from coalmine.cli.options import JSON, Command, Verbosity, argument
from coalmine.cli.run import PAGE, follow_rank_0, join_ranks, live_progress, report, training_extra
from coalmine.log.run_directory import RunDirectory


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path), help="Run directory of `coalmine run`.")
@PAGE
@JSON
@click.pass_obj
def resume(verbosity: Verbosity, directory: Path, page: bool, as_json: bool) -> int:
    """Continue an interrupted run.

    The result is the same as without the interruption. The run keeps its number of workers: under torchrun or srun, start
    as many ranks as before.
    """
    with training_extra():
        from coalmine.simulation.config import RunConfig
        from coalmine.simulation.training_run import resume as resume_run

    if not (directory / "config.toml").is_file():
        problem = "holds no run: config.toml is missing" if directory.is_dir() else "is not a run directory"
        raise ValueError(f"{directory} {problem}; name the --out of a `coalmine run`")
    stored = RunDirectory(directory).read_config()
    if trainer := stored.get("trainer"):
        raise ValueError(
            f"{directory} was not made by `coalmine run` but by the integration of {shown(trainer)}: run your training "
            "script again, with this directory"
        )
    config = RunConfig.from_dict(stored)
    ranks = join_ranks(config)
    if ranks is not None and ranks.rank:
        return follow_rank_0(ranks)
    with resumable("coalmine resume", directory), live_progress(config.rounds, hidden=verbosity.quiet) as progress:
        outcome = resume_run(directory, progress=progress, ranks=ranks)
    return report(outcome, directory, page=page, as_json=as_json, quiet=verbosity.quiet)
