"""A grid of runs, each in its own directory: finished runs are skipped, stopped ones are resumed.

Several processes, on several machines, may run the same grid at the same time. The lock of a run's directory decides which
process trains it. The lock is released when its process ends, so another process can resume a killed run.
"""

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

from coalmine.argument_checks import short_repr, whole_number
from coalmine.canaries.array_types import cores
from coalmine.log.files import write_atomically
from coalmine.log.run_directory import RunDirectory
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import defaults_of, merged, read_config
from coalmine.simulation.training_run import Progress, check_plans, resume, start

log = logging.getLogger("coalmine")
LONGEST_NAME = 120
FAILURE = "failure.txt"  # in a run's directory: the error of a failed run of a shard
MOST_SHARDS = 10_000
TRAINED, HELD, FINISHED = "trained", "held", "finished"
UNSET = ("auto", 0, None)  # values of engine settings that depend on the machine


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its name, its values of the swept settings, and its config."""

    name: str
    values: dict[str, Any]
    config: RunConfig


@dataclass(frozen=True)
class SweepProgress:
    """The progress of a sweep. `seconds_left` assumes that future rounds take as long as past ones; None at first."""

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
    """The outcome of one run. `error` is None if it finished, or if another process is training it (`held`)."""

    point: Point
    directory: Path
    error: str | None = None
    held: bool = False
    trained: bool = False  # by this call of run_sweep


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count` of a sweep that several processes run at once."""

    number: int
    count: int

    def __post_init__(self) -> None:
        whole_number("the number of shards", self.count, minimum=1)
        if not 1 <= whole_number("the shard", self.number, minimum=1) <= min(self.count, MOST_SHARDS):
            raise ValueError(
                f"a shard must lie between 1 and the number of shards, at most {MOST_SHARDS:,}, "
                f"got {self.number}/{self.count}"
            )

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Parse a text like 3/16."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise ValueError(f"a shard must be its number and the number of shards, like 3/16, got {short_repr(text)}")
        return cls(int(match[1]), int(match[2]))

    def own(self, points: Sequence[Point]) -> Sequence[Point]:
        """The runs of this shard: every `count`-th one."""
        return points[self.number - 1 :: self.count]

    def others(self, points: Sequence[Point]) -> list[Point]:
        """The runs of the other shards, starting with the next shard."""
        starts = [(self.number + step) % self.count for step in range(self.count - 1)]
        return [point for start in starts for point in points[start :: self.count]]


def read_sweep(path: Path) -> list[Point]:
    """The runs of a sweep file: TOML with a run's config and a section `sweep` of lists under dotted names.

    The first name changes slowest. The settings of every run are validated here, before any run starts.
    """
    values = read_config(path)
    grid = values.pop("sweep", None)
    if grid is None:
        raise ValueError(f"{path} has no [sweep] section; `coalmine run --config {path}` runs it alone")
    if not isinstance(grid, Mapping):
        raise ValueError(f"{path}: sweep must be a section, got {short_repr(grid)}")
    return make_points(values, dict(_flat(grid)))


def make_points(base: Mapping[str, Any], grid: Mapping[str, Any]) -> list[Point]:
    """Every combination of the values in `grid`, applied to the settings `base`."""
    if not grid:
        raise ValueError(
            '[sweep] must name at least one setting and its values, as in "privacy.noise_multiplier" = [1, 2]'
        )
    for name, values in grid.items():
        if not isinstance(values, list):
            raise ValueError(f"sweep: {name} must be a list of values, got {short_repr(values)}")
        if not values:
            raise ValueError(f"sweep: {name} must list at least one value, got none")
        repeated = [value for index, value in enumerate(values) if value in values[:index]]
        if repeated:
            raise ValueError(f"sweep: {name} lists {short_repr(repeated[0])} twice")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    names = _names(combinations)
    return [Point(name, values, _config(base, values, name)) for name, values in zip(names, combinations, strict=True)]


def _flat(section: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; TOML parses unquoted dotted names as nested sections."""
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
            raise ValueError(
                f"{section} must be a section, since the sweep names {dotted}; got {short_repr(base[section])}"
            )
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


def _names(combinations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A directory name for each run: the last part of each setting's name (the full name if ambiguous) and its value."""
    last = [name.rpartition(".")[2] for name in combinations[0]]
    short = {name: end if last.count(end) == 1 else name for name, end in zip(combinations[0], last, strict=True)}
    plain = [",".join(f"{short[name]}={_word(value)}" for name, value in values.items()) for values in combinations]
    names = []
    for name, values in zip(plain, combinations, strict=True):
        if len(name) > LONGEST_NAME or plain.count(name) > 1:  # different values may give the same file name
            digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]
            name = f"{name[:LONGEST_NAME]}~{digest}"
        names.append(name)
    return names


