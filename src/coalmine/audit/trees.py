"""Models as people hold them: dicts, lists and tuples of numpy arrays, torch tensors or jax arrays.

A `Tree` remembers the structure of a model's parameters, not the parameters. Its coordinates are those of its leaves, one
after another; no vector of all of them is ever made unless they are one block.
"""

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.argument_checks import printable, shown
from coalmine.audit.vectors import as_tensor, is_device_jax, is_tensor, jax_measures, numpy_vector, unusable

DEEPEST = 100  # levels of nesting
WHOLE = "parameters"  # name of a model that is one array
WIDEST = 8  # bytes of a number that a canary is added to


@dataclass(frozen=True)
class Leaf:
    """One array of a model: its name, shape and type, and what is needed to make another one like it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # numpy, torch, jax
    dtype: Any
    size: int  # coordinates in this process
    place: Any = None  # torch: the device; jax: the sharding
    mesh: Any = None  # of a DTensor: mesh, placements, shape and stride of the whole
    audited: bool = True  # integers, flags and frozen parameters hold no canary
    parts: tuple["Part", ...] = ()  # of a jax array that is not on the host: what each device holds, each number once

    @classmethod
    def of(cls, name: str, value: Any, *, frozen: bool) -> "Leaf":
        local, mesh = _local(name, value)
        kind = kind_of(local)
        if kind is None:
            module = "; of a torch module pass dict(module.named_parameters())" if name == WHOLE else ""
            raise ValueError(
                f"parameters must be numpy arrays, torch tensors or jax arrays in dicts, lists and tuples, got "
                f"{shown(value)} at {name}{module}"
            )
        if problem := _unreadable(local, kind):
            raise ValueError(f"{name} must be a plain array, got {problem}")
        place = local.device if kind == "torch" else local.sharding if kind == "jax" else None
        size = math.prod(local.shape)
        audited = not frozen and _holds_canaries(name, local, kind)
        parts = _device_parts(name, local) if audited and is_device_jax(local) else ()
        return cls(name, tuple(local.shape), kind, local.dtype, size, place, mesh, audited, parts)

    @property
    def coordinates(self) -> int:
        """How many of the audit's coordinates it holds."""
        return self.size if self.audited else 0

    @property
    def on_host(self) -> bool:
        """Whether it lies in the memory of the host."""
        return not self.parts and (self.kind != "torch" or self.place.type == "cpu")

    def rows(self, what: str, value: Any) -> dict[str, Any]:
        """The numbers of a value in this leaf's place by the names of layers: in one row, or one for each device."""
        local = self.checked(what, value)
        if not self.parts and not is_device_jax(local):
            return {self.name: plain(local).reshape(-1)}
        # a value from elsewhere is moved to where the model is, or to one device
        given = numpy_vector(local) if is_tensor(local) else local
        array = jax_measures().moved(given, self.place if self.parts else None)
        found = jax_measures().one_of_each(array)
        names = [part.name for part in self.parts] or [self.name]
        return {name: piece.reshape(-1) for name, (_, piece) in zip(names, found, strict=True)}

    def empty_rows(self) -> dict[str, Any]:
        """Rows of this leaf's numbers to be filled, by the names of layers."""
        if not self.parts:
            return {self.name: self.empty()}
        jax = sys.modules["jax"]
        return {part.name: jax.numpy.zeros(part.size, self.dtype, device=part.device) for part in self.parts}

    def checked(self, what: str, value: Any) -> Any:
        """This process's part of a value in this leaf's place, refused if it is no array of this shape."""
        local, _ = _local(f"{what} at {self.name}", value)
        kind = kind_of(local)
        problem = shown(value) if kind is None else _unreadable(local, kind)
        if problem:
            raise ValueError(f"{what} must hold a plain array at {self.name}, got {problem}")
        if _is_flag_or_complex(local):
            raise ValueError(f"{what} must hold real numbers at {self.name}, got {local.dtype}")
        if tuple(local.shape) != self.shape:
            raise ValueError(f"{what} must have shape {self.shape} at {self.name}, got {tuple(local.shape)}")
        return local

    def empty(self) -> Any:
        """A row of this leaf's numbers to be filled, and to be handed to `rebuilt`."""
        if self.kind == "torch":
            torch = sys.modules["torch"]
            return (torch.empty if self.audited else torch.zeros)(self.size, dtype=self.dtype, device=self.place)
        return np.empty(self.size, self.dtype) if self.audited else np.zeros(self.size, self.dtype)

    def rebuilt(self, rows: Mapping[str, Any]) -> Any:
        """An array like this leaf from the rows of its numbers."""
        if self.parts:
            return jax_measures().assembled(self.shape, self.place, [rows[part.name] for part in self.parts])
        shaped = rows[self.name].reshape(self.shape)
        if self.kind == "jax":
            return sys.modules["jax"].device_put(shaped, self.place)
        if self.mesh is not None:
            kind, mesh, placements, shape, stride = self.mesh
            return kind.from_local(shaped, mesh, placements, run_check=False, shape=shape, stride=stride)
        return shaped


