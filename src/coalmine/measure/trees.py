"""Models as nested dicts, lists and tuples of numpy arrays, torch tensors or jax arrays.

A `Tree` remembers the structure of a model's parameters, not their values. Its coordinates are those of its leaves, one
leaf after another. A vector of all coordinates is made only if they form one block.
"""

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coalmine.argument_checks import printable, short_repr
from coalmine.measure.vectors import as_tensor, is_device_jax, is_tensor, jax_measures, numpy_vector, unusable

DEEPEST = 100  # levels of nesting
WHOLE = "parameters"  # name of a model that is one array
WIDEST = 8  # bytes of a number in a leaf that holds canaries


@dataclass(frozen=True)
class Leaf:
    """One array of a model: its name, shape and type, and the information needed to create another one like it."""

    name: str
    shape: tuple[int, ...]
    kind: str  # numpy, torch, jax
    dtype: Any
    size: int  # coordinates in this process
    place: Any = None  # torch: the device; jax: the sharding
    mesh: Any = None  # of a DTensor: mesh, placements, shape and stride of the whole
    audited: bool = True  # integers, flags and frozen parameters hold no canary
    parts: tuple["Part", ...] = ()  # of a jax array that is not on the host: one for each device, without replicas

    @classmethod
    def of(cls, name: str, value: Any, *, frozen: bool) -> "Leaf":
        local, mesh = _local_part(name, value)
        kind = kind_of(local)
        if kind is None:
            module = "; for a torch module pass dict(module.named_parameters())" if name == WHOLE else ""
            raise ValueError(
                f"parameters must be numpy arrays, torch tensors or jax arrays in dicts, lists and tuples, got "
                f"{short_repr(value)} at {name}{module}"
            )
        if problem := _unreadable_reason(local, kind):
            raise ValueError(f"{name} must be a plain array, got {problem}")
        place = local.device if kind == "torch" else local.sharding if kind == "jax" else None
        size = math.prod(local.shape)
        audited = not frozen and _holds_canaries(name, local, kind)
        parts = _device_parts(name, local) if audited and is_device_jax(local) else ()
        return cls(name, tuple(local.shape), kind, local.dtype, size, place, mesh, audited, parts)

    @property
    def coordinates(self) -> int:
        """The number of the audit's coordinates in this leaf."""
        return self.size if self.audited else 0

    @property
    def on_host(self) -> bool:
        """Whether the array is in host memory."""
        return not self.parts and (self.kind != "torch" or self.place.type == "cpu")

    def rows(self, argument: str, value: Any) -> dict[str, Any]:
        """The numbers of a value for this leaf, as flat rows by layer name: one row, or one for each device."""
        local = self.local_array(argument, value)
        if not self.parts and not is_device_jax(local):
            return {self.name: as_plain_array(local).reshape(-1)}
        # A value on other devices is moved to the model's devices, or to one device.
        source = numpy_vector(local) if is_tensor(local) else local
        array = jax_measures().moved(source, self.place if self.parts else None)
        pieces = jax_measures().one_of_each(array)
        names = [part.name for part in self.parts] or [self.name]
        return {name: piece.reshape(-1) for name, (_, piece) in zip(names, pieces, strict=True)}

    def empty_rows(self) -> dict[str, Any]:
        """Uninitialised rows for this leaf's numbers, by layer name."""
        if not self.parts:
            return {self.name: self.empty_row()}
        jax = sys.modules["jax"]
        return {part.name: jax.numpy.zeros(part.size, self.dtype, device=part.device) for part in self.parts}

    def local_array(self, argument: str, value: Any) -> Any:
        """This process's part of a value for this leaf. Raises ValueError if it is not an array of this shape."""
        local, _ = _local_part(f"{argument} at {self.name}", value)
        kind = kind_of(local)
        problem = short_repr(value) if kind is None else _unreadable_reason(local, kind)
        if problem:
            raise ValueError(f"{argument} must hold a plain array at {self.name}, got {problem}")
        if _is_flag_or_complex(local):
            raise ValueError(f"{argument} must hold real numbers at {self.name}, got {local.dtype}")
        if tuple(local.shape) != self.shape:
            raise ValueError(f"{argument} must have shape {self.shape} at {self.name}, got {tuple(local.shape)}")
        return local

    def empty_row(self) -> Any:
        """A row for this leaf's numbers, to be filled and passed to `rebuild`. A leaf without canaries gets zeros."""
        if self.kind == "torch":
            torch = sys.modules["torch"]
            return (torch.empty if self.audited else torch.zeros)(self.size, dtype=self.dtype, device=self.place)
        return np.empty(self.size, self.dtype) if self.audited else np.zeros(self.size, self.dtype)

    def rebuild(self, rows: Mapping[str, Any]) -> Any:
        """An array like this leaf, made from the rows of its numbers."""
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
    """The part of a jax array on one device: the name of its layer, its size, and the device."""

    name: str
    size: int
    device: Any


