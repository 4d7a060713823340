"""Models as nested dicts, lists and tuples of numpy arrays, torch tensors or jax arrays.

A `Tree` remembers the structure of a model's parameters, not their values. Its coordinates are those of its leaves, one
leaf after another. A vector of all coordinates is made only if they form one block.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from coalmine.argument_checks import printable, short_repr
from coalmine.canaries.array_types import is_tensor
from coalmine.measure.leaves import WHOLE, Leaf, Part
from coalmine.measure.stretches import Stretch, empty_working_array, gather_block, write_piece
from coalmine.measure.tied_weights import Memory, check_tied_weights, memory_of

DEEPEST = 100  # levels of nesting


class Tree:
    """The structure of a model's parameters."""

    def __init__(self, parameters: Any) -> None:
        leaves: list[Leaf] = []
        memory: list[Memory] = []
        values = list(_walk(parameters, ""))
        for (name, value), frozen in zip(values, _frozen([value for _, value in values]), strict=True):
            leaf = Leaf.of(name, value, frozen=frozen)
            leaves.append(leaf)
            if leaf.coordinates and (addresses := memory_of(name, value)) is not None:
                memory.append(addresses)
        check_tied_weights(memory)
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

    @cached_property
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

    @cached_property
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


def _frozen(values: list[Any]) -> list[bool]:
    """Which torch parameters are not trained: those that require no gradient, provided that others do.

    In a `state_dict` none requires a gradient, so none counts as frozen.
    """
    trained = [bool(getattr(value, "requires_grad", False)) for value in values]
    return [any(trained) and not flag and is_tensor(value) for flag, value in zip(trained, values, strict=True)]


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
