"""Gauge of the noise over the rounds: does it come again?"""

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import bdtrc, chdtrc, chdtri, gammainc, gammaincinv, ndtri

from coalmine.argument_checks import Floats
from coalmine.estimators.null import CosineNull
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import Gauge, GaugeResult, Results, Statistic, Symptom, deciding_reading
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds, Pairs, length, unit
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Round

SHIFTED_ROUNDS = 20  # most rounds that are compared with each other at every distance
SHIFTS = 1 << 18  # distances that are distinguished; larger ones wrap around
NEARLY_EQUAL = 0.5  # cosine: noise on few coordinates is little noise, and its cosines spread as in few dimensions
COMES_BACK = (
    "The residual of one round resembles that of another. Look for a generator that is seeded again in every "
    "round, or a PRNG key that is not split. Clients that are missing from `others` have the same effect."
)


class Repetition(Gauge):
    """Is the noise of every round fresh?

    Residuals are compared along the unobserved canaries, with momentum undone and correlated noise whitened.
    """

    name = "repetition"
    order = 30
    PAIR = Statistic(
        name="repeat",
        meaning="largest cosine between a round's residual and an earlier one",
        law="a cosine of random directions, over all pairs of rounds",
        advice=COMES_BACK,
        refutes=1.0,
        seen="reuse between rounds",
        unseen="reuse between rounds (needs two)",
    )
    SUM = Statistic(
        name="repeat of any",
        meaning="cosine between a round's residual and the sum of all earlier ones",
        law="a cosine of random directions; the length of the sum of all rounds is χ²",
        advice=COMES_BACK,
        refutes=1.0,
    )
    SHIFTED = Statistic(
        name="shifted repeat",
        meaning="share of a round's largest noise values that stand in another round at one common distance",
        law="signs of the 256 largest values agree with probability 1/2",
        advice="The same noise appears in two rounds at different positions. Look for noise that is cut from a "
        "buffer that was filled once, and draw fresh noise in every round. Clients that are missing from "
        "`others` have the same effect.",
    )
    REPEAT = Symptom(
        name="repeat",
        of=PAIR,
        always=(faults.CLIP_AFTER_AVERAGING, faults.NOISE_REUSED),
        sometimes=(*faults.WRONG_OTHERS, faults.NOISE_AFTER_ADAM, *faults.SIGNAL_IN_NOISE, faults.NOISE_IN_SUBSPACE),
        never=(
            *faults.SCALED_UPDATES,
            *faults.LITTLE_NOISE,
            *faults.BARE_PARTS,
            faults.SMALL_TENSOR_WITHOUT_NOISE,
            faults.NOISE_IN_LAST_ROUNDS,
            faults.NOISE_KEY_REUSED,
            faults.NOISE_IN_PAIRS,
            *faults.POOLED_NOISE,
            faults.CANARIES_LOST,
        ),
        precedence=50,
        cause="the same noise is repeated in another call. Draw new noise in every call: seed the generator once, outside",
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._with_before: list[float] = []
        self._total: Floats | None = None

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.white_residual is None:
            return
        own = unit(look.white_residual.unobserved)
        if self._total is None:
            self._total = own
        else:
            self._with_before.append(float(own @ self._total) / length(self._total))
            self._total += own

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        sketches = self.rounds.sketches
        if len(sketches.numbers) > 1 and self._total is not None:
            yield self.of_pairs(sketches.pairs, sketches.numbers, sketches.dof, level)
            yield self._common(np.array(self._with_before), self._total, sketches.numbers, level)
        counted = self.rounds.law.counted
        if len(counted) > 1 and not self.rounds.proofs_only:
            yield self._shifted(counted, self.rounds.law.dim, level)

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """Not by chance cosines of little noise, unless rounds are nearly equal."""
        repeats = [each for each in (results.outside(cls.PAIR), results.outside(cls.SUM)) if each is not None]
        little = Length.LOW_RESIDUAL in Length.shown(results)
        if any(not little or each.smallest > NEARLY_EQUAL for each in repeats):
            yield cls.REPEAT

    @classmethod
    def of_pairs(cls, compared: Pairs, numbers: list[int], dof: float, level: float) -> GaugeResult:
        """The largest cosine between the residuals of two rounds."""
        largest, _, pairs = compared.results()
        limit = float(-CosineNull(max(int(dof), 2)).ppf(level / (2 * pairs)))
        outside = np.abs(largest) > limit
        worst = float(np.nanmax(np.abs(largest)))
        certain = math.tanh(math.atanh(min(worst, 1 - 1e-12)) + float(ndtri(level / (2 * pairs))) / math.sqrt(dof))
        return cls.PAIR.result(
            float(np.nanmin(largest[1:])),
            float(np.nanmax(largest[1:])),
            limits=(-limit, limit),
            flagged=(numbers[index] for index in np.flatnonzero(outside)),
            noise_left=math.sqrt(1 - max(certain, 0.0) ** 2) if outside.any() else None,
            values=largest[1:],
        )

    def _common(self, with_before: Floats, total: Floats, numbers: list[int], level: float) -> GaugeResult:
        """A common part of all rounds: the cosine of each with the sum of all before, and the sum's norm."""
        dof, count = self.settings.unobserved_dof, len(numbers)
        limit = float(-CosineNull(max(int(dof), 2)).ppf(level / (4 * len(with_before))))
        outside = np.abs(with_before) > limit
        statistic = dof * float(total @ total) / count
        # the length of the sum of all rounds, as the cosine of the last one with the sum of those before
        mean, *ends = (
            _last_cosine(value / dof, count)
            for value in (statistic, 2 * float(gammaincinv(dof / 2, level / 4)), float(chdtri(dof, level / 4)))
        )
        pooled = min(float(chdtrc(dof, statistic)), float(gammainc(dof / 2, statistic / 2))) < level / 4
        shared = (statistic / float(chdtri(dof, level / 4)) * count - count) / (count * (count - 1))
        certain = max(shared, float((np.abs(with_before) - limit).max()) ** 2, 0.0)
        smallest, largest, limits = deciding_reading(with_before, (-limit, limit), mean, (ends[0], ends[1]))
        return self.SUM.result(
            smallest,
            largest,
            limits=limits,
            flagged=(numbers[index + 1] for index in np.flatnonzero(outside)),
            noise_left=math.sqrt(max(1 - certain, 0.0)) if outside.any() or pooled else None,
            values=with_before,
        )

    def _shifted(self, rounds: list[Round], dim: int, level: float) -> GaugeResult:
        """Whether the largest values of a round recur in another round at a common shift: noise taken twice from one stream.

        At a given shift the signs of two rounds' largest values agree by chance, each with probability one half. Shift 0 is
        left out, since correlated noise may repeat there; the other statistics test it. A client that is missing from
        `others` and whose update fills a block looks the same, so this prevents a PASS but proves nothing.
        """
        measured = [item for item in rounds if item.law_peaks is not None and item.law_peaks.size][:SHIFTED_ROUNDS]
        width = min(1 << (2 * dim - 1).bit_length(), SHIFTS)  # a power of 2: shifts are distinguished modulo it
        pairs = [(one, two) for index, one in enumerate(measured) for two in measured[:index]]
        each = level / (max(len(pairs), 1) * min(2 * dim, SHIFTS) * 2)
        readings = [_agreement(one, two, width) for one, two in pairs]
        outside = [index for index, (_, p_value) in enumerate(readings) if p_value < each]
        largest = max((agreed for agreed, _ in readings), default=0.0)
        longest = max((len(item.law_peaks) for item in measured if item.law_peaks is not None), default=1)
        smallest = math.ceil(-math.log2(each)) / longest
        return self.SHIFTED.result(
            min((agreed for agreed, _ in readings), default=0.0),
            largest,
            limits=(0.0, float(max(smallest, largest if not outside else 0.0))),
            flagged=sorted({pairs[index][0].number for index in outside}),
            failed=bool(outside),
            values=np.array([agreed for agreed, _ in readings]),
        )


def _last_cosine(square: float, count: int) -> float:
    """The cosine of a round with the sum of those before it, if the sum of all is √square times that of independent ones."""
    shared = (square - 1) / (count - 1)  # mean cosine of two rounds
    return shared * math.sqrt((count - 1) / (1 + (count - 2) * shared))


def _agreement(one: Round, two: Round, width: int) -> tuple[float, float]:
    """The share of largest values that agree in sign beyond chance at the best shift, and its p-value there."""
    assert one.law_peaks is not None
    assert two.law_peaks is not None
    places = (np.abs(one.law_peaks)[:, None] - np.abs(two.law_peaks)).ravel() & (width - 1)
    signs = (np.sign(one.law_peaks).astype(np.float64)[:, None] * np.sign(two.law_peaks)).ravel()
    excess = np.abs(np.bincount(places, weights=signs, minlength=width))
    excess[0] = 0.0  # shift 0
    largest = excess.max()
    both = min(int((places == place).sum()) for place in np.flatnonzero(excess == largest)[:8])
    p_value = 2 * float(bdtrc((both + largest) / 2 - 1, both, 0.5)) if largest else 1.0
    return float(largest) / len(one.law_peaks), p_value
