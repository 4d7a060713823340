"""A run directory, read for a report as far as it can be read."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from coalmine.audit.derivation import derive_result, derive_scores
from coalmine.audit.gauge import Gauge
from coalmine.audit.gauge_reader import GaugeReader, read_gauges
from coalmine.audit.ladder import LadderReader, Scores, ladder
from coalmine.audit.published import published_rows
from coalmine.audit.result import CONFIDENCE, AuditResult
from coalmine.audit.views import Reader, View
from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.report import plots
from coalmine.report.epsilon_by_round import EpsilonReader
from coalmine.report.round_views import ViewsReader
from coalmine.report.table_rows import main_rows, published_row
from coalmine.report.trainer_entries import number
from coalmine.storage.mapped_rounds import Rounds, map_rounds
from coalmine.storage.record import FEWEST, Commitment, Settings
from coalmine.storage.round_schema import check_fit
from coalmine.storage.run_directory import RunDirectory

logger = logging.getLogger("coalmine")
MOST = 60_000_000  # cosines of one run that are read whole; beyond it unobserved canaries are thinned
MOST_SIDE_BY_SIDE = 5_000_000  # the same for each of several runs
MOST_PRODUCTS = 1_000_000_000  # of rounds with rounds for each canary, which several presentations take
Part = TypeVar("Part")


class _Readings(NamedTuple):
    scores: list[Scores]
    estimates: dict[str, list[tuple[int, EpsilonEstimate]]]
    gauges: list[Gauge]
    views: list[View]
    residual: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is known of a run; `read_run` makes it.

    Attributes:
        path: The run directory.
        result: The stored result; of an unfinished run the result that follows from the rounds so far, without a claim.
        finished: Whether a stored result could be read.
        commitment: The commitment to the seed and the settings that was published before round 1.
        demonstration: Whether the seed can be guessed, so that the audit convinces nobody else.
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
    rounds: Rounds | None = field(default=None, repr=False)
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
    def gauges(self) -> list[Gauge]:
        """The gauges of the result, with their values in each round from the log; empty without a log.

        Of many rounds, those that a picture does not show have no value (NaN) in gauges that compare rounds with each other.
        """
        return self._readings.gauges

    @property
    def views(self) -> list[View]:
        """The view of each round, for pictures, with few unobserved canaries; empty without a log."""
        return self._readings.views

    @property
    def views_are_residuals(self) -> bool:
        """Whether these views are without everybody else's part."""
        return self._readings.residual

    @cached_property
    def _readings(self) -> "_Readings":
        """Everything that the report takes from the log, in one pass."""
        if self.rounds is None or self._thinned is None:
            return _Readings([], {}, [], [], False)
        (rounds, settings), result = self._thinned, self.result
        thinned, numbers = rounds is not self.rounds, [item.number for item in rounds.kept]
        shown = _shown_rounds(numbers, result.gauges)
        ladder_reader, gauge_reader = LadderReader(rounds.as_log, settings), GaugeReader(settings, len(numbers), shown)
        epsilon_reader = EpsilonReader(ladder_reader, numbers, result)
        views_reader = ViewsReader(settings, len(numbers))
        beside: list[Reader] = [epsilon_reader, views_reader]
        if self.finished and not thinned:
            beside.append(gauge_reader)
        scores = derive_scores(rounds.as_log, settings, claim=result.claim, reader=ladder_reader, beside=beside)
        gauges = list(result.gauges)
        if self.finished:  # otherwise the result was derived just now, and its gauges have their values
            read = read_gauges(self.rounds.as_log, result.settings, shown) if thinned else gauge_reader.gauges()
            values = {gauge.name: gauge.values for gauge in read}
            gauges = [replace(gauge, values=values[gauge.name]) for gauge in gauges if gauge.name in values]
        return _Readings(scores, epsilon_reader.estimates, gauges, views_reader.views, views_reader.residual)

    @property
    def shown_scores(self) -> list[Scores]:
        """One group of scores for each rung, that of the row which tables show; of a pooled headline the largest group."""
        wanted = {row.rung: row.presentations for row in main_rows(self.result)}
        found: dict[str, Scores] = {}
        for group in self.scores:
            if group.rung not in found or _better(group, found[group.rung], wanted.get(group.rung)):
                found[group.rung] = group
        return list(found.values())

    @cached_property
    def _thinned(self) -> tuple[Rounds, Settings] | None:
        """As much of the log as is read whole."""
        return None if self.rounds is None else self.rounds.thinned(self.result.settings, most=MOST)

    @cached_property
    def few_scores(self) -> list[Scores]:
        """The same with fewer unobserved canaries where there are many: enough for one picture of many runs.

        None where they would take too long: the pictures then have the fitted laws of the result.
        """
        if self.rounds is None:
            return []
        canaries = self.result.settings.canaries
        repeated = sum(item.present.size for item in self.rounds.kept) > canaries
        if repeated and len(self.rounds.kept) ** 2 * canaries > MOST_PRODUCTS:
            return []
        least = None if repeated else FEWEST  # what rounds share is learnt from the unobserved; else they are not drawn
        rounds, settings = self.rounds.thinned(self.result.settings, most=MOST_SIDE_BY_SIDE, least=least)
        return ladder(rounds.as_log, settings)

    @cached_property
    def published(self) -> tuple[LiteratureRow, ...]:
        """What every published estimator says of the canaries behind the number on top; none where there is no log."""
        row = published_row(self.result)
        if row is None or self._thinned is None:
            return ()
        of_row = [each for each in self.scores if (each.rung, each.presentations) == (row.rung, row.presentations)]
        if not of_row:
            return ()
        rounds, settings = self._thinned
        return published_rows(
            of_row[0], delta=settings.delta, confidence=CONFIDENCE, log=rounds.as_log, settings=settings
        )

    @property
    def noise_multiplier(self) -> float | None:
        """The noise multiplier that the trainer wrote into the result or the config."""
        privacy = self.config.get("privacy")
        configured = privacy.get("noise_multiplier") if isinstance(privacy, dict) else None
        found = number(self.result.extra.get("noise_multiplier"))
        return number(configured) if found is None else found

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """Round and accuracy of each evaluation that the trainer wrote down."""
        pairs = [(number(line.get("round")), number(line.get("accuracy"))) for line in self.metrics]
        return [(int(place), value) for place, value in pairs if place is not None and value is not None]

    @property
    def accuracy(self) -> float | None:
        """The accuracy of the final model, or else the last one in the metrics."""
        told = number(self.result.extra.get("accuracy"))
        return self.accuracies[-1][1] if told is None and self.accuracies else told


