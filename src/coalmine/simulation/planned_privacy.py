"""The privacy of a run as its config plans it: exposures, analytical epsilon and claim. All is known before round 1."""

import logging
from dataclasses import dataclass
from functools import cached_property

from coalmine.audit.claim import Claim
from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.simulation.clipping import Clipping
from coalmine.simulation.cohorts import Cohorts, sampling_of
from coalmine.simulation.config import RunConfig
from coalmine.simulation.exposure import CanaryExposures, Exposure, canary_exposures, exposed_epsilon, most_exposed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedPrivacy:
    """The planned exposures and epsilons of a run with `population` clients or examples."""

    config: RunConfig
    cohorts: Cohorts
    population: int

    @cached_property
    def clipping(self) -> Clipping:
        return self.config.privacy.clipping_of(self.cohorts.expected_size)

    @cached_property
    def law(self) -> CorrelatedNoise | None:
        return self.config.noise_law()

    def exposures(self, rounds: int) -> CanaryExposures:
        """The canaries' exposures after `rounds` rounds."""
        count = self.config.canaries.count
        return canary_exposures(lambda number: self.cohorts.of_round(number).canaries, rounds, count, self.law)

    @cached_property
    def usual(self) -> Exposure:
        """The most common exposure of a canary after all planned rounds."""
        return self.exposures(self.config.rounds).usual

    @cached_property
    def analytical(self) -> float:
        """The analytical epsilon of the most common exposure."""
        return self.epsilon(self.usual)

    def epsilon(self, exposure: Exposure) -> float:
        """The analytical epsilon of an exposure."""
        return exposed_epsilon(exposure, self.clipping, delta=self.config.privacy.delta)

    @property
    def counts_clients(self) -> bool:
        """Whether client exposures are counted exactly: under correlated noise, and for rounds from a file."""
        return self.law is not None or self.config.participation.kind == "file"

    @cached_property
    def client(self) -> Exposure:
        """A client's exposure: the average, or the largest in this run if clients are counted exactly."""
        config, cohorts = self.config, self.cohorts
        if self.counts_clients:
            present = (cohorts.of_round(number).clients for number in range(1, config.rounds + 1))
            return most_exposed(present, self.law)
        replaced = config.canaries.count if config.canaries.pattern == "replace" else 0
        share = (cohorts.expected_size - cohorts.expected_canaries) / (self.population - replaced)
        times = max(1, round(round(config.rounds * share, 9)))  # rounding twice treats an exact half as a half
        return Exposure(times, times)

    @cached_property
    def claim(self) -> Claim | None:
        """The claim that the config makes; None if it makes none."""
        settings = self.config.claim
        if settings.counts_on_sampling:
            return self._amplified_claim(settings.epsilon)
        if settings.epsilon is not None:
            return self.claim_of(settings.epsilon)
        if not settings.analytical:
            return None
        if self.analytical == 0:  # delta alone covers it
            log.warning("the analytical epsilon is 0 at this delta, so there is no claim to judge")
            return None
        return self.claim_of(self.analytical)

    def claim_of(self, epsilon: float) -> Claim:
        """A claim for the most common exposure of the canaries."""
        sensitivity = None if self.law is None else self.usual.sensitivity
        return Claim(epsilon, participations=self.usual.times, sensitivity=sensitivity)

    def _amplified_claim(self, epsilon: float | None) -> Claim:
        """The claim of the accountant's epsilon, or of a number that the user says is the accountant's."""
        config = self.config
        scheme, noise = sampling_of(config, self.population), config.privacy.noise_multiplier
        assert scheme is not None  # RunConfig checks it
        accounted = float(amplified_epsilon(noise, scheme, config.privacy.delta)) if epsilon is None else epsilon
        observed = (
            config.canaries.pattern != "spread"
        )  # canaries take part exactly when the clients' sampler picks them
        return Claim(accounted, sampling=scheme, noise_multiplier=noise or None, sampler_observed=observed)
