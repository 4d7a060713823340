"""Read a run directory for a report, as far as it can be read."""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.gauge_reader import GaugeReader, read_gauges
from coalmine.evidence.gaussian_bound import CONFIDENCE
from coalmine.evidence.ladder import LadderReader, Scores, ladder
from coalmine.evidence.literature import published_rows
from coalmine.evidence.views import Reader, View
from coalmine.log.commitment import Commitment
from coalmine.log.mapped_rounds import LogReader, map_rounds
from coalmine.log.round_schema import check_fit
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import FEWEST, Settings
from coalmine.report import plots
from coalmine.report.epsilon_by_round import EpsilonReader
from coalmine.report.round_views import ViewsReader
from coalmine.report.table_rows import main_rows, published_row
from coalmine.result.audit_result import AuditResult
from coalmine.result.derivation import derive_result, derive_scores

logger = logging.getLogger("coalmine")
MOST_COSINES = 60_000_000  # of one run; beyond that, fewer unobserved canaries are read
MOST_COSINES_COMPARED = 5_000_000  # the same for each run of a comparison
MOST_PRODUCTS = 1_000_000_000  # of pairs of rounds, for each canary, where canaries have several presentations
Part = TypeVar("Part")


class _Readings(NamedTuple):
    scores: list[Scores]
    estimates: dict[str, list[tuple[int, EpsilonEstimate]]]
    gauges: list[GaugeResult]
    views: list[View]
    residual: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as read from its directory by `read_run`.

    Attributes:
        path: The run directory.
        result: The stored result. For an unfinished run, the result of the rounds so far, without a claim.
        finished: Whether a stored result could be read.
        commitment: The commitment to the seed and the settings that was published before round 1.
        demonstration: Whether the seed is short enough to guess, so that nobody else can trust the audit.
        rounds: The rounds of the log, or None if there is no log or it is damaged.
        config: The trainer's config, empty if there is none.
        metrics: The trainer's metrics, one mapping for each round.
        problems: A sentence for each file that could not be read.
    """

    path: Path
    result: AuditResult
    finished: bool
    commitment: Commitment | None = None
    demonstration: bool = False
    rounds: LogReader | None = field(default=None, repr=False)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list, repr=False)
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    @property
    def has_result_file(self) -> bool:
        """Whether result.json exists, readable or not."""
        return (self.path / "result.json").exists()

    @property
    def scores(self) -> list[Scores]:
        """The scores of every rung, from the log; empty without a log."""
        return self._readings.scores

    @property
    def estimates(self) -> dict[str, list[tuple[int, EpsilonEstimate]]]:
        """ε during training: for each rung, pairs of a round and the estimate from the rounds so far."""
        return self._readings.estimates

    @property
    def gauges(self) -> list[GaugeResult]:
        """The gauges of the result, with their values in each round from the log; empty without a log.

        In a long run, gauges that compare rounds have no value (NaN) for rounds that the picture leaves out.
        """
        return self._readings.gauges

    @property
    def views(self) -> list[View]:
        """The view of each round, for pictures, with a limited number of unobserved canaries; empty without a log."""
        return self._readings.views

    @property
    def views_are_residuals(self) -> bool:
        """Whether `views` are those of the residual, without everybody else's updates."""
        return self._readings.residual

    @cached_property
    def _readings(self) -> "_Readings":
        """Everything that the report needs from the log, read in one pass."""
        if self.rounds is None or self._thinned is None:
            return _Readings([], {}, [], [], False)
        (rounds, settings), result = self._thinned, self.result
        thinned, numbers = rounds is not self.rounds, [item.number for item in rounds.kept]
        compared = _rounds_to_compare(numbers, result.gauges)
        ladder_reader = LadderReader(rounds, settings)
        gauge_reader = GaugeReader(settings, len(numbers), compared)
        epsilon_reader = EpsilonReader(ladder_reader, numbers, result)
        views_reader = ViewsReader(settings, len(numbers))
        more_readers: list[Reader] = [epsilon_reader, views_reader]
        if self.finished and not thinned:
            more_readers.append(gauge_reader)
        scores = derive_scores(rounds, settings, claim=result.claim, reader=ladder_reader, beside=more_readers)
        gauges = list(result.gauges)
        if (
            self.finished
        ):  # an unfinished run's result was derived from the log, so its gauges already have their values
            read = read_gauges(self.rounds, result.settings, compared) if thinned else gauge_reader.results()
            values = {gauge.name: gauge.values for gauge in read}
            gauges = [replace(gauge, values=values[gauge.name]) for gauge in gauges if gauge.name in values]
        return _Readings(scores, epsilon_reader.estimates, gauges, views_reader.views, views_reader.residual)

    @property
    def shown_scores(self) -> list[Scores]:
        """One group of scores for each rung: that of the row in the tables, or the largest one for a pooled headline."""
        presentations = {row.rung: row.presentations for row in main_rows(self.result)}
        chosen: dict[str, Scores] = {}
        for group in self.scores:
            if group.rung not in chosen or _is_better(group, chosen[group.rung], presentations.get(group.rung)):
                chosen[group.rung] = group
        return list(chosen.values())

    @cached_property
    def _thinned(self) -> tuple[LogReader, Settings] | None:
        """The rounds and settings, with fewer unobserved canaries if the log is too large to be read whole."""
        return None if self.rounds is None else self.rounds.thinned(self.result.settings, most=MOST_COSINES)

    @cached_property
    def few_scores(self) -> list[Scores]:
        """The scores with at most a limited number of unobserved canaries, for a picture of many runs.

        Empty if they would take too long; the pictures then show the fitted laws of the result.
        """
        if self.rounds is None:
            return []
        canaries = self.result.settings.canaries
        repeated = sum(item.present.size for item in self.rounds.kept) > canaries
        if repeated and len(self.rounds.kept) ** 2 * canaries > MOST_PRODUCTS:
            return []
        least = None if repeated else FEWEST  # repeated canaries need them: they show what rounds share
        rounds, settings = self.rounds.thinned(self.result.settings, most=MOST_COSINES_COMPARED, least=least)
        return ladder(rounds, settings)

    @cached_property
    def published(self) -> tuple[LiteratureRow, ...]:
        """Every published estimator, applied to the canaries behind the measured ε; empty without a log."""
        row = published_row(self.result)
        if row is None or self._thinned is None:
            return ()
        matching = [each for each in self.scores if (each.rung, each.presentations) == (row.rung, row.presentations)]
        if not matching:
            return ()
        rounds, settings = self._thinned
        return published_rows(matching[0], delta=settings.delta, confidence=CONFIDENCE, log=rounds, settings=settings)

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that the trainer wrote into the result or the config."""
        privacy = self.config.get("privacy")
        configured = privacy.get("noise_multiplier") if isinstance(privacy, dict) else None
        stored = self.result.trainer.noise_multiplier
        return _number(configured) if stored is None else stored

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """Round and accuracy of each evaluation in the trainer's metrics."""
        pairs = [(_number(line.get("round")), _number(line.get("accuracy"))) for line in self.metrics]
        return [(int(round_), value) for round_, value in pairs if round_ is not None and value is not None]

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the final model, or else the last one in the metrics."""
        stored = self.result.trainer.accuracy
        return self.accuracies[-1][1] if stored is None and self.accuracies else stored


def _number(value: Any) -> float | None:
    """A number of a config or of metrics; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return float(value) if is_number else None


