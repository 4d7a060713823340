"""Whether a function that aggregates clients' updates gives the epsilon that it claims (Algorithm 1, many canaries a call).

Every client of a call is a canary. The canaries are orthogonal, so one release gives one score for each of them, as an
attacker who knows everybody else's update sees it. Scores need no unit: sum and mean are told apart by the canaries' length.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from coalmine.argument_checks import (
    Floats,
    WrongTypeError,
    one_number,
    positive_array,
    shown,
    unit_interval,
    whole_number,
)
from coalmine.audit.audit import Audit, Seed
from coalmine.audit.claim import Claim
from coalmine.audit.coverage import AuditedItem, Status
from coalmine.audit.derivation import derive_result, derive_scores
from coalmine.audit.gauge_reader import GaugeReader
from coalmine.audit.ladder import LadderReader
from coalmine.audit.noise_law import resolution_of
from coalmine.audit.noise_signal import NoiseSignal
from coalmine.audit.result import AuditResult, Headline
from coalmine.audit.stated_noise import StatedReader
from coalmine.audit.verdict import ROUNDED, Evidence, Outcome, Verdict, judge
from coalmine.audit.views import read_log
from coalmine.canaries.secret import secret_seed
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.storage.record import seed_bytes
from coalmine.testing.call_plan import (
    HUGE,
    CallPlan,
    Indices,
    Pattern,
    all_alike,
    heaviest,
    other_calls,
    outliers,
    plan_calls,
    uneven,
)
from coalmine.testing.likely_fault import Reading, likely_fault
from coalmine.testing.update_arrays import Form, Shapes, UpdateForm, checked_shapes, released_vector

Adjacency = Literal["zero-out", "add-remove", "replace-one"]
Aggregate = Literal["sum", "mean"]
MOVES: dict[str, int] = {
    "zero-out": 1,
    "add-remove": 1,
    "replace-one": 2,
}  # clip norms by which one client moves the sum
CREDIBLE_STDS = 3.0  # by which canaries' measured length may differ from that of a sum or a mean
DETECTED_STDS = 5.0  # below this the canaries get more calls
MORE_CALLS = 4  # times the planned number, at most, to detect canaries
CERTAIN = 1e-6  # p-value below which a failure is not repeated
MARGIN = 1.2  # times its limit that a gauge may read by chance
CONFIDENCE = 0.95
RUNG = "known-others"
ROUNDED_RELEASE = "the release is rounded: it has half precision or fewer bits, or lies on a grid"
ROUNDED_NOISE = (
    "the noise was drawn in half precision, or has no more bits: its scale is right, but its values lie on a grid, and a "
    "release in higher precision shows what is left beside the grid. Draw the noise in single precision"
)
SMALLEST_DIM = 20
CLIENTS = 100  # where nobody says for how many the function is configured


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """What is tested: the function, and what is claimed of it."""

    release: Callable[..., Any]
    epsilon: float
    delta: float
    dim: int
    clients: int
    clip_norm: float
    adjacency: Adjacency
    aggregate: Aggregate | None
    weights: Floats | None
    form: UpdateForm
    noise: CorrelatedNoise | None
    scale: float
    most_calls: int

    @property
    def moves(self) -> int:
        """The clip norms by which one client moves the sum."""
        return MOVES[self.adjacency]

    @cached_property
    def needed_noise(self) -> float:
        """The noise std in clip norms that the claim needs, for noise that is fresh in every call."""
        return self.moves * float(mechanism_noise(self.epsilon, delta=self.delta))

    @cached_property
    def allowed_noise(self) -> float:
        """The same for an epsilon that is printed as the claimed one."""
        return self.moves * float(mechanism_noise(ROUNDED * self.epsilon, delta=self.delta))

    @cached_property
    def claim(self) -> Claim:
        """The claim of one call; under correlated noise that of the most exposed client who takes part in one call."""
        exposed = 1.0
        if self.noise is not None:
            exposed = math.sqrt(max(self.noise.strength([t]) for t in range(1, self.noise.rounds + 1)))
        return Claim(epsilon=self.epsilon, sensitivity=self.moves * exposed)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call: what was released, and how much of each canary of its group is in that."""

    vector: Floats
    group: int
    tested: Indices
    along: Floats

    @property
    def variance(self) -> float:
        """Variance of the noise in one coordinate, from the directions that hold no canary."""
        free = self.vector.size - self.along.size
        return max(float(self.vector @ self.vector) - float(self.along @ self.along), 0.0) / free


