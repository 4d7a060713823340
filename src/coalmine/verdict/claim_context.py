"""What a claim means for one run: the noise multiplier that it needs, and the facts of the run besides its scores."""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.mechanism import mechanism_epsilon, mechanism_noise
from coalmine.estimators.sampling import Sampling
from coalmine.evidence import levels
from coalmine.evidence.gauges.gauge import GaugeResult, Results
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.gauges.others import Others
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_schedule import NoiseSchedule
from coalmine.evidence.stated_noise import RoundScores, StatedNoise
from coalmine.verdict.claim import Claim
from coalmine.verdict.round_limits import composed_epsilon

# A true claim is called VIOLATION in at most 1 % of runs: level_ledger.py lists the levels of all tests.
BOUND_LEVEL = levels.BOUND_LEVEL
ROUNDED = 1.005  # printed epsilons are rounded: a claim is refuted only beyond this factor


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run that a verdict needs besides scores and gauges.

    `planned` is the number of presentations of the audit's own schedule; None if the pattern is the user's own or rounds
    were not observed. `presentations` is the largest observed number of presentations. `most_hidden` bounds the real
    clients' part of a round, ‖X‖/(C√d). `without_others` and `without_noise` count rounds in which these were not given.
    `schedule` is that of the stated noise if it varies.
    `correlated` means that noise is correlated between rounds. `vouched` means that the caller vouches for `others`,
    although no stated noise can confirm it.
    """

    delta: float
    planned: int | None
    presentations: int
    rounds: RoundScores | None = None
    stated: StatedNoise | None = None
    schedule: NoiseSchedule | None = None
    without_others: int = 0
    without_noise: int = 0
    most_hidden: float | None = None
    correlated: bool = False
    vouched: bool = False

    def exposure_of(self, times: int) -> float:
        """Σ(reference/z_t)² over the `times` rounds with the least noise: `times` if all rounds state the same."""
        return float(times) if self.schedule is None else self.schedule.exposure(times)


def context_of(
    claim: Claim,
    rungs: list[Scores],
    gauges: list[GaugeResult],
    run: RunFacts,
    sampled: tuple[float, Sampling] | None,
) -> "ClaimContext":
    """What every rung and gauge is judged by; arguments as for `judge`."""
    strongest, results = None, Results(gauges)
    residual, others = results.of(Length.RESIDUAL), results.outside(Others.OTHERS)
    if run.correlated:
        strengths = [s.largest_strength for s in rungs if s.largest_strength is not None]
        strongest = max(strengths, default=(claim.sensitivity or 1.0) ** 2)
    times = claim.participations or run.planned
    explicit = times is not None or claim.sensitivity is not None or run.correlated
    exposure = run.exposure_of(times or 1)
    if sampled is None:
        noise = _claimed_noise(claim, times or 1, strongest, exposure, run.delta)
    else:  # a client may be in any of the rounds
        noise, times, explicit = sampled[0], sampled[1].total_rounds, True
    return ClaimContext(
        claim,
        noise,
        times if explicit else None,
        max(run.presentations, times or 1),
        strongest,
        run,
        noise_seen=1.0 if residual is None else float(np.median(residual.values)),
        shortest=1.0 if residual is None else residual.smallest,
        others_wrong=None if others is None else others.largest,
        sampling=None if sampled is None else sampled[1],
    )


def _claimed_noise(claim: Claim, times: int, strongest: float | None, exposure: float, delta: float) -> float:
    """The noise multiplier that the claim implies, in the reference of the rounds' schedule if their noise varies."""
    if claim.sensitivity is None and strongest is None:
        noise = claim.moved * float(mechanism_noise(claim.epsilon, delta=delta, participations=times))
        return noise if exposure == times else noise * math.sqrt(exposure / times)
    if claim.sensitivity is None and claim.participations is not None:
        raise ValueError(
            "under correlated noise the number of participations does not determine a client's exposure: give the claim its "
            "sensitivity, or omit participations to claim epsilon for the most exposed canary"
        )
    sensitivity = claim.moved * math.sqrt(strongest or 1.0) if claim.sensitivity is None else claim.sensitivity
    return sensitivity * math.sqrt(exposure / times) * float(mechanism_noise(claim.epsilon, delta=delta))


