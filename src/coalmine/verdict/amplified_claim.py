"""The three parts of a verdict on an amplified claim: accounting, noise and sampling. PASS needs all of them.

- Accounting: the accountant's epsilon for the claimed noise and scheme is no more than the claim.
- Noise: the rounds had the noise that the claim needs.
- Sampling: the pipeline's own sampler, tested on the canaries that it picks, follows the scheme.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from coalmine.estimators.amplification import amplified_epsilon, amplified_noise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampler_tests import SamplerReading, rate_power, read_sampler
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, largest_exposure
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.evidence.unknown_round import RUNG
from coalmine.log.recorded import RecordedRounds
from coalmine.log.rounds_file import Entry
from coalmine.measure.schedule import Indices
from coalmine.measure.settings import FEWEST, Settings
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import ROUNDED, RunFacts
from coalmine.verdict.event_claims import as_add_or_remove
from coalmine.verdict.findings.amplified import (
    Accounted,
    AccountedAboveClaim,
    AllPartsAgree,
    DividedByCohort,
    EpsilonInRange,
    OtherSampler,
    PickFacts,
    RoundsUnobserved,
    SampledAsClaimed,
    SamplerAboveClaim,
    SamplerAllowed,
    SamplerNotObserved,
    SamplerUnclear,
    ScheduleAboveClaim,
    TooFewPicks,
)
from coalmine.verdict.findings.finding import Finding
from coalmine.verdict.findings.power import WeakAttacker
from coalmine.verdict.mechanism_claim import judge
from coalmine.verdict.outcome import PASS, UNDERPOWERED, VIOLATION
from coalmine.verdict.rung_claim import KNOWN, POWER
from coalmine.verdict.verdict import Verdict

PARTS = ACCOUNTING, NOISE, SAMPLING = "accounting", "noise", "sampling"
NAMED = (
    "poisson",
    "random_allocation",
    "shuffled",
    "random_allocation or shuffled",
    "fixed_size",
)  # samplers with a known range of epsilon
MOST = 0.9  # share of the rounds with a known cohort size from which on cohort sizes count as known
CONSTANT = 1e-3  # largest scatter of clip norm times participants, relative to that of the clip norm
EVERYONE = 0.9  # share of the canaries in a round from which on every client counts as known to be in it


@dataclass(frozen=True)
class SampledClaim:
    """An amplified claim with the inputs of its parts: its noise multiplier and the scheme that covers all rounds.

    `noise` is the claimed noise multiplier, or else the one that gives the claimed epsilon. `required_noise` is the noise
    multiplier that the claim needs: `noise`, or less if the claim is looser than its own accounting. The noise part confirms
    `required_noise` and no more. So the observed sampler counts as harmless only if it is harmless with `required_noise`,
    and as a violation only if it is one with `noise`.
    """

    claim: Claim
    sampling: Sampling
    noise: float
    required_noise: float
    delta: float

    @classmethod
    def of(cls, claim: Claim, *, delta: float, rounds: int, schedule: NoiseSchedule | None = None) -> "SampledClaim":
        """The claim on a run with this many observed rounds, which may state different noise."""
        claim = as_add_or_remove(claim, delta)
        assert claim.sampling is not None
        sampling = with_schedule(_with_rounds(claim.sampling, rounds), schedule)
        if schedule is not None:
            noise = schedule.reference
        else:
            noise = claim.noise_multiplier or amplified_noise(claim.epsilon, claim.sampling, delta)
        required = noise
        if amplified_epsilon(noise, sampling, delta).high < claim.epsilon / ROUNDED:
            required = min(noise, amplified_noise(claim.epsilon, sampling, delta))
        return cls(claim, sampling, noise, required, delta)

    @property
    def most_noise(self) -> float:
        """The noise multiplier of the rounds with the most noise."""
        return self.noise / min((strength for strength, _ in self.sampling.strengths), default=1.0)

    def unobserved(self, log: RecordedRounds) -> int:
        """The number of the claim's rounds that were not observed, whose noise and sampling are unknown."""
        claimed = set(range(1, self.sampling.total_rounds + 1))
        return len(claimed - set(log.numbers))

    def refutes(self, epsilon: float) -> bool:
        """Whether a lower bound on epsilon contradicts the claim, which may be rounded."""
        return epsilon > ROUNDED * self.claim.epsilon

    @property
    def accounting(self) -> Verdict:
        """The accounting part."""
        varied, own = bool(self.sampling.strengths), self.claim.noise_multiplier
        noise, scheme = (own, replace(self.sampling, strengths=())) if varied and own else (self.noise, self.sampling)
        accounted = amplified_epsilon(noise, scheme, self.delta)
        finding: type[Accounted | EpsilonInRange | AccountedAboveClaim] = Accounted
        if self.refutes(accounted.low):
            finding = ScheduleAboveClaim if varied and not own else AccountedAboveClaim
        elif self.refutes(accounted.high):
            finding = EpsilonInRange
        found = finding(
            claimed_epsilon=self.claim.epsilon,
            epsilon=accounted.high,
            epsilon_range=(accounted.low, accounted.high),
            epsilon_kind=accounted.kind,
            claimed_noise=noise,
            accountant=accounted.accountant,
            adjacency=accounted.adjacency,
            scheme=str(self.sampling),
        )
        return Verdict(finding=found, part=ACCOUNTING)

    def sampler_finding(self, observed: Sequence[Entry], settings: Settings, clip_norms: Sequence[float]) -> Finding:
        """The finding of the sampling part, from the observed rounds and their clip norms."""
        scheme = str(self.sampling)
        if not self.claim.sampler_observed or not observed:
            return SamplerNotObserved(scheme=scheme)
        cohorts = [entry.participants for entry in observed]
        sized = sum(size is not None for size in cohorts) >= MOST * len(cohorts)
        present = [entry.present for entry in observed]
        numbers = [entry.number for entry in observed]
        reading = read_sampler(present, numbers, settings.canaries, self.sampling, cohorts if sized else None)
        if isinstance(self.sampling, Poisson | RandomAllocation) and divides_by_participants(cohorts, clip_norms):
            return DividedByCohort(scheme=scheme, picks=reading.picks, rate=reading.rate, cohorts_known=sized)
        if reading.passed:
            return self._sampler_power(reading, sized)
        low, high = self._epsilon_range(reading, present, numbers, settings.canaries)
        finding: type[SamplerUnclear | SamplerAllowed | SamplerAboveClaim] = SamplerUnclear
        if self.refutes(low):
            finding = SamplerAboveClaim
        elif not self.refutes(high):
            finding = SamplerAllowed
        worst = min(reading.failed, key=lambda test: test.p_value)
        return finding(
            scheme=scheme,
            picks=reading.picks,
            rate=reading.rate,
            cohorts_known=sized,
            seen=reading.seen,
            seen_scheme=" or ".join(str(scheme) for scheme in reading.candidates) or None,
            test=worst.name,
            p_value=worst.p_value,
            level=worst.level,
            epsilon_range=(low, high),
            claimed_epsilon=self.claim.epsilon,
        )

    def _sampler_power(self, reading: SamplerReading, sized: bool) -> SampledAsClaimed | TooFewPicks:
        """PASS if a rate at which epsilon is twice the claim would have been detected with 90 % probability."""
        facts = vars(PickFacts(scheme=str(self.sampling), picks=reading.picks, rate=reading.rate, cohorts_known=sized))
        enough = reading.picks >= FEWEST
        if not isinstance(self.sampling, Poisson | FixedSize):  # once per epoch: one pick too many would be detected
            return SampledAsClaimed(**facts) if enough else TooFewPicks(**facts)
        rate = self._detectable_rate(reading)
        if rate is None:
            return TooFewPicks(**facts, power=POWER)
        detectable = Poisson(rate, reading.rounds, self.sampling.strengths)
        reached = amplified_epsilon(self.required_noise, detectable, self.delta).high
        finding = SampledAsClaimed if enough and reached <= 2 * ROUNDED * self.claim.epsilon else TooFewPicks
        return finding(**facts, detectable_rate=rate, detectable_epsilon=reached, power=POWER)

    def _detectable_rate(self, reading: SamplerReading) -> float | None:
        """The smallest rate that the test of the rate detects with 90 % probability; None if there is none, 1 if it is 1."""
        claimed = self.sampling.rate
        if claimed >= 1 or rate_power(self.sampling, reading.rounds, reading.canaries, 1.0) < POWER:
            return 1.0 if claimed >= 1 else None

        def missing(rate: float) -> float:
            return rate_power(self.sampling, reading.rounds, reading.canaries, rate) - POWER

        return float(brentq(missing, claimed, 1 - 1e-9, xtol=1e-9))

    def _epsilon_range(
        self, reading: SamplerReading, present: Sequence[Indices], numbers: Sequence[int], canaries: int
    ) -> tuple[float, float]:
        """The range of epsilon for the observed sampler: the lower end with the claimed noise, the upper with the tested."""
        rounds = self.sampling.total_rounds
        exposed = self.required_noise / math.sqrt(largest_exposure(self.sampling, rounds) / rounds)
        known = float(mechanism_epsilon(exposed, delta=self.delta, participations=rounds))
        named = reading.candidates if reading.seen in NAMED else ()
        ranges = [self._range_of(scheme, reading) for scheme in named]
        low = min((low for low, _ in ranges), default=0.0)
        high = max((high for _, high in ranges), default=known)
        if reading.seen in ("too many", "uneven") and reading.worst_rate > 0:
            often = Poisson(min(reading.worst_rate, 1.0), rounds, self.sampling.strengths)
            low = max(low, amplified_epsilon(self.noise, often, self.delta).low)
        if reading.seen == "repeated order":
            low = max(low, self._repeated(reading, present, numbers, canaries))
            low = max(low, self._cyclic(reading, present, numbers, canaries))
        if reading.seen in ("clumped", "changing rate", "too many", "other"):
            shares = np.array([row.size for row in present]) / canaries
            certain = math.floor(float(shares[shares >= EVERYONE].sum()) + 1e-9)
            if certain:
                low = max(low, float(mechanism_epsilon(self.most_noise, delta=self.delta, participations=certain)))
        return low, max(low, high)

    def _range_of(self, scheme: Sampling, reading: SamplerReading) -> tuple[float, float]:
        """The range of epsilon of a scheme; over the interval of its rate, if that was measured."""
        scheme = replace(scheme, strengths=self.sampling.strengths)
        slowest, fastest = self._at_rates(scheme, reading)
        low = amplified_epsilon(self.noise, slowest, self.delta).low
        return low, amplified_epsilon(self.required_noise, fastest, self.delta).high

    def _at_rates(self, scheme: Sampling, reading: SamplerReading) -> tuple[Sampling, Sampling]:
        """The scheme at the slowest and at the fastest rate that the picks allow."""
        slowest, fastest = (min(max(end, 1e-12), 1.0) for end in reading.rate_interval)
        if isinstance(scheme, Poisson) and scheme.rate != self.sampling.rate:
            return replace(scheme, probability=slowest), replace(scheme, probability=fastest)
        if isinstance(scheme, FixedSize):
            most, fewest = (max(round(scheme.size / rate), scheme.size) for rate in (slowest, fastest))
            return replace(scheme, population=most), replace(scheme, population=fewest)
        return scheme, scheme

    def _repeated(
        self, reading: SamplerReading, present: Sequence[Indices], numbers: Sequence[int], canaries: int
    ) -> float:
        """Epsilon if every client returns after a fixed number of rounds: one random position, with averaged noise."""
        if reading.rate <= 0:
            return 0.0
        period = max(round(1 / reading.rate), 1)
        returns = _fixed_returns(present, numbers, canaries, period)
        if returns < 2:
            return 0.0
        return amplified_epsilon(self.most_noise / math.sqrt(returns), RandomAllocation(period), self.delta).low

    def _cyclic(
        self, reading: SamplerReading, present: Sequence[Indices], numbers: Sequence[int], canaries: int
    ) -> float:
        """Epsilon where everybody is in one of c groups, which take turns, and joins its rounds by a coin.

        An attacker who looks at the rounds of one group sees the target there with probability 1/c, and otherwise nobody.
        With that probability a test of (ε, cδ) becomes one of (log(1 + (e^ε - 1)/c), δ), if all others send 0.
        """
        groups = _groups(present, numbers, canaries)
        turns = self.sampling.total_rounds // groups if groups else 0
        if groups < 2 or not turns or groups * self.delta >= 1:
            return 0.0
        together: dict[int, list[Indices]] = {}
        for row, number in zip(present, numbers, strict=True):
            together.setdefault((number - 1) // groups + 1, []).append(row)
        rows = [np.unique(np.concatenate(parts)) for parts in together.values()]
        coin = Poisson(min(groups * reading.rate, 1.0), max(turns, *together))
        if not read_sampler(rows, list(together), canaries, coin).passed:
            return 0.0
        slowest = Poisson(min(max(groups * reading.rate_interval[0], 1e-12), 1.0), turns)
        within = amplified_epsilon(self.most_noise, slowest, groups * self.delta).low
        return within + math.log(math.exp(-within) + (1 - math.exp(-within)) / groups)


def _groups(present: Sequence[Indices], numbers: Sequence[int], canaries: int) -> int:
    """The largest number of groups that take turns such that no canary was ever picked out of turn; 0 if nobody returns."""
    first, apart = np.zeros(canaries, dtype=np.int64), 0
    for row, number in zip(present, numbers, strict=True):
        again = row[first[row] > 0]
        apart = int(np.gcd.reduce(number - first[again], initial=apart))
        first[row] = np.where(first[row] > 0, first[row], number)
    return apart


def _fixed_returns(present: Sequence[Indices], numbers: Sequence[int], canaries: int, period: int) -> int:
    """How often most canaries return at the same position of a period; 0 if they have no fixed position."""
    positions = np.zeros((canaries, period), dtype=np.int64)
    for row, number in zip(present, numbers, strict=True):
        positions[row, number % period] += 1
    counts, kept = positions.sum(axis=1), positions.max(axis=1)
    several = counts > 1
    if not several.any() or np.mean(kept[several] == counts[several]) < EVERYONE:
        return 0
    return int(np.quantile(kept[several], 0.1))


def divides_by_participants(cohorts: Sequence[int | None], clip_norms: Sequence[float]) -> bool:
    """Whether a client's contribution shrinks as more take part: the sum is divided by the actual cohort size."""
    pairs = np.array([(size, clip) for size, clip in zip(cohorts, clip_norms, strict=True) if size])
    if len(pairs) < 3 or np.ptp(pairs[:, 0]) == 0:
        return False
    product = pairs[:, 0] * pairs[:, 1]
    return float(np.ptp(product)) < CONSTANT * float(np.ptp(pairs[:, 1])) * float(pairs[:, 0].mean())


def judge_sampled(
    sampled: SampledClaim,
    rungs: list[Scores],
    gauges: list[GaugeResult],
    run: RunFacts,
    log: RecordedRounds,
    settings: Settings,
    clip_norms: Sequence[float],
) -> tuple[Verdict, dict[str, Verdict], dict[str, Verdict], list[str]]:
    """The verdict on an amplified claim, that of each rung, that of each part, and notes."""
    needs = (sampled.required_noise, sampled.sampling)
    noise, by_rung, notes = judge(sampled.claim, rungs, gauges, run, sampled=needs)
    missing = sampled.unobserved(log)
    if missing and noise.outcome == PASS:
        noise = Verdict(finding=RoundsUnobserved(rounds=missing, scheme=str(sampled.sampling)))
    parts = {
        ACCOUNTING: sampled.accounting,
        NOISE: replace(noise, part=NOISE),
        SAMPLING: Verdict(finding=sampled.sampler_finding(log.observed, settings, clip_norms), part=SAMPLING),
    }
    rung = RUNG if RUNG in by_rung else None
    if rung is not None and moves_in_groups(parts):  # canaries are not independent, so the bound is not valid
        by_rung[rung] = Verdict(finding=WeakAttacker(), rung=rung)
    bounds = {name: verdict for name, verdict in by_rung.items() if name not in KNOWN}
    verdict = _combine(parts, bounds, rung)
    if rung is not None and by_rung[rung].outcome != VIOLATION:
        by_rung[rung] = replace(verdict, rung=rung)
    return verdict, by_rung, parts, notes


def moves_in_groups(parts: dict[str, Verdict]) -> bool:
    """Whether the sampler picks canaries in groups: then a bound that assumes independent scores is not valid."""
    sampler = parts[SAMPLING].finding if SAMPLING in parts else None
    return isinstance(sampler, OtherSampler) and sampler.seen == "clumped"


def _combine(parts: dict[str, Verdict], bounds: dict[str, Verdict], rung: str | None) -> Verdict:
    """The verdict on the run: a violated part decides, then a bound above the claim, then an undecided part."""
    violated = [name for name in PARTS if parts[name].outcome == VIOLATION]
    above = [name for name, verdict in bounds.items() if verdict.outcome == VIOLATION]
    if violated:
        first = parts[violated[0]]
        deciding = first.rung or rung
        also = [f"the {name} leg" for name in violated[1:]] + [name for name in above if name != deciding]
        return replace(first, evidence=(*first.evidence, *also), rung=deciding)
    if above:
        return replace(bounds[above[-1]], evidence=tuple(above[:-1]))
    undecided = [name for name in PARTS if parts[name].outcome == UNDERPOWERED]
    if undecided:
        return replace(parts[undecided[0]], rung=parts[undecided[0]].rung or rung)
    accounted, sampler = parts[ACCOUNTING].finding, parts[SAMPLING].finding
    assert isinstance(accounted, Accounted)
    detectable = [part.facts["detectable_epsilon"] for part in parts.values() if "detectable_epsilon" in part.facts]
    agreed = AllPartsAgree(
        claimed_epsilon=accounted.claimed_epsilon,
        scheme=accounted.scheme,
        accountant=accounted.accountant,
        adjacency=accounted.adjacency,
        claimed_noise=accounted.claimed_noise,
        seen=sampler.seen if isinstance(sampler, OtherSampler) else None,
        detectable_epsilon=max(detectable, default=None),
        power=POWER,
    )
    return Verdict(finding=agreed, rung=rung)


def with_schedule(sampling: Sampling, schedule: NoiseSchedule | None) -> Sampling:
    """The scheme with the strengths of its rounds."""
    return sampling if schedule is None else replace(sampling, strengths=schedule.counted(sampling.total_rounds))


def read_claim(claim: Claim | None, settings: Settings, last_round: int) -> Claim | None:
    """The claim as it is judged: a bare number counts sampling if the audit knows the scheme, over the steps that ran."""
    if claim is not None:
        claim.check_delta(settings.delta)
    if claim is None or not claim.bare or settings.sampling is None:
        return claim
    sampling = settings.sampling
    if isinstance(sampling, Poisson | FixedSize):
        sampling = replace(sampling, rounds=max(last_round, 1))
    return claim.read_as(Claim(claim.epsilon, sampling=sampling))


def _with_rounds(sampling: Sampling, rounds: int) -> Sampling:
    """The scheme, extended to all observed rounds if there are more than it states."""
    if rounds <= sampling.total_rounds:
        return sampling
    if isinstance(sampling, Poisson | FixedSize):
        return replace(sampling, rounds=rounds)
    return replace(sampling, epochs=-(-rounds // sampling.rounds))