def _rounds_to_compare(numbers: list[int], gauges: Iterable[GaugeResult]) -> set[int]:
    """The rounds that the picture of a gauge shows: as many as fit, and all in which a gauge is outside its limits."""
    return {numbers[place] for place in plots.spread(len(numbers))}.union(*(gauge.flagged for gauge in gauges))


def _is_better(group: Scores, other: Scores, presentations: int | None) -> bool:
    """Whether `group` represents its rung better than `other`: by the number of presentations, then by size."""
    exact = (group.presentations == presentations, other.presentations == presentations)
    return group.observed.size > other.observed.size if exact[0] == exact[1] else exact[0]


def read_run(path: Path | str) -> Run:
    """Read the run in a directory, as far as it can be read.

    A file that is missing or damaged is named in `Run.problems`. The digests of the log are checked. Raises ValueError if
    neither the result nor the rounds can be read.
    """
    return _read(Path(path), checked=True)


def read_runs(paths: list[Path]) -> tuple[list[Run], list[str]]:
    """Several runs, and a line for each that cannot be read. The digests of their logs are not checked."""
    runs, refused = [], []
    for path in paths:
        try:
            runs.append(_read(path, checked=False))
        except (ValueError, OSError) as error:
            refused.append(str(error))
    if not runs:
        raise ValueError("; ".join(refused))
    return runs, refused


def _read(path: Path, *, checked: bool) -> Run:
    if not path.is_dir():
        raise ValueError(f"{path} is not a run directory")
    home, problems = RunDirectory(path), []

    def attempt(read: Callable[[], Part], *needed: str) -> Part | None:
        if not all((path / name).exists() for name in needed):
            return None
        try:
            return read()
        except (ValueError, OSError, KeyError, TypeError) as error:
            problems.append(str(error))
            return None

    config = attempt(home.read_config, "config.toml") or {}
    metrics = attempt(home.read_metrics, "metrics.jsonl") or []
    record = attempt(home.read_record, "audit/record.json")
    statement = attempt(home.read_statement, "audit/record.json") if record else None
    log_file = path / "audit" / "rounds.log"
    result = attempt(lambda: AuditResult.from_dict(home.read_result()), "result.json")
    settings = result.settings if result else record[0] if record else None
    checked |= not (path / "result.json").exists()  # then the result is derived from the log
    rounds = attempt(lambda: map_rounds(log_file, checked=checked), "audit/rounds.log") if settings else None
    if settings is not None and rounds is not None and not _fits(rounds, settings):
        problems.append(f"{log_file} does not fit the settings of this run; is it from another run?")
        rounds = None
    finished = result is not None
    if result is None and settings is not None and rounds is not None and rounds.kept:
        result = attempt(lambda: derive_result(rounds, settings))
    if result is None:
        raise ValueError(problems[0] if problems else _no_run_message(path))
    return Run(
        path=path,
        result=result,
        finished=finished,
        commitment=record[1] if record else None,
        demonstration=statement is not None and statement.demonstration,
        rounds=rounds,
        config=config,
        metrics=[line for line in metrics if isinstance(line, dict)],
        problems=tuple(problems),
    )


def _no_run_message(path: Path) -> str:
    if (path / "audit" / "rounds.log").exists():
        return f"{path} has no rounds yet; `coalmine watch {path}` follows it"
    return f"{path} holds no run: it has neither result.json nor audit/rounds.log"


def _fits(rounds: LogReader, settings: Settings) -> bool:
    """Whether every record can belong to an audit with these settings."""
    try:
        for item in (*rounds.kept, *([] if rounds.final is None else [rounds.final])):
            check_fit(item, settings)
    except ValueError:
        return False
    return list(rounds.numbers) == sorted(set(rounds.numbers))