def _device_parts(name: str, array: Any) -> tuple[Part, ...]:
    """The parts of a jax array, without replicas. An array on one device is one part with the array's name."""
    pieces = jax_measures().one_of_each(array)
    names = [name] if len(pieces) == 1 else [f"{name}@{number}" for number in range(len(pieces))]
    return tuple(
        Part(part, math.prod(piece.shape), device) for part, (device, piece) in zip(names, pieces, strict=True)
    )


@dataclass(frozen=True)
class Stretch:
    """A contiguous range of one leaf's row, and its offset in its block."""

    name: str
    layer: int
    start: int
    stop: int
    offset: int

    @property
    def in_leaf(self) -> slice:
        """The range in the leaf's row."""
        return slice(self.start, self.stop)

    @property
    def in_block(self) -> slice:
        """The range in the block."""
        return slice(self.offset, self.offset + self.stop - self.start)


class Tree:
    """The structure of a model's parameters."""

    def __init__(self, parameters: Any) -> None:
        leaves: list[Leaf] = []
        memory: list[_Memory] = []
        values = list(_walk(parameters, ""))
        for (name, value), frozen in zip(values, _frozen([value for _, value in values]), strict=True):
            leaf = Leaf.of(name, value, frozen=frozen)
            leaves.append(leaf)
            if leaf.coordinates and (addresses := _memory_of(name, value)) is not None:
                memory.append(addresses)
        _check_tied_weights(memory)
        self._skeleton = _skeleton(parameters, iter(range(len(leaves))))
        names = [name for leaf in leaves for name in {leaf.name, *(part.name for part in leaf.parts)}]
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"parameters must have different names, but {repeated!r} comes twice")
        self.leaves = tuple(leaves)
        self._by_device = _parts_by_device(self.leaves)

    @property
    def dim(self) -> int:
        """The number of coordinates in this process."""
        return sum(leaf.coordinates for leaf in self.leaves)

    @property
    def on_host(self) -> bool:
        """Whether all audited leaves are in host memory."""
        return all(leaf.on_host for leaf in self.leaves if leaf.audited)

    @property
    def layers(self) -> list[tuple[str, int]]:
        """Names and sizes of the leaves that hold canaries. A model on several devices has one layer per leaf and device."""
        if self._by_device:
            return [(part.name, part.size) for parts in self._by_device for part in parts]
        return [(leaf.name, leaf.coordinates) for leaf in self.leaves if leaf.audited]

    @property
    def device_sizes(self) -> tuple[int, ...]:
        """The number of coordinates on each device; empty if no jax array is spread over several."""
        return tuple(sum(part.size for part in parts) for parts in self._by_device)

    def rows(self, argument: str, tree: Any) -> dict[str, Any]:
        """The leaves of a value with this structure, as flat rows by layer name; `argument` names it in error messages."""
        values = list(_matching_leaves(self._skeleton, tree, argument, ""))
        rows: dict[str, Any] = {}
        for leaf, (_, value) in zip(self.leaves, values, strict=True):
            if leaf.audited:
                rows |= leaf.rows(argument, value)
        return rows

    def empty_rows(self) -> dict[str, Any]:
        """Uninitialised rows by layer name, to be filled and passed to `rebuild`."""
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

    def vector(self, argument: str, tree: Any, *, own: bool = False) -> Any:
        """The leaves of a value with this structure as one vector, for a model of one block. With `own`, always a copy."""
        return gather_block(self.rows(argument, tree), self._whole, own=own)

    def vector_like(self) -> Any:
        """An empty array of the kind that `vector` returns."""
        return empty_working_array(list(self.empty_rows().values()))

    def from_vector(self, vector: Any, factor: float = 1.0) -> Any:
        """The inverse of `vector`: this structure, filled with the vector's numbers times a factor."""
        rows = self.empty_rows()
        for part in self._whole:
            rows[part.name] = write_piece(rows[part.name], part.in_leaf, vector[part.in_block], factor)
        return self.rebuild(rows)

    def rebuild(self, rows: Mapping[str, Any]) -> Any:
        """A value with this structure and with these rows as its leaves."""
        values = [leaf.rebuild(rows if leaf.audited else {leaf.name: leaf.empty_row()}) for leaf in self.leaves]
        return _fill_skeleton(self._skeleton, values)


