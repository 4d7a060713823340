"""A grid of runs, each in a directory of its own: finished ones are left alone, stopped ones go on."""

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
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from coalmine.canaries.vectors import cores
from coalmine.checks import shown, whole_number
from coalmine.simulation.config import RunConfig, merged, read_config, task_defaults
from coalmine.simulation.training_run import Progress, check_plans, resume, start
from coalmine.storage.files import write_atomically
from coalmine.storage.run_directory import RunDirectory

log = logging.getLogger("coalmine")
LONGEST_NAME = 120
UNSET = ("auto", 0, None)  # of the engine: what the machine gives


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its name, the values that make it, and all of its settings."""

    name: str
    values: dict[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is. `seconds_left` counts rounds, as if they all took as long as those so far; None at first."""

    done: int
    failed: int
    runs: int
    current: str  # the run that moved last, "" at first
    round_number: int
    rounds: int
    running: int
    seconds_left: float | None


@dataclass(frozen=True)
class SweepRun:
    """What became of one run; `error` is None where it finished."""

    point: Point
    directory: Path
    error: str | None = None


def read_sweep(path: Path) -> list[Point]:
    """The runs of a TOML file: a run's config, and a section `sweep` of lists under dotted names; a ValueError if not.

    The first name changes slowest. Every run's settings are checked here, before any of them starts.
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
    """Dotted names: TOML makes sections of those without quotes."""
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
    task = changes.get("task", {})
    task = task if isinstance(task, Mapping) else {}
    try:
        defaults = task_defaults(task.get("name", "digits"), task.get("level", "client"))
        config = RunConfig.from_dict(merged(defaults, changes))
        config.engine.resolved()
    except ValueError as error:
        raise ValueError(f"sweep, run {name}: {error}") from None
    return config


def _names(chosen: Sequence[Mapping[str, Any]]) -> list[str]:
    """A directory's name for each run: last parts of the settings' names, in full where two end alike, and values."""
    last = [name.rpartition(".")[2] for name in chosen[0]]
    short = {name: end if last.count(end) == 1 else name for name, end in zip(chosen[0], last, strict=True)}
    plain = [",".join(f"{short[name]}={_word(value)}" for name, value in values.items()) for values in chosen]
    found = []
    for name, values in zip(plain, chosen, strict=True):
        if len(name) > LONGEST_NAME or plain.count(name) > 1:  # two values may look alike as file names
            digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]
            name = f"{name[:LONGEST_NAME]}~{digest}"
        found.append(name)
    return found


def _word(value: Any) -> str:
    """A value as a file name can hold it."""
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
    """Run what is left of a sweep in `out`, `jobs` at a time; a run that fails is noted and the others go on.

    ValueError before anything starts if a directory there holds another run than the sweep's of this name. `plan`, the
    sweep's file, is kept beside the runs.
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
                _go_on(point.config, out / point.name, lambda seen, name=point.name: board.moved(name, seen))  # type: ignore[misc]
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
    """Whether the run's result is there; a ValueError where the directory holds another run."""
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
        self._started: float | None = None  # when the first round was heard of
        self._trained, self._current, self._progress = 0, "", progress
        self._tell()

    def moved(self, name: str, round_number: int) -> None:
        """A run has finished a round."""
        before = self._seen.get(name, round_number - 1)  # the first one heard of tells where it went on
        self._left -= round_number - self._seen.get(name, 0)
        if self._started is None:
            self._started = time.monotonic()
        else:
            self._trained += round_number - before
        self._seen[name], self._current = round_number, name
        self._tell()

    def ended(self, point: Point, failed: bool) -> None:
        self._left -= point.config.rounds - self._seen.pop(point.name, 0)
        self._done += not failed
        self._failed += failed
        self._tell()

    def _tell(self) -> None:
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


def _go_on(config: RunConfig, directory: Path, moved: Callable[[int], None]) -> None:
    """Start the run, or go on with it as it was begun: with the device and the threads it had."""

    def follow(seen: Progress) -> None:
        moved(seen.report.round_number)

    if (directory / "config.toml").is_file():
        resume(directory, progress=follow)
    else:
        start(config, directory, progress=follow)


def _shared(point: Point, jobs: int) -> Point:
    """The run with its share of the cores."""
    engine = point.config.engine
    share = max(1, cores() // jobs)
    threads, workers = engine.threads or min(torch.get_num_threads(), share), engine.workers or share
    return replace(point, config=replace(point.config, engine=replace(engine, threads=threads, workers=workers)))


class _Worker:
    """A process that runs one point after the other, and says so."""

    def __init__(self, out: Path) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may hang
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, str(out)))
        self.process.start()
        theirs.close()
        self.point: Point | None = None

    def take(self, point: Point) -> None:
        self.point = point
        with suppress(OSError):  # it has died: what it says next is that
            self.connection.send((point.name, point.config.to_dict()))

    def said(self) -> tuple[str, Any]:
        """A "round" and its number, or that the run "ended" or the process "died", with what went wrong."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            return "died", f"its process died (exit code {self.process.exitcode})"
        return kind, value

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _in_processes(todo: Sequence[Point], out: Path, jobs: int, board: _Board) -> Iterator[tuple[Point, str | None]]:
    """Each run with what went wrong in it, None if nothing, as they end. A process that dies fails its run alone."""
    waiting = list(reversed(todo))
    workers = [_Worker(out) for _ in range(min(jobs, len(todo)))]
    try:
        for worker in workers:
            worker.take(waiting.pop())
        while any(worker.point for worker in workers):
            busy = {worker.connection: worker for worker in workers if worker.point}
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                point = worker.point
                assert point is not None
                kind, value = worker.said()
                if kind == "round":
                    board.moved(point.name, value)
                    continue
                yield point, value
                worker.point = None
                if kind == "died":
                    worker.end()
                    workers[workers.index(worker)] = worker = _Worker(out)
                if waiting:
                    worker.take(waiting.pop())
    finally:
        for worker in workers:
            worker.end()


def _work(connection: Connection, out: str) -> None:
    """What a worker does until its parent ends it; it ends by itself if the parent is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_the_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=leave_with_the_parent, daemon=True).start()
    while True:
        try:
            name, values = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            _go_on(RunConfig.from_dict(values), Path(out) / name, lambda number: connection.send(("round", number)))
            connection.send(("ended", None))
        except KeyboardInterrupt:
            return
        except Exception as error:
            connection.send(("ended", _one_line(error)))


def _one_line(error: Exception) -> str:
    log.debug("a run of the sweep failed", exc_info=error)
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: {text}"
