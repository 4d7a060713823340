"""Whether a function that aggregates clients' updates has the epsilon that it claims (Algorithm 1, many canaries per call).

Every client of a call is a canary. The canaries are orthogonal, so one release gives one score for each of them, as an
attacker who knows all other updates sees it. Scores need no unit: the canaries' norm distinguishes a sum from a mean.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coalmine.argument_checks import WrongTypeError, names_neighbours, short_repr
from coalmine.audit import Seed
from coalmine.canaries.secret import secret_seed
from coalmine.canaries.seeds import seed_bytes
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import FunctionCheck, TrainerSection
from coalmine.testing.call_plan import (
    CERTAIN,
    MOST_CALLS,
    PLANNED_POWER,
    SHORT,
    VERY_LONG,
    CallPlan,
    Pattern,
    all_alike,
    alone,
    assorted,
    heaviest,
    outliers,
    plan_calls,
    uneven,
)
from coalmine.testing.likely_fault import TrialReading, likely_fault
from coalmine.testing.release_calls import ROUNDED_NOISE, Progress, ReleaseTrials, carried_over, make_after
from coalmine.testing.replayed_calls import ReplayedCalls, replay_calls
from coalmine.testing.shaped_calls import ShapedPattern, shaped_patterns
from coalmine.testing.tested_mechanism import Adjacency, Aggregate, Mechanism, checked_mechanism
from coalmine.testing.update_arrays import Form
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.coverage import AuditedItem, Status
from coalmine.verdict.findings.canaries import UnevenScores
from coalmine.verdict.findings.checks import CarriedOver, NoiseFollowsData, ReplyMovesTooFar, ShrunkByOthers
from coalmine.verdict.findings.finding import Significance
from coalmine.verdict.findings.gauges import GaugeReading, NoisePartlyLeft, NoiseRemovable, OutsideLimits
from coalmine.verdict.findings.power import DetectableInCalls, EnoughPower, PowerFacts, TooFewCalls
from coalmine.verdict.gauge_proofs import reading_of
from coalmine.verdict.outcome import Outcome
from coalmine.verdict.verdict import Verdict

AFTER_CALLS = 6  # pairs of calls that show what is left of one call's updates in the next
FAINT = 0.5  # share of the contribution that the claim allows, below which single clients get more calls
LONELY_CALLS = 120
LONGEST_ASSORTED = 30.0  # largest norm of the pattern, in clip norms
NOISE_RATIO = (
    0.5  # noise at other norms over that at the main one, or its inverse; below it, the noise follows the data
)
ARRIVES = 0.5  # share of its norm that an update of at most the clip norm must keep among long ones
ARRIVES_STDS = 5.0  # standard errors by which it must be shorter
MORE_CALLS = 4  # most calls to detect canaries, as a multiple of the planned number
NO_NOISE = 1e-3  # share of the noise below which the rest hides nothing
MARGIN = 1.2  # factor by which a gauge may exceed its limit by chance


@names_neighbours
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
    most_calls: int | None = None,
    seed: Seed = 0,
    progress: Progress | None = None,
) -> AuditResult:
    """Audit one aggregation function: verdict, measured epsilon, gauges of the noise.

    `release` takes the updates of exactly `clients` clients (default: 100, or dim / 2 if that is less) and returns their
    noised sum or mean. The claim is that one
    call is (epsilon, delta)-private if each client's update is clipped to `clip_norm`. `adjacency` is the change that must
    stay hidden: under "zero-out" and "add-remove" a client is present or absent, and under "replace-one" they send another
    update, which moves the sum twice as far.

    Without `aggregate` the check compares the noise with the measured contribution of a canary, whatever the release is
    divided by. "sum" or "mean" states that contribution, so that a few percent of missing noise is detected too.

    The function is called often enough to detect 1.2 times the claimed epsilon with probability 98 %, at least three times
    and at most `most_calls` times (default: 1,000; 200 for claims below 2, which need more). The reason of the verdict says
    which epsilon would have been detected. Most updates have `scale` times the clip norm. Others have exactly the clip norm,
    1,000 times the clip norm, or are short while others are long; others again are 0 in most coordinates, or equally large
    in all.

    `updates` is "matrix" for one array of shape (clients, dim), or "list" for a list of vectors. `like` is "numpy", "torch",
    "jax", or an array whose dtype and device the updates take. With `shapes` each update is a list of layers, and `dim` is
    their total size. With `weights`, one for each client, `release` is called as release(updates, weights), and the clients
    with the largest weight are tested. `noise` declares noise that is correlated between calls: a TreeNoise or a
    BandedNoise, for which the function is called once for each of its rounds.

    A failure that chance might explain is repeated once with other canaries, and counts if it occurs again. `progress` is
    called with the number of calls made and the number planned.

    >>> rng = np.random.default_rng(1)
    >>> def noised_sum(updates):
    ...     norms = np.linalg.norm(updates, axis=1, keepdims=True)
    ...     return (updates / np.maximum(norms, 1.0)).sum(axis=0) + rng.normal(scale=0.7, size=updates.shape[1])
    >>> check_private(noised_sum, epsilon=10.0, delta=1e-5, dim=1_000).verdict.outcome
    <Outcome.PASS: 'PASS'>
    """
    mechanism = checked_mechanism(
        release,
        (epsilon, delta, clip_norm, adjacency, aggregate),
        (dim, clients, weights),
        (updates, like, shapes),
        noise,
        scale,
        most_calls,
    )
    if progress is not None and not callable(progress):
        raise WrongTypeError(f"progress must be a function of two numbers, got {short_repr(progress)}")
    secret = seed_bytes(secret_seed(seed))
    result, certain = _check(mechanism, secret, progress)
    if mechanism.noise is None and not _passed(result) and not certain:
        again, certain = _check(mechanism, secret + b"again", progress)
        first = f"a first check was {_outcome(result)}, which chance might explain ({_reason(result)})"
        second = "a second one with other canaries passed" if _passed(again) else "a second one did not pass either"
        if _refuted(again) and not _refuted(result) and not certain:  # refuted once only
            again = result
        result = replace(again, log_notes=(*again.log_notes, f"{first}; {second}"))
    return result


def _check(mechanism: Mechanism, seed: bytes, progress: Progress | None) -> tuple[AuditResult, bool]:
    """One whole check: the main pattern decides, unless another one refutes the claim. Also whether chance is excluded."""
    plan, patterns, shaped = _plan(mechanism)
    total = (
        sum(count for _, count in patterns)
        + (mechanism.noise is None) * (1 + 2 * AFTER_CALLS)
        + len(shaped) * plan.others
    )
    trials = ReleaseTrials(mechanism, plan, seed, progress, main=patterns[0][0], total=total)
    due: list[tuple[Pattern | ShapedPattern, int]] = [*patterns, *((pattern, plan.others) for pattern in shaped)]
    order = np.random.default_rng(list(seed[:64]) or [0])
    for number in range(max(count for _, count in due)):
        now = [pattern for pattern, count in due if number < count]
        for index in order.permutation(len(now)):  # so that a fault with a period in the calls meets every pattern
            pattern = now[index]
            if isinstance(pattern, ShapedPattern):
                trials.make_shaped(pattern, number)
            else:
                trials.make(pattern, number)
    main, planned = patterns[0]
    if mechanism.noise is None:
        trials.repeat(main)
    if trials.all_zero(main):
        raise ValueError("release must return the noised aggregate, got zeros in every call")
    most = min(MORE_CALLS * planned, mechanism.most_calls or max(MOST_CALLS, planned))
    while mechanism.noise is None and not trials.detected(main) and trials.count(main) < most:
        for _ in range(plan.groups):
            trials.make(main, trials.count(main))
    if mechanism.noise is None:
        for number in range(AFTER_CALLS):
            make_after(trials, main, number)
        _compare_faint(mechanism, main, trials)
    return _combined(mechanism, [pattern for pattern, _ in patterns], shaped, trials, seed)


def _lonely(mechanism: Mechanism) -> Pattern:
    """One very long update at a time, all others short."""
    length = mechanism.scale if mechanism.scale == 1 or mechanism.form.is_half else max(VERY_LONG, mechanism.scale)
    return replace(alone(mechanism.clients, length), name="lonely")


def _compare_faint(mechanism: Mechanism, main: Pattern, trials: ReleaseTrials) -> None:
    """Single clients, if one among many counts for far less than the claim allows.

    If the batch is clipped, one very long update counts for all that the clip leaves.
    """
    usual = trials.reading(main)
    if mechanism.clients > 1 and usual.length < FAINT * usual.noise / mechanism.needed_noise:
        for number in range(LONELY_CALLS):
            trials.make(_lonely(mechanism), number)


def _plan(mechanism: Mechanism) -> tuple[CallPlan, list[tuple[Pattern, int]], list[ShapedPattern]]:
    """Groups of canaries, each dense pattern with its number of calls, and shaped ones; the first pattern decides."""
    count, scale = mechanism.clients, mechanism.scale
    main = all_alike("long", count, scale)
    if mechanism.noise is not None:
        rounds = mechanism.noise.rounds
        if rounds * count > mechanism.dim // 2:
            raise ValueError(
                f"rounds · clients must be at most dim / 2 under correlated noise, got {rounds} · {count} in "
                f"{mechanism.dim:,} dimensions: every call has its own canaries"
            )
        return CallPlan(rounds, rounds), [(main, rounds)], []
    plan = plan_calls(mechanism.test, count, mechanism.dim, most_calls=mechanism.most_calls)
    very_long = scale if scale == 1 or mechanism.form.is_half else max(VERY_LONG, scale)
    patterns = [(main, plan.calls)]
    others = []
    if scale > 1:
        others.append(all_alike("exact", count, 1.0))
        others += [] if mechanism.form.is_half else [all_alike("huge", count, very_long)]
    if count >= 3:
        others.append(uneven(count, scale))
    if scale > 1 and count >= 2:
        others.append(outliers(count, very_long))
    if scale > 1:
        others.append(assorted(count, LONGEST_ASSORTED))
    if count >= 2:
        others += [all_alike("short", count, SHORT), alone(count, scale)]
    patterns += [(pattern, plan.others) for pattern in others]
    if mechanism.weights is not None and np.ptp(mechanism.weights) > 0:
        heavy = heaviest(mechanism.weights, scale)
        tested = float(heavy.tested(0).size)
        needed = plan_calls(mechanism.test, count, mechanism.dim, most_calls=mechanism.most_calls, tested=tested)
        patterns.append((heavy, needed.calls))
    return plan, patterns, shaped_patterns(count, mechanism.dim, very_long)


def _combined(
    mechanism: Mechanism, patterns: list[Pattern], shaped: list[ShapedPattern], trials: ReleaseTrials, seed: bytes
) -> tuple[AuditResult, bool]:
    """The result of the first pattern, or of another one that refutes the claim, with the details of the check.

    Unequal weights must pass too: a claim is about the client with the largest weight. Also whether chance is excluded.
    """
    main, *others = patterns
    result, decided = trials.result(main), main
    verdicts = {pattern.name: trials.verdict(pattern) for pattern in others}
    if not _refuted(result):
        sharing = sum(not pattern.weighted for pattern in others)
        failed = [each for each in others if _refutes(verdicts[each.name], 1 if each.weighted else sharing)]
        if not failed and _passed(result):
            failed = [each for each in others if each.weighted and verdicts[each.name].outcome != Outcome.PASS]
        if failed:
            result, decided = trials.result(failed[0]), failed[0]
    name = decided.name
    if mechanism.noise is None and not _refuted(result):
        result, name = _by_client(patterns, shaped, trials, result, name)
    if mechanism.noise is None and not _refuted(result):
        result = _compared(mechanism, patterns, shaped, trials, result)
    replayed: ReplayedCalls | None = None
    if mechanism.noise is None and not _refuted(result) and not isinstance(_verdict(result).finding, GaugeReading):
        replayed = replay_calls(mechanism, seed)
        if (proof := replayed.finding(mechanism)) is not None:
            result = replace(result, verdict=Verdict(finding=proof), headline=replayed.headline(mechanism))
            name = "replay"
    readings = {pattern.name: trials.reading(pattern) for pattern in patterns}
    readings |= {pattern.name: trials.shaped_reading(pattern) for pattern in shaped}
    verdict = _verdict(result)
    if mechanism.noise is None and isinstance(verdict.finding, PowerFacts):
        tested = [main, *(pattern for pattern in others if pattern.weighted)]
        reached = max(trials.detectable(pattern) for pattern in tested)
        facts = verdict.finding.facts | {"power": PLANNED_POWER, "detectable_epsilon": reached}
        found = DetectableInCalls if isinstance(verdict.finding, EnoughPower) else TooFewCalls
        result = replace(result, verdict=replace(verdict, finding=found(**facts)))
    certain = mechanism.noise is None and _is_certain(verdict, trials.excess(decided))
    described = _described(mechanism, main, trials, result, name, readings, verdicts)
    if replayed is not None:
        items = (replayed.item(mechanism) if item.name == "rows" else item for item in described.audited)
        described = replace(described, audited=tuple(items))
    return described, certain


def _described(
    mechanism: Mechanism,
    main: Pattern,
    trials: ReleaseTrials,
    result: AuditResult,
    decided: str,
    readings: dict[str, TrialReading],
    verdicts: dict[str, Verdict],
) -> AuditResult:
    """The result with notes, audited items and the details of the check."""
    fault = None if _passed(result) else likely_fault(mechanism, decided, result, readings)
    notes = [*result.log_notes]
    rounded = trials.rounding(main) if mechanism.noise is None and _passed(result) else None
    notes += [] if rounded is None else [rounded]
    if mechanism.adjacency == "add-remove":
        notes.append(
            "every call had the same number of clients: whether the number itself stays private is not checked"
        )
    check = FunctionCheck(
        adjacency=mechanism.adjacency,
        clients=mechanism.clients,
        clip_norm=mechanism.clip_norm,
        calls=trials.total,
        decided_by=decided,
        likely_fault=fault,
        warning=rounded if rounded == ROUNDED_NOISE else None,
    )
    return replace(
        result,
        clients=mechanism.clients,
        audited=tuple(_checked_item(item, mechanism, verdicts) for item in result.audited),
        log_notes=tuple(notes),
        trainer=TrainerSection(check=check),
    )


def _by_client(
    patterns: list[Pattern], shaped: list[ShapedPattern], trials: ReleaseTrials, result: AuditResult, decided: str
) -> tuple[AuditResult, str]:
    """The result if single clients, or updates of a special shape, refute the claim; and what decided.

    A one-hot update meets the noise of one coordinate, which must be Gaussian: no gauge may contradict that.
    """
    found = trials.refuted_by_client(patterns)
    if found is not None:
        return replace(result, verdict=found[0], headline=found[1]), "clients"
    for pattern in shaped if not isinstance(_verdict(result).finding, GaugeReading) else ():
        found = trials.refuted_by_shaped(pattern)
        if found is not None:
            return replace(result, verdict=found[0], headline=found[1]), pattern.name
    return result, decided


def _compared(
    mechanism: Mechanism,
    patterns: list[Pattern],
    shaped: list[ShapedPattern],
    trials: ReleaseTrials,
    result: AuditResult,
) -> AuditResult:
    """The result after calls are compared with each other: their noise, and the effect of other clients' updates."""
    main, *others = patterns
    repeat, rank = trials.repeats()
    if repeat.status == "low":
        left = 0.0 if repeat.noise_left is None else repeat.noise_left
        epsilon = _epsilon_with(left, result, mechanism.delta)
        if epsilon > ROUNDED * mechanism.epsilon:
            proof = NoiseRemovable(**reading_of(repeat))
            if left >= NO_NOISE:
                proof = NoisePartlyLeft(**reading_of(repeat), noise_left=left, epsilon=epsilon)
            return replace(result, verdict=Verdict(finding=proof))
    if not _passed(result):
        return result
    for gauge in (repeat, rank):
        if gauge.status != "ok":
            return replace(result, verdict=Verdict(finding=OutsideLimits(**reading_of(gauge))))
    usual = trials.reading(main)
    if (carried := carried_over(trials, usual)) is not None:
        return replace(result, verdict=Verdict(finding=CarriedOver(share=carried)))
    compared: list[Pattern | ShapedPattern] = [*(other for other in others if not other.weighted), *shaped]
    for each in compared if usual.noise > 0 else ():
        ratio = trials.noise_ratio(each)
        if not NOISE_RATIO <= ratio <= 1 / NOISE_RATIO:
            return replace(result, verdict=Verdict(finding=NoiseFollowsData(factor=ratio)))
    if usual.length > 0 and trials.count(_lonely(mechanism)):
        lonely = trials.reading(_lonely(mechanism))
        if lonely.is_longer(usual, 1 / ARRIVES):
            return replace(result, verdict=Verdict(finding=ShrunkByOthers(length=usual.length / lonely.length)))
    for pattern in others if trials.is_steady() else ():
        kept = trials.arrival(pattern, usual)
        if kept is not None and kept[0] < ARRIVES and kept[0] + ARRIVES_STDS * kept[1] < 1:
            return replace(result, verdict=Verdict(finding=ShrunkByOthers(length=kept[0])))
    return result


