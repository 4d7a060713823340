"""Gauge of the dimensions that the noise fills."""

import math
from collections.abc import Iterator

from scipy.special import chdtri

from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Statistic, Symptom
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds, Pairs

# Level of the statistic, which only prevents a PASS: in 12 rounds a fixed half of the dimensions hardly shows.
RANK_LEVEL = 2e-3
VISIBLE = 10.0  # standard deviations by which noise in half of the dimensions must move it to be detected


class Subspace(Gauge):
    """Does the noise fill all dimensions?

    Rounds of noise that lies in fewer dimensions are more alike than chance has them. This takes many rounds.
    """

    name = "dimensions"
    order = 40
    RANK = Statistic(
        name="rank",
        meaning="mean squared cosine between two rounds over that of noise in all dimensions",
        law="ν·cos² over all pairs of rounds is χ², at a level of 0.2 %",
        advice="The noise lies in a subspace, so some directions get none. Look for noise that is drawn in "
        "fewer dimensions and then projected, and for one draw that is repeated over many coordinates.",
        seen="dimensions without noise",
        unseen="noise in a fixed subspace (needs more rounds, or more unobserved canaries)",
    )
    SPANNED = Symptom(
        name="rank",
        of=RANK,
        always=(faults.NOISE_IN_SUBSPACE,),
        sometimes=(
            *faults.MIXED_NOISE,
            faults.NOISE_REUSED,
            faults.NOISE_AFTER_ADAM,
            faults.NOISE_KEY_REUSED,
            faults.NOISE_IN_PAIRS,
            *faults.POOLED_NOISE,
        ),
        precedence=20,
        cause="the noise lies in a subspace. Draw independent noise for every coordinate",
    )

    def results(self, level: float) -> Iterator[GaugeResult]:
        """The statistic, if there are two rounds; its level is its own."""
        sketches = self.rounds.sketches
        if len(sketches.numbers) > 1:
            yield self.of_pairs(sketches.pairs, sketches.dof)

    @classmethod
    def of_pairs(cls, compared: Pairs, dof: float) -> GaugeResult:
        """The sum of the squares of the cosines between the residuals of every two rounds."""
        _, squares, pairs = compared.results()
        reading, high = dof * squares / pairs, float(chdtri(pairs, RANK_LEVEL)) / pairs
        return cls.RANK.result(reading, limits=(0.0, high), failed=reading > high)

    @classmethod
    def coverage(cls, present: set[Statistic], rounds: GaugedRounds) -> tuple[list[str], list[str]]:
        """Only what a run of this length would show."""
        settings = rounds.settings
        visible = power(rounds.count, settings.unobserved_dof, settings.dim) >= VISIBLE
        return ([cls.RANK.seen], []) if visible else ([], [cls.RANK.unseen])


def power(rounds: int, dof: float, dim: int) -> float:
    """The number of standard deviations by which noise in a fixed half of the dimensions would move the statistic."""
    return math.sqrt(rounds * (rounds - 1) / 4) * dof / dim
