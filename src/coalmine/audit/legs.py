"""The three legs of a verdict on an amplified claim: accounting, noise and sampling. PASS needs all of them.

- Accounting: the accountant's epsilon for the claimed noise and scheme is no more than the claim.
- Noise: the rounds had the noise that the claim needs.
- Sampling: the pipeline's own sampler, seen through the canaries that it picks, does what the scheme says.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from coalmine.audit.claim import Claim
from coalmine.audit.gauge import Gauge
from coalmine.audit.ladder import Scores
from coalmine.audit.unknown_round import RUNG
from coalmine.audit.verdict import (
    KNOWN,
    PASS,
    POWER,
    ROUNDED,
    UNDERPOWERED,
    VIOLATION,
    Evidence,
    Verdict,
    judge,
)
from coalmine.estimators.amplification import amplified_epsilon, amplified_noise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampler_tests import SamplerReading, rate_power, read_sampler
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling
from coalmine.storage.record import FEWEST, Settings
from coalmine.storage.rounds_file import RoundLog

LEGS = ("accounting", "noise", "sampling")
NAMED = ("poisson", "random_allocation", "shuffled", "random_allocation or shuffled", "fixed_size")  # have a range
EVERYBODY = 0.9  # share of the canaries in a round from which on everybody is as good as known to be in it


@dataclass(frozen=True)
class SampledClaim:
    """An amplified claim with all that its legs need: its noise multiplier and the scheme that covers all rounds.

    `noise` is the claimed one; left out, the one that gives the claimed epsilon. `tested` is the noise multiplier that the
    claim needs: `noise`, or less where the claim is looser than its own accounting.
    """

    claim: Claim
    sampling: Sampling
    noise: float
    tested: float
    delta: float

    @classmethod
    def of(cls, claim: Claim, *, delta: float, last_round: int) -> "SampledClaim":
        assert claim.sampling is not None
        sampling = _with_rounds(claim.sampling, last_round)
        noise = claim.noise_multiplier or amplified_noise(claim.epsilon, claim.sampling, delta)
        tested = noise
        if amplified_epsilon(noise, sampling, delta).high < claim.epsilon / ROUNDED:
            tested = min(noise, amplified_noise(claim.epsilon, sampling, delta))
        return cls(claim, sampling, noise, tested, delta)

    def refutes(self, epsilon: float) -> bool:
        """Whether an epsilon that is certain to be reached contradicts the claim; printed figures are rounded."""
        return epsilon > ROUNDED * self.claim.epsilon

    @property
    def accounting(self) -> Verdict:
        """The leg of accounting."""
        accounted = amplified_epsilon(self.noise, self.sampling, self.delta)
        facts = Verdict(
            outcome=PASS,
            code="accounted",
            leg="accounting",
            claimed_epsilon=self.claim.epsilon,
            epsilon=accounted.high,
            epsilon_range=(accounted.low, accounted.high),
            epsilon_kind=accounted.kind,
            claimed_noise=self.noise,
            accountant=accounted.accountant,
            adjacency=accounted.adjacency,
            scheme=str(self.sampling),
        )
        if not self.refutes(accounted.high):
            return facts
        outcome = VIOLATION if self.refutes(accounted.low) else UNDERPOWERED
        return replace(facts, outcome=outcome, code="accounting" if outcome == VIOLATION else "range")

    def sampling_leg(self, log: RoundLog, settings: Settings) -> Verdict:
        """The leg of sampling."""
        facts = Verdict(outcome=UNDERPOWERED, code="sampler not observed", leg="sampling", scheme=str(self.sampling))
        observed = log.observed
        if not self.claim.sampler_observed or not observed:
            return facts
        reading = read_sampler(
            [entry.present for entry in observed],
            [entry.number for entry in observed],
            settings.canaries,
            self.sampling,
            [entry.participants for entry in observed],
        )
        facts = replace(facts, picks=reading.picks, rate=reading.rate, cohorts_known=reading.cohort_sizes_known)
        if reading.passed:
            return self._sampler_power(facts, reading)
        low, high = self._price(reading, [entry.present.size for entry in observed], settings.canaries)
        worst = min(reading.failed, key=lambda test: test.p_value)
        facts = replace(
            facts,
            seen=reading.meaning,
            seen_scheme=" or ".join(str(scheme) for scheme in reading.candidates) or None,
            test=worst.title,
            p_value=worst.p_value,
            level=worst.level,
            epsilon_range=(low, high),
            claimed_epsilon=self.claim.epsilon,
        )
        if self.refutes(low):
            return replace(facts, outcome=VIOLATION, code="sampler")
        if not self.refutes(high):
            return replace(facts, outcome=PASS, code="sampler allowed")
        return replace(facts, code="sampler")

    def _sampler_power(self, facts: Verdict, reading: SamplerReading) -> Verdict:
        """PASS if a rate at which epsilon is twice the claim would have been seen with 90 % probability."""
        if not isinstance(self.sampling, Poisson | FixedSize):  # once an epoch: one pick too many would be seen
            enough = reading.picks >= FEWEST
            return replace(facts, outcome=PASS if enough else UNDERPOWERED, code="sampled" if enough else "picks")
        rate = self._detectable_rate(reading)
        reached = math.inf
        if rate is not None:
            seen_rate = Poisson(rate, reading.rounds)
            reached = amplified_epsilon(self.noise, seen_rate, self.delta).high
        enough = rate is not None and reached <= 2 * ROUNDED * self.claim.epsilon
        return replace(
            facts,
            outcome=PASS if enough else UNDERPOWERED,
            code="sampled" if enough else "picks",
            detectable_rate=rate,
            detectable_epsilon=reached if rate is not None else None,
            power=POWER,
        )

    def _detectable_rate(self, reading: SamplerReading) -> float | None:
        """The smallest rate that the test of the rate sees with 90 % probability; None if it sees none, 1 if all are."""
        claimed = self.sampling.rate
        if claimed >= 1 or rate_power(self.sampling, reading.rounds, reading.canaries, 1.0) < POWER:
            return 1.0 if claimed >= 1 else None

        def missing(rate: float) -> float:
            return rate_power(self.sampling, reading.rounds, reading.canaries, rate) - POWER

        return float(brentq(missing, claimed, 1 - 1e-9, xtol=1e-9))

    def _price(self, reading: SamplerReading, sizes: list[int], canaries: int) -> tuple[float, float]:
        """The range of epsilon for the sampler that was seen, at the claimed noise."""
        rounds = self.sampling.total_rounds
        known = float(mechanism_epsilon(self.noise, delta=self.delta, participations=rounds))
        named = reading.candidates if reading.seen in NAMED else ()
        ranges = [self._priced(scheme, reading) for scheme in named]
        low = min((low for low, _ in ranges), default=0.0)
        high = max((high for _, high in ranges), default=known)
        if reading.seen in ("too many", "uneven") and reading.worst_rate > 0:
            often = Poisson(min(reading.worst_rate, 1.0), rounds)
            low = max(low, amplified_epsilon(self.noise, often, self.delta).low)
        if reading.seen == "repeated order":
            low = max(low, self._repeated(reading))
        if reading.seen in ("clumped", "changing rate", "too many", "other"):
            shares = np.array(sizes) / canaries
            everybody = math.floor(float(shares[shares >= EVERYBODY].sum()) + 1e-9)
            if everybody:
                low = max(low, float(mechanism_epsilon(self.noise, delta=self.delta, participations=everybody)))
        return low, max(low, high)

    def _priced(self, scheme: Sampling, reading: SamplerReading) -> tuple[float, float]:
        """The range of a scheme, where its rate was measured over that rate's interval."""
        slowest, fastest = self._at_rates(scheme, reading)
        low, high = (amplified_epsilon(self.noise, end, self.delta) for end in (slowest, fastest))
        return low.low, high.high

    def _at_rates(self, scheme: Sampling, reading: SamplerReading) -> tuple[Sampling, Sampling]:
        """The scheme at the slowest and at the fastest rate that the picks allow."""
        slowest, fastest = (min(max(end, 1e-12), 1.0) for end in reading.rate_interval)
        if isinstance(scheme, Poisson) and scheme.rate != self.sampling.rate:
            return replace(scheme, probability=slowest), replace(scheme, probability=fastest)
        if isinstance(scheme, FixedSize):
            most, fewest = (max(round(scheme.size / rate), scheme.size) for rate in (slowest, fastest))
            return replace(scheme, population=most), replace(scheme, population=fewest)
        return scheme, scheme

    def _repeated(self, reading: SamplerReading) -> float:
        """Epsilon where everybody returns after as many rounds: one random place, and noise that averages out."""
        if reading.rate <= 0:
            return 0.0
        period = max(round(1 / reading.rate), 1)
        returns = max(reading.rounds // period, 1)
        once = RandomAllocation(period)
        return amplified_epsilon(self.noise / math.sqrt(returns), once, self.delta).low


def judge_sampled(
    sampled: SampledClaim,
    rungs: list[Scores],
    gauges: list[Gauge],
    evidence: Evidence,
    log: RoundLog,
    settings: Settings,
) -> tuple[Verdict, dict[str, Verdict], dict[str, Verdict], list[str]]:
    """The verdict on an amplified claim, that of each rung, the legs, and notes."""
    needs = (sampled.tested, sampled.sampling)
    noise, by_rung, notes = judge(sampled.claim, rungs, gauges, evidence, sampled=needs)
    legs = {
        "accounting": sampled.accounting,
        "noise": replace(noise, leg="noise"),
        "sampling": sampled.sampling_leg(log, settings),
    }
    rung = RUNG if RUNG in by_rung else None
    bounds = {name: verdict for name, verdict in by_rung.items() if name not in KNOWN}
    verdict = _combine(legs, bounds, rung)
    if rung is not None and by_rung[rung].outcome != VIOLATION:
        by_rung[rung] = replace(verdict, rung=rung)
    return verdict, by_rung, legs, notes


def _combine(legs: dict[str, Verdict], bounds: dict[str, Verdict], rung: str | None) -> Verdict:
    """The verdict on the run: a violated leg decides, then a bound above the claim, then an undecided leg."""
    violated = [name for name in LEGS if legs[name].outcome == VIOLATION]
    above = [name for name, verdict in bounds.items() if verdict.outcome == VIOLATION]
    if violated:
        also = [f"the {name} leg" for name in violated[1:]] + above
        return replace(
            legs[violated[0]], evidence=(*legs[violated[0]].evidence, *also), rung=legs[violated[0]].rung or rung
        )
    if above:
        return replace(bounds[above[-1]], evidence=tuple(above[:-1]))
    undecided = [name for name in LEGS if legs[name].outcome == UNDERPOWERED]
    if undecided:
        return replace(legs[undecided[0]], rung=legs[undecided[0]].rung or rung)
    accounted = legs["accounting"]
    return Verdict(
        outcome=PASS,
        code="legs",
        rung=rung,
        claimed_epsilon=accounted.claimed_epsilon,
        scheme=accounted.scheme,
        accountant=accounted.accountant,
        adjacency=accounted.adjacency,
        claimed_noise=accounted.claimed_noise,
        detectable_epsilon=max(
            (leg.detectable_epsilon for leg in legs.values() if leg.detectable_epsilon is not None), default=None
        ),
        power=POWER,
    )


def _with_rounds(sampling: Sampling, last_round: int) -> Sampling:
    """The scheme over all rounds that were seen, where they are more than it says."""
    if last_round <= sampling.total_rounds:
        return sampling
    if isinstance(sampling, Poisson | FixedSize):
        return replace(sampling, rounds=last_round)
    return replace(sampling, epochs=-(-last_round // sampling.rounds))
