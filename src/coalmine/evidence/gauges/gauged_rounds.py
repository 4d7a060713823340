"""What several gauges need of the rounds of a run: the measurements of the noise's law, and sketches of the residuals."""

import math
from collections.abc import Container
from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.evidence.views import FEWEST_COLUMNS, SKETCH, RoundViews, sketch_columns
from coalmine.measure.noise_law import CELL, MANY_COORDINATES, NoiseParts
from coalmine.measure.round import Final, Round
from coalmine.measure.settings import Settings

COMPARED = SKETCH // FEWEST_COLUMNS  # each round is compared with at most this many before it
BLOCK = 512  # rounds that are compared at a time
SINGLE = 1e-5  # more than a cosine of unit vectors in single precision is off
GRID_STRENGTH = (
    0.05  # modulus of the characteristic function, 0 to 1; half-precision noise has less at these frequencies
)
ALIGNED = 0.5  # modulus of the characteristic function, 0 to 1, from which on most values lie on the grid
FINE_STEP = 0.25 * CELL  # standard deviations: a coarser grid of release and `others` shows in the histogram
COARSE_RELEASE = (
    0.1  # share of rounding in the residual's variance from which on the law of the noise cannot be measured
)


class GaugedRounds:
    """Takes one round after another, before the gauges do.

    `expected` is the approximate number of rounds to come. Every round is compared with all earlier ones, or, if `compared`
    is given, only the rounds with these numbers are, which is enough for a picture. `final` is the record of the final
    model. `proofs_only` leaves out what cannot refute a claim.
    """

    def __init__(
        self,
        settings: Settings,
        expected: int,
        *,
        compared: Container[int] | None = None,
        final: Final | None = None,
        proofs_only: bool = False,
    ) -> None:
        self.settings, self.final, self.proofs_only = settings, final, proofs_only
        self.law = LawRounds(settings)
        self.sketches = Sketches(settings, expected, compared)
        self.count = self.residuals = 0

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        self.count += 1
        self.residuals += look.item.residual_norm is not None
        self.law.add(look)
        self.sketches.add(look)

    @property
    def misses_law(self) -> bool:
        """Whether the law of the noise was not measured where it had to be.

        A large model is measured in the rounds that the key draws, so it only needs a residual in every round.
        """
        large = self.settings.dim > MANY_COORDINATES
        return not self.law.all or (self.residuals if large else len(self.law.all)) < self.count


class LawRounds:
    """The rounds in which the law of the noise was measured."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.all: list[Round] = []

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        if look.item.law_moments is not None:
            self.all.append(_without_scores(look.item))

    @property
    def dim(self) -> int:
        """The number of measured coordinates."""
        return self._settings.law_dim

    @property
    def parts(self) -> NoiseParts:
        """The layers of the measured coordinates."""
        return NoiseParts.of_all(self._settings)

    @property
    def sizes(self) -> Floats:
        """The number of coordinates of each group of layers."""
        return np.array([place.stop - place.start for place in self.parts.groups], dtype=np.float64)

    @property
    def counted(self) -> list[Round]:
        """The rounds with the expensive measurements."""
        return [item for item in self.all if item.law_counts is not None]

    @property
    def smooth(self) -> list[Round]:
        """Those among them whose release does not lie on a coarse grid."""
        return [item for item in self.counted if not self._on_lattice(item)]

    @property
    def repeated(self) -> float:
        """The factor by which correlated noise increases the variance of a sum over rounds: ΣK²/T over pairs of rounds.

        K is the correlation of two rounds' noise; the measurements within a round are of second order or higher in it.
        """
        noise = self._settings.noise
        if noise is None or not self.all:
            return 1.0
        rows = np.linalg.inv(noise.matrix())[np.array([item.number for item in self.all]) - 1]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return float(np.square(rows @ rows.T).sum()) / len(self.all)

    def rounding(self, rounds: list[Round]) -> Floats:
        """The share of rounding in each residual's variance."""
        return np.array([(item.rounding or 0.0) * self.dim / variance(item) for item in rounds])

    def is_coarse(self, rounds: list[Round]) -> bool:
        """Whether the release was rounded so coarsely that the law of the noise cannot be measured."""
        return float(self.rounding(rounds).max()) > COARSE_RELEASE

    def _on_lattice(self, item: Round) -> bool:
        """Whether release and `others` lie on a coarse grid: then the residual does too, which costs no privacy."""
        std = math.sqrt(variance(item) / self.dim)
        if math.sqrt(item.lattice or 0.0) > FINE_STEP * std:
            return True
        assert item.law_grid is not None
        strength, frequency, own, _ = item.law_grid
        return bool(strength > GRID_STRENGTH and own > ALIGNED and frequency * FINE_STEP < 1)


def variance(item: Round) -> float:
    """The sum of squares of a round's noise."""
    assert item.law_moments is not None
    return float(item.law_moments.reshape(-1, 3)[:, 1].sum())


