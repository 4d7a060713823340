"""`coalmine watch`: follow a run in the terminal or on a page, and stop it if it violates its claim."""

import os
import subprocess
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.options import COUNT, Command, FiniteRange, argument
from coalmine.cli.output import print_error, print_line
from coalmine.cli.page_server import page_server
from coalmine.cli.screen import screen
from coalmine.integrations.trackers import Tracker, mlflow, tensorboard, wandb
from coalmine.log.run_directory import is_run
from coalmine.report.document import write_live_page
from coalmine.report.live_view import Frame, Watcher
from coalmine.verdict.claim import Claim

RELOADED = 5  # least seconds between reloads of the live page
DRAWING = 3.0  # least wait before drawing the page again, as a multiple of the time that drawing took


@click.command(cls=Command)
@argument("directory", type=click.Path(path_type=Path), help="Run directory.")
@click.option(
    "--every", type=FiniteRange(min=0.1), default=1.0, show_default=True, metavar="S", help="Seconds between updates."
)
@click.option(
    "--claim",
    type=FiniteRange(min=0, min_open=True),
    metavar="E",
    help="Claimed ε to check.  [default: the claim that the run was started with]",
)
@click.option(
    "--participations",
    type=COUNT,
    metavar="N",
    help="Number of rounds that the claim's client takes part in.  [default: that of the audit's schedule]",
)
@click.option("--stop-on-violation", is_flag=True, help="Stop watching and exit with 1 when a round refutes the claim.")
@click.option(
    "--on-violation",
    metavar="COMMAND",
    help="Run a shell command once when a round refutes the claim, for example 'kill -TERM 4711'.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File for a live report, which is kept up to date, and served on an address that is printed.",
)
@click.option(
    "--tensorboard",
    "event_folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for TensorBoard event files.",
)
@click.option("--mlflow", "to_mlflow", is_flag=True, help="Also log to the active MLflow run.")
@click.option("--wandb", "to_wandb", is_flag=True, help="Also log to the active run of Weights & Biases.")
def watch(
    directory: Path,
    every: float,
    claim: float | None,
    participations: int | None,
    stop_on_violation: bool,
    on_violation: str | None,
    html: Path | None,
    event_folder: Path | None,
    to_mlflow: bool,
    to_wandb: bool,
) -> int:
    """Follow a run while it trains.

    Shows the rounds, the accuracy, each adversary's estimate so far and, for a claim, the evidence against it. The
    evidence may be checked after every round: a true claim raises the alarm in at most 0.25 % of runs. The run is not
    affected unless the command of --on-violation changes it. Watching ends when the run has a result, at an alarm with
    --stop-on-violation, or with Ctrl-C. Outside a terminal the current state is printed once, unless an option requires
    following the run.

    Exit codes: 1 if a round refuted the claim and --stop-on-violation is given, else 0.
    """
    if directory.is_dir() and not is_run(directory):
        raise ValueError(f"{directory} holds no run, not even an unfinished one: name the --out of a `coalmine run`")
    if participations is not None and claim is None:
        raise click.UsageError("--participations belongs to a --claim")
    trackers = [tensorboard(event_folder)] if event_folder else []
    trackers += [make() for make, wanted in ((mlflow, to_mlflow), (wandb, to_wandb)) if wanted]
    asked = None if claim is None else Claim(claim, participations=participations)
    watcher, console = Watcher(directory, asked), Console()
    follower = _Follower(watcher, trackers, html, on_violation, stop_on_violation)
    if not console.is_terminal:
        console.width = 120  # a file or a pipe has no width of its own
    frame = follower.look()
    if (stop_on_violation or on_violation) and watcher.claim is None:
        raise click.UsageError("an alarm needs a claim, and this run was started without one: give --claim")
    follows = console.is_terminal or trackers or html or on_violation or stop_on_violation
    if follower.done or not follows:
        console.print(screen(frame))
        return follower.exit_code
    try:
        with page_server(html) if html else nullcontext("") as address:
            if address:
                print_line(f"the page is at {address} while this watches")
            _follow(follower, frame, console, every)
    except KeyboardInterrupt:
        console.print("stopped watching; the run continues")
    return follower.exit_code


def _follow(follower: "_Follower", frame: Frame, console: Console, every: float) -> None:
    """Look at the run every few seconds until it is done; a terminal shows each look, a file only the last."""
    if not console.is_terminal:
        while not follower.done:
            time.sleep(every)
            frame = follower.look()
        console.print(screen(frame))
        return
    with Live(screen(frame), console=console, auto_refresh=False) as live:
        while not follower.done:
            time.sleep(every)
            live.update(screen(follower.look()), refresh=True)


@dataclass
class _Follower:
    """Reads a run, keeps dashboards and page up to date, and reacts once to an alarm."""

    watcher: Watcher
    trackers: list[Tracker]
    html: Path | None
    command: str | None
    stops: bool
    done: bool = False
    _alarmed: bool = field(default=False, init=False)
    _shown: tuple[int, bool, bool] | None = field(default=None, init=False)
    _next_page: float = field(default=0.0, init=False)

    @property
    def exit_code(self) -> int:
        return VERDICT_CODES["VIOLATION"] if self._alarmed and self.stops else 0

    def look(self) -> Frame:
        """The current state of the run."""
        frame = self.watcher.look()
        for tracker in self.trackers:
            tracker.send(frame.scalars)
        alarm = None if frame.alarm_state is None else frame.alarm_state.alarm
        if alarm is not None and not self._alarmed:
            self._alarmed = True
            if self.command:
                _run_command(self.command, str(alarm))
        self.done = frame.finished or (self._alarmed and self.stops)
        if self.html is not None:
            self._write_page(frame, self.html)
        return frame

    def _write_page(self, frame: Frame, path: Path) -> None:
        """Write the page if it has changed and drawing it does not take most of the time."""
        now = (frame.rounds, frame.finished, self._alarmed)
        started = time.monotonic()
        if now == self._shown or (started < self._next_page and not self.done):
            return
        seconds = None if self.done else max(RELOADED, round(self._next_page - started))
        write_live_page(self.watcher.path, path, frame.alarm_state, seconds=seconds)
        if self._shown is None:
            print_line(f"the page is {path}")
        self._shown = now
        self._next_page = time.monotonic() + DRAWING * (time.monotonic() - started)


def _run_command(command: str, alarm: str) -> None:
    """Run the user's command with the alarm in COALMINE_ALARM; a failure is reported and changes nothing else."""
    done = subprocess.run(command, shell=True, check=False, env=os.environ | {"COALMINE_ALARM": alarm})
    if done.returncode:
        print_error(f"the command of --on-violation ended with exit code {done.returncode}: {command}")
