"""Gauge of what the pipeline says of the other clients."""

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import ndtri

from coalmine.argument_checks import Floats
from coalmine.evidence import faults
from coalmine.evidence.dilution import DilutionReader
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Statistic, Symptom
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds, length
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Round

EXPLAINED = 0.005  # share of the residual that `others` must explain to count as wrong


class Others(Gauge):
    """Is `others` what the real clients summed, and are the canaries in the sum beside it?"""

    name = "others"
    order = 100
    item = ""
    OTHERS = Statistic(
        name="others",
        meaning="ratio of the sum that entered the round to the reported `others`",
        law="Σ⟨r, o⟩ is normal; must explain more than 0.5 % of ‖r‖²",
        advice="`others` is not the sum that entered the round. Pass the clipped sum of the real clients, divided by the "
        "same n and multiplied by the same server learning rate as model_delta.",
    )
    CANARIES = Statistic(
        name="canaries in the release",
        meaning="share of the canaries' contribution to the residual that is in the release too",
        law="Student's t about 1, at each canary's first presentation; must differ by 5 %",
        advice="The release does not hold the canaries that `others` leaves out. Check that every canary that is "
        "reported as present is added to the sum once, and that `others` is the real clients' sum.",
    )
    WRONG = Symptom(name="others", of=OTHERS, always=faults.WRONG_OTHERS)

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._products: list[float] = []
        self._lengths: list[float] = []
        self._canaries = DilutionReader(rounds.settings)

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        self._canaries.add(look)
        view = look.white_residual
        if view is not None:
            clients = _others_sketch(look.item, self.settings.canaries)
            self._products.append(float(view.unobserved @ clients) / view.scale)
            self._lengths.append(length(clients) / view.scale)

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        if any(self._lengths):
            yield self._others(np.array(self._products), np.array(self._lengths), level)
        share = self._canaries.first
        if share is not None:
            reach = share.limit(level)
            yield self.CANARIES.result(share.share, limits=(1 - reach, 1 + reach), failed=share.is_off(level))

    def _others(self, products: Floats, lengths: Floats, level: float) -> GaugeResult:
        """The share of `others` that is still in the residual: 0 if `others` is the sum that entered the round.

        The reading is the ratio of the sum that entered the round to the reported `others`.
        """
        settings = self.settings
        overlap = 1.0 if settings.kind == "rotated" else math.sqrt(1 + settings.unobserved / settings.dim)
        square = float(lengths @ lengths)
        score = float(products.sum()) / math.sqrt(square) / overlap
        factor = 1 + float(products.sum()) / square
        explained = (score * score - 1) / (len(products) * settings.unobserved_dof)
        margin = -float(ndtri(level / 2)) * overlap / math.sqrt(square)
        margin = max(margin, math.sqrt(EXPLAINED * len(products) * settings.unobserved_dof / square))
        return self.OTHERS.result(
            factor,
            limits=(1 - margin, 1 + margin),
            failed=abs(score) > -float(ndtri(level / 2)) and explained > EXPLAINED,
            values=products / np.maximum(lengths, 1e-300),
        )


def _others_sketch(item: Round, canaries: int) -> Floats:
    """The sum of all other updates of a round, along the unobserved canaries."""
    assert item.residual_cosines is not None
    assert item.residual_norm is not None
    whole = np.asarray(item.cosines[canaries:], np.float64) * item.norm
    return np.asarray(whole - np.asarray(item.residual_cosines[canaries:], np.float64) * item.residual_norm)
