"""The function under test, which aggregates clients' updates, and the claim about it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from coalmine.argument_checks import (
    Floats,
    WrongTypeError,
    positive,
    positive_array,
    short_repr,
    unit_interval,
    whole_number,
)
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.testing.call_plan import ScoreTest
from coalmine.testing.update_arrays import Shapes, UpdateForm, checked_shapes
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import ROUNDED

Adjacency = Literal["zero-out", "add-remove", "replace-one"]
Aggregate = Literal["sum", "mean"]
MOVES = {"zero-out": 1, "add-remove": 1, "replace-one": 2}  # clip norms by which one client moves the sum
SMALLEST_DIM = 20
LARGEST_EPSILON = 1e9  # a larger epsilon needs so little noise that rounding acts as noise
SIZES = (1e-30, 1e30)  # smallest and largest clip norm, so that updates fit single precision
LARGEST_SCALE = 1e6
MOST_NUMBERS = 10**9  # most numbers in the updates of one call
CLIENTS = 100  # default number of clients


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The function under test, and the claim about it."""

    release: Callable[..., Any]
    epsilon: float
    delta: float
    dim: int
    clients: int
    clip_norm: float
    adjacency: Adjacency
    aggregate: Aggregate | None
    weights: Floats | None
    form: UpdateForm
    noise: CorrelatedNoise | None
    scale: float
    most_calls: int | None

    @property
    def moves(self) -> int:
        """The clip norms by which one client moves the sum."""
        return MOVES[self.adjacency]

    @cached_property
    def needed_noise(self) -> float:
        """The noise std in clip norms that the claim needs, for noise that is independent in every call."""
        return self.moves * float(mechanism_noise(self.epsilon, delta=self.delta))

    @cached_property
    def allowed_noise(self) -> float:
        """The same for the largest epsilon that rounds to the claimed one."""
        return self.moves * float(mechanism_noise(ROUNDED * self.epsilon, delta=self.delta))

    @cached_property
    def test(self) -> ScoreTest:
        """The test of the mean score, for noise that is independent in every call."""
        return ScoreTest(epsilon=self.epsilon, delta=self.delta, moves=self.moves)

    @cached_property
    def claim(self) -> Claim:
        """The claim of one call; under correlated noise, that of the most exposed client in one call."""
        exposed = 1.0
        if self.noise is not None:
            exposed = math.sqrt(max(self.noise.strength([t]) for t in range(1, self.noise.rounds + 1)))
        return Claim(epsilon=self.epsilon, sensitivity=self.moves * exposed)


def checked_mechanism(
    release: Any,
    claim: tuple[float, float, float, Any, Any],
    size: tuple[int | None, int | None, Sequence[float] | None],
    form: tuple[Any, Any, Any],
    noise: CorrelatedNoise | None,
    scale: float,
    most_calls: int | None,
) -> Mechanism:
    """The arguments, checked."""
    (epsilon, delta, clip_norm, adjacency, aggregate), (dim, clients, weights) = claim, size
    updates, like, shapes = form
    if not callable(release):
        raise WrongTypeError(f"release must be a function of the clients' updates, got {short_repr(release)}")
    if short_repr(adjacency) not in map(repr, get_args(Adjacency)):  # an array has no truth value
        raise ValueError(f"adjacency must be 'zero-out', 'add-remove' or 'replace-one', got {short_repr(adjacency)}")
    if aggregate is not None and short_repr(aggregate) not in map(repr, get_args(Aggregate)):
        raise ValueError(f"aggregate must be 'sum', 'mean' or None, got {short_repr(aggregate)}")
    if noise is not None and not isinstance(noise, get_args(CorrelatedNoise)):
        raise WrongTypeError(f"noise must be a TreeNoise or a BandedNoise, got {short_repr(noise)}")
    layers = checked_shapes(shapes)
    coordinates = _checked_dim(dim, layers)
    count = min(CLIENTS, coordinates // 2) if clients is None else whole_number("clients", clients, minimum=1)
    if count * coordinates > MOST_NUMBERS:
        raise ValueError(
            f"clients times dim must be at most {MOST_NUMBERS:,}, got {short_repr(count * coordinates)}: test the "
            "function with a smaller dim, if it behaves the same"
        )
    mechanism = Mechanism(
        release=release,
        epsilon=positive("epsilon", epsilon),
        delta=unit_interval("delta", delta),
        dim=coordinates,
        clients=count,
        clip_norm=positive("clip_norm", clip_norm),
        adjacency=adjacency,
        aggregate=aggregate,
        weights=_checked_weights(weights, count),
        form=UpdateForm.of(updates, like, layers),
        noise=noise,
        scale=positive("scale", scale),
        most_calls=None if most_calls is None else whole_number("most_calls", most_calls, minimum=3),
    )
    if mechanism.epsilon > LARGEST_EPSILON:
        raise ValueError(f"epsilon must be at most {LARGEST_EPSILON:g}, got {mechanism.epsilon:g}")
    if not SIZES[0] <= mechanism.clip_norm <= SIZES[1]:
        raise ValueError(f"clip_norm must lie between {SIZES[0]:g} and {SIZES[1]:g}, got {mechanism.clip_norm:g}")
    if not 1 <= mechanism.scale <= LARGEST_SCALE:
        raise ValueError(f"scale must lie between 1 and {LARGEST_SCALE:g}, got {mechanism.scale:g}")
    return mechanism


def _checked_dim(dim: int | None, shapes: Shapes | None) -> int:
    if shapes is None:
        if dim is None:
            raise ValueError("dim must be given: the number of coordinates of an update")
        return whole_number("dim", dim, minimum=SMALLEST_DIM)
    size = sum(map(math.prod, shapes))
    if dim is not None and whole_number("dim", dim, minimum=1) != size:
        raise ValueError(f"dim must be the total size of shapes, {size:,}, got {dim:,}")
    if size < SMALLEST_DIM:
        raise ValueError(f"shapes must hold at least {SMALLEST_DIM} numbers, got {size}")
    return size


def _checked_weights(weights: Sequence[float] | None, clients: int) -> Floats | None:
    if weights is None:
        return None
    checked = positive_array("weights", weights)
    if checked.shape != (clients,):
        raise ValueError(f"weights must be one for each of {clients} clients, got shape {checked.shape}")
    return checked
