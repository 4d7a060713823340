"""A gauge: one question about a run, the statistics that answer it, and everything that a reader has to know about them.

Each subclass of `Gauge` is one gauge, in a module of this package. Coverage, verdict, report and documentation take what
they say about a gauge from its class, so a new one is a new module.
"""

import math
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.special import chdtri, gammaincinv

from coalmine.argument_checks import Floats
from coalmine.evidence.faults import Fault
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.levels import GAUGE_LEVEL
from coalmine.evidence.views import RoundViews

LEVEL = GAUGE_LEVEL  # probability that one statistic fails in a correct run
Status = Literal["ok", "low", "warning"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Statistic:
    """One statistic of a gauge.

    `meaning` is a phrase for the quantity, and `law` its law in an honest run. `advice` is the likely cause of a value
    outside the limits, and where to look; `advice_above` the one of a value above them, if it differs. `refutes` is the
    share of a gauge's level with which it may prove that noise is missing; at 0 it can only prevent a PASS. `seen` says
    what a run with the statistic was checked for, and `unseen` why another was not.
    """

    name: str
    meaning: str
    law: str
    advice: str
    advice_above: str = ""
    refutes: float = 0.0
    seen: str = ""
    unseen: str = ""
    item: str | None = None  # the audited item that it contradicts outside its limits; by default that of the gauge
    needs_others: bool = True  # whether it measures the residual
    needs_gaussian: bool = False  # whether its proof assumes that all coordinates together follow a Gaussian law
    by_tensor: bool = False  # whether each tensor has its own
    sees_grids: bool = False  # whether a release that lies on a grid moves it

    def __repr__(self) -> str:
        return f"<statistic {self.name!r}>"

    def result(
        self,
        smallest: float,
        largest: float | None = None,
        *,
        limits: tuple[float, float],
        failed: bool = False,
        noise_left: float | None = None,
        flagged: Iterable[int] = (),
        values: Floats | None = None,
        left_by_round: Iterable[float] = (),
        part: str = "",
    ) -> "GaugeResult":
        """The statistic of a run. It is "low" with `noise_left`, and otherwise a "warning" if it `failed`."""
        assert noise_left is None or self.refutes, f"{self.name} has no share of the level for a proof"
        return GaugeResult(
            statistic=self,
            part=part,
            smallest=smallest,
            largest=smallest if largest is None else largest,
            limits=limits,
            flagged=tuple(flagged),
            status="low" if noise_left is not None else "warning" if failed else "ok",
            noise_left=noise_left,
            values=np.array([smallest]) if values is None else values,
            left_by_round=tuple(left_by_round),
        )


@dataclass(frozen=True, kw_only=True)
class GaugeResult:
    """One statistic of a gauge over a run.

    `status` is "ok", "low" (evidence of less noise than stated) or "warning" (a fault that does not prove less noise).
    Both prevent a PASS, except for the gauge of training (see `bars_pass`). `smallest` and `largest` are the extremes over
    rounds or layers, and `limits` are those of a correct run; `flagged` rounds lie outside. If noise is missing,
    `noise_left` is an upper confidence limit on the remaining noise as a share of the stated noise; None if it is unknown.
    It is that of the worst round. `left_by_round` has one for each flagged round, if they are known.
    `part` is the tensor, if the statistic is that of one.
    """

    statistic: Statistic
    part: str = ""
    smallest: float
    largest: float
    limits: tuple[float, float]
    flagged: tuple[int, ...] = ()
    status: Status = "ok"
    noise_left: float | None = None
    values: Floats = field(repr=False, compare=False, default_factory=lambda: np.zeros(0))
    left_by_round: tuple[float, ...] = field(repr=False, compare=False, default=())

    @property
    def name(self) -> str:
        return f"{self.statistic.name} {self.part}" if self.part else self.statistic.name

    @property
    def gauge(self) -> "type[Gauge]":
        """The gauge of which this is a statistic."""
        return gauge_of(self.statistic)

    @property
    def meaning(self) -> str:
        """A phrase for the quantity."""
        return self.statistic.meaning

    @property
    def advice(self) -> str:
        """The likely cause of a value outside the limits, and where to look."""
        return (self.statistic.advice_above if self.status == "warning" else "") or self.statistic.advice

    @property
    def contradicts(self) -> str:
        """The audited item that a value outside the limits contradicts; empty if there is none."""
        return self.gauge.item if self.statistic.item is None else self.statistic.item

    @property
    def bars_pass(self) -> bool:
        """Whether there can be no PASS."""
        return self.gauge.bars_pass(self)

    @property
    def side(self) -> Literal["low", "high"]:
        """The side of the limits on which it lies; "low" if on both, since that is the proof."""
        return "low" if self.status == "low" or self.smallest < self.limits[0] else "high"

    def relative_to(self, longest: float | None) -> "GaugeResult":
        """With the share of the stated noise instead of that of the residual, which is at most `longest` times it."""
        if not self.noise_left or self.gauge.measures_length:
            return self
        return replace(self, noise_left=None if longest is None else self.noise_left * longest)

    def as_warning(self) -> "GaugeResult":
        """The same as evidence of something wrong, but not of less noise."""
        return replace(self, status="warning", noise_left=None) if self.status == "low" else self

    def to_dict(self) -> dict[str, Any]:
        return {
            "meaning": self.meaning,
            "smallest": self.smallest,
            "largest": self.largest,
            "limits": list(self.limits),
            "flagged": list(self.flagged),
            "status": self.status,
            "noise_left": self.noise_left,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Symptom:
    """Evidence that points to faults or away from them.

    Every run with a fault in `always` shows it, if it has the statistic `of` which it is. Some runs with one in `sometimes`
    do, and runs with one in `never` do not. `cause` says what it means if nothing else is known, as in the check of a
    function.
    """

    name: str
    of: Statistic | None = None
    always: tuple[Fault, ...] = ()
    sometimes: tuple[Fault, ...] = ()
    never: tuple[Fault, ...] = ()
    cause: str = ""
    precedence: int = 0  # of several causes the one with the highest counts


class Results:
    """All statistics of a run, and its number of rounds."""

    def __init__(self, results: Iterable[GaugeResult], rounds: int = 0) -> None:
        self.all, self.rounds = tuple(results), rounds

    def of(self, statistic: Statistic) -> GaugeResult | None:
        """The statistic, if the run has it."""
        return next((each for each in self.all if each.statistic is statistic), None)

    def outside(self, statistic: Statistic) -> GaugeResult | None:
        """The statistic, if it is outside its limits."""
        result = self.of(statistic)
        return None if result is None or result.status == "ok" else result

    def parts(self, statistic: Statistic) -> dict[str, GaugeResult]:
        """The statistic of each tensor."""
        return {each.part: each for each in self.all if each.statistic is statistic}

    @property
    def statistics(self) -> set[Statistic]:
        return {each.statistic for each in self.all}


class Gauge:
    """One question about a run; a subclass states it in the first paragraph of its docstring.

    Its statistics and symptoms are attributes of the class. An instance takes one round after another, and has the
    statistics whose inputs were given at the end.
    """

    name: ClassVar[str]
    order: ClassVar[int] = 100  # place in lists
    item: ClassVar[str] = "noise law"  # the audited item that it contradicts, if it is outside its limits
    measures_length: ClassVar[bool] = False  # of the noise; then `noise_left` is a share of the stated noise
    in_alarm: ClassVar[bool] = True  # whether it may refute a claim during training
    concerns_law: ClassVar[bool] = True  # whether bounds that assume Gaussian noise are withheld outside its limits

    def __init__(self, rounds: GaugedRounds) -> None:
        self.rounds = rounds
        self.settings = rounds.settings

    def add(self, look: RoundViews) -> None:
        """Take the next round, if `rounds` does not have what is needed of it."""

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        raise NotImplementedError

    def notes(self) -> list[str]:
        """What there is to say beside the statistics."""
        return []

    @classmethod
    def question(cls) -> str:
        """The question: the first paragraph of the docstring, as one line."""
        return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    @classmethod
    def statistics(cls) -> list[Statistic]:
        """Its statistics, in the order of their definition."""
        return [value for value in vars(cls).values() if isinstance(value, Statistic)]

    @classmethod
    def symptoms(cls) -> list[Symptom]:
        """The evidence for faults that it can show."""
        return [value for value in vars(cls).values() if isinstance(value, Symptom)]

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """The symptoms in a result: by default those whose statistic is outside its limits."""
        return (each for each in cls.symptoms() if each.of is not None and results.outside(each.of))

    @classmethod
    def bars_pass(cls, result: GaugeResult) -> bool:
        """Whether there can be no PASS with this statistic."""
        return result.status != "ok"

    @classmethod
    def settled(cls, result: GaugeResult, results: Results) -> GaugeResult:
        """The statistic in view of all others."""
        return result

    @classmethod
    def coverage(cls, present: set[Statistic], rounds: GaugedRounds) -> tuple[list[str], list[str]]:
        """What was checked, and what was not and why."""
        each = cls.statistics()
        return (
            [one.seen for one in each if one.seen and one in present],
            [one.unseen for one in each if one.unseen and one not in present],
        )


@cache
def all_gauges() -> tuple[type[Gauge], ...]:
    """The classes of all gauges: those in the modules of this package, in their `order`."""
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules(import_module(package).__path__):
        import_module(f"{package}.{module.name}")
    own = [each for each in Gauge.__subclasses__() if each.__module__.startswith(f"{package}.")]
    return tuple(sorted(own, key=lambda each: (each.order, each.name)))


@cache
def all_statistics() -> dict[str, Statistic]:
    """The statistics of all gauges, by name."""
    return {each.name: each for gauge in all_gauges() for each in gauge.statistics()}


@cache
def gauge_of(statistic: Statistic) -> type[Gauge]:
    """The gauge to which a statistic belongs."""
    return next(gauge for gauge in all_gauges() if statistic in gauge.statistics())


def statistic_of(name: str) -> tuple[Statistic, str]:
    """The statistic with this name, and the tensor if the name ends with one; ValueError if there is none."""
    known = all_statistics()
    first, _, part = name.partition(" ")
    if name in known:
        return known[name], ""
    if part and first in known and known[first].by_tensor:
        return known[first], part
    raise ValueError(f"no gauge has the statistic {name!r}")


def status_of(results: Sequence[GaugeResult]) -> Status:
    """The gravest status of several statistics."""
    found = {each.status for each in results}
    return "low" if "low" in found else "warning" if "warning" in found else "ok"


def by_gauge(results: Sequence[GaugeResult]) -> dict[type[Gauge], list[GaugeResult]]:
    """The statistics of a run by gauge, in the order of the gauges."""
    found = {gauge: [each for each in results if each.gauge is gauge] for gauge in all_gauges()}
    return {gauge: each for gauge, each in found.items() if each}


def deciding_reading(
    values: Floats, limits: tuple[float, float], pooled: float, pooled_limits: tuple[float, float]
) -> tuple[float, float, tuple[float, float]]:
    """Smallest and largest reading with their limits: those of single rounds, or of all together if only these are outside.

    So the reading of a gauge that fails lies outside the limits beside it, whichever of its two tests failed.
    """
    smallest, largest = float(values.min()), float(values.max())
    inside = limits[0] <= smallest and largest <= limits[1]
    if inside and not pooled_limits[0] <= pooled <= pooled_limits[1]:
        return pooled, pooled, pooled_limits
    return smallest, largest, limits


@lru_cache(maxsize=64)
def ratio_quantile(probability: float, dof: float) -> float:
    """The quantile of a noise vector's norm over its root mean square."""
    if probability > 0.5:
        return math.sqrt(float(chdtri(dof, 1 - probability)) / dof)
    return math.sqrt(2 * float(gammaincinv(dof / 2, probability)) / dof)