def _without_scores(item: Round) -> Round:
    """A copy of the record without its long arrays, and not a view of the file: a run has many rounds."""
    kept: dict[str, Any] = {
        name: np.array(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(item).items()
        if name not in ("cosines", "residual_cosines", "scores")
    }
    return Round(**kept)


class Sketches:
    """Sketches of the residuals: their scores along the unobserved canaries, with momentum undone and correlation whitened.

    They cost nothing: the scores are in the log. `expected` is the number of rounds, so that all sketches fit in memory. If
    there are more than 32,768 rounds, each is compared only with that many before it.
    """

    def __init__(self, settings: Settings, expected: int, compared: Container[int] | None) -> None:
        self._compared = compared
        self._columns = sketch_columns(settings, expected)
        self._settings = settings
        self.pairs = Pairs()
        self.numbers: list[int] = []

    @property
    def dof(self) -> float:
        """The degrees of freedom of a sketch."""
        return self._settings.unobserved_dof * (self._columns / self._settings.unobserved)

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        view = look.white_residual
        if view is None:
            return
        wanted = self._compared is None or view.number in self._compared
        self.pairs.add(unit(view.unobserved)[: self._columns].astype(np.float32), compared=wanted)
        self.numbers.append(view.number)


def unit(vector: Floats) -> Floats:
    """The vector over its length."""
    return vector / length(vector)


def length(vector: Floats) -> float:
    """The Euclidean norm."""
    return math.sqrt(float(vector @ vector))


class Pairs:
    """Cosines between every two rounds, at most COMPARED apart: for each round the largest one, and the sum of squares.

    The sum of squares follows from the sum of the rows' outer products, which is exact and linear in the rounds. The largest
    cosines are searched in single precision, and those that may be the largest are computed again in double precision:
    single precision differs from processor to processor.
    """

    def __init__(self) -> None:
        self._before: list[Floats] = []  # blocks of unit vectors of the last rounds
        self._singles: list[npt.NDArray[np.float32]] = []  # the same in single precision
        self._outer: Floats | None = None  # the sum of their outer products
        self._new: list[Floats] = []
        self._wanted: list[bool] = []  # whether a new round is compared with those before it
        self._largest: list[Floats] = []
        self._squares, self._count = 0.0, 0

    def add(self, row: npt.NDArray[np.float32], *, compared: bool = True) -> None:
        """Take the sketch of the next round, to be compared with those before it, or only those after it with this one."""
        self._new.append(unit(row.astype(np.float64)))
        self._wanted.append(compared)
        if len(self._new) == BLOCK:
            self._compare()

    def results(self) -> tuple[Floats, float, int]:
        """Each round's largest cosine with a previous round, the sum of squares, and the number of pairs.

        The largest cosine of a round that was not compared with those before it is NaN.
        """
        self._compare()
        return np.concatenate([np.zeros(0), *self._largest]), self._squares, self._count

    def _compare(self) -> None:
        """Compare the new rows with those before them and with each other."""
        if not self._new:
            return
        new, wanted = np.stack(self._new), np.flatnonzero(self._wanted)
        before = sum(map(len, self._before))
        own = new if wanted.size == len(new) else new[wanted]
        singles, found = own.astype(np.float32), np.zeros(wanted.size)
        for block, block_singles in zip(self._before, self._singles, strict=True):
            found = _larger(own, block, singles @ block_singles.T, found)
        if self._outer is None:
            self._outer = np.zeros((new.shape[1], new.shape[1]))
        self._squares += float(np.vdot(own @ self._outer, own))
        among = own @ new.T
        among[np.arange(len(new)) >= wanted[:, None]] = 0.0  # each pair once
        self._squares += float(np.vdot(among, among))
        largest = np.full(len(new), np.nan)
        largest[wanted] = _larger_of(among, found)
        self._largest.append(largest)
        self._count += int(before * wanted.size + wanted.sum())
        self._keep(new)
        self._new, self._wanted = [], []

    def _keep(self, new: Floats) -> None:
        """Keep a block for the rounds that follow, and forget blocks that are too far back."""
        assert self._outer is not None
        self._before.append(new)
        self._singles.append(new.astype(np.float32))
        self._outer += new.T @ new
        while sum(map(len, self._before)) > COMPARED:
            old = self._before.pop(0)
            self._singles.pop(0)
            self._outer -= old.T @ old


def _larger(own: Floats, block: Floats, cosines: npt.NDArray[np.float32], largest: Floats) -> Floats:
    """The largest cosine of each row in absolute value, where `largest` is that of earlier blocks.

    `cosines` are in single precision: all that may be the largest are computed again.
    """
    most = np.maximum(cosines.max(axis=1), -cosines.min(axis=1)).astype(np.float64)
    rows = np.flatnonzero(most > np.abs(largest) - SINGLE)
    if not rows.size:
        return largest
    near, column = np.nonzero(np.abs(cosines[rows]) >= (most[rows] - SINGLE)[:, None])
    exact = np.zeros((rows.size, block.shape[0]))
    exact[near, column] = np.einsum("ij,ij->i", own[rows[near]], block[column])
    found = largest.copy()
    found[rows] = _larger_of(exact, largest[rows])
    return found


def _larger_of(cosines: Floats, largest: Floats) -> Floats:
    high, low = cosines.max(axis=1, initial=0.0), cosines.min(axis=1, initial=0.0)
    found = np.where(high >= -low, high, low)
    return np.where(np.abs(found) > np.abs(largest), found, largest)