def _epsilon_with(noise_left: float, result: AuditResult, delta: float) -> float:
    """The measured epsilon if only this share of the noise protects a client."""
    if noise_left <= 0 or result.headline is None or not 0 < result.headline.epsilon < math.inf:
        return math.inf
    noise = float(mechanism_noise(result.headline.epsilon, delta=delta))
    return float(mechanism_epsilon(noise * noise_left, delta=delta))


def _checked_item(item: AuditedItem, mechanism: Mechanism, verdicts: dict[str, Verdict]) -> AuditedItem:
    """An audited item of a check of one function, in place of that of an audit of training."""
    scale = mechanism.scale
    checked: dict[str, tuple[Status, str]] = {
        "noise level": ("checked", "the canaries' scores compare the noise with one client's contribution"),
        "clipping": ("checked", f"updates had {scale:g} times the clip norm, and other norms")
        if scale > 1
        else ("not checked", "no update was longer than the clip norm: pass scale=10"),
        "weights": ("checked", "the clients with the largest weight were tested")
        if "weights" in verdicts
        else ("not checked", "all clients had the same weight: pass weights=… if the function takes any"),
        "sampler": ("not checked", "one call has no sampling: the claim is about one call"),
        "participations": ("not checked", "the claim is about one call; how often it is called is unknown"),
        "others": ("checked", "every client was a canary, so there are no others"),
    }
    if item.name not in checked:
        return item
    status, detail = checked[item.name]
    return replace(item, status=status, detail=detail)


