"""The operations of measuring on torch tensors: the functions of `on_numpy`.

On a GPU they launch few kernels, and wait for results only where numbers are returned to the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coalmine.argument_checks import Floats
from coalmine.canaries.base import usable
from coalmine.measure.arrays import many_parts, on_numpy
from coalmine.measure.arrays.host import host_array, is_on_device, numpy_vector

_ROW = 4096


SMALLEST_FLOAT = 2  # bytes of a number


def unreadable(array: Any) -> str | None:
    """Why the tensor's numbers cannot be read; None if they can."""
    if torch.nn.parameter.is_lazy(array):
        return "an uninitialized parameter: run the model once first"
    if array.is_nested or array.layout is not torch.strided:
        return "a sparse or nested tensor: call .to_dense() first"
    if array.is_meta:
        return "a tensor on the meta device, which has no numbers"
    if array.is_quantized:
        return "a quantized tensor: call .dequantize() first"
    return "a fake tensor, which has no numbers" if type(array).__name__ == "FakeTensor" else None


def unreadable_row(array: Any) -> str | None:
    """Why the numbers of a flat vector cannot be read as they are; None if they can."""
    if problem := unreadable(array):
        return problem
    if array.dtype.is_floating_point and array.dtype.itemsize < SMALLEST_FLOAT:
        return f"a tensor of {array.dtype}: call .float() first"
    return "a tensor that is still to be negated: call .resolve_neg() first" if array.is_neg() else None


def tensor(vector: Any, **options: Any) -> torch.Tensor:
    """A tensor, if possible without a copy; a read-only array is copied, since torch warns about it."""
    if isinstance(vector, np.ndarray) and not vector.flags.writeable:
        vector = vector.copy()
    return torch.as_tensor(vector, **options).detach()


def norm(vector: Any) -> float:
    """The norm in float64."""
    length = float(lazy_norm(vector.detach()))
    if usable(length):
        return length
    return float(torch.linalg.vector_norm(vector.detach(), dtype=torch.float64))  # squares may be zero or infinite


def lazy_norm(vector: Any) -> Any:
    """The norm in float64, without waiting for the device: squares are summed a few thousand at a time, then in float64."""
    whole = len(vector) // _ROW * _ROW
    if not whole or vector.dtype.itemsize < 4 or not vector.is_contiguous():
        return torch.linalg.vector_norm(vector, dtype=torch.float64)
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, _ROW), dim=1).double()
    rest = torch.linalg.vector_norm(vector[whole:], dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat([rows, rest.unsqueeze(0)]))


def norms(vector: Any, sizes: Sequence[int]) -> Floats:
    """The norms of consecutive parts of a vector."""
    if not is_on_device(vector) and many_parts.are_many(sizes, len(vector)):
        return np.sqrt(many_parts.squares(host_array(vector), sizes))
    parts = vector.detach().split(list(sizes))
    return numpy_vector(torch.stack(_each_norm(parts) if is_on_device(vector) else [lazy_norm(p) for p in parts]))


def _each_norm(parts: Sequence[Any]) -> Any:
    return torch._foreach_norm(list(parts), 2, torch.float64)


def square(vector: Any) -> Any:
    """The squared length in float64. On a GPU it takes few kernel launches and does not wait for the result."""
    if is_on_device(vector):
        return torch.linalg.vector_norm(vector).double() ** 2
    return lazy_norm(vector) ** 2


def squares(parts: Sequence[Any]) -> list[Any]:
    """`square` of several vectors, at once if they are on one GPU."""
    if not all(is_on_device(part) and part.device == parts[0].device for part in parts):
        return [square(part) for part in parts]
    return list(torch.stack(_each_norm(parts)).square())


def group_squares(vector: Any, groups: Sequence[slice]) -> Floats:
    """The squared lengths of parts of a vector that follow each other."""
    return np.square(numpy_vector(torch.stack(_each_norm(vector.split(_sizes(groups))))))


def _sizes(groups: Sequence[slice]) -> list[int]:
    return [place.stop - place.start for place in groups]


def difference(first: Any, second: Any) -> Any:
    """first - second on the device and in the precision of `first`."""
    return first.detach() - tensor(second).to(device=first.device, dtype=first.dtype)


def stacked(rows: Sequence[Any]) -> Any:
    """Vectors as the rows of a matrix."""
    return torch.stack(list(rows))


def copied(vector: Any) -> Any:
    """A copy that does not change with the original."""
    return vector.detach().clone()


def is_contiguous(row: Any) -> bool:
    """Whether the numbers of a row follow each other in memory."""
    return bool(row.is_contiguous())


def joined(pieces: Sequence[Any], places: Sequence[slice], like: Any, into: Any = None) -> Any:
    """Pieces in their places of one vector of the kind of `like`; of `into`, if that has its dtype and device."""
    fits = into is not None and (into.dtype, into.device) == (like.dtype, like.device)
    vector = into if fits else like.new_empty(places[-1].stop)
    for place, piece in zip(places, pieces, strict=True):
        put(vector, place, piece)
    return vector


