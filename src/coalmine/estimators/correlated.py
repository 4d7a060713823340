"""Noise that is correlated between rounds, and its epsilon: the tree of DP-FTRL, and banded matrix factorisation.

Round t releases its sum X_t with noise Z_t, where Z = C⁻¹ζ, C is lower triangular and ζ is independent normal noise. An
attacker who sees all rounds can multiply by C, so the release is equivalent to CX + ζ, a Gaussian mechanism. A client who
takes part in the rounds that u marks changes CX by at most ‖Cu‖ clip norms: no entry of C is negative, so the worst case
is the same update every time. Epsilon is therefore exactly that of one Gaussian release with noise multiplier z/‖Cu‖,
without amplification by sampling. This holds even if updates depend on earlier releases (Denisov et al. 2022, arXiv
2202.08312).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from coalmine.argument_checks import (
    Floats,
    WrongTypeError,
    finite_array,
    nonnegative,
    nonnegative_array,
    one_number,
    short_repr,
    whole_number,
)
from coalmine.estimators.mechanism import mechanism_epsilon


class Encoder(Protocol):
    """Multiplies a stream of vectors by C, one round after the other."""

    def add(self, round_number: int, values: Floats) -> Floats | None:
        """Row `round_number` of CX, or None if a round that it depends on was never added. `values` are not copied."""
        ...


@dataclass(frozen=True, kw_only=True)
class TreeNoise:
    """Tree aggregation (Kairouz et al. 2021, arXiv 2103.00039): a prefix sum has the noise of the nodes that form it.

    Node t sums the rounds from t − 2^j + 1 to t, where 2^j is the largest power of two that divides t, and adds its own
    noise. The nodes of a prefix are t, t − 2^j, and so on, so the noise of a round is N_t − N_{t−1}: that of its own node
    minus that of its children. Row t of C is node t. After `restart` rounds a new tree begins. The noise multiplier is
    that of one node.
    """

    rounds: int
    restart: int | None = None

    def __post_init__(self) -> None:
        whole_number("rounds", self.rounds, minimum=1)
        if self.restart is not None:
            whole_number("restart", self.restart, minimum=1)

    @property
    def span(self) -> int:
        """The number of rounds of one tree."""
        return min(self.restart or self.rounds, self.rounds)

    def children(self, round_number: int) -> list[int]:
        """The children of this round's node: together with the round itself they make up the node."""
        _check_round(round_number, self.rounds)
        place = (round_number - 1) % self.span + 1
        return [round_number - (1 << level) for level in range(_twos(place))]

    def std(self, round_number: int) -> float:
        """The noise std of a round divided by that of one node: √(1 + number of children)."""
        return math.sqrt(1 + len(self.children(round_number)))

    def strength(self, rounds: Iterable[int]) -> float:
        """‖Cu‖² of a client who takes part in these rounds: the sum over nodes of the squared number of its rounds."""
        counts: dict[int, int] = {}
        for number in rounds:
            _check_round(number, self.rounds)
            first = (number - 1) // self.span * self.span
            place, last = number - first, min(self.span, self.rounds - first)
            while place <= last:
                counts[first + place] = counts.get(first + place, 0) + 1
                place += place & -place
        return float(sum(count * count for count in counts.values()))

    def worst_strength(self, participations: int, separation: int) -> float:
        """An upper bound on ‖Cu‖² for this many rounds, at least `separation` apart; exact for one round.

        A node of 2^j rounds contains at most ⌈2^j/separation⌉ of them, and the squares are largest if nodes are full. The
        bound is attained at each level alone, but not always at all levels at once.
        """
        times = _check_pattern(participations, separation, self.rounds)
        total = 0
        for level in range(self.span.bit_length()):
            full = min(times, -(-(1 << level) // separation))
            held = min(times, full * self._nodes(level))
            total += held // full * full**2 + (held % full) ** 2
        return float(total)

    def encoder(self) -> Encoder:
        return _TreeEncoder(self)

    def matrix(self) -> Floats:
        """C as a dense matrix; use it for few rounds only."""
        return _matrix(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "tree", "rounds": self.rounds, "restart": self.restart}

    def _nodes(self, level: int) -> int:
        """The number of nodes with 2^level rounds, in all trees."""

        def nodes_in_tree(size: int) -> int:
            return (size >> level) - (size >> (level + 1))

        trees, rest = divmod(self.rounds, self.span)
        return trees * nodes_in_tree(self.span) + nodes_in_tree(rest)


@dataclass(frozen=True, kw_only=True)
class BandedNoise:
    """Banded matrix factorisation (Choquette-Choo et al. 2023, arXiv 2306.08153): C has `coefficients` below its diagonal.

    Column s of C holds them from row s on, and every column is scaled to length 1. The noise multiplier is that of ζ. A
    client who takes part R times, at least as many rounds apart as there are bands, has ‖Cu‖² = R. Coefficients must not
    increase, so that C⁻¹ stays bounded.
    """

    rounds: int
    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        whole_number("rounds", self.rounds, minimum=1)
        values = nonnegative_array("coefficients", finite_array("coefficients", self.coefficients))
        if values.ndim != 1 or not values.size or not values[0] > 0:
            raise ValueError(f"coefficients must be a list that starts above 0, got {self.coefficients}")
        if (np.diff(values) > 0).any():
            raise ValueError("coefficients must not increase from one to the next: the noise would grow")
        if values.size > self.rounds:
            raise ValueError(f"bands must be at most rounds = {self.rounds}, got {values.size}")
        object.__setattr__(self, "coefficients", tuple(float(value) for value in values))

    @classmethod
    def for_prefix_sums(cls, rounds: int, *, bands: int, momentum: float = 0.0) -> "BandedNoise":
        """The bands for a server that adds up the rounds, with `momentum`.

        They are the square root of the server's Toeplitz matrix, cut to `bands` (Kalinin and Lampert 2024, arXiv
        2405.13763): a closed form whose error is within 5 % of the best Toeplitz bands (docs/evidence/noise.md).
        """
        count = whole_number("bands", bands, minimum=1)
        beta = one_number("momentum", momentum)
        if not 0 <= beta < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {beta}")
        root = np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, count)]))  # of 1/√(1 − x)
        return cls(rounds=rounds, coefficients=tuple(np.convolve(root, root * beta ** np.arange(count))[:count]))

    @property
    def bands(self) -> int:
        return len(self.coefficients)

    @cached_property
    def unit(self) -> Floats:
        """The coefficients as a vector of length 1: a column of C, except the last ones."""
        plain = np.array(self.coefficients)
        return np.asarray(plain / np.linalg.norm(plain))

    def column_norm(self, round_number: int) -> float:
        """The length of a column before scaling; below 1 if the run ends before the bands do. Column s is divided by it."""
        _check_round(round_number, self.rounds)
        return float(self._column_norms[min(self.rounds - round_number + 1, self.bands) - 1])

    @cached_property
    def _column_norms(self) -> Floats:
        return np.asarray(np.sqrt(np.cumsum(self.unit**2)) / np.sqrt(np.sum(self.unit**2)))

    def std(self, round_number: int) -> float:
        """The noise std of a round divided by that of ζ: the length of row t of C⁻¹."""
        return self.column_norm(round_number) * float(self._row_norms[round_number - 1])

    @cached_property
    def _row_norms(self) -> Floats:
        """Lengths of the rows of the inverse Toeplitz matrix, which are prefixes of one series."""
        series = np.zeros(self.rounds)
        series[0] = 1 / self.unit[0]
        for place in range(1, self.rounds):
            before = series[max(0, place - self.bands + 1) : place][::-1]
            series[place] = -(self.unit[1 : before.size + 1] @ before) / self.unit[0]
        return np.asarray(np.sqrt(np.cumsum(series**2)))

    def strength(self, rounds: Iterable[int]) -> float:
        """‖Cu‖² of a client who takes part in these rounds."""
        moved = np.zeros(self.rounds)
        for number in rounds:
            column = self._column(number)
            moved[number - 1 : number - 1 + column.size] += column
        return float(moved @ moved)

    def worst_strength(self, participations: int, separation: int) -> float:
        """An upper bound on ‖Cu‖² for this many rounds, at least `separation` apart.

        Exact for one round, or if separation ≥ bands. The i-th and the (i+j)-th participation are at least j·separation
        rounds apart, and contribute at most the largest product of two columns that far apart.
        """
        times = _check_pattern(participations, separation, self.rounds)
        between = sum((times - j) * self._largest_product(j * separation) for j in range(1, times))
        return times + 2 * between

    def _largest_product(self, apart: int) -> float:
        return float(self._products[apart:].max(initial=0.0))

    @cached_property
    def _products(self) -> Floats:
        """The largest product of two columns of C at each distance, including columns cut off by the end of the run."""
        largest = np.zeros(self.bands)
        for apart in range(self.bands):
            for first in range(max(1, self.rounds - 2 * self.bands), self.rounds - apart + 1):
                left, right = self._column(first)[apart:], self._column(first + apart)
                size = min(left.size, right.size)
                largest[apart] = max(largest[apart], float(left[:size] @ right[:size]))
        return largest

    def encoder(self) -> Encoder:
        return _BandedEncoder(self)

    def matrix(self) -> Floats:
        """C as a dense matrix; use it for few rounds only."""
        return _matrix(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "banded", "rounds": self.rounds, "coefficients": list(self.coefficients)}

    def _column(self, round_number: int) -> Floats:
        norm = self.column_norm(round_number)
        return self.unit[: self.rounds - round_number + 1] / norm