@dataclass(frozen=True)
class ClaimContext:
    """What every rung is judged by: the claim, its noise multiplier, and the client's participations.

    `times` is None if the participations are unknown. Then the noise multiplier is that of one participation, the least that
    the claim can mean, so that a VIOLATION contradicts every interpretation of the claim. `strongest` is the most exposed
    canary's ‖Cu‖² under correlated noise. `noise_seen` and `shortest` are the median and the smallest reading of the
    residual gauge, and `others_wrong` is the factor by which `others` is off. `sampling` is the scheme of an amplified
    claim.
    """

    claim: Claim
    noise: float
    times: int | None
    presentations: int
    strongest: float | None
    run: RunFacts
    bound_level: float = BOUND_LEVEL
    noise_seen: float = 1.0
    shortest: float = 1.0
    others_wrong: float | None = None
    sampling: Sampling | None = None

    @property
    def delta(self) -> float:
        return self.run.delta

    @property
    def explicit(self) -> bool:
        return self.times is not None or self.claim.sensitivity is not None or self.run.correlated

    @property
    def needed_noise(self) -> float:
        """The noise multiplier that the claim needs if the client's rounds all have equal noise: from the claim alone."""
        if self.sampling is not None or self.run.schedule is None:
            return self.noise
        times = self.times or 1
        return self.noise / math.sqrt(self.run.exposure_of(times) / times)

    @property
    def in_every_round(self) -> bool:
        """Whether the claim is about a client who takes part in every observed round: then one pooled factor is valid."""
        rounds = self.run.rounds
        return self.sampling is None and rounds is not None and (self.times or 1) >= len(rounds.numbers)

    def epsilon(self, presentations: int | None, strength: float | None = None) -> float:
        """The claimed epsilon for a client with these presentations, or with this strength."""
        if self.sampling is not None and presentations is None:
            return self.claim.epsilon
        if self.strongest is not None:
            return float(mechanism_epsilon(self.noise / math.sqrt(strength or self.strongest), delta=self.delta))
        if self.run.schedule is not None:
            exposure = strength or self.run.exposure_of(presentations or self.presentations)
            return float(mechanism_epsilon(self.noise / math.sqrt(exposure), delta=self.delta))
        times = presentations or self.presentations
        return float(mechanism_epsilon(self.noise, delta=self.delta, participations=times))

    def implied_for(self, times: int) -> float:
        """The epsilon of a client like the claim's in this many rounds: more than a canary's if clients are replaced."""
        exposure = self.claim.moved * math.sqrt(self.run.exposure_of(times))
        return float(mechanism_epsilon(self.noise / exposure, delta=self.delta))

    def composed(self, inverse: npt.NDArray[np.float64]) -> float:
        """Epsilon of the claim's own client if round t has noise multiplier 1/inverse[t]: the accountant's lower end."""
        times = self.times or 1
        exposure = (self.claim.sensitivity or self.claim.moved * math.sqrt(times)) ** 2
        return composed_epsilon(inverse, delta=self.delta, times=times, exposure=exposure, sampling=self.sampling)

    def implied(self, multiplier: float) -> float:
        """The epsilon of the claim's own client under another noise multiplier in all of its rounds."""
        if multiplier <= 0 or math.isinf(multiplier):
            return 0.0 if multiplier > 0 else math.inf
        if self.sampling is not None:
            return amplified_epsilon(multiplier, replace(self.sampling, strengths=()), self.delta).low
        exposure = self.claim.sensitivity or self.claim.moved * math.sqrt(self.strongest or self.times or 1)
        return float(mechanism_epsilon(multiplier / exposure, delta=self.delta))

    def refutes(self, multiplier: float) -> bool:
        """Whether this noise multiplier in all rounds implies more than the claimed epsilon."""
        return self.exceeded(self.implied(multiplier))

    def exceeded(self, epsilon: float) -> bool:
        """Whether an epsilon is more than the claimed one, which may be rounded."""
        return epsilon > ROUNDED * self.claim.epsilon

    def permits(self, multiplier: float) -> bool:
        """Whether the claim holds with this noise multiplier in all rounds."""
        if self.sampling is None or multiplier <= 0:
            return not self.refutes(multiplier)
        plain = replace(self.sampling, strengths=())
        return amplified_epsilon(multiplier, plain, self.delta).high <= ROUNDED * self.claim.epsilon
