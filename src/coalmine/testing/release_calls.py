"""The calls of a check: the updates, the releases, and their audit."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc, ndtr

from coalmine.argument_checks import Floats
from coalmine.audit import Audit
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.gauges.gauge import LEVEL, GaugeResult
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.gauges.gauged_rounds import Pairs
from coalmine.evidence.gauges.repetition import Repetition
from coalmine.evidence.gauges.subspace import Subspace
from coalmine.evidence.gaussian_bound import GaussianBound
from coalmine.evidence.gaussian_gate import NOT_MEASURED
from coalmine.evidence.ladder import LadderReader
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.stated_noise import StatedReader
from coalmine.evidence.views import read_log
from coalmine.measure.noise_law import resolution_of
from coalmine.result.audit_result import AuditResult, Headline
from coalmine.result.derivation import derive_result, derive_scores
from coalmine.testing.call_plan import CERTAIN, SHORT, CallPlan, Indices, Pattern
from coalmine.testing.likely_fault import TrialReading
from coalmine.testing.shaped_calls import LEVEL as CLIENT_LEVEL
from coalmine.testing.shaped_calls import ShapedCall, ShapedPattern, client_verdict, judge_shaped
from coalmine.testing.tested_mechanism import Mechanism
from coalmine.testing.update_arrays import Shapes, released_vector
from coalmine.verdict.claim_context import RunFacts
from coalmine.verdict.mechanism_claim import judge
from coalmine.verdict.verdict import Verdict

Progress = Callable[[int, int], None]
CREDIBLE_STDS = 3.0  # standard errors by which the canaries' measured norm may differ from that of a sum or a mean
DETECTED_STDS = 5.0  # standard errors below which the canaries get more calls
CONFIDENCE = 0.95
TINY = np.finfo(float).tiny
STEADY_LEVEL = 1e-6  # that a steady contribution of the canaries is taken for a changing one
MOST_KEPT = 20_000  # most coordinates of each call that are compared between calls
RUNG = "known-others"
NO_NOISE = "there is practically no noise"
ROUNDED_RELEASE = "the release is rounded: it has half precision or fewer bits, or lies on a grid"
ROUNDED_NOISE = (
    "the noise was drawn in half precision, or has no more bits: its scale is right, but its values lie on a grid, and a "
    "release in higher precision reveals what lies off the grid. Draw the noise in single precision"
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: the release, and its inner product with each canary of the group."""

    vector: Floats
    group: int
    tested: Indices
    along: Floats

    @property
    def variance(self) -> float:
        """Variance of the noise in one coordinate, from the directions without a canary."""
        free = self.vector.size - self.along.size
        return max(float(self.vector @ self.vector) - float(self.along @ self.along), 0.0) / free