def _word(value: Any) -> str:
    """A value as text that is valid in a file name."""
    text = "+".join(map(_word, value)) if isinstance(value, list) else str(value)
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text)


def run_sweep(
    points: Sequence[Point],
    out: Path,
    *,
    jobs: int = 1,
    shard: Shard | None = None,
    plan: bytes | None = None,
    progress: Callable[[SweepProgress], None] = lambda _: None,
) -> list[SweepRun]:
    """Run the unfinished runs of a sweep in `out`, `jobs` at a time; a failed run does not stop the others.

    If a directory holds a different run, this raises ValueError before anything starts. `plan`, the content of the sweep
    file, is stored next to the runs. With `shard`, other processes run the same grid. This process trains its own shard
    first. Then it takes over runs of other shards that no process is training. It returns the runs of its shard and those
    that it took over.
    """
    count = whole_number("jobs", jobs, minimum=1)
    todo = [point for point in points if not is_finished(point, out / point.name)]
    check_plans({point.name: point.config for point in todo})
    if plan is not None:
        write_atomically(out / "sweep.toml", plan)
    shard_points = list(points) if shard is None else list(shard.own(points))
    shard_names = {point.name for point in shard_points}
    first = [point for point in todo if point.name in shard_names]
    sweep = _Sweep(out, count, _ProgressCounter(shard_points, first, progress), shared=shard is not None)
    sweep.train(first)
    while shard is not None and sweep.train(sweep.free([*shard_points, *shard.others(points)])):
        pass  # repeat while there was work: other shards may have been killed in the meantime
    return [sweep.outcome(point) for point in points if point.name in shard_names | sweep.trained | sweep.failed.keys()]


class _Sweep:
    """The part of a sweep that one process trains."""

    def __init__(self, out: Path, jobs: int, counter: "_ProgressCounter", *, shared: bool) -> None:
        self.out, self.jobs, self.counter, self.shared = out, jobs, counter, shared
        self.failed: dict[str, str] = {}
        self.held: set[str] = set()
        self.trained: set[str] = set()

    def free(self, points: Sequence[Point]) -> list[Point]:
        """The runs that are neither finished nor failed, here or in another process."""
        return [
            point
            for point in points
            if point.name not in self.failed
            and not is_finished(point, self.out / point.name)
            and not (self.out / point.name / FAILURE).exists()
        ]

    def train(self, todo: Sequence[Point]) -> bool:
        """Train these runs, except those that other processes hold; return whether any run was trained or failed."""
        before = len(self.trained) + len(self.failed)
        for point, ending, problem in self._endings(todo):
            self.held.discard(point.name)
            if problem is not None:
                self.failed[point.name] = problem
                if self.shared:
                    _write_failure(self.out / point.name, problem)
            elif ending == HELD and not self.shared:
                self.failed[point.name] = f"{self.out / point.name} is being written by another process; wait for it"
            elif ending == HELD:
                self.held.add(point.name)
            elif ending == TRAINED:
                self.trained.add(point.name)
            if ending != HELD or not self.shared:
                self.counter.ended(point, point.name in self.failed)
        return len(self.trained) + len(self.failed) > before

    def outcome(self, point: Point) -> SweepRun:
        name = point.name
        held = name in self.held and not is_finished(point, self.out / name)
        return SweepRun(point, self.out / name, self.failed.get(name), held=held, trained=name in self.trained)

    def _endings(self, todo: Sequence[Point]) -> Iterator[tuple[Point, str, str | None]]:
        """Each run as it ends, with its ending and its error, if any."""
        if self.jobs > 1:
            yield from _in_processes(
                [_with_core_share(point, self.jobs) for point in todo], self.out, self.jobs, self.counter
            )
            return
        for point in todo:
            try:
                ending = _train(point.config, self.out / point.name, partial(self.counter.round_finished, point.name))
                yield point, ending, None
            except Exception as error:
                yield point, TRAINED, _one_line(error)


def _write_failure(directory: Path, problem: str) -> None:
    """Write the error to the run's directory, so that other shards do not repeat the failed run."""
    with suppress(OSError):
        write_atomically(directory / FAILURE, f"{problem}\n".encode())


def is_finished(point: Point, directory: Path) -> bool:
    """Whether the run has a result. Raises ValueError if the directory holds another run."""
    if not (directory / "config.toml").is_file():
        return False
    stored = RunDirectory(directory).read_config()
    expected = point.config.to_dict()
    engine, stored_engine = expected.pop("engine"), stored.pop("engine", {})
    stored.pop("schema_version")
    changed = [name for name in sorted(stored.keys() | expected.keys()) if stored.get(name) != expected.get(name)]
    changed += [
        f"engine.{name}" for name, value in engine.items() if value not in UNSET and stored_engine.get(name) != value
    ]
    if changed:
        raise ValueError(
            f"{directory} holds a run with another config (it differs in {', '.join(changed)}); choose another directory "
            "with --out"
        )
    return (directory / "result.json").is_file()


