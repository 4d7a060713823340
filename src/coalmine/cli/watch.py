"""`coalmine watch`: follow a run in the terminal."""

import time
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from coalmine.cli.options import Command, FiniteRange, argument
from coalmine.report.live_view import Frame, Watcher, screen
from coalmine.report.trackers import MLflow, TensorBoard, Tracker
from coalmine.storage.run_directory import is_run


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path), help="Run directory.")
@click.option(
    "--every", type=FiniteRange(min=0.1), default=1.0, show_default=True, metavar="S", help="Seconds between updates."
)
@click.option(
    "--tensorboard", type=click.Path(path_type=Path, file_okay=False), help="Folder for TensorBoard event files."
)
@click.option("--mlflow", is_flag=True, help="Log to the active MLflow run too.")
def watch(directory: Path, every: float, tensorboard: Path | None, mlflow: bool) -> None:
    """Follow a run while it trains.

    Shows the rounds, the accuracy and each adversary's estimate so far. The run is not affected. Watching ends when the
    run has a result, or with Ctrl-C. Outside a terminal the current state is printed once.
    """
    if directory.is_dir() and not is_run(directory):
        raise ValueError(f"{directory} holds no run, not even an unfinished one: name the --out of a `coalmine run`")
    trackers: list[Tracker] = [TensorBoard(tensorboard)] if tensorboard else []
    if mlflow:
        trackers.append(MLflow())
    watcher, console = Watcher(directory), Console()
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    frame = _look(watcher, trackers)
    if frame.finished or not (console.is_terminal or trackers):
        console.print(screen(frame))
        return
    try:
        with Live(screen(frame), console=console, auto_refresh=False) as live:
            while not frame.finished:
                time.sleep(every)
                frame = _look(watcher, trackers)
                live.update(screen(frame), refresh=True)
    except KeyboardInterrupt:
        console.print("stopped watching; the run continues")


def _look(watcher: Watcher, trackers: list[Tracker]) -> Frame:
    frame = watcher.look()
    for tracker in trackers:
        tracker.send(frame.scalars)
    return frame
