"""Argument checks whose errors state the requirement and the value received, and the formatting of values in messages."""

import math
import operator
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import signature
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
AnyCallable = TypeVar("AnyCallable", bound=Callable[..., Any])


class WrongTypeError(TypeError, ValueError):
    """A value of the wrong type. Also a ValueError, as every other rejected input is."""


def finite_array(name: str, value: npt.ArrayLike) -> Floats:
    """`value` as float64, rejected unless every entry is a finite number."""
    if isinstance(value, np.ma.MaskedArray):
        raise WrongTypeError(
            f"{name} must be numbers without a mask, got {short_repr(value)}; fill or drop the masked entries"
        )
    try:
        given = np.asarray(value)
        if given.dtype.kind not in "biufO" or (given.dtype.kind == "O" and None in given.ravel().tolist()):
            raise TypeError
        with np.errstate(invalid="ignore"):  # damaged files can hold signalling NaNs; they are rejected below
            array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise WrongTypeError(f"{name} must be numbers, got {short_repr(value)}") from None
    except OverflowError:
        raise ValueError(
            f"{name} must be finite, got a number beyond the range of a float, {short_repr(value)}"
        ) from None
    if not np.isfinite(array).all():
        first = array[~np.isfinite(array)].flat[0]
        where = "" if array.ndim == 0 else f" ({(~np.isfinite(array)).sum()} of {array.size} values)"
        raise ValueError(f"{name} must be finite, got {first}{where}")
    return array


def positive_array(name: str, value: npt.ArrayLike) -> Floats:
    """`value` as float64, rejected unless every entry is finite and above 0."""
    array = finite_array(name, value)
    if array.size and array.min() <= 0:
        raise ValueError(f"{name} must be above 0, got {array.min()}")
    return array


def nonnegative_array(name: str, value: npt.ArrayLike) -> Floats:
    """`value` as float64, rejected unless every entry is finite and at least 0."""
    array = finite_array(name, value)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must be at least 0, got {array.min()}")
    return array


def delta_array(delta: npt.ArrayLike) -> Floats:
    """The delta of (epsilon, delta) as float64, rejected unless every entry lies in (0, 1)."""
    array = np.asarray(finite_array("delta", delta))
    if array.size and not ((array > 0) & (array < 1)).all():
        raise ValueError(f"delta must lie in (0, 1), got {array[~((array > 0) & (array < 1))].flat[0]}")
    return array


def unit_interval(name: str, value: float) -> float:
    """`value` as a float, rejected unless it lies in (0, 1)."""
    number = one_number(name, value)
    if not 0 < number < 1:
        raise ValueError(f"{name} must lie in (0, 1), got {number}")
    return number


def one_number(name: str, value: Any) -> float:
    """`value` as a finite float."""
    if isinstance(value, bool):
        raise WrongTypeError(f"{name} must be a number, got {value}")
    if isinstance(value, float) and math.isfinite(value):
        return float(value)  # as every round states several
    array = finite_array(name, value)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got an array of shape {array.shape}")
    return float(array)


def positive(name: str, value: Any) -> float:
    """`value` as a float, rejected unless it is finite and above 0."""
    number = one_number(name, value)
    return number if number > 0 else float(positive_array(name, number))


def nonnegative(name: str, value: Any) -> float:
    """`value` as a float, rejected unless it is finite and at least 0."""
    number = one_number(name, value)
    return number if number >= 0 else float(nonnegative_array(name, number))


def whole_number(name: str, value: SupportsIndex | float, *, minimum: int) -> int:
    """`value` as an int, rejected unless it is a whole number of at least `minimum`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        if not isinstance(value, float | np.floating):
            raise WrongTypeError(f"{name} must be a whole number, got {short_repr(value)}") from None
        if not math.isfinite(value) or value != int(value):
            raise ValueError(f"{name} must be a whole number, got {short_repr(value)}") from None
        number = int(value)
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {number}")
    return number


def one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Reject a value that is not among the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {short_repr(value)}")


def same_shape(**arrays: Floats) -> tuple[Floats, ...]:
    """The arrays broadcast against each other, rejected if their shapes do not fit."""
    try:
        return np.broadcast_arrays(*arrays.values())
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"shapes must broadcast against each other, got {shapes}") from None


NEIGHBOURS = {  # words of Opacus, dp-accounting, jax_privacy and TensorFlow Privacy, and what they are called here
    "sample_rate": ("sampling_probability", "probability", "sampling", "participation", "clients_per_round"),
    "sampling_prob": ("sampling_probability", "probability", "sampling"),
    "q": ("sampling_probability", "probability", "sampling"),
    "steps": ("rounds", "steps", "participations", "sampling"),
    "num_steps": ("steps", "rounds", "participations", "sampling"),
    "epochs": ("rounds", "steps", "participations", "sampling"),
    "sigma": ("noise_multiplier", "noise_std"),
    "noise_scale": ("noise_multiplier", "noise_std"),
    "target_epsilon": ("claim", "epsilon", "max_epsilon"),
    "target_delta": ("delta",),
    "max_grad_norm": ("clip_norm",),
    "l2_norm_clip": ("clip_norm",),
    "l2_clip_norm": ("clip_norm",),
    "num_canaries": ("canaries",),
    "output": ("out",),
}


def neighbour(name: str, known: Iterable[str]) -> str | None:
    """The name here of something that other libraries call `name`; None if nothing in `known` is it.

    >>> neighbour("--target-epsilon", ["--claim", "--delta"]), neighbour("sample_rate", ["sampling_probability"])
    ('--claim', 'sampling_probability')
    """
    words = {each.lstrip("-").replace("-", "_"): each for each in known}
    meant = NEIGHBOURS.get(name.lstrip("-").replace("-", "_"), ())
    return next((words[word] for word in meant if word in words), None)


def hint_of(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one here, if `neighbour` knows it."""
    meant = neighbour(name, known)
    return "" if meant is None else f": here it is {meant}"


class _Arguments(tuple[Any, ...]):
    """Arguments that print as nothing: one may be a secret."""

    def __repr__(self) -> str:
        return "…"


class _Keywords(dict[str, Any]):
    """Keywords that print as nothing."""

    def __repr__(self) -> str:
        return "…"


def names_neighbours(call: AnyCallable) -> AnyCallable:
    """Decorate a function or a class: an unknown keyword that other libraries have is an error that names the one here."""
    if isinstance(call, type):
        call.__init__ = names_neighbours(call.__init__)  # type: ignore[misc]
        return cast(AnyCallable, call)
    known = signature(call).parameters

    @wraps(call)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        arguments, keywords = _Arguments(arguments), _Keywords(keywords)  # a traceback may show this frame
        for name in keywords.keys() - known.keys():
            if hint := hint_of(name, known):
                raise TypeError(f"{call.__qualname__.removesuffix('.__init__')}() has no {name!r}{hint}")
        return call(*arguments, **keywords)

    return cast(AnyCallable, checked)


def short_repr(value: object) -> str:
    """`value` as error messages print it, on one line and cut to 60 characters."""
    try:
        text = one_line(repr(value))
    except (RecursionError, ValueError):  # lists nested too deeply; whole numbers of more than 4,300 digits
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    r"""`text` with "�" for each character that a terminal might obey instead of printing, line ends included.

    >>> printable("run \x1b[31m1")
    'run �[31m1'
    """
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: str) -> str:
    """`text` on one line, without control characters."""
    return printable(" ".join(text.split()))


def count_of(number: int, noun: str) -> str:
    """A number with its noun: "1 round", "2 rounds"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
