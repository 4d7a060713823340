"""What a caller states about a round, checked before anything is measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import WrongTypeError, one_number, positive, short_repr, whole_number
from coalmine.measure.arrays.on_numpy import LONGEST, SHORTEST
from coalmine.measure.settings import Settings

MOST_CLIENTS = 10**15


@dataclass(frozen=True, kw_only=True)
class RoundFacts:
    """The stated fields of a round's record, by their names in `Round`."""

    number: int
    present: npt.NDArray[np.int32]
    clip_norm: float
    clip_declared: bool
    noise_std: float | None
    scale: float
    participants: int | None

    @classmethod
    def checked(
        cls,
        settings: Settings,
        number: int,
        *,
        present: Iterable[SupportsIndex],
        noise_std: float | None,
        clip_norm: float | None,
        scale: float,
        participants: int | None,
    ) -> "RoundFacts":
        """The facts, or a ValueError that names the invalid one."""
        indices = observed_indices(present, settings)
        return cls(
            number=number,
            present=np.array(indices, dtype=np.int32),
            clip_norm=1.0 if clip_norm is None else _clip_norm_or_none_at_all(clip_norm),
            clip_declared=clip_norm is not None,
            noise_std=None if noise_std is None else _noise_std(noise_std),
            scale=_usable_size("scale", scale),
            participants=None if participants is None else _cohort_size(participants, len(indices)),
        )

    def check_released(self) -> None:
        """Refuse a clip norm of 0 in a round that released something: only a skipped round, at rate 0, has one."""
        if self.clip_norm == 0:
            raise ValueError("clip_norm must be above 0, got 0.0: it may be 0 only where model_delta is 0")

    @property
    def indices(self) -> list[int]:
        """The present canaries."""
        return [int(index) for index in self.present]


def observed_indices(present: Iterable[SupportsIndex], settings: Settings) -> list[int]:
    """Distinct observed canaries, rejected unless they lie in 0..canaries - 1."""
    if not isinstance(present, Iterable) or isinstance(present, bytes | bytearray | memoryview | str | Mapping):
        raise WrongTypeError(f"present must list canaries, got {short_repr(present)}")
    listed = list(present.tolist() if hasattr(present, "tolist") else present)
    indices = listed  # plain numbers, as a selection gives them; anything else is looked at one by one
    if any(type(index) is not int or index < 0 for index in listed):
        indices = [whole_number("a canary's index", index, minimum=0) for index in listed]
    beyond = [index for index in indices if index >= settings.canaries]
    if beyond:
        raise ValueError(f"present canaries must lie in 0..{settings.canaries - 1}, got {beyond[0]}")
    if len(set(indices)) < len(indices):
        raise ValueError("present canaries must differ, got one twice")
    return indices


def _clip_norm_or_none_at_all(value: float) -> float:
    """A checked clip norm, or the 0 of a round in which nothing moves, for example at a learning rate of 0."""
    number = one_number("clip_norm", value)
    return 0.0 if number == 0 else checked_clip_norm(number)


def checked_clip_norm(value: float) -> float:
    """A clip norm as a float, rejected unless products of such norms neither underflow nor overflow."""
    return _usable_size("clip_norm", value)


def _noise_std(value: float) -> float | None:
    number = one_number("noise_std", value)
    if number < 0:
        raise ValueError(f"noise_std must be at least 0, got {number}")
    return _usable_size("noise_std", number) if number else None  # no noise is claimed, so there is nothing to measure


def _cohort_size(participants: int, canaries: int) -> int:
    number = whole_number("participants", participants, minimum=0)
    if number > MOST_CLIENTS:
        raise ValueError(f"participants must be at most {MOST_CLIENTS:,}, got {short_repr(number)}")
    if number < canaries:
        raise ValueError(f"participants must count the {canaries} canaries of the round too, got {number}")
    return number


def _usable_size(name: str, value: float) -> float:
    number = positive(name, value)
    if not SHORTEST < number < LONGEST:
        raise ValueError(f"{name} must lie between {SHORTEST:g} and {LONGEST:g}, got {number:g}")
    return number
