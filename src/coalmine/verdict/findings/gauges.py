"""Findings of gauges: one that proves missing noise, one outside its limits, or no training at all."""

from collections.abc import Sequence
from dataclasses import dataclass

from coalmine.argument_checks import count_of
from coalmine.evidence.gauges.gauge import Statistic, statistic_of
from coalmine.evidence.gauges.grid import Grid
from coalmine.evidence.gauges.training import Training
from coalmine.verdict.findings.finding import Doubt, Refutation, at_least, at_most, listed


@dataclass(frozen=True, kw_only=True)
class GaugeReading:
    """A gauge outside its limits: its smallest and largest value, and the rounds outside, if it reads single rounds."""

    gauge: str
    reading: tuple[float, float]
    limits: tuple[float, float]
    rounds: int | None = None
    first_round: int | None = None

    @property
    def statistic(self) -> Statistic:
        """The statistic that was read."""
        return statistic_of(self.gauge)[0]

    @property
    def described(self) -> str:
        """The gauge's name with what it measures."""
        return f"{self.gauge} gauge ({self.statistic.meaning})"

    def left_limits(self) -> str:
        """The clause that says where the gauge left its limits."""
        return f"the {self.described} left {self.limits[0]:.4g} … {self.limits[1]:.4g}{self.where()}"

    def where(self) -> str:
        """The rounds in which the gauge left its limits."""
        return f" in {count_of(self.rounds, 'round')}, first in round {self.first_round}" if self.rounds else ""


@dataclass(frozen=True, kw_only=True)
class NoiseRemovable(GaugeReading, Refutation):
    """A gauge proves that the attacker can remove the noise."""

    code = "gauge"
    remedy = "find out why this measurement of the noise is outside its limits"

    def sentence(self) -> str:
        return f"{self.left_limits()}: the attacker can remove the noise"

    def plain(self) -> str:
        return f"the noise is not what it should be{self.where()}: the attacker can remove it"


@dataclass(frozen=True, kw_only=True)
class NoisePartlyLeft(NoiseRemovable):
    """A gauge proves that too little of the stated noise protects a client."""

    code = "gauge"
    noise_left: float  # upper limit, as a share of the stated noise
    epsilon: float
    measured_noise: float | None = None  # noise multiplier that is left at most; None in a check of a function
    claimed_noise: float | None = None

    def sentence(self) -> str:
        left = at_most(self.noise_left, below=1.0)
        return (
            f"{self.left_limits()}: at most {left} of the stated noise protects a client, which means an epsilon of at "
            f"least {at_least(self.epsilon)}"
        )

    def plain(self) -> str:
        left = f"at most {at_most(self.noise_left, 2, below=1.0)} of the stated noise protects a client"
        return f"{left}{self.where()}: ε is at least {at_least(self.epsilon, 2)}"


@dataclass(frozen=True, kw_only=True)
class OutsideLimits(GaugeReading, Doubt):
    """A gauge is outside its limits."""

    code = "gauge"
    remedy = "look for more noise than stated, a wrong law, correlated draws, an incomplete `others`"
    headline = "the noise does not look as stated, so the claim is not confirmed"

    def sentence(self) -> str:
        if self.statistic is Grid.ROUNDING:
            return (
                f"rounding the release makes up {self.reading[1]:.0%} of the residual's variance, so the law of the noise "
                "cannot be measured: pass model_delta before rounding"
            )
        where = f", first in round {self.first_round}" if self.first_round is not None else ""
        span, limits = _told_apart(self.reading, self.limits)
        return (
            f"the {self.described} reads {span}, outside {limits}{where}: the residual is not independent Gaussian noise "
            "of the stated level."
        )

    def plain(self) -> str:
        if self.statistic is Grid.ROUNDING:
            return "the release is rounded too coarsely to measure its noise"
        return "the noise is not independent Gaussian noise of the stated size"

    def ending(self, evidence: Sequence[str]) -> str:
        return (
            f" Also outside their limits: {listed(evidence)}."
            if evidence and self.statistic is not Grid.ROUNDING
            else ""
        )


@dataclass(frozen=True, kw_only=True)
class LongResidual(OutsideLimits):
    """The residual is longer than the stated noise."""

    code = "gauge"
    remedy = "check that `others` holds every real client, and that the clip bounds every update"
    length: float  # of the residual, over that of the stated noise

    def sentence(self) -> str:
        return (
            f"the residual is {self.length:.3g} times as long as the stated noise: there is more noise than stated, or the "
            "rounds summed more than the canaries and `others`, as where a clip does not bound every update. What "
            "`others` lacks could hide missing noise, so this is not a PASS"
        )

    def plain(self) -> str:
        return f"the noise is {self.length:.3g} times as strong as stated, or some of the updates are not in `others`"

    def ending(self, evidence: Sequence[str]) -> str:
        return ""


@dataclass(frozen=True, kw_only=True)
class Untrained(Doubt):
    """No weight moved, no layer had a gradient, or no layer had both: nothing was trained."""

    code = "training"
    remedy = "check the optimizer's parameters, the learning rate and the loss"
    headline = "nothing was trained, so the claim is not confirmed for a trained model"
    gauge: str

    def sentence(self) -> str:
        statistic, _ = statistic_of(self.gauge)
        if statistic is Training.MOVED:
            return (
                "nothing refutes the claim, but no weight moved from the first round to the last: nothing was trained, so "
                "this is not a PASS for a trained model. Check that the optimizer holds this model's parameters, that they "
                "require gradients, and that the learning rate is above 0"
            )
        if statistic is Training.TRAINED:
            return (
                "nothing refutes the claim, but the layers that received a gradient never moved, and noise alone moved the "
                "others, so this is not a PASS for a trained model. Check the learning rate of each group of parameters"
            )
        return (
            "nothing refutes the claim, but no layer received a gradient in any round: noise alone moved the weights, so "
            "this is not a PASS for a trained model. Check that the loss depends on the parameters that the optimizer holds"
        )

    def plain(self) -> str:
        seen = {Training.MOVED: "no weight moved", Training.TRAINED: "no layer that received a gradient moved"}
        return f"{seen.get(statistic_of(self.gauge)[0], 'no layer received a gradient')}: nothing was trained"


def _told_apart(reading: tuple[float, float], limits: tuple[float, float]) -> tuple[str, str]:
    """A reading and its limits in as many digits as it takes to see that the reading lies outside."""
    for digits in (4, 6, 9, 17):
        (smallest, largest), (low, high) = ([f"{value:.{digits}g}" for value in ends] for ends in (reading, limits))
        if float(smallest) < float(low) or float(largest) > float(high):
            break
    return smallest if smallest == largest else f"{smallest} … {largest}", f"{low} … {high}"