@dataclass(frozen=True)
class Part:
    """What one device holds of a jax array: the name of its layer, how many numbers, and the device."""

    name: str
    size: int
    device: Any


def _device_parts(name: str, array: Any) -> tuple[Part, ...]:
    """The parts of a jax array, each number once: an array on one device is one part, which has the array's name."""
    found = jax_measures().one_of_each(array)
    names = [name] if len(found) == 1 else [f"{name}@{number}" for number in range(len(found))]
    return tuple(Part(own, math.prod(piece.shape), device) for own, (device, piece) in zip(names, found, strict=True))


@dataclass(frozen=True)
class Stretch:
    """A stretch of one leaf's row, and where it lies in its block."""

    name: str
    layer: int
    start: int
    stop: int
    place: int

    @property
    def here(self) -> slice:
        """Its place in the leaf's row."""
        return slice(self.start, self.stop)

    @property
    def there(self) -> slice:
        """Its place in the block."""
        return slice(self.place, self.place + self.stop - self.start)


class Tree:
    """The structure of a model's parameters."""

    def __init__(self, parameters: Any) -> None:
        found: list[Leaf] = []
        memory: list[_Memory] = []
        walked = list(_walk(parameters, ""))
        for (name, value), frozen in zip(walked, _frozen([value for _, value in walked]), strict=True):
            leaf = Leaf.of(name, value, frozen=frozen)
            found.append(leaf)
            if leaf.coordinates and (place := _memory_of(name, value)) is not None:
                memory.append(place)
        _refuse_tied(memory)
        self._skeleton = _skeleton(parameters, iter(range(len(found))))
        names = [name for leaf in found for name in {leaf.name, *(part.name for part in leaf.parts)}]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"parameters must have different names, but {twice!r} comes twice")
        self.leaves = tuple(found)
        self._by_device = _in_order_of_devices(self.leaves)

    @property
    def dim(self) -> int:
        """Coordinates in this process."""
        return sum(leaf.coordinates for leaf in self.leaves)

    @property
    def on_host(self) -> bool:
        """Whether all of it lies in the memory of the host."""
        return all(leaf.on_host for leaf in self.leaves if leaf.audited)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Names and sizes of the leaves that can hold a canary; of a model on several devices, device by device."""
        if self._by_device:
            return [(part.name, part.size) for parts in self._by_device for part in parts]
        return [(leaf.name, leaf.coordinates) for leaf in self.leaves if leaf.audited]

    @property
    def device_sizes(self) -> tuple[int, ...]:
        """How many coordinates each of several devices holds; empty if no jax array is on several."""
        return tuple(sum(part.size for part in parts) for parts in self._by_device)

    def rows(self, what: str, given: Any) -> dict[str, Any]:
        """The leaves of a value of this structure by their names, each in one row."""
        found = list(_matched(self._skeleton, given, what, ""))
        rows: dict[str, Any] = {}
        for leaf, (_, value) in zip(self.leaves, found, strict=True):
            if leaf.audited:
                rows |= leaf.rows(what, value)
        return rows

    def empty_rows(self) -> dict[str, Any]:
        """Rows to be filled, and to be handed to `rebuilt`, by the names of layers."""
        rows: dict[str, Any] = {}
        for leaf in self.leaves:
            if leaf.audited:
                rows |= leaf.empty_rows()
        return rows

    @property
    def _whole(self) -> tuple[Stretch, ...]:
        """All leaves as one block."""
        starts = np.cumsum([0, *(size for _, size in self.layers)]).tolist()
        return tuple(
            Stretch(name, number, 0, size, int(start))
            for number, ((name, size), start) in enumerate(zip(self.layers, starts, strict=False))
            if size
        )

    def vector(self, what: str, given: Any, *, own: bool = False) -> Any:
        """The leaves of a value of this structure as one vector, for a model of one block; with `own` always a copy."""
        return gathered(self.rows(what, given), self._whole, own=own)

    def vector_like(self) -> Any:
        """An empty array of the kind that `vector` returns."""
        return template(list(self.empty_rows().values()))

    def from_vector(self, vector: Any, factor: float = 1.0) -> Any:
        """The inverse of `vector`: the same structure, filled with its numbers, times a factor."""
        rows = self.empty_rows()
        for part in self._whole:
            rows[part.name] = fill(rows[part.name], part.here, vector[part.there], factor)
        return self.rebuilt(rows)

    def rebuilt(self, rows: Mapping[str, Any]) -> Any:
        """The same structure with these rows in the place of its leaves."""
        values = [leaf.rebuilt(rows if leaf.audited else {leaf.name: leaf.empty()}) for leaf in self.leaves]
        return _filled(self._skeleton, values)


def gathered(rows: dict[str, Any], stretches: Sequence[Stretch], *, own: bool = False, into: Any = None) -> Any:
    """One block's vector in working precision: a copy, unless it need not be its own and is one stretch of such numbers.

    The copy is in `into` if that is of the same kind.
    """
    pieces = [rows[part.name][part.here] for part in stretches]
    like = template(pieces)
    if not own and into is None and len(pieces) == 1 and pieces[0].dtype == like.dtype and _is_contiguous(pieces[0]):
        return pieces[0]
    if is_device_jax(like):
        return jax_measures().joined(pieces, like.dtype)
    size = stretches[-1].there.stop
    if into is not None and is_tensor(like) and (into.dtype, into.device) == (like.dtype, like.device):
        vector = into
    else:
        vector = like.new_empty(size) if is_tensor(like) else np.empty(size, like.dtype)
    for part, piece in zip(stretches, pieces, strict=True):
        fill(vector, part.there, piece)
    return vector


def take_away(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """The vector less a piece, times a factor, in a part of it, in its own precision: the same one, unless it is jax's."""
    if is_device_jax(vector):
        return jax_measures().taken_away(vector, place, piece, factor)
    if is_tensor(vector):
        tensor = piece if is_tensor(piece) else as_tensor(_native(piece))
        vector[place].sub_(tensor.to(vector.device), alpha=factor)
        return vector
    own = numpy_vector(piece) if is_tensor(piece) else _native(piece)
    part = vector[place]
    with np.errstate(over="ignore", invalid="ignore"):  # who measures the vector sees what came out
        np.subtract(part, own if factor == 1.0 else own * factor, out=part, casting="same_kind")
    return vector