class _ProgressCounter:
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
        before = self._seen.get(name, round_number - 1)  # a resumed run first reports a later round
        if name in self._rounds:
            self._left -= round_number - self._seen.get(name, 0)
        if self._started is None:
            self._started = time.monotonic()
        else:
            self._trained += round_number - before
        self._seen[name], self._current = round_number, name
        self._report()

    def ended(self, point: Point, failed: bool) -> None:
        if point.name not in self._rounds:  # taken over from another shard
            self._runs, self._done = self._runs + 1, self._done + (not failed)
            self._failed += failed
            self._seen.pop(point.name, None)
            self._report()
            return
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


def _train(config: RunConfig, directory: Path, on_round: Callable[[int], None], most_workers: int | None = None) -> str:
    """Start the run, or resume it with its original device and threads, unless another process holds its lock.

    The directory is listed again after locking, since another machine may have just finished the run.
    """

    def follow(seen: Progress) -> None:
        on_round(seen.report.round_number)

    home = RunDirectory(directory)
    if not home.try_lock():
        return HELD
    try:
        names = {path.name for path in directory.iterdir()}
        if "result.json" in names:
            return FINISHED
        (directory / FAILURE).unlink(missing_ok=True)
        if "config.toml" in names:
            resume(directory, progress=follow, home=home)
        else:
            start(config, directory, progress=follow, home=home, most_workers=most_workers)
    finally:
        home.close()
    return TRAINED


def _with_core_share(point: Point, runs: int) -> Point:
    """The run with its share of the cores as its number of threads."""
    engine, share = point.config.engine, core_share(runs)
    threads = engine.threads or min(torch.get_num_threads(), share)
    return replace(point, config=replace(point.config, engine=replace(engine, threads=threads)))


def core_share(runs: int) -> int:
    """The number of cores for each of `runs` parallel runs."""
    return max(1, cores() // runs)


def _in_processes(
    todo: Sequence[Point], out: Path, jobs: int, counter: _ProgressCounter
) -> Iterator[tuple[Point, str, str | None]]:
    """Each run as it ends, with its ending and its error, if any.

    Each job is a pool with one process, so that a process that dies fails only its own run.
    """
    context = multiprocessing.get_context("spawn")  # a forked torch may hang
    rounds = context.SimpleQueue()
    # Nothing is sent through this pipe: it closes when the sweep or this process ends.
    ends_with_sweep, kept_open = context.Pipe(duplex=False)
    waiting = list(reversed(todo))
    running: dict[Future[str], tuple[Point, ProcessPoolExecutor]] = {}

    def start_next(pool: ProcessPoolExecutor | None) -> None:
        pool = pool or ProcessPoolExecutor(1, context, initializer=_begin_worker, initargs=(rounds, ends_with_sweep))
        point = waiting.pop()
        arguments = point.name, point.config.to_dict(), str(out), core_share(jobs)
        running[pool.submit(_run_in_worker, *arguments)] = point, pool

    try:
        for _ in range(min(jobs, len(todo))):
            start_next(None)
        while running:
            ended, _ = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
            while not rounds.empty():
                counter.round_finished(*rounds.get())
            for future in ended:
                point, pool = running.pop(future)
                error = future.exception()
                died = isinstance(error, BrokenProcessPool)
                if error is None:
                    yield point, future.result(), None
                else:
                    yield point, TRAINED, "its process died" if died else _one_line(error)
                if waiting:
                    start_next(None if died else pool)
                else:
                    pool.shutdown()
    finally:
        kept_open.close()


_rounds: Any = None  # in a worker: the queue for run names and round numbers


def _begin_worker(rounds: Any, ends_with_sweep: Connection) -> None:
    """Prepare a worker: store the queue, and end this process when the sweep or its process ends."""
    global _rounds
    _rounds = rounds

    def exit_with_sweep() -> None:
        with suppress(EOFError, OSError):
            ends_with_sweep.recv()
        os._exit(1)

    threading.Thread(target=exit_with_sweep, daemon=True).start()


def _run_in_worker(name: str, values: dict[str, Any], out: str, most_workers: int) -> str:
    return _train(
        RunConfig.from_dict(values), Path(out) / name, lambda number: _rounds.put((name, number)), most_workers
    )


def _one_line(error: BaseException) -> str:
    log.debug("a run of the sweep failed", exc_info=error)
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError | OSError | ImportError) else f"{type(error).__name__}: {text}"
