"""A run in progress, read from its files without locking them."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coalmine.estimators.gaussian_fit import EpsilonEstimate
from coalmine.evidence.gauges.gauge_reader import read_gauges
from coalmine.evidence.ladder import ladder
from coalmine.log.mapped_rounds import LogReader, map_rounds
from coalmine.log.round_schema import check_fit, check_values
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import Settings
from coalmine.report.epsilon_by_round import estimate_scores, largest_groups
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import format_number
from coalmine.verdict.alarm import Alarm, AlarmReader
from coalmine.verdict.claim import Claim

MOST_COSINES = 4_000_000  # read for one frame
SHARE = 0.1  # of the time that the estimates may take


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The state of a run at one moment."""

    path: Path
    rounds: int
    planned: int | None
    canaries: int | None
    metrics: list[dict[str, Any]]
    estimates: dict[str, EpsilonEstimate]
    flagged: tuple[str, ...]
    finished: bool
    problem: str = ""
    result: AuditResult | None = None  # of a finished run
    alarm_state: "AlarmState | None" = None  # None if no claim is known

    @property
    def scalars(self) -> Iterator[tuple[str, float, int]]:
        """Name, value and round of everything that a dashboard can plot."""
        yield from metric_scalars(self.metrics)
        for rung, estimate in self.estimates.items():
            yield f"coalmine/epsilon/{rung}", estimate.epsilon, self.rounds


@dataclass(frozen=True, kw_only=True)
class AlarmState:
    """The evidence of the rounds so far against the claim, and the alarm if there is one. It is valid at any time."""

    claim: Claim
    round: int  # the last one that was read
    evidence: float
    needed: float  # evidence that raises the alarm
    claimed_noise: float
    measured_noise: float | None
    alarm: Alarm | None

    @property
    def sentence(self) -> str:
        """The alarm, or how much evidence is missing for one."""
        if self.alarm is not None:
            return str(self.alarm)[:1].upper() + str(self.alarm)[1:]
        measured = (
            "no canary was observed yet"
            if self.measured_noise is None
            else f"noise {format_number(self.measured_noise)} was measured"
        )
        return (
            f"No alarm after round {self.round}: the evidence against the claimed ε = {format_number(self.claim.epsilon)} "
            f"is {format_number(self.evidence)}, and {self.needed:.0f} raises the alarm. The claim needs noise "
            f"{format_number(self.claimed_noise)}; {measured}."
        )


@dataclass
class Watcher:
    """Reads a run repeatedly. It estimates ε only so often that the estimates take a tenth of the time.

    It checks every round against `claim`, or else against the claim in the audit's record or in the run's config.
    """

    path: Path
    claim: Claim | None = None
    _estimates: dict[str, EpsilonEstimate] = field(default_factory=dict)
    _flagged: tuple[str, ...] = ()
    _estimated_round: int = 0
    _next_estimate: float = 0.0  # on the monotonic clock
    _alarms: AlarmReader | None = None
    _last_norm: float = 0.0  # of the last round that the alarm has read

    def look(self) -> Frame:
        """Read one frame. Raises ValueError if the path is not a directory."""
        home = RunDirectory(self.path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is not a run directory")
        metrics, problem, settings, logged_rounds, metric_rounds, result = [], "", None, 0, 0, None
        finished = (self.path / "result.json").exists()
        try:
            metrics = home.read_metrics()
            if (self.path / "audit" / "record.json").exists():
                settings, _ = home.read_record()
                self.claim = self.claim or stored_claim(home)
                logged_rounds = self._read_log(settings)
            metric_rounds = max((line.get("round", 0) for line in metrics), default=0)
            config = home.read_config() if (self.path / "config.toml").exists() else {}
            result = AuditResult.from_dict(home.read_result()) if finished else None
        except (ValueError, OSError, TypeError, AttributeError) as error:
            config, problem = {}, str(error)
        planned = config.get("rounds") or (settings.rounds if settings else None)
        return Frame(
            path=self.path,
            rounds=max(logged_rounds, metric_rounds),
            planned=planned if isinstance(planned, int) else None,
            canaries=settings.canaries if settings else None,
            metrics=metrics,
            estimates=self._estimates,
            flagged=self._flagged,
            finished=finished,
            problem=problem,
            result=result,
            alarm_state=self.alarm_state,
        )

    @property
    def alarm_state(self) -> AlarmState | None:
        """The evidence of the rounds so far against the claim; None without a claim or before the first round."""
        reader = self._alarms
        if reader is None or self.claim is None:
            return None
        return AlarmState(
            claim=self.claim,
            round=reader.last_round,
            evidence=reader.evidence,
            needed=reader.needed,
            claimed_noise=reader.claimed_noise,
            measured_noise=reader.measured_noise,
            alarm=reader.alarm,
        )

    def _check_claim(self, rounds: LogReader, settings: Settings) -> None:
        """Check the rounds since the last frame against the claim; all rounds if a resumed run went back."""
        if self.claim is None:
            return
        last = 0 if self._alarms is None else self._alarms.last_round
        same = any(item.number == last and item.norm == self._last_norm for item in rounds.kept)
        if self._alarms is None or (last and not same):
            self._alarms, last = AlarmReader(settings, self.claim), 0
        for item in rounds.kept:
            if item.number > last:
                check_fit(item, settings)
                check_values(item)
                self._alarms.see(item)
                self._last_norm = item.norm

    def _read_log(self, settings: Settings) -> int:
        path = self.path / "audit" / "rounds.log"
        if not path.exists():
            return 0
        mapped = map_rounds(path, checked=False)
        last = max(mapped.numbers, default=0)
        started = time.monotonic()
        self._check_claim(mapped, settings)
        if last == self._estimated_round or started < self._next_estimate:
            return last
        for item in mapped.kept:
            check_fit(item, settings)
        rounds, fewer = mapped.thinned(settings, most=MOST_COSINES)
        for item in rounds.kept:
            check_values(item)
        largest = largest_groups(ladder(rounds, fewer))
        estimates = {rung: estimate_scores(scores, settings.delta) for rung, scores in largest.items()}
        self._estimates = {rung: estimate for rung, estimate in estimates.items() if estimate is not None}
        gauges = read_gauges(rounds, fewer)
        self._flagged = tuple(f"{gauge.name} is {gauge.status}" for gauge in gauges if gauge.status != "ok")
        self._estimated_round = last
        self._next_estimate = time.monotonic() + (time.monotonic() - started) / SHARE
        return last


def stored_claim(home: RunDirectory) -> Claim | None:
    """The claim in the audit's record, or else the ε that the run's config claims for known rounds."""
    recorded = home.read_statement().claim
    if recorded is not None:
        return Claim.from_dict(recorded)
    config = home.read_config() if (home.path / "config.toml").exists() else {}
    claim = config.get("claim")
    if not isinstance(claim, dict) or claim.get("amplified") or not isinstance(claim.get("epsilon"), int | float):
        return None
    return Claim(claim["epsilon"])


def metric_scalars(metrics: list[dict[str, Any]]) -> Iterator[tuple[str, float, int]]:
    """Name, value and round of every number in the metrics of a run."""
    for line in metrics:
        number = line.get("round")
        if isinstance(number, int):
            for name, value in line.items():
                if name not in ("round", "schema_version") and plottable(value):
                    yield f"coalmine/{name}", float(value), number


def plottable(value: Any) -> bool:
    """Whether a value of the metrics is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
