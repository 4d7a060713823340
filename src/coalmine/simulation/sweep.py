"""A grid of runs, each in its own directory: finished runs are skipped, stopped ones are resumed."""

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from coalmine.argument_checks import shown, whole_number
from coalmine.canaries.array_types import cores
from coalmine.simulation.config import RunConfig, defaults_of, merged, read_config
from coalmine.simulation.training_run import Progress, check_plans, resume, start
from coalmine.storage.files import write_atomically
from coalmine.storage.run_directory import RunDirectory

log = logging.getLogger("coalmine")
LONGEST_NAME = 120
UNSET = ("auto", 0, None)  # engine settings that the machine decides


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its name, the values that make it, and all of its settings."""

    name: str
    values: dict[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep. `seconds_left` assumes that all rounds take as long as those so far; None at first."""

    done: int
    failed: int
    runs: int
    current: str  # the run that reported last, "" at first
    round_number: int
    rounds: int
    running: int
    seconds_left: float | None


@dataclass(frozen=True)
class SweepRun:
    """The outcome of one run; `error` is None where it finished."""

    point: Point
    directory: Path
    error: str | None = None


def read_sweep(path: Path) -> list[Point]:
    """The runs of a TOML file: a run's config, and a section `sweep` of lists under dotted names.

    The first name changes slowest. Every run's settings are validated here, before any run starts.
    """
    values = read_config(path)
    grid = values.pop("sweep", None)
    if grid is None:
        raise ValueError(f"{path} has no [sweep] section; `coalmine run --config {path}` runs it alone")
    if not isinstance(grid, Mapping):
        raise ValueError(f"{path}: sweep must be a section, got {shown(grid)}")
    return make_points(values, dict(_flat(grid)))


def make_points(base: Mapping[str, Any], grid: Mapping[str, Any]) -> list[Point]:
    """Every combination of the lists in `grid`, over the settings of `base`."""
    if not grid:
        raise ValueError(
            '[sweep] must name at least one setting and its values, as in "privacy.noise_multiplier" = [1, 2]'
        )
    for name, values in grid.items():
        if not isinstance(values, list):
            raise ValueError(f"sweep: {name} must be a list of values, got {shown(values)}")
        if not values:
            raise ValueError(f"sweep: {name} must list at least one value, got none")
        twice = [value for place, value in enumerate(values) if value in values[:place]]
        if twice:
            raise ValueError(f"sweep: {name} lists {shown(twice[0])} twice")
    chosen = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = _names(chosen)
    return [Point(name, values, _config(base, values, name)) for name, values in zip(names, chosen, strict=True)]


def _flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names; TOML makes sections of unquoted ones."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _config(base: Mapping[str, Any], values: Mapping[str, Any], name: str) -> RunConfig:
    changes: dict[str, Any] = dict(base)
    for dotted, value in values.items():
        section, _, rest = dotted.partition(".")
        if rest and not isinstance(base.get(section, {}), Mapping):
            raise ValueError(f"{section} must be a section, since the sweep names {dotted}; got {shown(base[section])}")
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        changes = merged(changes, nested)
    try:
        config = RunConfig.from_dict(merged(defaults_of(changes), changes))
        config.engine.resolved()
    except ValueError as error:
        raise ValueError(f"sweep, run {name}: {error}") from None
    return config


def _names(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A directory name for each run: the last part of each setting's name, in full where ambiguous, and its value."""
    last = [name.rpartition(".")[2] for name in chosen[0]]
    short = {name: end if last.count(end) == 1 else name for name, end in zip(chosen[0], last, strict=True)}
    plain = [",".join(f"{short[name]}={_word(value)}" for name, value in values.items()) for values in chosen]
    found = []
    for name, values in zip(plain, chosen, strict=True):
        if len(name) > LONGEST_NAME or plain.count(name) > 1:  # different values may give the same file name
            digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]
            name = f"{name[:LONGEST_NAME]}~{digest}"
        found.append(name)
    return found