CorrelatedNoise = TreeNoise | BandedNoise


def correlated_noise(values: Mapping[str, Any]) -> CorrelatedNoise:
    """The inverse of to_dict."""
    if values["kind"] == "tree":
        return TreeNoise(rounds=values["rounds"], restart=values["restart"])
    if values["kind"] == "banded":
        return BandedNoise(rounds=values["rounds"], coefficients=tuple(values["coefficients"]))
    raise ValueError(
        f"the kind of noise must be tree or banded, got {values['kind']!r}; was it written by a newer coalmine?"
    )


def correlated_epsilon(
    noise_multiplier: float,
    *,
    noise: CorrelatedNoise,
    delta: float,
    participations: int = 1,
    separation: int = 1,
) -> float:
    """An upper bound on epsilon for a client who takes part `participations` times; no amplification by sampling.

    Participations are at least `separation` rounds apart. Exact for one participation, and for banded noise with at most
    `separation` bands (see `worst_strength`). For known rounds, mechanism_epsilon(noise_multiplier/√noise.strength(rounds))
    is exact.

    >>> tree = TreeNoise(rounds=64)
    >>> round(correlated_epsilon(2.0, noise=tree, delta=1e-6), 2)  # the round is in 7 nodes: noise 2/√7
    6.74
    """
    if not isinstance(noise, TreeNoise | BandedNoise):
        raise WrongTypeError(f"noise must be a TreeNoise or a BandedNoise, got {short_repr(noise)}")
    multiplier = nonnegative("noise_multiplier", noise_multiplier)
    strength = noise.worst_strength(participations, separation)
    return float(mechanism_epsilon(multiplier / math.sqrt(strength), delta=delta))


