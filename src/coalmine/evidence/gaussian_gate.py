"""May a bound assume that the noise is Gaussian? What a run contradicts, or did not measure, withholds it.

The gate can only withhold a bound. It asks the gauges of the noise's law, the scores themselves, and, for an attacker who
does not know the rounds, the tests of the sampler. Gauges of the noise's level do not count: the bound measures the level.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coalmine.evidence.gauges.gauge import GaugeResult, by_gauge
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.ladder import Scores
from coalmine.evidence.noise_signal import NoiseSignal

NORMALITY_LEVEL = 0.01  # of the test of normality of final models' scores
NOT_MEASURED = "the law of the noise was not measured: pass others in every round"
TOO_COARSE = "the release is rounded too coarsely to measure the law of the noise"
UNEQUAL = "the scores spread more than those of canaries that count alike"
NO_SAMPLER = "the pipeline's own sampler was not tested"
BY_COHORT = "the sum is divided by the number of participants"
OTHER_SAMPLER = "the sampler's tests contradict the declared scheme"


@dataclass(frozen=True, kw_only=True)
class GaussianGate:
    """Why bounds that assume Gaussian noise are withheld: empty where nothing is. `sampler` concerns unknown-round alone."""

    noise: str = NOT_MEASURED
    sampler: str = NO_SAMPLER

    @classmethod
    def of(cls, gauges: Sequence[GaugeResult], rounds: GaugedRounds, *, sampler: str = NO_SAMPLER) -> "GaussianGate":
        """The gate of a run with these gauges and rounds."""
        return cls(noise=_noise_doubt(gauges, rounds), sampler=sampler)

    def known_rounds(self, groups: list[Scores]) -> str:
        """Why it is withheld from an attacker who knows the rounds, with these scores."""
        if self.noise:
            return self.noise
        spread, limit = NoiseSignal.of(groups).spread(groups)
        return UNEQUAL if spread > limit else ""

    def unknown_rounds(self, groups: list[Scores]) -> str:
        """Why it is withheld from one who does not, where known-others has these scores."""
        return self.sampler or self.known_rounds(groups)


def _noise_doubt(gauges: Sequence[GaugeResult], rounds: GaugedRounds) -> str:
    outside = [each for each in gauges if each.status != "ok" and each.gauge.concerns_law]
    if outside:
        return f"the {outside[0].name} gauge is outside its limits"
    law = rounds.law
    if Gaussian not in by_gauge(gauges) or rounds.misses_law:
        return NOT_MEASURED
    return TOO_COARSE if law.is_coarse(law.all) else ""