def _word(value: Any) -> str:
    """A value in characters that suit a file name."""
    text = "+".join(map(_word, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


def run_sweep(
    points: Sequence[Point],
    out: Path,
    *,
    jobs: int = 1,
    plan: bytes | None = None,
    progress: Callable[[SweepProgress], None] = lambda _: None,
) -> list[SweepRun]:
    """Run the unfinished runs of a sweep in `out`, `jobs` at a time; a failed run does not stop the others.

    A directory there that holds a different run is a ValueError before anything starts. `plan`, the content of the sweep's
    file, is stored beside the runs.
    """
    count = whole_number("jobs", jobs, minimum=1)
    todo = [point for point in points if not is_finished(point, out / point.name)]
    check_plans({point.name: point.config for point in todo})
    if plan is not None:
        write_atomically(out / "sweep.toml", plan)
    board = _Board(points, todo, progress)
    failed: dict[str, str] = {}
    if count == 1:
        for point in todo:
            try:
                _start_or_resume(point.config, out / point.name, partial(board.round_finished, point.name))
            except Exception as error:
                failed[point.name] = _one_line(error)
            board.ended(point, point.name in failed)
    else:
        for point, problem in _in_processes([_shared(point, count) for point in todo], out, count, board):
            if problem is not None:
                failed[point.name] = problem
            board.ended(point, problem is not None)
    return [SweepRun(point, out / point.name, failed.get(point.name)) for point in points]


def is_finished(point: Point, directory: Path) -> bool:
    """Whether the run has a result; ValueError if the directory holds another run."""
    if not (directory / "config.toml").is_file():
        return False
    stored = RunDirectory(directory).read_config()
    wanted = point.config.to_dict()
    engine, there = wanted.pop("engine"), stored.pop("engine", {})
    stored.pop("schema_version")
    changed = [name for name in sorted(stored.keys() | wanted.keys()) if stored.get(name) != wanted.get(name)]
    changed += [f"engine.{name}" for name, value in engine.items() if value not in UNSET and there.get(name) != value]
    if changed:
        raise ValueError(
            f"{directory} holds a run with another config (it differs in {', '.join(changed)}); name another directory "
            "by --out"
        )
    return (directory / "result.json").is_file()


class _Board:
    """Counts runs and rounds for a progress bar."""

    def __init__(
        self, points: Sequence[Point], todo: Sequence[Point], progress: Callable[[SweepProgress], None]
    ) -> None:
        self._rounds = {point.name: point.config.rounds for point in todo}
        self._seen: dict[str, int] = {}
        self._runs, self._done, self._failed = len(points), len(points) - len(todo), 0
        self._left = sum(self._rounds.values())
        self._started: float | None = None  # when the first round was reported
        self._trained, self._current, self._progress = 0, "", progress
        self._report()

    def round_finished(self, name: str, round_number: int) -> None:
        """Count a finished round of a run."""
        before = self._seen.get(name, round_number - 1)  # the first report shows where it resumed
        self._left -= round_number - self._seen.get(name, 0)
        if self._started is None:
            self._started = time.monotonic()
        else:
            self._trained += round_number - before
        self._seen[name], self._current = round_number, name
        self._report()

    def ended(self, point: Point, failed: bool) -> None:
        self._left -= point.config.rounds - self._seen.pop(point.name, 0)
        self._done += not failed
        self._failed += failed
        self._report()

    def _report(self) -> None:
        spent = 0.0 if self._started is None else time.monotonic() - self._started
        self._progress(
            SweepProgress(
                done=self._done,
                failed=self._failed,
                runs=self._runs,
                current=self._current,
                round_number=self._seen.get(self._current, self._rounds.get(self._current, 0)),
                rounds=self._rounds.get(self._current, 0),
                running=len(self._seen),
                seconds_left=spent / self._trained * self._left if self._trained else None,
            )
        )


def _start_or_resume(config: RunConfig, directory: Path, on_round: Callable[[int], None]) -> None:
    """Start the run, or resume it with the device and the threads it was started with."""

    def follow(seen: Progress) -> None:
        on_round(seen.report.round_number)

    if (directory / "config.toml").is_file():
        resume(directory, progress=follow)
    else:
        start(config, directory, progress=follow)


def _shared(point: Point, runs: int) -> Point:
    """The run with its share of the cores."""
    engine = point.config.engine
    share = max(1, cores() // runs)
    threads, jobs = engine.threads or min(torch.get_num_threads(), share), engine.jobs or share
    return replace(point, config=replace(point.config, engine=replace(engine, threads=threads, jobs=jobs)))


def _in_processes(todo: Sequence[Point], out: Path, jobs: int, board: _Board) -> Iterator[tuple[Point, str | None]]:
    """Each run with its error, or None, as it ends.

    Each job is a pool of one process, so that a process that dies fails its run alone.
    """
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    rounds = context.SimpleQueue()
    parent, held = context.Pipe(duplex=False)  # nobody writes: it closes with this process, or at the end
    waiting = list(reversed(todo))
    running: dict[Future[None], tuple[Point, ProcessPoolExecutor]] = {}

    def start_next(pool: ProcessPoolExecutor | None) -> None:
        pool = pool or ProcessPoolExecutor(1, context, initializer=_begin_worker, initargs=(rounds, parent))
        point = waiting.pop()
        running[pool.submit(_run_in_worker, point.name, point.config.to_dict(), str(out))] = point, pool

    try:
        for _ in range(min(jobs, len(todo))):
            start_next(None)
        while running:
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            while not rounds.empty():
                board.round_finished(*rounds.get())
            for future in ended:
                point, pool = running.pop(future)
                error = future.exception()
                died = isinstance(error, BrokenProcessPool)
                yield point, "its process died" if died else None if error is None else _one_line(error)
                if waiting:
                    start_next(None if died else pool)
                else:
                    pool.shutdown()
    finally:
        held.close()


_rounds: Any = None  # of a worker: the queue for names and round numbers


def _begin_worker(rounds: Any, parent: Connection) -> None:
    """Prepare a worker: keep the queue, and end the process when the sweep ends or its process is gone."""
    global _rounds
    _rounds = rounds

    def end_with_the_sweep() -> None:
        with suppress(EOFError, OSError):
            parent.recv()
        os._exit(1)

    threading.Thread(target=end_with_the_sweep, daemon=True).start()


def _run_in_worker(name: str, values: dict[str, Any], out: str) -> None:
    _start_or_resume(RunConfig.from_dict(values), Path(out) / name, lambda number: _rounds.put((name, number)))


def _one_line(error: BaseException) -> str:
    log.debug("a run of the sweep failed", exc_info=error)
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: {text}"