def _shown_rounds(numbers: list[int], gauges: Iterable[Gauge]) -> set[int]:
    """The rounds that a picture of a gauge shows: as many as fit, and those outside of its limits."""
    return {numbers[place] for place in plots.spread(len(numbers))}.union(*(gauge.flagged for gauge in gauges))


def _better(group: Scores, other: Scores, presentations: int | None) -> bool:
    """Whether a group stands for its rung rather than another one."""
    exact = (group.presentations == presentations, other.presentations == presentations)
    return group.observed.size > other.observed.size if exact[0] == exact[1] else exact[0]


def read_run(path: Path | str) -> Run:
    """Read the run in a directory, as far as it can be read.

    A file that is missing or damaged is named in `Run.problems`. The digests of the log are checked. Raises ValueError if
    neither the result nor the rounds can be read.
    """
    return _read(Path(path), checked=True)


def read_runs(paths: list[Path]) -> tuple[list[Run], list[str]]:
    """Several runs, and a line for each that cannot be read; the digests of their logs are not checked."""
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
        raise ValueError(f"{path} is not a directory of a run")
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
    checked |= not (path / "result.json").exists()  # the result will rest on the log
    rounds = attempt(lambda: map_rounds(log_file, checked=checked), "audit/rounds.log") if settings else None
    if settings is not None and rounds is not None and not _fits(rounds, settings):
        problems.append(f"{log_file} does not fit the settings of this run; is it from another run?")
        rounds = None
    finished = result is not None
    if result is None and settings is not None and rounds is not None and rounds.kept:
        result = attempt(lambda: derive_result(rounds.as_log, settings))
    if result is None:
        raise ValueError(problems[0] if problems else _nothing_in(path))
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


def _nothing_in(path: Path) -> str:
    if (path / "audit" / "rounds.log").exists():
        return f"{path} holds no round yet; `coalmine watch {path}` follows it"
    return f"{path} holds no run: neither result.json nor audit/rounds.log is there"


def _fits(rounds: Rounds, settings: Settings) -> bool:
    """Whether every record can belong to an audit with these settings."""
    try:
        for item in (*rounds.kept, *([] if rounds.final is None else [rounds.final])):
            check_fit(item, settings)
    except ValueError:
        return False
    return list(rounds.numbers) == sorted(set(rounds.numbers))
