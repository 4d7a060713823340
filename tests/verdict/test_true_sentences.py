"""No sentence of a result contradicts its numbers: invariants over thousands of generated results, honest and broken."""

import math
import pickle
import re
from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
from example_findings import example
from scipy.stats import norm

from coalmine import Audit, Claim, Poisson, amplified_epsilon, epsilon_lower_bound, mechanism_epsilon
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.gaussian_gate import GaussianGate
from coalmine.evidence.ladder import Scores, exact_bound, unit_null
from coalmine.evidence.views import read_log
from coalmine.measure.settings import Settings
from coalmine.report.statement import privacy_statement
from coalmine.report.statement_facts import facts_from_dict
from coalmine.report.statement_page import people_picture
from coalmine.result import rows
from coalmine.result.derivation import derive_result
from coalmine.result.rows import make_headline, make_row
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.amplified import SamplerAboveClaim
from coalmine.verdict.findings.finding import Significance
from coalmine.verdict.findings.gauges import LongResidual, NoisePartlyLeft, OutsideLimits
from coalmine.verdict.findings.missing import OthersWrong
from coalmine.verdict.findings.noise import (
    BoundAboveClaim,
    ComposedAboveClaim,
    MeanTooHigh,
    RoundAboveClaim,
    StatedTooLittle,
)
from coalmine.verdict.findings.power import TooFewCanaries
from coalmine.verdict.rung_claim import TEST_LEVEL
from coalmine.verdict.verdict import Verdict

DELTA = 1e-5
FEW, MANY = 25, 250  # audits, each judged by eight claims
NUMBER = r"-?(?:inf|\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
READS = re.compile(rf"reads ({NUMBER})(?: … ({NUMBER}))?, outside ({NUMBER}) … ({NUMBER})")


def normal(rng, dim, before):
    return rng.normal(size=dim)


def first_again(rng, dim, before):
    return before[0] if before else rng.normal(size=dim)


def partly_repeated(rng, dim, before):
    fresh = rng.normal(size=dim)
    return 0.8 * fresh + 0.6 * before[-1] if before else fresh


def common_part(rng, dim, before):
    return 0.9 * rng.normal(size=dim) + math.sqrt(0.19) * np.random.default_rng(1).normal(size=dim)