def gather_block(rows: dict[str, Any], stretches: Sequence[Stretch], *, own: bool = False, into: Any = None) -> Any:
    """One block's vector in working precision.

    It is a view if the block is one stretch that already has this precision; with `own`, it is always a copy. The copy is
    written to `into` if that has the same dtype and device.
    """
    pieces = [rows[part.name][part.in_leaf] for part in stretches]
    like = empty_working_array(pieces)
    if not own and into is None and len(pieces) == 1 and pieces[0].dtype == like.dtype and _is_contiguous(pieces[0]):
        return pieces[0]
    if is_device_jax(like):
        return jax_measures().joined(pieces, like.dtype)
    size = stretches[-1].in_block.stop
    if into is not None and is_tensor(like) and (into.dtype, into.device) == (like.dtype, like.device):
        vector = into
    else:
        vector = like.new_empty(size) if is_tensor(like) else np.empty(size, like.dtype)
    for part, piece in zip(stretches, pieces, strict=True):
        write_piece(vector, part.in_block, piece)
    return vector


def subtract_piece(vector: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Subtract `factor` times a piece from the vector at `place`, in the vector's precision, and return the vector.

    It is changed in place, except for a jax array, of which a new one is returned.
    """
    if is_device_jax(vector):
        return jax_measures().taken_away(vector, place, piece, factor)
    if is_tensor(vector):
        tensor = piece if is_tensor(piece) else as_tensor(_torch_compatible(piece))
        vector[place].sub_(tensor.to(vector.device), alpha=factor)
        return vector
    array = numpy_vector(piece) if is_tensor(piece) else _torch_compatible(piece)
    part = vector[place]
    with np.errstate(over="ignore", invalid="ignore"):  # the measurements of the vector check for infinities
        np.subtract(part, array if factor == 1.0 else array * factor, out=part, casting="same_kind")
    return vector


def empty_working_array(pieces: Sequence[Any]) -> Any:
    """An empty array of the type and precision for computing with these pieces: torch if any is, double if any is wide."""
    double = any(piece.dtype.itemsize > (4 if _is_float(piece) else 2) for piece in pieces)
    tensor = next((piece for piece in pieces if is_tensor(piece)), None)
    array = next((piece for piece in pieces if is_device_jax(piece)), None)
    if array is not None and tensor is None:
        return jax_measures().empty_like(array, np.float64 if double else np.float32)
    if tensor is None:
        return np.empty(0, np.float64 if double else np.float32)
    return tensor.new_empty(0).double() if double else tensor.new_empty(0).float()


def write_piece(row: Any, place: slice, piece: Any, factor: float = 1.0) -> Any:
    """Write `factor` times a piece into the row at `place`, whatever types both have, and return the row.

    It is changed in place, except for a jax array, of which a new one is returned.
    """
    if is_device_jax(row):
        return jax_measures().put(row, place, piece if factor == 1.0 else piece * factor)
    if factor != 1.0 and type(row) is type(piece) is np.ndarray and row.dtype == piece.dtype:
        np.multiply(piece, factor, out=row[place])  # one pass over memory
        return row
    scaled = piece if factor == 1.0 else piece * factor
    if is_tensor(row):
        row[place].copy_(scaled if is_tensor(scaled) else as_tensor(_torch_compatible(scaled)))
    else:
        row[place] = numpy_vector(scaled) if is_tensor(scaled) else scaled
    return row


def as_plain_array(array: Any) -> Any:
    """The array without its framework's extras: a jax array on the host becomes numpy, a tensor is detached."""
    if is_device_jax(array):
        return array
    if is_tensor(array):
        return array.detach().resolve_neg()
    return np.asarray(array)


def host_vector(name: str, value: Any) -> Any:
    """A jax array on a CPU as numpy, without a copy; anything else unchanged."""
    if kind_of(value) != "jax":
        return value
    if problem := _unreadable_reason(value, "jax"):
        raise ValueError(f"{name} must be a plain array, got {problem}")
    return value if is_device_jax(value) else np.asarray(value)


def kind_of(value: Any) -> str | None:
    """numpy, torch or jax; None for anything else, and for arrays of objects or text."""
    if is_tensor(value):
        return "torch"
    if isinstance(value, np.ndarray | np.generic):  # most operations turn an array without dimensions into a scalar
        return "numpy" if value.dtype.kind in "fiubc" or _is_bfloat16(value.dtype) else None
    jax = sys.modules.get("jax")
    return "jax" if jax is not None and isinstance(value, jax.Array) else None


def _frozen(values: list[Any]) -> list[bool]:
    """Which torch parameters are not trained: those that require no gradient, provided that others do.

    In a `state_dict` none requires a gradient, so none counts as frozen.
    """
    trained = [bool(getattr(value, "requires_grad", False)) for value in values]
    return [any(trained) and not flag and is_tensor(value) for flag, value in zip(trained, values, strict=True)]


def _unreadable_reason(array: Any, kind: str) -> str | None:
    """Why the array's numbers cannot be read; None if they can."""
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
        return "a jax array on several hosts: pass this host's part"
    return None


def _is_bfloat16(dtype: Any) -> bool:
    """Whether a dtype is bfloat16, which numpy does not have itself."""
    return str(dtype) == "bfloat16"


def _is_float(array: Any) -> bool:
    if is_tensor(array):
        return bool(array.dtype.is_floating_point)
    return array.dtype.kind == "f" or _is_bfloat16(array.dtype)


def _is_flag_or_complex(array: Any) -> bool:
    if is_tensor(array):
        return bool(array.dtype.is_complex) or str(array.dtype) == "torch.bool"
    return not hasattr(array.dtype, "kind") or array.dtype.kind in "bc"


def _parts_by_device(leaves: Sequence[Leaf]) -> tuple[tuple[Part, ...], ...]:
    """The parts of a model on several devices, grouped by device; empty if it is on one."""
    parts = [part for leaf in leaves for part in leaf.parts]
    first = next((leaf for leaf in leaves if len(leaf.parts) > 1), None)
    if first is None:
        return ()
    devices = list(dict.fromkeys([*(part.device for part in first.parts), *(part.device for part in parts)]))
    on_host = [leaf.name for leaf in leaves if leaf.audited and not leaf.parts]
    if on_host:
        raise ValueError(f"all of a model on several devices must be on devices, but {on_host[0]} is on the host")
    return tuple(tuple(part for part in parts if part.device == device) for device in devices)


def _is_contiguous(row: Any) -> bool:
    if is_device_jax(row):
        return True
    return bool(row.is_contiguous() if is_tensor(row) else row.flags.c_contiguous)


def _torch_compatible(piece: Any) -> Any:
    """A numpy row with a type, byte order and layout that torch accepts."""
    wide = piece.dtype.itemsize > (4 if _is_float(piece) else 2)
    return np.ascontiguousarray(piece, dtype=np.float64 if wide else np.float32)


def _holds_canaries(name: str, array: Any, kind: str) -> bool:
    """Whether a leaf holds canaries: floating-point numbers do, integers and flags do not. Other types raise ValueError."""
    dtype, kinds = array.dtype, getattr(array.dtype, "kind", "")
    if kind == "torch":
        floating, whole = dtype.is_floating_point, not (dtype.is_floating_point or dtype.is_complex)
    else:
        floating, whole = kinds == "f" or _is_bfloat16(dtype), kinds in ("b", "i", "u")
    if whole:
        return False
    if not floating or not 2 <= dtype.itemsize <= WIDEST:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64 to hold a canary, got {dtype}; convert it, or leave it "
            "out if it is not trained"
        )
    return True


