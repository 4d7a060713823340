"""Checks of a log's records: types as written, finite numbers, and sizes that match the audit's settings."""

from dataclasses import fields
from functools import cache
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
import numpy as np

from coalmine.measure.round import LARGEST_SQUARE, SMALLEST_SQUARE
from coalmine.measure.settings import Settings

RESIDUAL = ("residual_norm", "residual_rest", "residual_cosines")
STATED = ("clip_norm", "scale", "noise_std")
SMALLEST_REST = 1e-8  # fraction of a vector's norm orthogonal to the canaries: an audit writes no less
LENGTHS = ("norm", "rest", "residual_norm", "residual_rest", "update_norm")
LARGEST = 2.0**1000  # of any number
LARGEST_COSINE = 10.0  # more than rounding can make of 1
SHORTEST, LONGEST = 1e-140, 1e140  # wider than an audit accepts; squares neither underflow nor overflow
COORDINATES = 12  # numbers of a reading of the sums that follow each coordinate, before those of each layer
LAW = {  # size of each array that is measured with the histogram of the noise; None for any size
    "law_counts": None,
    "law_zeros": (1, 2),
    "law_follows": None,
    "law_spectrum": (2,),
    "law_grid": (4,),
    "law_peaks": None,
}
NOT_NEGATIVE = (
    "rounding",
    "lattice",
    "block_rests",
    "residual_block_rests",
    "update_block_rests",
    "chunk_rests",
    "layer_rests",
    "layer_others",
    "layer_moves",
    "law_moments",
    "law_counts",
    "law_zeros",
    "law_spectrum",
    "law_grid",
    "law_coordinates",
)
PER_CANARY = ("cosines", "residual_cosines", "update_cosines")
PER_BLOCK = dict(zip(("block_rests", "residual_block_rests", "update_block_rests"), PER_CANARY, strict=True))


class _Schema(NamedTuple):
    scalars: dict[str, tuple[Any, frozenset[type]]]  # annotation, and the types of values that need no further look
    arrays: dict[str, Any]  # by the type of their entries
    optional: frozenset[str]


def _schema_of(item: Any) -> _Schema:
    kind: Any = type(item)
    return _schema(kind)


@cache
def _schema(kind: Any) -> _Schema:
    """The fields of a record, from the annotations of its dataclass; `scores` is left to its own check."""
    scalars: dict[str, tuple[Any, frozenset[type]]] = {}
    arrays: dict[str, Any] = {}
    optional = set()
    for part in fields(kind):
        whole: Any = part.type
        plain = get_args(whole)[0] if isinstance(whole, UnionType) else whole
        if plain is not whole:
            optional.add(part.name)
        if part.name == "scores":
            continue
        if getattr(plain, "__origin__", None) is np.ndarray:
            arrays[part.name] = np.dtype(get_args(get_args(plain)[1])[0])
        else:
            kinds = get_args(whole) if isinstance(whole, UnionType) else (whole,)
            scalars[part.name] = whole, frozenset(get_origin(each) or each for each in kinds)
    return _Schema(scalars, arrays, frozenset(optional))


def check_types(item: Any) -> None:
    """TypeError or ValueError if a field of a record does not have the type that is written."""
    schema, values = _schema_of(item), vars(item)
    for name, (kind, plain) in schema.scalars.items():
        value = values[name]
        if type(value) not in plain and not (float in plain and isinstance(value, float)):  # numpy's float64 is one
            msgspec.convert(value, kind)
        if isinstance(value, (int, float)) and not -LARGEST < value < LARGEST:  # nor is NaN between them
            raise ValueError(f"{name} must be finite")
    for name, dtype in schema.arrays.items():
        value = values[name]
        if (value is not None or name not in schema.optional) and getattr(value, "dtype", None) != dtype:
            raise TypeError(f"{name} must be numbers of type {dtype}")
    for name, value in getattr(item, "scores", {}).items():
        if value.dtype != np.float32:
            raise TypeError(f"scores of {name} must be numbers of type float32")


