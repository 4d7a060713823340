"""Noise that varies from round to round, as the rounds state it: each round's strength relative to a reference.

A canary in a round with a third of the reference noise counts like one in nine rounds. So the scores of a schedule are
those of constant noise with other exposures.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from coalmine.estimators.sampling import NO_SCHEDULE, Strengths
from coalmine.log.rounds_file import Entry
from coalmine.measure.settings import Settings

EQUAL = 1e-6  # relative difference up to which rounds state the same noise


@dataclass(frozen=True)
class NoiseSchedule:
    """The median of the stated noise multipliers, and the strength of each round: the median over its multiplier."""

    reference: float
    strengths: dict[int, float]

    @classmethod
    def of(cls, observed: Iterable[Entry], settings: Settings) -> "NoiseSchedule | None":
        """The schedule; None if the noise is correlated, if a round does not state it, or if all rounds state the same."""
        stated = {entry.number: entry.multiplier for entry in observed}
        if settings.noise is not None or not stated:
            return None
        multipliers = {number: value for number, value in stated.items() if value}
        if len(multipliers) < len(stated) or max(multipliers.values()) <= (1 + EQUAL) * min(multipliers.values()):
            return None
        reference = float(np.median(list(multipliers.values())))
        return cls(reference, {number: reference / value for number, value in multipliers.items()})

    def exposure(self, times: int) -> float:
        """The sum of squared strengths over the `times` rounds with the least noise; more rounds than these count as 1."""
        largest = np.sort(np.array(list(self.strengths.values())))[::-1][:times]
        return float(largest @ largest) + max(times - largest.size, 0)

    def counted(self, total: int) -> Strengths:
        """Each strength with its number of rounds, for an accountant; rounds that were not observed count as 1."""
        return counted_strengths([*self.strengths.values(), *[1.0] * (total - len(self.strengths))])


def counted_strengths(strengths: Iterable[float]) -> Strengths:
    """Strengths in order, each with its number of rounds; nothing if all are 1, or if there are none."""
    values, counts = np.unique(np.asarray(list(strengths), dtype=np.float64), return_counts=True)
    if values.size == 0 or (values.size == 1 and values[0] == 1):
        return NO_SCHEDULE
    return tuple((float(value), int(count)) for value, count in zip(values, counts, strict=True))