def _outcome(result: AuditResult) -> str:
    return str(_verdict(result).outcome)


def _refuted(result: AuditResult) -> bool:
    return _outcome(result) == Outcome.VIOLATION


def _passed(result: AuditResult) -> bool:
    return _outcome(result) == Outcome.PASS


def _reason(result: AuditResult) -> str:
    return _verdict(result).reason


def _verdict(result: AuditResult) -> Verdict:
    assert result.verdict is not None
    return result.verdict


def _refutes(verdict: Verdict, sharing: int) -> bool:
    """Whether a pattern's verdict is VIOLATION at its share of the level of one audit.

    A check counts a VIOLATION that is not certain only if it occurs again with other canaries. So a correct function fails
    with at most the square of the patterns' levels, plus CERTAIN for each test. tests/testing/test_levels.py adds them up.
    """
    if verdict.outcome != Outcome.VIOLATION:
        return False
    finding = verdict.finding
    return not isinstance(finding, Significance) or finding.p_value < finding.level / sharing


def _is_certain(verdict: Verdict, p_value: float) -> bool:
    """Whether a failure is so clear that no correct function fails like this by chance.

    Any other one is repeated. `p_value` is that of the mean score in the calls that decided.
    """
    finding = verdict.finding
    if isinstance(finding, ReplyMovesTooFar):
        return True
    if isinstance(finding, NoiseRemovable):  # without a share that is left, the attacker can remove all noise
        return not isinstance(finding, NoisePartlyLeft) or p_value <= CERTAIN
    if verdict.outcome == Outcome.VIOLATION:
        return min(p_value, finding.p_value if isinstance(finding, Significance) else 1.0) <= CERTAIN
    if isinstance(finding, UnevenScores):
        return finding.spread >= MARGIN * finding.most_spread
    if isinstance(finding, OutsideLimits):
        smallest, largest = finding.reading
        low, high = finding.limits
        return smallest < low - (MARGIN - 1) * abs(low) or largest > high + (MARGIN - 1) * abs(high)
    return True