def check_values(item: Any) -> None:
    """ValueError if a measured number is not finite, or if a part of the residual's measurement is missing."""
    values = vars(item)
    for name in _schema_of(item).arrays:
        value = values[name]
        if value is not None and not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite")
        if name in PER_CANARY and value is not None and value.size and np.abs(value).max() > LARGEST_COSINE:
            raise ValueError(f"{name} must be cosines, got {np.abs(value).max():.3g}")
    if len({values.get(name) is None for name in RESIDUAL}) > 1:
        raise ValueError(f"{', '.join(RESIDUAL)} must be given together")
    released = not values.get("skipped", False)
    for name in (*STATED, *(LENGTHS if released else ())):
        value = values.get(name)
        if value is not None and not SHORTEST < value < LONGEST:
            raise ValueError(f"{name} must lie between {SHORTEST:g} and {LONGEST:g}, got {value:g}")
    for length, rest in (("norm", "rest"), ("residual_norm", "residual_rest")):
        whole, part = values.get(length), values.get(rest)
        if released and whole is not None and part is not None and part < SMALLEST_REST * whole:
            raise ValueError(f"{rest} must be at least {SMALLEST_REST:g} of {length}, got {part:g} of {whole:g}")
    if hasattr(item, "skipped") and released and not (item.cosines[:1].any() or item.cosines.any()):
        raise ValueError("cosines must not be 0")
    for name in NOT_NEGATIVE:
        value = values.get(name)
        if value is not None and np.any(np.asarray(value) < 0):
            raise ValueError(f"{name} must not be negative")
    _check_law(item)


def _check_law(item: Any) -> None:
    """ValueError if the measurements of the noise's law are incomplete."""
    moments = getattr(item, "law_moments", None)
    if moments is None:
        if any(getattr(item, name, None) is not None for name in (*LAW, "law_lags", "law_tail")):
            raise ValueError("law_moments must be given with every other measurement of the noise's law")
        return
    squares = moments[1::3]
    if moments.size == 0 or moments.size % 3 or not ((squares > SMALLEST_SQUARE) & (squares < LARGEST_SQUARE)).all():
        raise ValueError("law_moments must be three sums for each group of layers, neither tiny nor huge")
    if item.law_lags is None or item.law_lags.size < 2:
        raise ValueError("law_lags must be given with law_moments")
    if len({getattr(item, name) is None for name in LAW}) > 1:
        raise ValueError(f"{', '.join(LAW)} must be given together")
    for name, sizes in LAW.items():
        value = getattr(item, name)
        if value is not None and sizes is not None and value.size not in sizes:
            raise ValueError(f"{name} must be {sizes[-1]} numbers, got {value.size}")


def check_fit(item: Any, settings: Settings) -> None:
    """ValueError if a record cannot belong to an audit with these settings."""
    if getattr(item, "skipped", False):
        return
    for name in PER_CANARY:
        value = getattr(item, name, None)
        if value is not None and value.size != settings.total:
            raise ValueError(f"{name} must be {settings.total} numbers, one for each canary, got {value.size}")
    if any(value.size != settings.total for value in getattr(item, "scores", {}).values()):
        raise ValueError(f"scores must be {settings.total} numbers, one for each canary")
    present = getattr(item, "present", None)
    if present is not None and present.size and (present.min() < 0 or present.max() >= settings.canaries):
        raise ValueError(f"present must be canaries in 0..{settings.canaries - 1}")
    for name, cosines in PER_BLOCK.items():
        value = getattr(item, name, None)
        summed = settings.replicated and name == "residual_block_rests"  # no process has the whole vector
        blocks = len(settings.blocks) if getattr(item, cosines, None) is not None and not summed else 0
        if (0 if value is None else value.size) != blocks:
            raise ValueError(
                f"{name} must be {blocks} numbers, one for each block, got {0 if value is None else value.size}"
            )
        if value is not None and not value.any():
            raise ValueError(f"{name} must not all be 0")
    blocks = len(settings.blocks)
    for name, each in (("chunk_rests", settings.chunks), ("block_sketches", settings.sketch)):
        value = getattr(item, name, None)
        if value is not None and (value.size != blocks * each or not settings.in_blocks):
            raise ValueError(f"{name} must be {each} numbers for each of {blocks} blocks, got {value.size}")
    for name in ("layer_rests", "layer_others", "layer_moves"):
        value = getattr(item, name, None)
        count = len(settings.layers) or int(name == "layer_moves")  # without layers, of the model as a whole
        if value is not None and value.size != count:
            raise ValueError(f"{name} must be {count} numbers, one for each layer, got {value.size}")
    _check_coordinates(getattr(item, "law_coordinates", None), settings)


def _check_coordinates(row: Any, settings: Settings) -> None:
    """ValueError if a reading of the sums that follow each coordinate cannot be one of these settings."""
    if row is None:
        return
    layers = max(len(settings.layers), 1)
    if row.size != COORDINATES + layers:
        raise ValueError(f"law_coordinates must be {COORDINATES + layers} numbers, got {row.size}")
    first, last, rounds, followed = row[:4]
    if not (1 <= first <= last and 1 <= rounds <= last - first + 1 and 1 <= followed <= settings.dim):
        raise ValueError(
            "law_coordinates must be of at least one round and one coordinate, and of no more than there are"
        )
    if row[6] < row[5] or max(row[7], row[8]) >= layers or row[10:].max() > followed:
        raise ValueError(
            "law_coordinates must have its largest sum above the smallest, layers that exist, and fair counts"
        )
