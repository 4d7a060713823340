"""Gauge of what rounds hold of canaries that took part before, and not in them."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtr

from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Results, Statistic
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.gaussian import margin_of
from coalmine.evidence.gauges.repetition import Repetition
from coalmine.evidence.views import RoundViews, View

LAGS = 5  # rounds after its own in which a canary is looked for


class CarryOver(Gauge):
    """Does anything of an earlier round's rows come again?

    Gradients that are never cleared, and buffers that are released, bring old rows back. In the rounds after its own, as far
    as it takes no part in them, the score of a canary is noise: the mean over canaries is standard normal, at each distance
    of one to five rounds. Momentum is undone first, and correlated noise whitened. Canaries have to be orthogonal.
    """

    name = "carry-over"
    order = 95
    AGAIN = Statistic(
        name="carry-over",
        meaning="share of a canary's contribution that is in a later round too, where it stands out most",
        law="normal about 0, for each distance from one round to five",
        advice="Rows of earlier rounds come again. Look for gradients that are not cleared between steps "
        "(`zero_grad`), for a buffer or a cache that keeps updates, and for a reply that is used again in a "
        "later round.",
        refutes=0.5,
        seen="rows of earlier rounds",
        unseen="rows of earlier rounds (needs orthogonal canaries that sit rounds out)",
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._before: deque[_Before] = deque(maxlen=LAGS)
        self._sums = [_Sum() for _ in range(LAGS + 1)]  # by distance; 0 is the canary's own round
        self._declared = True

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item, view = look.item, look.white_residual
        if self.settings.kind != "rotated":
            return
        own = _Before(item.number, np.asarray(item.present), item.clip_norm if self.settings.noise is None else 1.0)
        if view is not None:
            self._sums[0].add(view, own)
            absent = np.ones(self.settings.canaries, dtype=bool)
            absent[view.present] = absent[item.present] = False
            for before in self._before:
                distance = item.number - before.number
                if distance <= LAGS:
                    self._sums[distance].add(view, before.only(absent))
        self._declared &= item.clip_declared or not item.present.size
        self._before.append(own)

    def results(self, level: float) -> Iterator[GaugeResult]:
        """The statistic, if a canary was absent after one of its rounds."""
        own, *later = self._sums
        known = [each for each in later if each.weight]
        if not known or not own.weight:
            return
        limit = -float(ndtri(level / (2 * (LAGS + 1))))  # of each distance, and of the contribution itself
        unit = max(own.share, limit * own.error)  # what canaries contribute to their own rounds
        worst = max(known, key=lambda each: abs(each.score))
        reading = worst.share / unit
        margin = margin_of(reading, worst.score, limit, 0.0)
        proved = sum(max(each.share - limit * each.error, 0.0) ** 2 for each in known if each.score > limit)
        left = (max(own.share - limit * own.error, 0.0) ** 2 + proved) ** -0.5 if proved else math.inf
        yield self.AGAIN.result(
            reading,
            limits=(-margin, margin),
            failed=abs(worst.score) > limit,
            noise_left=left if left < 1 and self._declared and self.settings.noise is None else None,
            values=np.array([each.share / unit for each in known]),
        )

    @classmethod
    def settled(cls, result: GaugeResult, results: Results) -> GaugeResult:
        """No proof if the noise comes again as well: then a round may hold an earlier release, which costs no privacy."""
        repeats = results.outside(Repetition.PAIR) or results.outside(Repetition.SUM)
        return result.as_warning() if repeats else result


@dataclass(frozen=True)
class _Before:
    """Canaries that took part in a round, and the length that they had in it."""

    number: int
    canaries: npt.NDArray[np.integer]
    clip_norm: float

    def only(self, chosen: npt.NDArray[np.bool_]) -> "_Before":
        """Those among them that are chosen."""
        return _Before(self.number, self.canaries[chosen[self.canaries]], self.clip_norm)


class _Sum:
    """Scores of canaries in rounds at one distance from their own, each round weighted by its precision."""

    def __init__(self) -> None:
        self.weight = self._sum = self._normal = 0.0

    def add(self, view: View, before: _Before) -> None:
        """Take one round. The scale of a round is estimated, so the mean score is Student's t and is made normal."""
        count = before.canaries.size
        if not count:
            return
        full = before.clip_norm / view.scale  # score of a canary that is there in full
        total = float(view.observed[before.canaries].sum())
        standard = total / math.sqrt(count)
        upper = float(stdtr(view.tail_dof, -abs(standard)))
        normal = math.copysign(float(ndtri(upper)), standard) if upper > 0 else standard
        self.weight += full * full * count
        self._sum += full * total
        self._normal += full * math.sqrt(count) * normal

    @property
    def share(self) -> float:
        """The share of the canaries that is in the rounds, in clip norms."""
        return self._sum / self.weight

    @property
    def error(self) -> float:
        """Its standard error."""
        return 1 / math.sqrt(self.weight)

    @property
    def score(self) -> float:
        """Standard normal if there is only noise."""
        return self._normal / math.sqrt(self.weight)