def template(pieces: Sequence[Any]) -> Any:
    """An empty array of the kind that a block of these pieces is computed in: torch and double if any of them is."""
    double = any(piece.dtype.itemsize > (4 if _is_float(piece) else 2) for piece in pieces)
    tensor = next((piece for piece in pieces if is_tensor(piece)), None)
    array = next((piece for piece in pieces if is_device_jax(piece)), None)
    if array is not None and tensor is None:
        return jax_measures().empty_like(array, np.float64 if double else np.float32)
    if tensor is None:
        return np.empty(0, np.float64 if double else np.float32)
    return tensor.new_empty(0).double() if double else tensor.new_empty(0).float()


def fill(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """The row with a piece, times a factor, written into it, whatever kind both are: the same row, unless it is jax's."""
    if is_device_jax(row):
        return jax_measures().put(row, place, piece if factor == 1.0 else piece * factor)
    if factor != 1.0 and type(row) is type(piece) is np.ndarray and row.dtype == piece.dtype:
        np.multiply(piece, factor, out=row[place])  # one pass over memory
        return row
    scaled = piece if factor == 1.0 else piece * factor
    if is_tensor(row):
        row[place].copy_(scaled if is_tensor(scaled) else as_tensor(_native(scaled)))
    else:
        row[place] = numpy_vector(scaled) if is_tensor(scaled) else scaled
    return row


def plain(array: Any) -> Any:
    """An array as numpy or torch: a jax array of the host becomes numpy, a tensor loses its gradient."""
    if is_device_jax(array):
        return array
    if is_tensor(array):
        return array.detach().resolve_neg()
    return np.asarray(array)


def host_vector(name: str, value: Any) -> Any:
    """A jax array on a CPU as numpy, without a copy; anything else as it is."""
    if kind_of(value) != "jax":
        return value
    if problem := _unreadable(value, "jax"):
        raise ValueError(f"{name} must be a plain array, got {problem}")
    return value if is_device_jax(value) else np.asarray(value)


def kind_of(value: Any) -> str | None:
    """numpy, torch or jax; None for anything else, and for arrays of objects or text."""
    if is_tensor(value):
        return "torch"
    if isinstance(value, np.ndarray | np.generic):  # an array without dimensions becomes a scalar in most operations
        return "numpy" if value.dtype.kind in "fiubc" or _is_half(value.dtype) else None
    jax = sys.modules.get("jax")
    return "jax" if jax is not None and isinstance(value, jax.Array) else None


def _frozen(values: list[Any]) -> list[bool]:
    """Which of a model's torch parameters are not trained: those that require no gradient, if any does.

    In a `state_dict` none does, so nothing is known of it.
    """
    trained = [bool(getattr(value, "requires_grad", False)) for value in values]
    return [any(trained) and not own and is_tensor(value) for own, value in zip(trained, values, strict=True)]


def _unreadable(array: Any, kind: str) -> str | None:
    """What keeps an array's numbers from being read; None for a plain one."""
    if kind == "torch" and sys.modules["torch"].nn.parameter.is_lazy(array):
        return "an uninitialized parameter: run the model once first"
    if kind != "jax":
        return unusable(array)
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        return "a value that jax traces: call the audit outside of jit"
    if array.is_deleted():
        return "a jax array that was deleted or donated"
    if not array.is_fully_addressable:
        return "a jax array of several hosts: pass this host's part"
    return None


def _is_half(dtype: Any) -> bool:
    """Whether it is bfloat16, which numpy knows only by name."""
    return str(dtype) == "bfloat16"


def _is_float(array: Any) -> bool:
    if is_tensor(array):
        return bool(array.dtype.is_floating_point)
    return array.dtype.kind == "f" or _is_half(array.dtype)


def _is_flag_or_complex(array: Any) -> bool:
    if is_tensor(array):
        return bool(array.dtype.is_complex) or str(array.dtype) == "torch.bool"
    return not hasattr(array.dtype, "kind") or array.dtype.kind in "bc"


def _in_order_of_devices(leaves: Sequence[Leaf]) -> tuple[tuple[Part, ...], ...]:
    """The parts of a model that several devices hold, device by device; empty if one holds it all."""
    parts = [part for leaf in leaves for part in leaf.parts]
    first = next((leaf for leaf in leaves if len(leaf.parts) > 1), None)
    if first is None:
        return ()
    devices = list(dict.fromkeys([*(part.device for part in first.parts), *(part.device for part in parts)]))
    outside = [leaf.name for leaf in leaves if leaf.audited and not leaf.parts]
    if outside:
        raise ValueError(f"a model on several devices must be on them whole, but {outside[0]} is on the host")
    return tuple(tuple(part for part in parts if part.device == device) for device in devices)


def _is_contiguous(row: Any) -> bool:
    if is_device_jax(row):
        return True
    return bool(row.is_contiguous() if is_tensor(row) else row.flags.c_contiguous)


def _native(piece: Any) -> Any:
    """A numpy row of a type, byte order and layout that torch takes."""
    wide = piece.dtype.itemsize > (4 if _is_float(piece) else 2)
    return np.ascontiguousarray(piece, dtype=np.float64 if wide else np.float32)


def _holds_canaries(name: str, array: Any, kind: str) -> bool:
    """Whether a leaf holds canaries: floating-point numbers do, whole numbers and flags do not, others are refused."""
    dtype, kinds = array.dtype, getattr(array.dtype, "kind", "")
    if kind == "torch":
        floating, whole = dtype.is_floating_point, not (dtype.is_floating_point or dtype.is_complex)
    else:
        floating, whole = kinds == "f" or _is_half(dtype), kinds in ("b", "i", "u")
    if whole:
        return False
    if not floating or not 2 <= dtype.itemsize <= WIDEST:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64 to hold a canary, got {dtype}; convert it, or leave it "
            "out if it is not trained"
        )
    return True


