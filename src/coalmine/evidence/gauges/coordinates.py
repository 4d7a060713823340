"""Gauge of the noise in single coordinates, in each round and over the rounds.

The sum of a coordinate's standardised squares over T rounds is chi-squared with T degrees of freedom. The smallest and the
largest sum show a single coordinate. The number of sums below a quantile shows many coordinates that have somewhat less
noise, each of which may be chance.
"""

import math
from collections.abc import Iterator

import numpy as np
from scipy.special import bdtrc, betaincinv, chdtri, gammainc, ndtr, ndtri

from coalmine.argument_checks import count_of
from coalmine.evidence import faults
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, GaugeResult, Results, Statistic, Symptom
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.gaussian import DIVERGENCE
from coalmine.evidence.gauges.layers import NO_NOISE
from coalmine.evidence.views import RoundViews
from coalmine.measure.coordinate_sums import QUANTILES, CoordinateReading, chi_quantile
from coalmine.measure.noise_law import BARE, zero_width
from coalmine.measure.round import Round

SLACK = 0.995  # share of its layer's noise that every coordinate may have: rounding explains it
TOO_LONG = 1.02  # ratio to its layer's noise from which on a coordinate holds more than noise
TINY = 1e-3  # standard deviations per round: smaller limits are below what rounding leaves
PROOFS = 0.25  # share of the level that is spent on proofs, of the smallest sum and of the counts together
MANY = 3.0  # times as many values near 0 as expected: heavy tails alone give fewer
WEAK = (
    "Some coordinates get less noise than the rest of their tensor, round after round. Look for a mask, for "
    "rows or columns that are scaled, and for noise that is drawn for a part of a tensor. A note of the result names "
    "the tensor."
)