def put(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Write `factor` times a piece into the row at `place`, whatever types both have, and return the row."""
    scaled = piece if factor == 1.0 else piece * factor
    row[place].copy_(scaled if isinstance(scaled, torch.Tensor) else tensor(on_numpy.compatible(scaled)))
    return row


def subtract(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Subtract `factor` times a piece from the vector at `place`, in the vector's precision, and return the vector."""
    own = piece if isinstance(piece, torch.Tensor) else tensor(on_numpy.compatible(piece))
    vector[place].sub_(own.to(vector.device), alpha=factor)
    return vector


def empty(like: Any, *, double: bool) -> Any:
    """An array without entries, of the kind and on the device of `like`, in single or double precision."""
    return like.new_empty(0, dtype=torch.float64 if double else torch.float32)


def device(vector: Any) -> Any:
    """The device of a vector."""
    return vector.device


def added(total: Any, values: Any, factor: float) -> Any:
    """A total plus `factor` times values, in the total's own memory."""
    return total.add_(values, alpha=factor)


def block_parts(vector: Any, *, chunks: int, sketch: int) -> tuple[Any, Any]:
    """Squared lengths in equal parts, and sums of the numbers at regular intervals with alternating signs."""
    each, rows = len(vector) // chunks, len(vector) // (2 * sketch)
    parts, pairs = vector[: each * chunks].reshape(chunks, each), vector[: rows * 2 * sketch].reshape(rows, 2, sketch)
    sums = pairs.sum(0).double()
    return torch.linalg.vector_norm(parts, dim=1).double() ** 2, sums[0] - sums[1]


def numbers(values: list[Any]) -> Floats:
    """Numbers on the host, transferred at once."""
    return numpy_vector(torch.stack(values))


def law_sums(vector: Any, groups: Sequence[slice], pairs: Sequence[tuple[slice, slice]]) -> Floats:
    """Sums of absolute values, squares and fourth powers by group; then products of neighbours, and of pairs of parts.

    By one kernel where that is possible: a sum for each layer would be thousands of launches.
    """
    from coalmine.canaries.rotation_torch import noise_sums

    bounds = tuple((place.start, place.stop) for place in groups)
    both = tuple(((one.start, one.stop), (two.start, two.stop)) for one, two in pairs)
    sums = noise_sums(vector, bounds, both)
    return numbers(on_numpy.list_law_sums(vector, groups, pairs)) if sums is None else numpy_vector(sums)


def scaled(vector: Any, groups: Sequence[slice], stds: Sequence[float]) -> Any:
    """A vector over the standard deviation of each group."""
    if len(groups) == 1:
        return vector / stds[0]
    result = vector.clone()
    torch._foreach_div_(list(result.split(_sizes(groups))), list(stds))
    return result


def follows(standard: Any, other: Any) -> Floats:
    """The product of a vector's squares, less 1, with another one's sizes about their mean, and those squared."""
    moved = torch.as_tensor(other, device=standard.device)
    weights = abs(moved.to(torch.promote_types(moved.dtype, standard.dtype)))
    mean = weights.mean()  # cast after the division: 1e60 is infinite in float32
    weights = (weights / (mean + (mean == 0))).clip(0, 3).to(standard.dtype)
    weights = weights - weights.mean()
    return numbers([weights @ (standard * standard - 1), weights @ weights])


def strongest_lag(standard: Any, size: int) -> Floats:
    """The largest product of a padded vector with itself moved, over the root of its terms; its lag; and that at lag 0."""
    lagged = torch.fft.irfft(torch.fft.rfft(standard, n=size).abs() ** 2, n=size)[: size // 2 + 1].abs()
    lag = torch.arange(size // 2 + 1, device=lagged.device, dtype=lagged.dtype)
    scores = lagged / on_numpy.lag_terms(lag, len(standard), size).clip(1) ** 0.5
    scores[0] = 0.0
    best = scores.argmax()
    return numbers([scores[best], lag[best], lagged[0]])


def counts(cells: Any, *, number: int) -> npt.NDArray[np.int64]:
    """How many entries are in each of this many cells."""
    return np.asarray(torch.bincount(cells.to(torch.int64), minlength=number).cpu().numpy(), dtype=np.int64)


def largest(vector: Any, *, count: int) -> tuple[Any, Any, Any]:
    """The largest sizes, where they are, and their signs."""
    found = vector.abs().topk(count)
    signs = vector[found.indices].sign()
    return tuple(np.asarray(each.cpu().numpy()) for each in (found.values, found.indices, signs))  # type: ignore[return-value]


def squares_added(
    total: Any, noise: Any, release: Any, groups: Sequence[slice], scales: list[float], wide: Floats | None
) -> Any:
    """The total, None before the first, with the squares of a vector, scaled by group; `wide` as for numpy."""
    noise = noise.float()
    total = torch.zeros_like(noise) if total is None else total
    sizes = _sizes(groups)
    if wide is not None:
        parts = zip(noise.split(sizes), release.float().split(sizes), *wide.tolist(), strict=True)
        noise = torch.cat([one.abs() * (1 + rel) + two.abs() * rel + step for one, two, rel, step in parts])
    own = list(noise.split(sizes))
    torch._foreach_addcmul_(list(total.split(sizes)), own, own, [scale * scale for scale in scales])
    return total


def below(total: Any, limit: float) -> tuple[npt.NDArray[np.int64], Floats]:
    """The places of the numbers below a limit, and these numbers."""
    places = (total < limit).nonzero().flatten()
    return np.asarray(places.cpu().numpy(), dtype=np.int64), numpy_vector(total[places])