def _local_part(name: str, value: Any) -> tuple[Any, Any]:
    """This process's part of a DTensor, and the layout to create another; anything else unchanged, and None."""
    if not (is_tensor(value) and hasattr(value, "to_local") and hasattr(value, "placements")):
        return value, None
    if not all(placement.is_shard() for placement in value.placements):
        raise ValueError(
            f"{name} must be sharded over the processes, each coordinate in one of them, got {value.placements}"
        )
    layout = (type(value), value.device_mesh, value.placements, value.shape, value.stride())
    return value.detach().to_local(), layout


@dataclass(frozen=True)
class _Memory:
    """The memory of a leaf: the addresses of its first and last number, and whether it owns all numbers between them."""

    name: str
    space: str
    low: int
    high: int
    dense: bool

    def shares(self, other: "_Memory") -> bool:
        """Whether two leaves share a number. Also False where the strides make that hard to decide."""
        if self.space != other.space or self.high < other.low or other.high < self.low:
            return False
        if self.low == other.low or self.high == other.high or (self.dense and other.dense):
            return True
        return self._surrounds(other) or other._surrounds(self)

    def _surrounds(self, other: "_Memory") -> bool:
        return self.dense and (self.low <= other.low <= self.high or self.low <= other.high <= self.high)


def _memory_of(name: str, value: Any) -> _Memory | None:
    """The memory of a tensor or numpy array. None for jax arrays: they are immutable, so no two names share a parameter."""
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