class _TreeEncoder:
    """Keeps node sums until their parent node needs them."""

    def __init__(self, noise: TreeNoise) -> None:
        self._noise = noise
        self._nodes: dict[int, Floats] = {}

    def add(self, round_number: int, values: Floats) -> Floats | None:
        children = self._noise.children(round_number)
        if (round_number - 1) % self._noise.span == 0:
            self._nodes.clear()
        parts = [self._nodes.pop(child, None) for child in children]
        total = values
        for part in parts:
            if part is None:
                return None
            total = total + part
        self._nodes[round_number] = total
        return total


class _BandedEncoder:
    """Keeps the last rounds, as many as there are bands."""

    def __init__(self, noise: BandedNoise) -> None:
        self._noise = noise
        self._recent: dict[int, Floats] = {}

    def add(self, round_number: int, values: Floats) -> Floats | None:
        self._recent[round_number] = values / self._noise.column_norm(round_number)
        first = max(1, round_number - self._noise.bands + 1)
        self._recent = {number: kept for number, kept in self._recent.items() if number >= first}
        if len(self._recent) < round_number - first + 1:
            return None
        total = np.zeros_like(values)
        for number, kept in self._recent.items():
            total += self._noise.unit[round_number - number] * kept
        return total


def _matrix(noise: CorrelatedNoise) -> Floats:
    encoder = noise.encoder()
    rows = [encoder.add(number, unit) for number, unit in enumerate(np.eye(noise.rounds), start=1)]
    return np.array(rows)


def _twos(number: int) -> int:
    """How many times 2 divides `number`."""
    return (number & -number).bit_length() - 1


def _check_round(number: int, rounds: int) -> None:
    if not 1 <= number <= rounds:
        raise ValueError(f"the noise was planned for rounds 1 to {rounds}, got round {number}")


def _check_pattern(participations: int, separation: int, rounds: int) -> int:
    times = whole_number("participations", participations, minimum=1)
    apart = whole_number("separation", separation, minimum=1)
    if (times - 1) * apart >= rounds:
        raise ValueError(f"{times} participations, {apart} rounds apart, do not fit into {rounds} rounds")
    return times
