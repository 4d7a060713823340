"""The exposure of participants: how often they took part, and the sensitivity over those rounds."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.simulation.clipping import Clipping
from coalmine.simulation.population import Indices


@dataclass(frozen=True)
class Exposure:
    """Participation in `times` rounds. `strength` is ‖Cu‖² under correlated noise, and `times` under independent noise."""

    times: int
    strength: float

    @property
    def sensitivity(self) -> float:
        return math.sqrt(self.strength)


class CanaryExposures:
    """Times and strengths of all canaries, updated round by round."""

    def __init__(self, canaries: int, law: CorrelatedNoise | None) -> None:
        self.times = np.zeros(canaries, dtype=np.int64)
        self._squares = np.zeros(canaries)
        self._encoder = None if law is None else law.encoder()

    def add(self, round_number: int, present: Indices) -> None:
        """Add the next round, in which the canaries `present` took part."""
        self.times[present] += 1
        if self._encoder is not None:
            shares = np.zeros(self.times.size)
            shares[present] = 1.0
            encoded = self._encoder.add(round_number, shares)
            assert encoded is not None  # no round is skipped
            self._squares += encoded * encoded

    @property
    def strengths(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
        return self.times.astype(np.float64) if self._encoder is None else self._squares

    @property
    def largest(self) -> Exposure:
        """The exposure of the most exposed canary so far."""
        canary = int(np.argmax(self.strengths))
        return Exposure(int(self.times[canary]), float(self.strengths[canary]))

    @property
    def usual(self) -> Exposure:
        """The most common number of rounds (on a tie, the largest) and the mean strength at that number.

        The known-others estimate is for this exposure.
        """
        counts = np.bincount(self.times)
        counts[0] = 0
        times = int(len(counts) - 1 - np.argmax(counts[::-1])) or 1
        members = self.times == times
        return Exposure(times, float(self.strengths[members].mean()) if members.any() else float(times))


def canary_exposures(
    present: Callable[[int], Indices], rounds: int, canaries: int, law: CorrelatedNoise | None
) -> CanaryExposures:
    """The canaries' exposures in the first `rounds` rounds."""
    exposures = CanaryExposures(canaries, law)
    for number in range(1, rounds + 1):
        exposures.add(number, present(number))
    return exposures


def most_exposed(rounds: Iterable[Indices], law: CorrelatedNoise | None) -> Exposure:
    """The largest exposure of any participant, exact for these rounds.

    Under independent noise (no law), this is the participant who took part most often.
    """
    rounds_of: dict[int, list[int]] = {}
    for number, present in enumerate(rounds, start=1):
        for participant in present.tolist():
            rounds_of.setdefault(participant, []).append(number)
    exposures = [
        Exposure(len(numbers), len(numbers) if law is None else law.strength(numbers)) for numbers in rounds_of.values()
    ]
    return max(exposures, key=lambda exposure: exposure.strength, default=Exposure(0, 0.0))


@lru_cache(maxsize=1000)  # called every round, mostly with the same arguments
def exposed_epsilon(exposure: Exposure, clipping: Clipping, *, delta: float) -> float:
    """The analytical epsilon at this exposure, without amplification.

    An adaptive clip's count is a second release with independent noise; the two compose into one Gaussian mechanism.
    """
    if not exposure.times:
        return 0.0
    if exposure.strength == exposure.times:
        multiplier = clipping.noise_multiplier
        return float(mechanism_epsilon(multiplier, delta=delta, participations=exposure.times))
    if not clipping.noise_multiplier:
        return math.inf
    updates = exposure.strength / clipping.update_noise_multiplier**2
    counts = exposure.times / clipping.count_noise_multiplier**2
    return float(mechanism_epsilon((updates + counts) ** -0.5, delta=delta))