def _check_tied_weights(leaves: list[_Memory]) -> None:
    """Raise ValueError if two names share a parameter."""
    candidates: list[_Memory] = []  # earlier leaves that may overlap the current one
    for leaf in sorted(leaves, key=lambda leaf: (leaf.space, leaf.low)):
        candidates = [other for other in candidates if other.space == leaf.space and other.high >= leaf.low]
        for other in candidates:
            if leaf.shares(other):
                one, two = sorted((leaf, other), key=leaves.index)
                raise ValueError(
                    f"parameters must not share memory, but {one.name} and {two.name} do (tied weights): "
                    "leave one of them out"
                )
        candidates.append(leaf)


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def _children(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))


def _walk(value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every leaf with its name: the keys on the path to it, joined by dots."""
    if depth > DEEPEST:
        raise ValueError(f"parameters must be nested at most {DEEPEST} deep")
    if value is None:
        return
    if not _is_container(value):
        yield name or WHOLE, value
        return
    for key, child in _children(value):
        printable_key = printable(str(key))  # names are printed, and a terminal must not interpret them
        yield from _walk(child, f"{name}.{printable_key}" if name else printable_key, depth + 1)


def _skeleton(value: Any, numbers: Iterator[int]) -> Any:
    """The containers of a tree, with the index of each leaf in its place."""
    if value is None:
        return None
    if not _is_container(value):
        return next(numbers)
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: _skeleton(child, numbers) for key, child in value.items()})
    children = [_skeleton(child, numbers) for child in value]
    return children if isinstance(value, list) else _like_tuple(value, children)


def _like_mapping(value: Any, children: dict[Any, Any]) -> Any:
    """The children in a mapping of the same type if possible: jax distinguishes an OrderedDict from a dict."""
    if type(value) is dict:
        return children
    try:
        mapping = copy.copy(value) if isinstance(value, dict) else type(value)(children)
        if isinstance(value, dict):
            mapping.update(children)
    except Exception:  # a custom mapping with another constructor; a dict has the same keys
        return children
    return mapping if isinstance(mapping, Mapping) else children


def _like_tuple(value: Any, children: list[Any]) -> Any:
    return type(value)(*children) if hasattr(value, "_fields") else tuple(children)


def _fill_skeleton(skeleton: Any, values: Sequence[Any]) -> Any:
    if skeleton is None:
        return None
    if isinstance(skeleton, int):
        return values[skeleton]
    if isinstance(skeleton, Mapping):
        return _like_mapping(skeleton, {key: _fill_skeleton(child, values) for key, child in skeleton.items()})
    children = [_fill_skeleton(child, values) for child in skeleton]
    return children if isinstance(skeleton, list) else _like_tuple(skeleton, children)


def _matching_leaves(skeleton: Any, value: Any, argument: str, name: str) -> Iterator[tuple[int, Any]]:
    """The leaves of a value in the skeleton's order. Raises ValueError if it does not have the skeleton's structure."""
    where = f" at {name}" if name else ""
    if skeleton is None:
        if value is not None:
            raise ValueError(
                f"{argument} must have the model's structure, which has nothing{where}, got {short_repr(value)}"
            )
        return
    if isinstance(skeleton, int):
        if _is_container(value) or value is None:
            raise ValueError(f"{argument} must have the model's structure, an array{where}, got {short_repr(value)}")
        yield skeleton, value
        return
    if isinstance(skeleton, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{argument} must have the model's structure, a dict{where}, got {short_repr(value)}")
        missing = [key for key in skeleton if key not in value]
        extra = [key for key in value if key not in skeleton]
        if missing or extra:
            problem = f"{missing[0]!r} is missing" if missing else f"{extra[0]!r} is not in it"
            raise ValueError(f"{argument} must have the model's structure{where}: {problem}")
        children = [(key, child, value[key]) for key, child in skeleton.items()]
    else:
        if not isinstance(value, list | tuple) or len(value) != len(skeleton):
            raise ValueError(
                f"{argument} must have the model's structure, {len(skeleton)} entries{where}, got {short_repr(value)}"
            )
        children = [(key, child, value[key]) for key, child in enumerate(skeleton)]
    for key, child, inner in children:
        yield from _matching_leaves(child, inner, argument, f"{name}.{key}" if name else str(key))