def one_layer_weak(rng, dim, before):
    noise = rng.normal(size=dim)
    noise[: dim // 4] *= 0.9
    return noise


def bare(rng, dim, before):
    noise = rng.normal(size=dim)
    noise[: dim // 20] *= 1e-3
    return noise


def on_grid(rng, dim, before):
    return np.round(rng.normal(size=dim) / 0.3) * 0.3


def smoothed(share):
    def noise(rng, dim, before):
        white = rng.normal(size=dim)
        return (white + share * np.roll(white, 1)) / math.hypot(1, share)

    return noise


def one_key(rng, dim, before):
    noise = rng.normal(size=dim)
    noise[dim // 2 : 2 * (dim // 2)] = noise[: dim // 2]
    return noise


def tied(rng, dim, before):
    return rng.choice(rng.normal(size=dim // 2), size=dim)


def one_odd_round(rng, dim, before):
    return rng.standard_t(3, size=dim) / math.sqrt(3) if len(before) == 1 else rng.normal(size=dim)


NOISES = {
    "honest": normal,
    "first again": first_again,
    "partly repeated": partly_repeated,
    "common part": common_part,
    "small": lambda rng, dim, before: 0.9 * rng.normal(size=dim),
    "large": lambda rng, dim, before: 1.1 * rng.normal(size=dim),
    "one layer weak": one_layer_weak,
    "bare": bare,
    "uniform": lambda rng, dim, before: rng.uniform(-math.sqrt(3), math.sqrt(3), size=dim),
    "heavy": lambda rng, dim, before: rng.standard_t(4, size=dim) / math.sqrt(2),
    "grid": on_grid,
    "smoothed": smoothed(1.0),
    "slightly smoothed": smoothed(0.08),
    "one key": one_key,
    "tied": tied,
    "truncated": lambda rng, dim, before: np.clip(rng.normal(size=dim), -2, 2),
    "one odd round": one_odd_round,
    "unequal canaries": normal,
    "others scaled": normal,
    "no others": normal,
    "schedule": normal,
    "schedule, less noise": lambda rng, dim, before: (0.8 if len(before) % 2 else 1.0) * rng.normal(size=dim),
    "noise not stated": normal,
}


def generate(seed):
    """The kind of fault, and a finished audit of a few rounds with it."""
    kind = list(NOISES)[seed % len(NOISES)]
    rng, noise_multiplier = np.random.default_rng(seed), float(np.random.default_rng(seed).choice([0.3, 1.0, 3.0]))
    dim, canaries, rounds = int(rng.choice([120, 300, 800, 2_000])), int(rng.integers(10, 40)), int(rng.integers(1, 9))
    style = rng.integers(3)
    layers = [("a", dim // 4), ("b", dim // 4), ("c", dim - 2 * (dim // 4))] if style == 1 else None
    audit = Audit(
        dim,
        canaries=canaries,
        unobserved=int(rng.integers(30, 80)),
        seed=seed.to_bytes(16, "big"),
        delta=DELTA,
        rounds=rounds,
        presentations=int(rng.integers(1, rounds + 1)),
        layers=layers,
        kind="sphere" if style == 2 else "rotated",
    )
    before = []
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        others = rng.choice([0.1, 1.0]) * rng.normal(size=dim)
        noise = NOISES[kind](rng, dim, before)
        before.append(noise)
        std = noise_multiplier * (1.5 ** ((number % 3) - 1) if "schedule" in kind else 1.0)
        total = others + audit.updates(present, 1.0) + std * noise
        if kind == "unequal canaries":
            total += 12 * audit.updates(present[present % 3 > 0], 1.0)
        given = None if kind == "no others" or rng.random() < 0.03 else others * (0.7 if kind == "others scaled" else 1)
        stated = None if kind == "noise not stated" and number % 2 else std
        audit.observe_round(number, total, present=present, others=given, noise_std=stated, clip_norm=1.0)
    audit.observe_final(np.ones(dim), initial=np.zeros(dim))
    return kind, noise_multiplier, audit


def claims_for(noise_multiplier, audit, *, amplified):
    """The true epsilon of the run, a little less, half of it, twice it, others for other readings, and an amplified one."""
    rounds = audit.settings.rounds
    true = float(mechanism_epsilon(noise_multiplier, delta=DELTA, participations=max(audit.settings.presentations)))
    yield from (Claim(true), Claim(true / 2), Claim(2 * true), Claim(true, participations=1))
    yield from (Claim(true / 1.006), Claim(0.99 * true, adjacency="replace one"), Claim.mechanism(true, rounds))
    yield Claim(true, sensitivity=1.1 * math.sqrt(rounds))
    if amplified:
        sampling = Poisson(0.5, rounds=rounds)
        yield Claim(float(amplified_epsilon(1.0, sampling, DELTA)), sampling=sampling, sampler_observed=True)


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.full)])
def audits(request):
    return [generate(seed) for seed in range(request.param)]


@pytest.fixture(scope="module")
def results(audits):
    """Each audit judged by several claims: the kind of fault, the log's rounds with `others`, and the result.

    What does not depend on the claim, an estimate of the same scores, is computed once.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("epsilon_estimate", "epsilon_lower_bound"):
            patch.setattr(rows, name, remembered(getattr(rows, name)))
        for index, (kind, noise_multiplier, audit) in enumerate(audits):
            with_others = sum(entry.has_others for entry in audit.log.observed)
            for claim in claims_for(noise_multiplier, audit, amplified=index % 20 in (0, 5) and 20 <= index < 80):
                with np.errstate(all="ignore"):
                    found.append((kind, with_others, derive_result(audit.log, audit.settings, claim=claim)))
    assert len(found) >= 8 * len(audits)
    return found


def remembered(function):
    """The function, which returns what it returned before for the same scores and settings."""
    known = {}

    def again(scores, *rest, **options):
        key = (np.asarray(scores).tobytes(), pickle.dumps((rest, options)))
        if key not in known:
            known[key] = function(scores, *rest, **options)
        return known[key]

    return again


def enough(count, least, results):
    """Whether an invariant was tried often enough; few audits do not have every kind of verdict."""
    return count > least or len(results) < 8 * MANY


def verdicts_of(result):
    """Every verdict of a result: its own, its legs', its rungs'."""
    rungs = [adversary.verdict for adversary in result.adversaries.values()]
    return [verdict for verdict in (result.verdict, *result.legs.values(), *rungs) if verdict is not None]


def test_a_gauge_that_fails_reads_outside_its_limits(audits):
    """At three levels, of which the loose ones make honest gauges fail, by single rounds or by all of them together."""
    failed = Counter()
    for kind, _, audit in audits:
        reader = GaugeReader(audit.settings, len(audit.log.numbers))
        read_log(audit.log, audit.settings, reader)
        for level in (1e-4, 0.05, 0.5):
            for gauge in reader.results(level):
                if gauge.status != "ok":
                    failed[gauge.name] += 1
                    inside = gauge.limits[0] <= gauge.smallest and gauge.largest <= gauge.limits[1]
                    assert not inside, (kind, level, gauge)
    if len(audits) == MANY:
        assert sum(failed.values()) > 1_600
        assert len([name for name, count in failed.items() if count >= 5]) >= 15  # most gauges failed at times


def test_a_reason_prints_a_reading_outside_the_limits_that_it_prints(results):
    """The printed digits, not only the numbers behind them."""
    read = 0
    for _, _, result in results:
        for verdict in verdicts_of(result):
            read += _reads_outside(verdict.reason)
    assert enough(read, 240, results)


def _reads_outside(reason):
    match = READS.search(reason)
    if match is None:
        assert "outside" not in reason or "reads" not in reason
        return 0
    smallest, largest, low, high = (float(text) for text in (match[1], match[2] or match[1], match[3], match[4]))
    assert smallest < low or largest > high, reason
    return 1


def test_a_reading_close_to_its_limit_is_printed_with_enough_digits():
    """Hand-made verdicts: readings that exceed a limit by as little as one part in 10^12."""
    rng = np.random.default_rng(0)
    for _ in range(2_000):
        low, width = rng.normal(), abs(rng.normal()) + 1e-3
        limits, excess = (low, low + width), 10.0 ** rng.uniform(-12, 0)
        reading = limits[1] + excess * max(abs(limits[1]), 1e-3)
        finding = OutsideLimits(gauge="neighbours", reading=(low + width / 2, reading), limits=limits)
        assert _reads_outside(Verdict(finding=finding).reason) == 1


def test_a_lower_bound_never_exceeds_the_upper_end_of_its_interval(results):
    for _, _, result in results:
        for adversary in result.adversaries.values():
            for row in adversary.rows:
                assert row.estimate.interval is None or row.lower_bound <= row.estimate.interval.high
        top = result.headline
        if top is not None and top.interval is not None and top.rung in result.adversaries:
            same = [row for row in result.adversaries[top.rung].rows if row.presentations == top.participations]
            assert all(row.lower_bound <= top.interval[1] for row in same)


@pytest.mark.full
def test_a_bound_above_the_interval_withdraws_it_and_stays_as_it_is():
    """A few loud canaries among many quiet ones, in a hundred variants: only the interval assumes a normal law."""
    settings = Settings(dim=5_000, canaries=100, unobserved=100, delta=DELTA)
    withdrawn = 0
    for loud, spread in [(1, 0.8), (1, 0.9), (2, 0.8), (2, 0.9), (3, 0.8)]:
        for loudness in np.linspace(4.0, 5.4, 20):
            scores = spread * norm.ppf((np.arange(100) + 0.5) / 100)
            scores[np.arange(loud) * 12 + 3] = loudness
            bound = exact_bound(scores, 4_900.0)
            group = Scores(
                rung="known-others", observed=scores, unobserved=np.zeros(100), null=unit_null(settings),
                null_dof=4_900.0, presentations=1, **bound,
            )  # fmt: skip
            row = make_row(group, settings, GaussianGate())
            valid = epsilon_lower_bound(group.bounded, null=group.bound_null, delta=DELTA)
            assert row.lower_bound == valid
            told = [line for line in row.warnings if "the lower bound lies above the interval" in line]
            assert len(told) == (row.estimate.interval is None)
            assert row.estimate.interval is None or valid <= row.estimate.interval.high
            headline = make_headline([group], settings, GaussianGate(), rung="known-others", participations=1)
            assert (headline.interval is None) == bool(told)
            withdrawn += len(told)
    assert 20 <= withdrawn <= 80  # some fit, some do not


def test_a_violation_close_to_its_level_advises_another_seed(results):
    close, clear = 0, 0
    for _, _, result in results:
        for verdict in verdicts_of(result):
            if verdict.outcome != "VIOLATION" or not isinstance(verdict.finding, Significance):
                assert "another seed to exclude" not in verdict.reason
                continue
            is_close = verdict.finding.p_value >= verdict.finding.level / 10
            close, clear = close + is_close, clear + (not is_close)
            assert ("repeat with another seed" in verdict.reason) == is_close
    assert enough(
        clear, 2, results
    )  # claims just below what the noise states are refuted without chance; the next test has close ones


@pytest.mark.parametrize("kind", [MeanTooHigh, RoundAboveClaim, SamplerAboveClaim])
@pytest.mark.parametrize(("share", "advised"), [(0.99, True), (0.11, True), (0.09, False), (1e-9, False)])
def test_each_kind_of_violation_by_a_p_value_has_that_advice(kind, share, advised):
    verdict = Verdict(finding=example(kind, p_value=share * TEST_LEVEL, level=TEST_LEVEL))
    assert ("repeat with another seed" in verdict.reason) == advised


def test_an_epsilon_for_several_participations_says_so(results):
    """A bound on a client with three rounds is compared with what the claim means for three, and both are said."""
    seen = Counter()
    for _, _, result in results:
        for name, adversary in result.adversaries.items():
            verdict = adversary.verdict
            finding = None if verdict is None else verdict.finding
            if not isinstance(finding, BoundAboveClaim) or finding.participations is None or name == "unknown-round":
                continue  # unknown-round repeats the verdict on the run
            times = "once" if finding.participations == 1 else f"{finding.participations} times"
            assert f"implies for a client that takes part {times}" in verdict.reason
            assert any(row.presentations == finding.participations for row in adversary.rows), name
            if result.claim.sensitivity is not None or result.claim.moved != 1:
                continue  # the claim's client adds more to a round than a canary
            own = result.claim.participations or (max(result.settings.presentations) if not result.legs else None)
            if own == finding.participations:
                assert finding.claimed_epsilon == pytest.approx(result.claim.epsilon, rel=1e-6)
            elif not result.legs:
                assert finding.claimed_epsilon != pytest.approx(result.claim.epsilon, rel=1e-3)
            seen[finding.participations] += 1
    assert enough(sum(seen.values()), 60, results)
    assert enough(len(seen), 2, results)


ABOVE = re.compile(
    rf"({NUMBER})(?: at [\d.]+% confidence)?(?: in round \d+)?,? (?:lies )?above the (?:claimed )?({NUMBER})"
)
NEEDS = re.compile(rf"multiplier (?:is|of|about) ({NUMBER})[^.;]*?(?:needs|not) ({NUMBER})")


def test_a_number_above_another_is_printed_above_it(results):
    """Scores, bounds and epsilons above the claim's, and noise below what the claim needs, in all words for people."""
    seen = Counter()
    for _, _, result in results:
        for verdict in verdicts_of(result):
            for text in (verdict.reason, verdict.finding.plain()):
                _in_order(text, seen)
    assert enough(seen["above"], 300, results)
    assert enough(seen["needs"], 300, results)


def _in_order(text, seen):
    for found in ABOVE.finditer(text):
        assert float(found[1]) > float(found[2]), text
        seen["above"] += 1
    for found in NEEDS.finditer(text):
        assert float(found[1]) < float(found[2]) or "varies" in text, text
        seen["needs"] += 1


@pytest.mark.parametrize("kind", [MeanTooHigh, BoundAboveClaim, ComposedAboveClaim, RoundAboveClaim, StatedTooLittle])
def test_numbers_that_are_close_are_printed_in_their_order(kind):
    """From far apart to one part in 10^9, at any size: as many digits as it takes."""
    rng, seen = np.random.default_rng(0), Counter()
    for _ in range(400):
        size, apart = 10 ** rng.uniform(-3, 3), 1 + 10 ** rng.uniform(-9, 1)
        more = max(apart, 1.0051)  # a claim is refuted only beyond its rounding
        close = {"score": apart * size, "claimed_score": size, "measured_noise": size, "claimed_noise": apart * size}
        close |= {"epsilon": more * size, "lower_bound": more * size, "claimed_epsilon": size}
        known = {field.name for field in fields(kind)}
        finding = example(kind, **{name: value for name, value in close.items() if name in known})
        for text in (finding.sentence(), finding.plain()):
            _in_order(text, seen)
            for least in re.findall(rf"(?:at least|ε ≥) ({NUMBER})", text):
                assert float(least) <= more * size * (1 + 1e-12)
                seen["at least"] += 1
    assert sum(seen.values()) >= 400


def test_less_noise_is_never_all_of_it():
    rng = np.random.default_rng(0)
    for left in 1 - 10 ** rng.uniform(-9, -1, size=500):
        finding = example(NoisePartlyLeft, noise_left=float(left))
        for text in (finding.sentence(), finding.plain()):
            printed = float(re.search(rf"at most ({NUMBER}) of the stated noise", text)[1])
            assert left <= printed * (1 + 1e-12)
            assert printed < 1


def test_power_that_misses_ninety_percent_is_printed_below_it(results):
    seen = Counter()
    for _, _, result in results:
        for verdict in verdicts_of(result):
            for printed in re.findall(r"detected with probability ([\d.]+)%", verdict.reason):
                assert float(printed) < 90 or "% only" not in verdict.reason, verdict.reason
                assert float(printed) >= 90 or verdict.outcome != "PASS", verdict.reason
                seen[str(verdict.outcome)] += 1
    assert enough(seen["PASS"], 100, results)
    assert "89.9% only" in example(TooFewCanaries, power=0.8999).sentence()


def test_others_that_nobody_gave_are_not_blamed(results):
    """Without `others` a reason may ask for them, but finds no fault with them."""
    blamed = Counter()
    for _, with_others, result in results:
        for verdict in verdicts_of(result):
            fault = re.search(r"`others` (is|are|lacks|holds)|and `others`", verdict.reason) is not None
            blamed[with_others > 0] += fault
            assert not fault or with_others
    assert enough(blamed[True], 40, results)


@pytest.mark.parametrize(
    "finding",
    [
        LongResidual(gauge="residual", reading=(1.1, 1.1), limits=(0.9, 1.02), length=1.1),
        OthersWrong(factor=1.2),
    ],
)
def test_a_fault_of_the_clip_is_named_beside_others(finding):
    """Where a pipeline computes `others` itself, its user passed none, and the clip may be at fault."""
    reason = Verdict(finding=finding).reason
    assert "clip" in reason
    assert "`others` is incomplete" not in reason


def test_an_item_that_does_not_apply_is_not_said_to_be_missing(results):
    item = AuditedItem("weights", "does not apply", "every example counts once")
    passed = next(result for _, _, result in results if result.verdict.outcome == "PASS" and not result.legs)
    kept = [own for own in passed.audited if own.name != "weights"]
    scope = replace(passed, audited=(*kept, item)).scope
    assert "weights" not in scope
    assert not item.is_open
    assert all(AuditedItem("weights", status, "").is_open for status in ("failed", "not checked", "cannot be checked"))


@pytest.mark.full
@pytest.mark.parametrize("guaranteed", [True, False])
def test_the_picture_of_a_statement_shows_the_number_in_its_caption(results, guaranteed):
    """For a thousand values of epsilon: marked people, the picture's label and the sentence under it agree."""
    result = next(result for _, _, result in results if result.verdict.outcome == "PASS")
    for epsilon in [*np.geomspace(1e-6, 60, 500).tolist(), math.inf] if guaranteed else [0.01, 0.3, 1.0, 2.2, 4.7, 9.0]:
        if guaranteed:
            facts = (
                facts_from_dict({"guarantee": {"epsilon": epsilon, "delta": DELTA}}) if math.isfinite(epsilon) else None
            )
            if facts is None:
                continue
            statement = privacy_statement(replace(result, claim=None, verdict=None, legs={}), facts=facts)
        else:
            top = replace(result.headline, epsilon=epsilon, pooled=True)
            statement = privacy_statement(replace(result, claim=None, verdict=None, legs={}, headline=top))
        assert statement.meanings[0].name == ("guaranteed" if guaranteed else "measured (an estimate)")
        epsilon = statement.meanings[0].epsilon
        picture = str(people_picture(statement))
        marked = picture.count('class="right"') - 50
        accuracy = 1 / (1 + math.exp(-epsilon))  # an attacker who starts at one half
        assert marked == min(math.ceil(100 * accuracy - 1e-9), 99)
        words = "nearly all" if accuracy > 0.99 else f"at most {marked}" if guaranteed else f"{marked}"
        assert f"{words} in the second." in picture
        assert f"with the model: {words}<" in picture
        assert f"can be right about {words} of them" in statement.guess_sentence
