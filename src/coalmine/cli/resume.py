"""`coalmine resume`: go on with a run that was stopped."""

from pathlib import Path

import click

from coalmine.cli.run import live_progress, report, training_extra
from coalmine.storage.run_directory import RunDirectory


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--page/--no-page", default=True, help="Write report.html into the directory, or not.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON instead of a table.")
@click.pass_obj
def resume(settings: dict[str, bool], directory: Path, page: bool, as_json: bool) -> int:
    """Go on with the run in DIRECTORY where it was stopped; the result is that of a run never stopped."""
    with training_extra():
        from coalmine.simulation.training_run import resume as go_on

    if not (directory / "config.toml").is_file():
        there = "holds no run: config.toml is missing" if directory.is_dir() else "is no directory of a run"
        raise ValueError(f"{directory} {there}; name the --out of a `coalmine run`")
    rounds = RunDirectory(directory).read_config().get("rounds")
    with live_progress(rounds if isinstance(rounds, int) else 0, hidden=settings["quiet"]) as progress:
        outcome = go_on(directory, progress=progress)
    return report(outcome, directory, page=page, as_json=as_json, quiet=settings["quiet"])
