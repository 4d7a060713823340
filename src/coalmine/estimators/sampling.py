"""Sampling schemes: how clients are chosen for rounds that the attacker does not know.

`amplification/` has the amplified epsilon of each.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import msgspec

from coalmine.argument_checks import names_neighbours, one_number, one_of, short_repr, whole_number

Strengths = tuple[tuple[float, int], ...]  # reference noise over the noise of a round, and the number of such rounds
NO_SCHEDULE: Strengths = ()  # every round has the reference noise


@names_neighbours
@dataclass(frozen=True)
class Poisson:
    """Each client joins each round independently, with this probability; the sum is divided by the expected number."""

    probability: float
    rounds: int
    strengths: Strengths = NO_SCHEDULE

    scheme: ClassVar[str] = "poisson"
    title: ClassVar[str] = "Poisson sampling"
    adjacency: ClassVar[str] = "add or remove one"

    def __post_init__(self) -> None:
        probability = one_number("probability", self.probability)
        if not 0 < probability <= 1:
            raise ValueError(f"probability must lie in (0, 1], got {probability}")
        object.__setattr__(self, "probability", probability)
        object.__setattr__(self, "rounds", whole_number("rounds", self.rounds, minimum=1))

    @property
    def rate(self) -> float:
        """The share of rounds in which a client takes part."""
        return self.probability

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the whole run."""
        return self.rounds

    def __str__(self) -> str:
        return f"{self.title} with probability {self.probability:g} in {self.rounds} rounds"


@dataclass(frozen=True)
class _Epochs:
    """Each client takes part once in each of `epochs` epochs of `rounds` rounds."""

    rounds: int
    epochs: int = 1
    strengths: Strengths = NO_SCHEDULE

    scheme: ClassVar[str]
    title: ClassVar[str]
    adjacency: ClassVar[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", whole_number("rounds", self.rounds, minimum=1))
        object.__setattr__(self, "epochs", whole_number("epochs", self.epochs, minimum=1))

    @property
    def rate(self) -> float:
        """The share of rounds in which a client takes part."""
        return 1 / self.rounds

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the whole run."""
        return self.rounds * self.epochs

    def __str__(self) -> str:
        over = f"{self.rounds} rounds" if self.epochs == 1 else f"{self.epochs} epochs of {self.rounds} rounds"
        return f"{self.title} over {over}"


@names_neighbours
@dataclass(frozen=True)
class RandomAllocation(_Epochs):
    """Each client draws one round of each epoch, independently, so cohort sizes vary; also called balls-and-bins."""

    scheme: ClassVar[str] = "random_allocation"
    title: ClassVar[str] = "random allocation"
    adjacency: ClassVar[str] = "add or remove one"


@names_neighbours
@dataclass(frozen=True)
class Shuffled(_Epochs):
    """Cohorts of fixed size from a permutation of all clients, a new one in each epoch, as in most data loaders.

    This is not random allocation: an attacker who knows the others sees the gap that a missing client leaves.
    """

    scheme: ClassVar[str] = "shuffled"
    title: ClassVar[str] = "shuffling"
    adjacency: ClassVar[str] = "zero out one"


@names_neighbours
@dataclass(frozen=True)
class FixedSize:
    """`size` of `population` clients are drawn in each round, without replacement: Flower's default."""

    size: int
    population: int
    rounds: int
    strengths: Strengths = NO_SCHEDULE

    scheme: ClassVar[str] = "fixed_size"
    title: ClassVar[str] = "fixed-size sampling"
    adjacency: ClassVar[str] = "replace one"

    def __post_init__(self) -> None:
        for name in ("size", "population", "rounds"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), minimum=1))
        if self.size > self.population:
            raise ValueError(f"size must be at most the population of {self.population}, got {self.size}")

    @property
    def rate(self) -> float:
        """The share of rounds in which a client takes part."""
        return self.size / self.population

    @property
    def total_rounds(self) -> int:
        """The number of rounds of the whole run."""
        return self.rounds

    def __str__(self) -> str:
        return f"{self.title} of {self.size} of {self.population} in {self.rounds} rounds"


def largest_exposure(sampling: "Sampling", times: int) -> float:
    """The sum of squared strengths over the `times` rounds with the least noise: `times` if all rounds have equal noise."""
    exposure, left = 0.0, times
    for strength, count in sorted(sampling.strengths, reverse=True):
        exposure += strength**2 * min(count, left)
        left -= min(count, left)
    return exposure + left


Sampling = Poisson | RandomAllocation | Shuffled | FixedSize
SCHEMES: dict[str, type[Sampling]] = {kind.scheme: kind for kind in (Poisson, RandomAllocation, Shuffled, FixedSize)}


def checked_sampling(sampling: Any) -> Sampling:
    """`sampling`, or an error that lists the schemes."""
    if not isinstance(sampling, Poisson | RandomAllocation | Shuffled | FixedSize):
        names = ", ".join(kind.__name__ for kind in SCHEMES.values())
        raise TypeError(f"sampling must be one of {names}, got {short_repr(sampling)}")
    return sampling


def sampling_to_dict(sampling: Sampling) -> dict[str, Any]:
    """A scheme as stored in files, without the noise of its rounds, which the log has."""
    values = {"scheme": sampling.scheme, **asdict(sampling)}
    del values["strengths"]
    return values


def sampling_from_dict(values: Mapping[str, Any]) -> Sampling:
    """The inverse of `sampling_to_dict`; ValueError for anything else."""
    settings = msgspec.convert(values, dict[str, Any])
    name = settings.pop("scheme", None)
    one_of("scheme", name, SCHEMES)
    kind = SCHEMES[name]
    unknown = sorted(settings.keys() - {part.name for part in fields(kind) if part.name != "strengths"})
    if unknown:
        raise ValueError(f"unknown settings of {name}: {short_repr(unknown)}")
    return msgspec.convert(settings, kind)