def _local(name: str, value: Any) -> tuple[Any, Any]:
    """This process's part of a DTensor, and what is needed to make another; anything else as it is."""
    if not (is_tensor(value) and hasattr(value, "to_local") and hasattr(value, "placements")):
        return value, None
    if not all(placement.is_shard() for placement in value.placements):
        raise ValueError(
            f"{name} must be sharded over the processes, each coordinate in one of them, got {value.placements}"
        )
    told = (type(value), value.device_mesh, value.placements, value.shape, value.stride())
    return value.detach().to_local(), told


@dataclass(frozen=True)
class _Memory:
    """Where a leaf's numbers lie: addresses of its first and last number, and whether all between them are its own."""

    name: str
    space: str
    low: int
    high: int
    dense: bool

    def shares(self, other: "_Memory") -> bool:
        """Whether two leaves have a number in common; False too where strides make it hard to say."""
        if self.space != other.space or self.high < other.low or other.high < self.low:
            return False
        if self.low == other.low or self.high == other.high or (self.dense and other.dense):
            return True
        return self._surrounds(other) or other._surrounds(self)

    def _surrounds(self, other: "_Memory") -> bool:
        return self.dense and (self.low <= other.low <= self.high or self.low <= other.high <= self.high)


def _memory_of(name: str, value: Any) -> _Memory | None:
    """Where the numbers of a tensor or a numpy array lie; jax's cannot be changed, so no two names share a parameter."""
    if is_tensor(value):
        local = value.to_local() if hasattr(value, "to_local") else value
        width, space = local.element_size(), str(local.device)
        steps = [width * step * (size - 1) for size, step in zip(local.shape, local.stride(), strict=True)]
        start, count = local.data_ptr(), local.numel()
    elif isinstance(value, np.ndarray):
        width, space, count = value.itemsize, "host", value.size
        steps = [step * (size - 1) for size, step in zip(value.shape, value.strides, strict=True)]
        start = value.__array_interface__["data"][0]
    else:
        return None
    low = start + sum(step for step in steps if step < 0)
    high = start + sum(step for step in steps if step > 0)
    return _Memory(name, space, low, high, high - low + width <= count * width)