class ReleaseTrials:
    """Every call of one check, by its pattern."""

    def __init__(
        self,
        mechanism: Mechanism,
        plan: CallPlan,
        seed: bytes,
        progress: Progress | None,
        *,
        main: Pattern,
        total: int,
    ) -> None:
        self._mechanism, self._plan, self._seed, self._main = mechanism, plan, seed, main
        self._canaries = self._audit()
        self._groups: dict[int, Floats] = {}
        self._made: dict[str, list[Call]] = {}
        self._shaped: dict[str, list[ShapedCall]] = {}
        self._numbers: dict[str, list[int]] = {}  # when each call of a pattern was made
        self._after: list[Floats] = []  # scores of earlier updates in the calls after them
        self._rests: list[npt.NDArray[np.float32]] = []  # residuals of all calls, in their order
        self._progress, self._total, self._count = progress, total, 0

    @property
    def total(self) -> int:
        """Calls made so far."""
        return self._count

    def count(self, pattern: Pattern) -> int:
        """Calls made so far with this pattern."""
        return len(self._made.get(pattern.name, ()))

    def make(self, pattern: Pattern, number: int) -> None:
        """Call the function once."""
        group = number % self._plan.groups
        units = self._units(group)
        rows = units * (pattern.lengths(number) * self._mechanism.clip_norm)[:, None]
        vector = self._released(rows, number if pattern.weighted else None)
        call = Call(vector=vector, group=group, tested=pattern.tested(number), along=units @ vector)
        self._made.setdefault(pattern.name, []).append(call)
        self._numbers.setdefault(pattern.name, []).append(self._count)
        if self._mechanism.noise is None:
            self._note_rest(call)

    def make_shaped(self, pattern: ShapedPattern, number: int) -> None:
        """Call the function once with updates of a special shape."""
        units = pattern.units(self._seed, number)
        rows = units * (pattern.length * self._mechanism.clip_norm)
        vector = self._released(rows, shape=f"{pattern.name} updates")
        self._shaped.setdefault(pattern.name, []).append(ShapedCall.of(vector, units))
        self._numbers.setdefault(pattern.name, []).append(self._count)

    def _released(self, rows: Floats, turn: int | None = None, *, shape: str | None = None) -> Floats:
        """The function's release. All clients have the largest weight, or their own ones shifted by `turn` clients.

        `shape` describes unusual updates in errors: a function may divide by the norm of a layer that is 0.
        """
        mechanism = self._mechanism
        arguments = [mechanism.form.present(rows)]
        if mechanism.weights is not None:
            alike = np.full(mechanism.clients, mechanism.weights.max())
            arguments.append(mechanism.form.vector(alike if turn is None else np.roll(mechanism.weights, turn)))
        released = mechanism.release(*arguments)
        try:
            vector = released_vector(released, mechanism.dim)
        except ValueError as error:
            if shape is None or not self._made:
                raise
            raise ValueError(f"{error} for {shape}, in which most coordinates can be 0") from None
        self._count += 1
        if self._progress is not None:
            self._progress(self.total, max(self._total, self.total))
        return vector

    def repeat(self, pattern: Pattern) -> None:
        """Call the function once more with the updates of its first call: noise that follows the updates repeats."""
        self.make(pattern, 0)
        self._made[pattern.name].pop()  # it is only compared with the other calls
        self._numbers[pattern.name].pop()

    def repeats(self) -> tuple[GaugeResult, GaugeResult]:
        """The gauges of repeated noise, over all calls in order, whatever their updates."""
        compared = Pairs()
        for row in self._rests:
            compared.add(row)
        numbers = list(range(1, len(self._rests) + 1))
        return Repetition.of_pairs(compared, numbers, self._dof, LEVEL), Subspace.of_pairs(compared, self._dof)

    @property
    def _dof(self) -> float:
        free = float(self._mechanism.dim - self._mechanism.clients)
        return free * min(len(self._rests[0]) / self._mechanism.dim, 1.0)

    def _note_rest(self, call: Call) -> None:
        """Keep the part of a release orthogonal to its canaries: its noise, in at most MOST_KEPT coordinates."""
        rest = call.vector - call.along @ self._units(call.group)
        kept = rest[:: -(-rest.size // MOST_KEPT)].astype(np.float32)
        if kept.any():
            self._rests.append(kept / np.linalg.norm(kept))

    def arrival(self, pattern: Pattern, usual: TrialReading) -> tuple[float, float] | None:
        """The share of their norm that updates of at most the clip norm keep among longer ones, and its standard error."""
        kept, lengths = [], []
        for number, call in enumerate(self._made[pattern.name]):
            length = pattern.lengths(number)
            rest = np.setdiff1d(np.flatnonzero(length <= 1), call.tested)
            kept.append(call.along[rest])
            lengths.append(length[rest])
        along, long = np.concatenate(kept), np.concatenate(lengths)
        if not along.size or usual.length <= 0:
            return None
        information = float(long @ long)
        share = float(along @ long) / information / usual.length
        return share, self.reading(pattern).noise / math.sqrt(information) / usual.length

    def all_zero(self, pattern: Pattern) -> bool:
        """Whether nothing but zeros was released."""
        return not any(call.vector.any() for call in self._made[pattern.name])

    def reading(self, pattern: Pattern) -> TrialReading:
        """A tested canary's contribution to a release, and the release's noise."""
        made = self._made[pattern.name]
        along = np.concatenate([call.along[call.tested] for call in made])
        noise = math.sqrt(float(np.mean([call.variance for call in made])))
        return TrialReading(length=float(along.mean()), noise=noise, canaries=along.size)

    def shaped_reading(self, pattern: ShapedPattern) -> TrialReading:
        """The same for updates of a special shape."""
        made = self._shaped[pattern.name]
        along = np.concatenate([call.along for call in made])
        noise = math.sqrt(float(np.mean([call.noise**2 for call in made])))
        return TrialReading(length=float(along.mean()), noise=noise, canaries=along.size)

    def is_steady(self) -> bool:
        """Whether a canary contributes equally to each call of the main pattern. Under an adaptive clip norm it does not."""
        made = [call for call in self._made[self._main.name] if call.variance > 0]
        if len(made) < 2:
            return True
        means = np.array([call.along[call.tested].mean() for call in made])
        precision = np.array([call.tested.size / call.variance for call in made])
        free = self._mechanism.dim - self._mechanism.clients  # each variance is estimated
        spread = precision @ (means - precision @ means / precision.sum()) ** 2 * (1 - 2 / max(free, 3))
        return bool(chdtrc(len(made) - 1, spread) >= STEADY_LEVEL)

    def noise_ratio(self, pattern: Pattern | ShapedPattern) -> float:
        """The noise of a pattern's calls over that of the main pattern, as it was at the time of each call.

        An adaptive clip norm, and the noise with it, may be many times as large at the end of a check as at its beginning.
        """
        usual = np.log(np.maximum([call.variance for call in self._made[self._main.name]], TINY))
        if isinstance(pattern, ShapedPattern):
            variances = [call.noise**2 for call in self._shaped[pattern.name]]
        else:
            variances = [call.variance for call in self._made[pattern.name]]
        then = np.interp(self._numbers[pattern.name], self._numbers[self._main.name], usual)
        return math.sqrt(float(np.mean(np.asarray(variances) / np.exp(then))))

    def refuted_by_shaped(self, pattern: ShapedPattern) -> tuple[Verdict, Headline] | None:
        """VIOLATION if updates of a special shape refute the claim; the noise must be Gaussian."""
        found = judge_shaped(self._shaped[pattern.name], self._claimed_score)
        return None if found is None else (found[0], self._headline(found[1]))

    def refuted_by_client(self, patterns: Sequence[Pattern]) -> tuple[Verdict, Headline] | None:
        """VIOLATION if the client at one position contributes more than the claim implies, over all calls of equal weights.

        Updates that are shorter than the clip norm do not count.
        """
        mechanism = self._mechanism
        sums, counts = np.zeros((2, mechanism.clients))
        for pattern in patterns:
            for number, call in enumerate(() if pattern.weighted else self._made[pattern.name]):
                long = call.tested[pattern.lengths(number)[call.tested] >= 1]
                if call.variance > 0:
                    sums[long] += call.along[long] / math.sqrt(call.variance)
                    counts[long] += 1
        means = sums / np.maximum(counts, 1)
        worst = int(np.argmax((means - self._claimed_score) * np.sqrt(counts)))
        free = float(mechanism.dim - mechanism.clients)
        signal = NoiseSignal(float(means[worst]), float(counts[worst]), free * counts[worst], free, means[worst] ** 2)
        p_value = min(signal.p_value(self._claimed_score) * mechanism.clients, 1.0)
        if p_value >= CLIENT_LEVEL:
            return None
        return client_verdict(signal.beta, self._claimed_score, p_value), self._headline(signal)

    def excess(self, pattern: Pattern) -> float:
        """The probability that scores as high as these, or higher, occur if the claim is true."""
        reading = self.reading(pattern)
        dof = float(self._mechanism.dim - self._mechanism.clients) * self.count(pattern)
        if reading.noise <= 0:
            return 0.0
        signal = NoiseSignal(reading.length / reading.noise, float(reading.canaries), dof, dof, 0.0)
        return signal.p_value(self._claimed_score)

    def detectable(self, pattern: Pattern) -> float:
        """The smallest epsilon that these calls would have shown, with the planned probability."""
        mechanism = self._mechanism
        dof = float(mechanism.dim - self._plan.groups * mechanism.clients) * self.count(pattern)
        return mechanism.test.detectable(self.reading(pattern).canaries, dof)

    @property
    def _claimed_score(self) -> float:
        return 1 / self._mechanism.needed_noise

    def detected(self, pattern: Pattern) -> bool:
        """Whether the canaries are detected in the releases."""
        reading = self.reading(pattern)
        return reading.length > DETECTED_STDS * reading.error

    def verdict(self, pattern: Pattern) -> Verdict:
        """The verdict of an audit of these calls alone."""
        audit = self._audited(pattern)
        rungs, gauges = LadderReader(audit.log, audit.settings), GaugeReader(audit.settings, len(audit.log.numbers))
        stated = StatedReader(audit.settings)
        with np.errstate(divide="ignore", invalid="ignore"):  # without any noise
            read_log(audit.log, audit.settings, rungs, gauges, stated)
            scores = [group for group in rungs.scores() if group.rung == RUNG]
            run = RunFacts(
                delta=self._mechanism.delta,
                planned=None,
                presentations=max((group.presentations or 1 for group in scores), default=0),
                rounds=stated.round_scores(),
                stated=stated.stated_noise(),
                vouched=True,
            )
            verdict, _, _ = judge(self._mechanism.claim, scores, self._fair(pattern, gauges.results()), run)
        return verdict

    def _fair(self, pattern: Pattern, gauges: list[GaugeResult]) -> list[GaugeResult]:
        """The gauges, without those that see a grid if the release lies on one: subtracting clients from it hides that."""
        if any(resolution_of(call.vector) for call in self._made[pattern.name]):
            return [gauge for gauge in gauges if not gauge.statistic.sees_grids]
        return gauges

    def result(self, pattern: Pattern) -> AuditResult:
        """The result of an audit of these calls alone."""
        audit = self._audited(pattern)
        with np.errstate(divide="ignore", invalid="ignore"):  # without any noise
            result = derive_result(audit.log, audit.settings, claim=self._mechanism.claim, others_complete=True)
            groups = [scores for scores in derive_scores(audit.log, audit.settings) if scores.rung == RUNG]
        if not groups:
            return replace(result, headline=None)
        known = result.adversaries.get(RUNG)
        withheld = NOT_MEASURED if known is None else known.headline.gaussian.withheld
        return replace(result, headline=self._headline(NoiseSignal.of(groups), withheld))

    def _audited(self, pattern: Pattern) -> Audit:
        """An audit that has observed these calls."""
        mechanism, reading = self._mechanism, self.reading(pattern)
        unit = None if mechanism.noise is not None else self._unit(pattern)
        stated: dict[str, Any] = {}
        if unit is not None and reading.noise > 0:
            stated = {"clip_norm": unit, "noise_std": self._stated_noise(reading, unit)}
        audit = self._audit()
        zeros = np.zeros(mechanism.dim)
        for number, call in enumerate(self._made[pattern.name], start=1):
            rest = np.setdiff1d(np.arange(mechanism.clients), call.tested)
            vector = call.vector
            if rest.size:  # subtract the clients that are not tested
                vector = vector - call.along[rest] @ self._units(call.group)[rest]
            present = call.group * mechanism.clients + call.tested
            length = float(pattern.lengths(number - 1)[call.tested].min())
            audit.observe_round(number, vector, present=present, others=zeros, scale=length, **stated)
        return audit

    def rounding(self, pattern: Pattern) -> str | None:
        """A note if the release, or its noise alone, has few bits."""
        made, unit = self._made[pattern.name][0], self._unit(pattern)
        if resolution_of(made.vector):
            return ROUNDED_RELEASE
        if unit is None:
            return None
        noise = (made.vector - unit * self._units(made.group).sum(axis=0)).astype(np.float32)
        return ROUNDED_NOISE if resolution_of(noise.astype(np.float64)) else None

    def _headline(self, signal: NoiseSignal, withheld: str = NOT_MEASURED) -> Headline:
        """mechanism_epsilon(1/(aβ)): the epsilon of one call, with its interval and, unless `withheld`, the bound."""
        delta, exposure = self._mechanism.delta, self._mechanism.claim.sensitivity or 1.0

        def epsilon(beta: float) -> float:
            return float(mechanism_epsilon(1 / (exposure * beta), delta=delta)) if beta > 0 else 0.0

        interval, best, gaussian = None, math.inf, GaussianBound(withheld=withheld or NO_NOISE)
        if not math.isinf(signal.beta):
            best = epsilon(signal.beta)
            with contextlib.suppress(ValueError, RuntimeError):  # practically no noise: the ends cannot be bracketed
                low, high = signal.interval(CONFIDENCE)
                interval = (epsilon(low), epsilon(high))
                if not withheld:
                    gaussian = GaussianBound(lower_bound=epsilon(signal.lower_limit(CONFIDENCE)), interval=interval)
        return Headline(rung=RUNG, participations=1, epsilon=best, interval=interval, gaussian=gaussian, pooled=True)

    def _unit(self, pattern: Pattern) -> float | None:
        """The contribution of a canary of the clip norm to a sum or a mean, if the measured one fits; otherwise None.

        If the aggregate is declared, canaries with a smaller contribution are judged against it too.
        """
        mechanism, reading = self._mechanism, self.reading(pattern)
        sizes = {"sum": mechanism.clip_norm, "mean": mechanism.clip_norm / mechanism.clients}
        if mechanism.aggregate is not None:
            size = sizes[mechanism.aggregate]
            return size if reading.length < size or self._fits(reading, size) else None
        fitting = {size for size in sizes.values() if self._fits(reading, size)}
        return fitting.pop() if len(fitting) == 1 and self.is_steady() else None

    def _fits(self, reading: TrialReading, size: float) -> bool:
        return abs(reading.length - size) <= CREDIBLE_STDS * reading.error + 1e-5 * size

    def _stated_noise(self, reading: TrialReading, unit: float) -> float:
        """The measured noise, or the noise that the claim needs if the aggregate is declared and the claim needs more.

        A contribution that merely fits a sum or a mean is not certain enough: a mean over 110 looks like one over 100.
        """
        mechanism = self._mechanism
        known = mechanism.aggregate is not None and self._fits(reading, unit)
        lacking = known and reading.noise < mechanism.allowed_noise * unit
        return mechanism.needed_noise * unit if lacking else reading.noise

    def _units(self, group: int) -> Floats:
        if group not in self._groups:
            if self._mechanism.noise is not None:
                self._groups.clear()  # every call has its own canaries
            first = group * self._mechanism.clients
            indices = range(first, first + self._mechanism.clients)
            self._groups[group] = np.stack([self._canaries.update(index, 1.0) for index in indices])
        return self._groups[group]

    def _audit(self) -> Audit:
        mechanism, shapes = self._mechanism, self._mechanism.form.shapes
        return Audit(
            mechanism.dim,
            canaries=self._plan.groups * mechanism.clients,
            seed=self._seed,
            delta=mechanism.delta,
            noise=mechanism.noise,
            layers=None if shapes is None else _named(shapes),
        )


def _named(shapes: Shapes) -> list[tuple[str, int]]:
    sizes = [(f"{number} ({'×'.join(map(str, shape))})", math.prod(shape)) for number, shape in enumerate(shapes, 1)]
    return [(name, size) for name, size in sizes if size]


def make_after(trials: ReleaseTrials, pattern: Pattern, number: int) -> None:
    """Call the function as usual, and then with short updates in the opposite directions: is the first still there?"""
    trials.make(pattern, number)
    trials._made[pattern.name].pop()
    trials._numbers[pattern.name].pop()
    units = trials._units(number % trials._plan.groups)
    rows = units * (-SHORT * trials._mechanism.clip_norm)
    vector = trials._released(rows, number if pattern.weighted else None)
    call = Call(vector=vector, group=0, tested=np.arange(len(units)), along=units @ vector)
    trials._after.append(call.along / max(math.sqrt(call.variance), TINY))


def carried_over(trials: ReleaseTrials, usual: TrialReading) -> float | None:
    """The share of a client's contribution that is in the next call's release; None if that may be chance."""
    scores = np.concatenate(trials._after) if trials._after else np.zeros(0)
    if not scores.size or not usual.length > 0 or ndtr(-float(scores.mean()) * math.sqrt(scores.size)) > CERTAIN:
        return None
    return float(scores.mean()) * usual.noise / usual.length
