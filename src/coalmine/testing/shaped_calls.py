"""Calls with updates of special shapes: one coordinate, few coordinates, or all coordinates equally large.

Dense canaries touch every coordinate of the sum, so they miss noise that is added only where the sum is not 0. They also
miss a clip by another norm, or by the norm of some coordinates, that agrees with the L2 norm on dense updates only.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import bdtrc, erf, ncfdtr

from coalmine.argument_checks import Floats
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.verdict.findings.checks import ClientTooLoud, SilentCoordinates
from coalmine.verdict.findings.noise import MeanTooHigh
from coalmine.verdict.verdict import Verdict

LEVEL = 1e-4  # of each test of shaped calls or single clients, over all calls of a check
STRETCH = 8  # one-hot updates often lie in one of this many parts of the coordinates
SILENT_FACTOR, SILENT_SHARE = 1.5, 1e-3  # zeros that rounding explains: this factor and share above the expected ones
Shape = Literal["one-hot", "sparse", "flat"]


@dataclass(frozen=True)
class ShapedPattern:
    """Orthogonal updates of one shape and of norm `length`, in clip norms.

    "one-hot": each client has a coordinate of its own. "sparse": each has an equal share of one half of the coordinates.
    "flat": the values are equally large, with other signs for each client, in a power of two of the coordinates.
    """

    name: Shape
    clients: int
    dim: int
    length: float

    def units(self, seed: bytes, call: int) -> Floats:
        """One row of norm 1 for every client."""
        turn = call // {"one-hot": 3, "sparse": 2, "flat": 1}[self.name]  # calls that share their random numbers
        rng = np.random.default_rng([*seed[:64], *self.name.encode(), turn])
        rows = np.zeros((self.clients, self.dim))
        if self.name == "flat":
            rows[:, rng.permutation(self.dim)[: self._span]] = self._signs(rng) / math.sqrt(self._span)
            return rows
        columns = self._one_hot(rng, call) if self.name == "one-hot" else self._sparse(rng, call)
        values = rng.choice([-1.0, 1.0], columns.shape) / math.sqrt(columns.shape[1])
        np.put_along_axis(rows, columns, values, axis=1)
        return rows

    def _one_hot(self, rng: np.random.Generator, call: int) -> npt.NDArray[np.int64]:
        """Evenly spread over all coordinates in every third call; in the others in one stretch of them, or the opposite one.

        So a stretch of dim / clients coordinates has a client in some call, and a layer of less than 3/8 of them has none.
        """
        stretch = self.dim if call % 3 == 1 else max(2 * self.clients, self.dim // STRETCH)
        start = int(rng.integers(self.dim)) + (self.dim // 2 if call % 3 == 2 else 0)
        steps = np.arange(self.clients) * stretch // self.clients
        return (start + rng.permutation(steps)[:, None]) % self.dim

    def _sparse(self, rng: np.random.Generator, call: int) -> npt.NDArray[np.int64]:
        count = self.clients * max(self.dim // (2 * self.clients), 1)
        # two calls in turn cover all coordinates
        return rng.permutation(self.dim)[: 2 * count].reshape(2, self.clients, -1)[call % 2]

    @property
    def _span(self) -> int:
        return 1 << (self.dim.bit_length() - 1)

    def _signs(self, rng: np.random.Generator) -> Floats:
        """Rows of a Hadamard matrix, with random signs of its columns."""
        chosen = rng.permutation(self._span)[: self.clients, None] & np.arange(self._span)
        for shift in (32, 16, 8, 4, 2, 1):
            chosen ^= chosen >> shift
        return (1.0 - 2.0 * (chosen & 1)) * rng.choice([-1.0, 1.0], self._span)


def shaped_patterns(clients: int, dim: int, length: float) -> list[ShapedPattern]:
    """The patterns of a check; flat updates add nothing to dense ones that are as long as the clip norm."""
    names: list[Shape] = ["one-hot", "sparse", "flat"]
    return [ShapedPattern(name, clients, dim, length) for name in names]


@dataclass(frozen=True)
class ShapedCall:
    """One release: the inner product with each client's unit update, and the release without the clients.

    `rest` has `dof` degrees of freedom. If the clients leave coordinates empty, it consists of these, and `energies` are the
    squared norms of the release on the coordinates of each client, `size` in number.
    """

    along: Floats
    rest: Floats
    dof: float
    energies: Floats | None = None
    size: int = 0

    @classmethod
    def of(cls, vector: Floats, units: Floats) -> "ShapedCall":
        """A call of which `vector` is the release."""
        along, own = units @ vector, units != 0
        empty = ~own.any(axis=0)
        size = int(own[0].sum())
        if 2 * len(units) * size > vector.size:  # flat updates, which leave too few coordinates empty
            return cls(along, vector - along @ units, float(vector.size - along.size))
        return cls(along, vector[empty], float(empty.sum()), own @ vector**2, size)

    @property
    def noise(self) -> float:
        """The std of the noise."""
        return math.sqrt(float(self.rest @ self.rest) / self.dof)


def judge_shaped(calls: list[ShapedCall], claimed: float) -> tuple[Verdict, NoiseSignal] | None:
    """VIOLATION, and the signal that it is about, if the calls of one pattern refute a claim; None if not.

    `claimed` is the mean score that the claim implies. The noise is Gaussian.
    """
    if calls[0].energies is None:
        return _mean(calls, claimed)
    return _silent(calls) or _mean(calls, claimed) or _client(calls, claimed)


def _silent(calls: list[ShapedCall]) -> tuple[Verdict, NoiseSignal] | None:
    """VIOLATION if coordinates without a client are exactly 0 more often than rounded noise is."""
    empty = np.concatenate([call.rest for call in calls])
    zeros = int(np.sum(empty == 0))
    share = zeros / empty.size
    if zeros < empty.size:
        step = float(np.abs(empty[empty != 0]).min())  # of a grid; tiny if the noise is continuous
        expected = float(erf(step / (2 * math.sqrt(2 * float(np.mean(empty**2))))))
    else:
        expected = 0.0
    p_value = float(bdtrc(zeros - 1, empty.size, min(SILENT_FACTOR * expected + SILENT_SHARE, 1.0))) if zeros else 1.0
    if p_value >= LEVEL:
        return None
    verdict = Verdict(finding=SilentCoordinates(factor=share, p_value=p_value, level=LEVEL))
    return verdict, NoiseSignal(math.inf, 0.0, math.inf, math.inf, 0.0)


def _mean(calls: list[ShapedCall], claimed: float) -> tuple[Verdict, NoiseSignal] | None:
    """VIOLATION if the clients contribute more on average than the claim implies."""
    scores = np.concatenate([call.along / call.noise for call in calls])
    free = calls[0].dof
    signal = NoiseSignal(float(scores.mean()), float(scores.size), free * len(calls), free, float(scores.mean()) ** 2)
    p_value = signal.p_value(claimed)
    if p_value >= LEVEL:
        return None
    found = MeanTooHigh(
        score=signal.beta,
        claimed_score=claimed,
        p_value=p_value,
        level=LEVEL,
        claimed_noise=1 / claimed,
        measured_noise=1 / signal.beta,
    )
    return Verdict(finding=found, rung="known-others"), signal


def _client(calls: list[ShapedCall], claimed: float) -> tuple[Verdict, NoiseSignal] | None:
    """VIOLATION if the release on the coordinates of one client is longer than the claim explains, in any direction."""
    clients = sum(call.along.size for call in calls)
    smallest, score, freedom = 1.0, 0.0, math.inf
    for call in calls:
        assert call.energies is not None
        worst = float(call.energies.max()) / call.noise**2
        p_value = float(1 - ncfdtr(call.size, call.dof, claimed**2, worst / call.size))
        if p_value < smallest:
            smallest, score, freedom = p_value, math.sqrt(max(worst - call.size, 0.0)), call.dof
    p_value = min(smallest * clients, 1.0)
    if p_value >= LEVEL:
        return None
    return client_verdict(score, claimed, p_value), NoiseSignal(score, 1.0, freedom, freedom, score**2)


def client_verdict(score: float, claimed: float, p_value: float) -> Verdict:
    """The verdict if one client contributes too much; contributions are in standard deviations of the noise."""
    found = ClientTooLoud(
        score=score,
        claimed_score=claimed,
        p_value=p_value,
        level=LEVEL,
        claimed_noise=1 / claimed,
        measured_noise=1 / score,
    )
    return Verdict(finding=found, rung="known-others")