def check_private(
    release: Callable[..., Any],
    *,
    epsilon: float,
    delta: float,
    dim: int | None = None,
    clip_norm: float = 1.0,
    clients: int | None = None,
    adjacency: Adjacency = "zero-out",
    aggregate: Aggregate | None = None,
    weights: Sequence[float] | None = None,
    updates: Form = "matrix",
    like: Any = "numpy",
    shapes: Sequence[Sequence[int]] | None = None,
    noise: CorrelatedNoise | None = None,
    scale: float = 10.0,
    most_calls: int = 1_000,
    seed: Seed = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """What an audit says of one aggregation function: verdict, measured epsilon, gauges of the noise.

    `release` takes the updates of exactly `clients` clients (default: 100, or dim / 2 if that is less) and returns their
    noised sum or mean. The claim is that one
    call is (epsilon, delta)-private if each client's update is clipped to `clip_norm`. `adjacency` says what one client may
    change: under "zero-out" and "add-remove" they are there or not, under "replace-one" they send another update, which
    moves the sum twice as far.

    Without `aggregate` the check compares the noise with what a canary is measured to add, whatever the release is divided
    by. "sum" or "mean" says what it must add, so that a few percent of missing noise are seen too.

    The function is called until twice the claimed epsilon would be caught with probability 90 %, at least three times and
    at most `most_calls` times. Most updates are `scale` times the clip norm long; others have the clip norm itself, are
    1,000 times as long, or are short beside long ones.

    `updates` is "matrix" for one array of shape (clients, dim), or "list" for a list of vectors. `like` is "numpy", "torch",
    "jax", or an array whose dtype and device the updates take. With `shapes` each update is a list of layers, and `dim` is
    their total size. With `weights`, one for each client, `release` is called as release(updates, weights), and the clients
    with the largest weight are tested. `noise` declares noise that is correlated between calls: a TreeNoise or a
    BandedNoise, for which the function is called once for each of its rounds.

    A failure that chance could explain is repeated once with other canaries. `progress` is called with the number of calls
    made and the number planned.

    >>> rng = np.random.default_rng(1)
    >>> def noised_sum(updates):
    ...     norms = np.linalg.norm(updates, axis=1, keepdims=True)
    ...     return (updates / np.maximum(norms, 1.0)).sum(axis=0) + rng.normal(scale=0.7, size=updates.shape[1])
    >>> check_private(noised_sum, epsilon=10.0, delta=1e-5, dim=1_000).verdict.outcome
    <Outcome.PASS: 'PASS'>
    """
    mechanism = _mechanism(
        release,
        (epsilon, delta, clip_norm, adjacency, aggregate),
        (dim, clients, weights),
        (updates, like, shapes),
        noise,
        scale,
        most_calls,
    )
    secret = seed_bytes(secret_seed(seed))
    result = _check(mechanism, secret, progress)
    if mechanism.noise is None and _may_be_chance(result):
        again = _check(mechanism, secret + b"again", progress)
        first = f"a first check was {_outcome(result)} by a margin that chance can explain ({_reason(result)})"
        ended = "a second one with other canaries passed" if _passed(again) else "a second one did not pass either"
        result = replace(again, notes=(*again.notes, f"{first}; {ended}"))
    return result


def _mechanism(
    release: Any,
    claim: tuple[float, float, float, Any, Any],
    size: tuple[int | None, int | None, Sequence[float] | None],
    form: tuple[Any, Any, Any],
    noise: CorrelatedNoise | None,
    scale: float,
    most_calls: int,
) -> Mechanism:
    """The arguments, checked."""
    (epsilon, delta, clip_norm, adjacency, aggregate), (dim, clients, weights) = claim, size
    updates, like, shapes = form
    if not callable(release):
        raise WrongTypeError(f"release must be a function of the clients' updates, got {shown(release)}")
    if adjacency not in get_args(Adjacency):
        raise ValueError(f"adjacency must be 'zero-out', 'add-remove' or 'replace-one', got {shown(adjacency)}")
    if aggregate not in (None, *get_args(Aggregate)):
        raise ValueError(f"aggregate must be 'sum', 'mean' or None, got {shown(aggregate)}")
    if noise is not None and not isinstance(noise, get_args(CorrelatedNoise)):
        raise WrongTypeError(f"noise must be a TreeNoise or a BandedNoise, got {shown(noise)}")
    layers = checked_shapes(shapes)
    coordinates = _checked_dim(dim, layers)
    count = min(CLIENTS, coordinates // 2) if clients is None else whole_number("clients", clients, minimum=1)
    found = Mechanism(
        release=release,
        epsilon=Claim(epsilon).epsilon,
        delta=unit_interval("delta", delta),
        dim=coordinates,
        clients=count,
        clip_norm=float(positive_array("clip_norm", one_number("clip_norm", clip_norm))),
        adjacency=adjacency,
        aggregate=aggregate,
        weights=_checked_weights(weights, count),
        form=UpdateForm.of(updates, like, layers),
        noise=noise,
        scale=float(positive_array("scale", one_number("scale", scale))),
        most_calls=whole_number("most_calls", most_calls, minimum=3),
    )
    if found.scale < 1:
        raise ValueError(f"scale must be at least 1, so that canaries have the clip norm's length, got {found.scale:g}")
    return found


def _checked_dim(dim: int | None, shapes: Shapes | None) -> int:
    if shapes is None:
        if dim is None:
            raise ValueError("dim must be given: the number of coordinates of an update")
        return whole_number("dim", dim, minimum=SMALLEST_DIM)
    size = sum(map(math.prod, shapes))
    if dim is not None and whole_number("dim", dim, minimum=1) != size:
        raise ValueError(f"dim must be the total size of shapes, {size:,}, got {dim:,}")
    if size < SMALLEST_DIM:
        raise ValueError(f"shapes must hold at least {SMALLEST_DIM} numbers, got {size}")
    return size


def _checked_weights(weights: Sequence[float] | None, clients: int) -> Floats | None:
    if weights is None:
        return None
    found = positive_array("weights", weights)
    if found.shape != (clients,):
        raise ValueError(f"weights must be one for each of {clients} clients, got shape {found.shape}")
    return found


def _check(mechanism: Mechanism, seed: bytes, progress: Callable[[int, int], None] | None) -> AuditResult:
    """One whole check: the main pattern decides, unless another one refutes the claim."""
    plan, patterns = _plan(mechanism)
    calls = _Calls(mechanism, plan, seed, progress, total=sum(count for _, count in patterns))
    order = np.random.default_rng(list(seed[:64]) or [0])
    for number in range(max(count for _, count in patterns)):
        due = [pattern for pattern, count in patterns if number < count]
        for place in order.permutation(len(due)):  # so that no period in the calls hides from every pattern
            calls.make(due[place], number)
    main, planned = patterns[0]
    if calls.all_zero(main):
        raise ValueError("release must return the noised aggregate, got zeros in every call")
    while (
        mechanism.noise is None
        and not calls.detected(main)
        and calls.count(main) < min(MORE_CALLS * planned, mechanism.most_calls)
    ):
        for _ in range(plan.groups):
            calls.make(main, calls.count(main))
    return _combined(mechanism, [pattern for pattern, _ in patterns], calls)


def _plan(mechanism: Mechanism) -> tuple[CallPlan, list[tuple[Pattern, int]]]:
    """Groups of canaries, and each pattern with its number of calls; the first pattern decides."""
    count, scale = mechanism.clients, mechanism.scale
    main = all_alike("long", count, scale)
    if mechanism.noise is not None:
        rounds = mechanism.noise.rounds
        if rounds * count > mechanism.dim // 2:
            raise ValueError(
                f"rounds · clients must be at most dim / 2 under correlated noise, got {rounds} · {count} in "
                f"{mechanism.dim:,} dimensions: every call has canaries of its own"
            )
        return CallPlan(rounds, rounds, math.nan), [(main, rounds)]
    settings: dict[str, Any] = {
        "noise": mechanism.needed_noise,
        "delta": mechanism.delta,
        "most_calls": mechanism.most_calls,
    }
    plan = plan_calls(count, mechanism.dim, **settings)
    patterns = [(main, plan.calls)]
    others = []
    if scale > 1:
        others.append(all_alike("exact", count, 1.0))
        others += [] if mechanism.form.is_half else [all_alike("huge", count, max(HUGE, scale))]
    if count >= 3:
        others.append(uneven(count, scale))
    if scale > 1 and count >= 2:
        others.append(outliers(count, scale if mechanism.form.is_half else max(HUGE, scale)))
    patterns += [(pattern, other_calls(plan)) for pattern in others]
    if mechanism.weights is not None and np.ptp(mechanism.weights) > 0:
        heavy = heaviest(mechanism.weights, scale)
        needed = plan_calls(count, mechanism.dim, tested=float(heavy.tested(0).size), **settings)
        patterns.append((heavy, needed.calls))
    return plan, patterns


class _Calls:
    """Every call of one check, by its pattern."""

    def __init__(
        self,
        mechanism: Mechanism,
        plan: CallPlan,
        seed: bytes,
        progress: Callable[[int, int], None] | None,
        *,
        total: int,
    ) -> None:
        self._mechanism, self._plan, self._seed = mechanism, plan, seed
        self._canaries = self._audit()
        self._groups: dict[int, Floats] = {}
        self._made: dict[str, list[Call]] = {}
        self._progress, self._total = progress, total

    @property
    def total(self) -> int:
        """Calls made so far."""
        return sum(map(len, self._made.values()))

    def count(self, pattern: Pattern) -> int:
        """Calls made so far with this pattern."""
        return len(self._made.get(pattern.name, ()))

    def make(self, pattern: Pattern, number: int) -> None:
        """Call the function once."""
        mechanism = self._mechanism
        group = number % self._plan.groups
        units = self._units(group)
        rows = units * (pattern.lengths(number) * mechanism.clip_norm)[:, None]
        arguments = [mechanism.form.present(rows)]
        if mechanism.weights is not None:
            alike = np.full(mechanism.clients, mechanism.weights.max())
            arguments.append(mechanism.form.vector(np.roll(mechanism.weights, number) if pattern.weighted else alike))
        vector = released_vector(mechanism.release(*arguments), mechanism.dim)
        call = Call(vector=vector, group=group, tested=pattern.tested(number), along=units @ vector)
        self._made.setdefault(pattern.name, []).append(call)
        if self._progress is not None:
            self._progress(self.total, max(self._total, self.total))

    def all_zero(self, pattern: Pattern) -> bool:
        """Whether nothing but zeros was released."""
        return not any(call.vector.any() for call in self._made[pattern.name])

    def reading(self, pattern: Pattern) -> Reading:
        """What a tested canary adds to a release, and the release's noise."""
        made = self._made[pattern.name]
        along = np.concatenate([call.along[call.tested] for call in made])
        noise = math.sqrt(float(np.mean([call.variance for call in made])))
        return Reading(length=float(along.mean()), noise=noise, canaries=along.size)

    def detected(self, pattern: Pattern) -> bool:
        """Whether the canaries can be seen in the releases."""
        reading = self.reading(pattern)
        return reading.length > DETECTED_STDS * reading.error

    def verdict(self, pattern: Pattern) -> Verdict:
        """The verdict of an audit of these calls alone."""
        audit = self._audited(pattern)
        rungs, gauges = LadderReader(audit.log, audit.settings), GaugeReader(audit.log, audit.settings)
        told = StatedReader(audit.settings)
        with np.errstate(divide="ignore", invalid="ignore"):  # without any noise
            read_log(audit.log, audit.settings, rungs, gauges, told)
            scores = [group for group in rungs.scores() if group.rung == RUNG]
            evidence = Evidence(
                delta=self._mechanism.delta,
                planned=None,
                shown=max((group.presentations or 1 for group in scores), default=0),
                rounds=told.round_scores(),
                stated=told.stated_noise(),
                vouched=True,
            )
            found, _, _ = judge(self._mechanism.claim, scores, gauges.gauges(), evidence)
        return found

    def result(self, pattern: Pattern) -> AuditResult:
        """The result of an audit of these calls alone."""
        audit = self._audited(pattern)
        with np.errstate(divide="ignore", invalid="ignore"):  # without any noise
            result = derive_result(audit.log, audit.settings, claim=self._mechanism.claim, others_complete=True)
            groups = [scores for scores in derive_scores(audit.log, audit.settings) if scores.rung == RUNG]
        return replace(result, headline=self._headline(NoiseSignal.of(groups)) if groups else None)

    def _audited(self, pattern: Pattern) -> Audit:
        """An audit that has observed these calls."""
        mechanism, reading = self._mechanism, self.reading(pattern)
        unit = None if mechanism.noise is not None else self._unit(reading)
        stated: dict[str, Any] = {}
        if unit is not None and reading.noise > 0:
            stated = {"clip_norm": unit, "noise_std": self._stated_noise(reading, unit)}
        audit = self._audit()
        zeros = np.zeros(mechanism.dim)
        for number, call in enumerate(self._made[pattern.name], start=1):
            rest = np.setdiff1d(np.arange(mechanism.clients), call.tested)
            vector = call.vector
            if rest.size:  # what is left without the clients that are not tested
                vector = vector - call.along[rest] @ self._units(call.group)[rest]
            present = call.group * mechanism.clients + call.tested
            length = float(pattern.lengths(number - 1)[call.tested].min())
            audit.observe_round(number, vector, present=present, others=zeros, scale=length, **stated)
        return audit

    def rounding(self, pattern: Pattern) -> str | None:
        """A note where the release, or its noise alone, has few bits."""
        made, unit = self._made[pattern.name][0], self._unit(self.reading(pattern))
        if resolution_of(made.vector):
            return ROUNDED_RELEASE
        if unit is None:
            return None
        noise = (made.vector - unit * self._units(made.group).sum(axis=0)).astype(np.float32)
        return ROUNDED_NOISE if resolution_of(noise.astype(np.float64)) else None

    def _headline(self, signal: NoiseSignal) -> Headline:
        """mechanism_epsilon(1/(aβ)): what one call costs, with its interval."""
        delta, exposure = self._mechanism.delta, self._mechanism.claim.sensitivity or 1.0

        def epsilon(beta: float) -> float:
            return float(mechanism_epsilon(1 / (exposure * beta), delta=delta)) if beta > 0 else 0.0

        try:
            low, high = signal.interval(CONFIDENCE)
            interval = (epsilon(low), epsilon(high))
        except (ValueError, RuntimeError):  # next to no noise: nothing brackets the ends
            interval = None
        return Headline(rung=RUNG, participations=1, epsilon=epsilon(signal.beta), interval=interval, pooled=True)

    def _unit(self, reading: Reading) -> float | None:
        """What a canary of the clip norm adds to a sum or to a mean, if it adds that; else None.

        Where the aggregate is declared, canaries that arrive shorter are judged against it too.
        """
        mechanism = self._mechanism
        sizes = {"sum": mechanism.clip_norm, "mean": mechanism.clip_norm / mechanism.clients}
        if mechanism.aggregate is not None:
            size = sizes[mechanism.aggregate]
            return size if reading.length < size or self._fits(reading, size) else None
        fitting = {size for size in sizes.values() if self._fits(reading, size)}
        return fitting.pop() if len(fitting) == 1 else None

    def _fits(self, reading: Reading, size: float) -> bool:
        return abs(reading.length - size) <= CREDIBLE_STDS * reading.error + 1e-5 * size

    def _stated_noise(self, reading: Reading, unit: float) -> float:
        """The noise that is there; where the aggregate is declared and the claim needs more noise, what it needs.

        A length that merely fits a sum or a mean is not known well enough: a mean over 110 looks like one over 100.
        """
        mechanism = self._mechanism
        known = mechanism.aggregate is not None and self._fits(reading, unit)
        lacking = known and reading.noise < mechanism.allowed_noise * unit
        return mechanism.needed_noise * unit if lacking else reading.noise

    def _units(self, group: int) -> Floats:
        if group not in self._groups:
            if self._mechanism.noise is not None:
                self._groups.clear()  # every call has canaries of its own
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


def _combined(mechanism: Mechanism, patterns: list[Pattern], calls: _Calls) -> AuditResult:
    """The result of the first pattern, or of another one that refutes the claim, with what the check knows beside.

    Different weights must pass too: a claim is about the client with the largest one.
    """
    main, *others = patterns
    result, decided = calls.result(main), main
    verdicts = {pattern.name: calls.verdict(pattern) for pattern in others}
    if _outcome(result) != Outcome.VIOLATION:
        failed = [pattern for pattern in others if verdicts[pattern.name].outcome == Outcome.VIOLATION]
        if not failed and _passed(result):
            failed = [each for each in others if each.weighted and verdicts[each.name].outcome != Outcome.PASS]
        if failed:
            result, decided = calls.result(failed[0]), failed[0]
    readings = {pattern.name: calls.reading(pattern) for pattern in patterns}
    fault = None if _passed(result) else likely_fault(mechanism, decided.name, result, readings)
    notes = [*result.notes]
    rounded = calls.rounding(main) if mechanism.noise is None and _passed(result) else None
    notes += [] if rounded is None else [rounded]
    if mechanism.adjacency == "add-remove":
        notes.append(
            "every call had the same number of clients: whether the number itself stays private is not checked"
        )
    check = {
        "adjacency": mechanism.adjacency,
        "clients": mechanism.clients,
        "clip_norm": mechanism.clip_norm,
        "calls": calls.total,
        "decided_by": decided.name,
        "likely_fault": fault,
        "warning": rounded if rounded == ROUNDED_NOISE else None,
    }
    return replace(
        result,
        clients=mechanism.clients,
        audited=tuple(_checked_item(item, mechanism, verdicts) for item in result.audited),
        notes=tuple(notes),
        extra={"check": check},
    )


def _checked_item(item: AuditedItem, mechanism: Mechanism, verdicts: dict[str, Verdict]) -> AuditedItem:
    """What was checked of one function, in the place of what an audit of training says."""
    scale = mechanism.scale
    said: dict[str, tuple[Status, str]] = {
        "noise level": ("checked", "the canaries' scores compare the noise with what one client adds"),
        "clipping": ("checked", f"updates came {scale:g} times too long, and at other lengths")
        if scale > 1
        else ("not checked", "no update was longer than the clip norm: give scale=10"),
        "weights": ("checked", "the clients with the largest weight were tested")
        if "weights" in verdicts
        else ("not checked", "all clients weighed the same: give weights=… if the function takes any"),
        "sampler": ("not checked", "one call has no sampling: the claim is that of a call"),
        "participations": ("not checked", "the claim is that of one call; how often it is called is not seen"),
        "others": ("checked", "every client was a canary, so there is nobody else"),
    }
    if item.name not in said:
        return item
    status, detail = said[item.name]
    return replace(item, status=status, detail=detail)


def _outcome(result: AuditResult) -> str:
    return str(_verdict(result).outcome)


def _passed(result: AuditResult) -> bool:
    return _outcome(result) == Outcome.PASS


def _reason(result: AuditResult) -> str:
    return _verdict(result).reason


def _verdict(result: AuditResult) -> Verdict:
    assert result.verdict is not None
    return result.verdict


def _may_be_chance(result: AuditResult) -> bool:
    """Whether a failure is so narrow that a correct function has it now and then."""
    verdict = _verdict(result)
    if verdict.outcome == Outcome.PASS:
        return False
    if verdict.code in ("mean", "round"):
        return (verdict.p_value or 0.0) > CERTAIN
    if verdict.code == "uneven":
        return (verdict.spread or 0.0) < MARGIN * (verdict.most_spread or 0.0)
    if verdict.code == "gauge" and verdict.reading is not None and verdict.limits is not None:
        smallest, largest = verdict.reading
        low, high = verdict.limits
        return smallest >= low - (MARGIN - 1) * abs(low) and largest <= high + (MARGIN - 1) * abs(high)
    return False