def _refuse_tied(places: list[_Memory]) -> None:
    """Refuse two names for one parameter."""
    open_: list[_Memory] = []
    for place in sorted(places, key=lambda place: (place.space, place.low)):
        open_ = [other for other in open_ if other.space == place.space and other.high >= place.low]
        for other in open_:
            if place.shares(other):
                one, two = sorted((place, other), key=places.index)
                raise ValueError(
                    f"parameters must not share memory, but {one.name} and {two.name} do (tied weights): "
                    "leave one of them out"
                )
        open_.append(place)


def _is_inner(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _children(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _walk(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name: the keys that lead to it, joined by dots."""
    if depth > DEEPEST:
        raise ValueError(f"parameters must be nested at most {DEEPEST} deep")
    if value is None:
        return
    if not _is_inner(value):
        yield name or WHOLE, value
        return
    for key, child in _children(value):
        plain_key = printable(str(key))  # names are printed: a terminal must not obey them
        yield from _walk(child, f"{name}.{plain_key}" if name else plain_key, depth + 1)


def _skeleton(value: Any, numbers: Iterator[int]) -> Any:
    """The containers of a tree, with numbers in the place of its leaves."""
    if value is None:
        return None
    if not _is_inner(value):
        return next(numbers)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: _skeleton(child, numbers) for key, child in value.items()})
    children = [_skeleton(child, numbers) for child in value]
    return children if isinstance(value, list) else _like_tuple(value, children)


def _like_mapping(value: Any, children: dict[Any, Any]) -> Any:
    """Children in a mapping of the same type, where one can be made: jax tells an OrderedDict from a dict."""
    if type(value) is dict:
        return children
    try:
        made = copy.copy(value) if isinstance(value, dict) else type(value)(children)
        if isinstance(value, dict):
            made.update(children)
    except Exception:  # a mapping of somebody's own; a dict has the same keys
        return children
    return made if isinstance(made, Mapping) else children


def _like_tuple(value: Any, children: list[Any]) -> Any:
    return type(value)(*children) if hasattr(value, "_fields") else tuple(children)


def _filled(skeleton: Any, values: Sequence[Any]) -> Any:
    if skeleton is None:
        return None
    if isinstance(skeleton, int):
        return values[skeleton]
    if isinstance(skeleton, Mapping):
        return _like_mapping(skeleton, {key: _filled(child, values) for key, child in skeleton.items()})
    children = [_filled(child, values) for child in skeleton]
    return children if isinstance(skeleton, list) else _like_tuple(skeleton, children)


def _matched(skeleton: Any, given: Any, what: str, name: str) -> Iterator[tuple[int, Any]]:
    """The leaves of a value that must have the skeleton's structure, in the skeleton's order."""
    where = f" at {name}" if name else ""
    if skeleton is None:
        if given is not None:
            raise ValueError(f"{what} must have the model's structure, which has nothing{where}, got {shown(given)}")
        return
    if isinstance(skeleton, int):
        if _is_inner(given) or given is None:
            raise ValueError(f"{what} must have the model's structure, an array{where}, got {shown(given)}")
        yield skeleton, given
        return
    if isinstance(skeleton, Mapping):
        if not isinstance(given, Mapping):
            raise ValueError(f"{what} must have the model's structure, a dict{where}, got {shown(given)}")
        missing = [key for key in skeleton if key not in given]
        extra = [key for key in given if key not in skeleton]
        if missing or extra:
            problem = f"{missing[0]!r} is missing" if missing else f"{extra[0]!r} is not in it"
            raise ValueError(f"{what} must have the model's structure{where}: {problem}")
        children = [(key, child, given[key]) for key, child in skeleton.items()]
    else:
        if not isinstance(given, list | tuple) or len(given) != len(skeleton):
            raise ValueError(
                f"{what} must have the model's structure, {len(skeleton)} entries{where}, got {shown(given)}"
            )
        children = [(key, child, given[key]) for key, child in enumerate(skeleton)]
    for key, child, value in children:
        yield from _matched(child, value, what, f"{name}.{key}" if name else str(key))