class Coordinates(Gauge):
    """Is there as much noise in each coordinate as in the rest of its layer?

    The last reading of each run without a restart has half of the level, and earlier ones, after 1, 2, 4, 8, ... rounds, the
    other half: they see coordinates that had too little noise in the first rounds only.
    """

    name = "coordinates"
    order = 60
    in_alarm = False
    EXTREMES = Statistic(
        name="coordinates",
        meaning="length of one coordinate's noise over the rounds, over that of its layer's noise",
        law="√(χ²_T/T), at its quantiles over all d coordinates",
        advice=WEAK,
        refutes=PROOFS / 2,
        needs_gaussian=True,
        sees_grids=True,
    )
    COUNTS = Statistic(
        name="weak coordinates",
        meaning="number of coordinates with little noise over the rounds, over the number that chance gives",
        law="binomial, below the 0.1 % and the 1 % quantile of χ²_T",
        advice=WEAK,
        refutes=PROOFS / 2,
        needs_gaussian=True,
        sees_grids=True,
    )
    ZEROS = Statistic(
        name="bare coordinates",
        meaning="coordinates with next to no noise, over the number that chance gives",
        law="binomial, in a round",
        advice="Some coordinates get next to no noise. Look for a mask, for frozen or padded parameters, and for "
        "tensors that skip the step that adds noise.",
    )
    NONE = Symptom(
        name="bare coordinates",
        of=ZEROS,
        always=(faults.COARSE_GRID,),
        sometimes=(*faults.MIXED_NOISE, faults.SMALL_TENSOR_WITHOUT_NOISE, faults.FINE_GRID, faults.LAPLACE_NOISE),
        never=(faults.COIN_FLIPS, *faults.BOUNDED_NOISE),
        precedence=40,
        cause=NO_NOISE,
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._readings: list[CoordinateReading] = []
        self._final = None if rounds.final is None else rounds.final.law_coordinates

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.item.law_coordinates is not None:
            self._readings.append(CoordinateReading.of(look.item.law_coordinates))

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; a correct run fails one with probability `level`."""
        if smooth := self.rounds.law.smooth:
            yield self._zeros(smooth, level)
        tests = [_Test(reading, share) for reading, share in self._tested(level)]
        if tests:
            yield _extremes(tests)
            yield _counts(tests)

    @classmethod
    def shown(cls, results: Results) -> Iterator[Symptom]:
        """Only by many coordinates near 0."""
        bare = results.outside(cls.ZEROS)
        yield from ([cls.NONE] if bare is not None and bare.largest > MANY else [])

    def _zeros(self, rounds: list[Round], level: float) -> GaugeResult:
        """Coordinates with hardly any noise: more than a Gaussian has near 0.

        If the canaries were subtracted exactly, a second count much closer to 0 detects single coordinates.
        """
        readings, dim, repeated = [], self.rounds.law.dim, self.rounds.law.repeated
        for column, width in enumerate((zero_width(dim), BARE)):
            measured = [item for item in rounds if item.law_zeros is not None and item.law_zeros.size > column]
            if measured:
                near = sum(int(item.law_zeros[column]) for item in measured if item.law_zeros is not None)
                count, total = near / repeated, dim * len(measured) / repeated
                probability = 2 * float(ndtr(width)) - 1
                p_value = float(bdtrc(math.ceil(count) - 1, round(total), probability)) if count else 1.0
                least = DIVERGENCE if column == 0 else 1 / dim
                excess = (count - probability * total) / total
                expected, odd = probability * total, p_value < level / 2 and excess > least
                most = expected + 4 - float(ndtri(level / 2)) * math.sqrt(expected)
                if odd:
                    most = max(_most(round(total), probability, level / 2), expected + least * total)
                readings.append((count / expected, odd, most / expected))
        failed = any(odd for _, odd, _ in readings) and not self.rounds.law.is_coarse(rounds)
        reading, _, limit = next((entry for entry in readings if entry[1]), readings[0])
        return self.ZEROS.result(reading, limits=(0.0, limit), failed=failed)

    def notes(self) -> list[str]:
        """The layer of the weak coordinates, and which coordinates and rounds were followed, if not all were."""
        tests = [_Test(reading, share) for reading, share in self._tested(LEVEL)]
        notes = []
        weak = next((test for test in tests if test.is_weak), None)
        if weak is not None:
            notes.append(f"coordinates: {self._weakness(weak)}")
        single = next((test for test in tests if test.is_small), None)
        if single is not None:
            reading = single.reading
            share = f"{single.smallest:.3g} of its layer's noise over {_rounds(reading)}"
            notes.append(f"coordinates: one coordinate{self._layer(reading.smallest_layer)} holds {share}")
        ends = self._ends()
        dim = self.settings.dim
        if ends and ends[-1].followed < dim:
            notes.append(
                f"coordinates: {ends[-1].followed:,} of {dim:,}, which the seed chose, were followed over the rounds"
            )
        if len(ends) > 1:
            covered = ", then ".join(_rounds(reading) for reading in ends[-3:])
            notes.append(f"coordinates: after a restart they are followed anew: {covered}")
        return notes

    def _ends(self) -> list[CoordinateReading]:
        """The last reading of each run without a restart."""
        readings = [*self._readings, *([] if self._final is None else [CoordinateReading.of(self._final)])]
        after = [reading.first for reading in readings[1:]]
        return [one for place, one in enumerate(readings) if place == len(after) or after[place] > one.first]

    def _tested(self, level: float) -> Iterator[tuple[CoordinateReading, float]]:
        """The readings that are tested, with the level of each."""
        ends = self._ends()
        early = [
            one for one in self._readings if one.rounds & (one.rounds - 1) == 0 and all(one is not end for end in ends)
        ]
        part = level / 2 if early else level
        yield from ((reading, part / len(ends)) for reading in ends)
        yield from ((reading, part / len(early)) for reading in early)

    def _weakness(self, test: "_Test") -> str:
        reading, name = test.reading, ""
        if self.settings.layers:
            layer = int(np.argmax(reading.by_layer))
            name = f", {reading.by_layer[layer]:,} of them{self._layer(layer)}"
        return (
            f"{reading.counts[-1]:,} of {reading.followed:,} hold less noise over {_rounds(reading)} than all but "
            f"{QUANTILES[-1]:.0%} of honest ones{name}"
        )

    def _layer(self, number: int) -> str:
        layers = self.settings.layers
        return f" in layer {layers[number][0]}" if number < len(layers) else ""


def _rounds(reading: CoordinateReading) -> str:
    if reading.last - reading.first + 1 == reading.rounds:
        return f"rounds {reading.first} to {reading.last}" if reading.rounds > 1 else f"round {reading.first}"
    return f"{count_of(reading.rounds, 'round')} from {reading.first} to {reading.last}"


class _Test:
    """The limits of one reading at a level: half of it for small sums, half for large ones.

    Of the half for small sums, the smallest one has half, and each count a quarter.
    """

    def __init__(self, reading: CoordinateReading, level: float) -> None:
        self.reading = reading
        rounds, followed = reading.rounds, max(reading.followed, 1)
        low = SLACK * math.sqrt(chi_quantile(level / 4 / followed, rounds) / rounds)
        self.low = low if low > TINY else 0.0
        high = math.sqrt(float(chdtri(rounds, level / 2 / followed)) / rounds)
        self.high = TOO_LONG * high if reading.complete else math.inf
        self.smallest = math.sqrt(reading.smallest / rounds)
        self.largest = math.sqrt(reading.largest / rounds)
        limits = [chi_quantile(probability, rounds) for probability in QUANTILES]
        self.expected = [float(gammainc(rounds / 2, limit / SLACK**2 / 2)) for limit in limits]
        self.p_values = [
            float(bdtrc(count - 1, followed, expected)) if count else 1.0
            for count, expected in zip(reading.counts, self.expected, strict=True)
        ]
        self._count_level = level / 4 / len(QUANTILES)
        self._proof_level = PROOFS * level / 2
        self._limits = limits

    @property
    def is_small(self) -> bool:
        """Whether one coordinate has too little noise."""
        return self.smallest < self.low

    @property
    def is_weak(self) -> bool:
        """Whether too many coordinates have little noise."""
        return min(self.p_values) < self._count_level

    @property
    def ratio(self) -> tuple[float, float]:
        """The number of small sums over the expected one, at the quantile that shows most, and its limit."""
        place = int(np.argmin(self.p_values))
        expected = self.expected[place] * self.reading.followed
        return self.reading.counts[place] / expected, _most(
            self.reading.followed, self.expected[place], self._count_level
        ) / expected

    @property
    def noise_left_in_one(self) -> float:
        """An upper confidence limit on the noise of the weakest coordinate, as a share of its layer's."""
        rounds = self.reading.rounds
        low = chi_quantile(self._proof_level / max(self.reading.followed, 1), rounds)
        return math.sqrt(self.reading.smallest / low) if low else math.inf

    @property
    def noise_left_in_some(self) -> float:
        """The same from the counts: with this share in all of them, so many small sums would be as unlikely as the level."""
        followed, left = self.reading.followed, 1.0
        for count, limit in zip(self.reading.counts, self._limits, strict=True):
            if count:
                share = float(betaincinv(count, followed - count + 1, self._proof_level / len(QUANTILES)))
                quantile = chi_quantile(share, self.reading.rounds)
                left = min(left, math.sqrt(limit / quantile)) if quantile else left
        return left


def _most(trials: int, probability: float, level: float) -> int:
    """The largest number of successes that is not outside the level."""
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        if float(bdtrc(middle, trials, probability)) < level:
            high = middle
        else:
            low = middle + 1
    return low


def _extremes(tests: list[_Test]) -> GaugeResult:
    """The noise of single coordinates. The reading that fails, or the last one, has the limits."""
    small = [test for test in tests if test.is_small]
    large = [test for test in tests if test.largest > test.high]
    shown = (small or large or tests)[0]
    left = min((test.noise_left_in_one * test.reading.spread for test in small), default=1.0)
    return Coordinates.EXTREMES.result(
        shown.smallest,
        shown.largest,
        limits=(shown.low, shown.high),
        failed=bool(small or large),
        noise_left=left if left < 1 else None,
        values=np.array([test.smallest for test in tests]),
    )


def _counts(tests: list[_Test]) -> GaugeResult:
    """The number of coordinates with little noise."""
    weak = [test for test in tests if test.is_weak]
    reading, limit = (weak or tests)[0].ratio
    left = min((test.noise_left_in_some * test.reading.spread for test in weak), default=1.0)
    return Coordinates.COUNTS.result(
        reading, limits=(0.0, limit), failed=bool(weak), noise_left=left if left < 1 else None
    )
