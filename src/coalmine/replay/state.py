"""What a training step writes: saved before a replay, compared between two replays, and restored bit for bit."""

import copy
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np

from coalmine.argument_checks import WrongTypeError, short_repr
from coalmine.canaries.array_types import is_tensor

OF_TORCH = frozenset({"_parameters", "_buffers", "_modules", "training"})  # of a module; saved in their own way
MOST_COPIED = 1 << 24  # numbers in what a function refers to; more are data, and not what it keeps
DEEPEST = 6  # lists in lists
LONGEST = 10_000  # entries of a list or dictionary in an attribute that is compared


class Snapshot:
    """The state of models, optimizers and other objects at one moment.

    Tensors are restored in place, so everything that refers to them stays valid.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._saved = [_saved(each) for each in self._objects]

    def restore(self) -> None:
        """Put everything back as it was."""
        for saved in self._saved:
            saved.restore()

    def written(self) -> dict[str, Any]:
        """What a step may write besides weights: buffers, tensors and numbers in attributes, states of other objects."""
        found: dict[str, Any] = {}
        several = len(self._objects) > 1
        for number, saved in enumerate(self._saved):
            start = f"{number}." if several else ""
            found |= {start + name: value for name, value in saved.written().items()}
        return found


def _saved(thing: Any) -> "_Module | _Optimizer | _Stateful | _Mapped":
    if hasattr(thing, "named_parameters") and hasattr(thing, "named_buffers"):
        return _Module(thing)
    if hasattr(thing, "param_groups") and hasattr(thing, "state"):
        return _Optimizer(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return _Stateful(thing)
    if isinstance(thing, MutableMapping):
        return _Mapped(thing)
    raise WrongTypeError(
        f"state must list models, optimizers, objects with a state_dict, or dictionaries of arrays, got {short_repr(thing)}"
    )


class _Module:
    """Weights, buffers and plain attributes of a torch module."""

    def __init__(self, model: Any) -> None:
        self._model = model
        tensors = [*model.parameters(), *model.buffers()]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._modules = [Attributes(part, skip=OF_TORCH) for part in model.modules()]
        self._parameters = [_Parameter(each) for each in model.parameters()]

    def restore(self) -> None:
        for tensor, saved in self._tensors:
            _overwrite(tensor, saved)
        for part in self._modules:
            part.restore()
        for parameter in self._parameters:
            parameter.restore()

    def written(self) -> dict[str, Any]:
        found = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}
        for name, part in self._model.named_modules():
            for key, value in vars(part).items():
                if key not in OF_TORCH and _is_value(value):
                    found[f"{name}.{key}".lstrip(".")] = _copied(value)
        return found


class _Parameter:
    """A parameter's gradient, and what Opacus keeps at it."""

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._grad = parameter, parameter.grad
        self._content = None if parameter.grad is None else parameter.grad.detach().clone()
        self._attributes = Attributes(parameter)

    def restore(self) -> None:
        self._parameter.grad = self._grad
        if self._content is not None:
            _overwrite(self._grad, self._content)
        self._attributes.restore()


class Attributes:
    """The attributes of an object: references, and the content of tensors, arrays, lists and dictionaries."""

    def __init__(self, owner: Any, *, skip: Iterable[str] = ()) -> None:
        self._owner = owner
        self._skip = set(skip)
        self._references = {name: value for name, value in vars(owner).items() if name not in self._skip}
        self._contents = {name: _copied(value) for name, value in self._references.items() if _is_mutable(value)}

    def restore(self) -> None:
        now = vars(self._owner)
        for name in [name for name in now if name not in self._references and name not in self._skip]:
            del now[name]
        for name, value in self._references.items():
            now[name] = value
            if name in self._contents:
                _refill(value, self._contents[name])


class Contents:
    """A reference, and the content of what it refers to if that is a tensor, an array, a list or a dictionary."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._content = _copied(value) if _is_mutable(value) and _count(value) <= MOST_COPIED else None

    def restored(self) -> Any:
        """The same object, with its content of that moment."""
        if self._content is not None:
            _refill(self.value, self._content)
        return self.value


class Remembered:
    """What a module's parts keep in plain attributes, lists and dictionaries, and in buffers that are not saved.

    Only numbers and arrays of at most `largest` numbers count, and parameters do not.
    """

    def __init__(self, model: Any, largest: int) -> None:
        self._model, self._largest = model, largest

    def read(self) -> dict[str, Any]:
        """A copy of each, by its name."""
        owners = self._owners()
        return {
            name: copied for name, (owner, key) in owners.items() if (copied := self._values(owner[key])) is not None
        }

    def write(self, kept: Mapping[str, Any]) -> None:
        """Put the copies of an earlier moment in the place of what is there."""
        owners = self._owners() if kept else {}
        for name in kept.keys() & owners.keys():
            owner, key = owners[name]
            owner[key] = _copied(kept[name])

    def _owners(self) -> dict[str, tuple[Any, str]]:
        found: dict[str, tuple[Any, str]] = {}
        for start, part in self._model.named_modules():
            own = {key: (vars(part), key) for key in vars(part) if key not in OF_TORCH}
            own |= {key: (part._buffers, key) for key in getattr(part, "_non_persistent_buffers_set", ())}
            found |= {f"{start}.{key}".lstrip("."): owner for key, owner in own.items()}
        return found

    def _values(self, value: Any) -> Any:
        """A copy of a number, an array, or a list or dictionary of nothing else; None for anything else."""
        if isinstance(value, list | dict):
            items = list(value.values() if isinstance(value, dict) else value)
            if not items or len(items) > LONGEST or any(self._values(item) is None for item in items):
                return None
            return _copied(value)
        if isinstance(value, bool) or not _is_value(value) or type(value).__name__ == "Parameter":
            return None
        return None if (value.numel() if is_tensor(value) else np.size(value)) > self._largest else _copied(value)


class _Optimizer:
    """State, hyperparameters and attributes of a torch optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._state = {key: (values, _copied(values)) for key, values in optimizer.state.items()}
        self._groups = [
            {name: value for name, value in group.items() if name != "params"} for group in _groups(optimizer)
        ]
        self._attributes = Attributes(optimizer, skip=("state", "param_groups"))
        parameters = {id(p): p for group in _groups(optimizer) for p in group["params"]}
        self._parameters = [_Parameter(each) for each in parameters.values()]
        self._tensors = [(each, each.detach().clone()) for each in parameters.values()]

    def restore(self) -> None:
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, (values, content) in self._state.items():
            state[key] = values
            _refill(values, content)
        for group, saved in zip(_groups(self._optimizer), self._groups, strict=True):
            group.update(saved)
        for tensor, content in self._tensors:
            _overwrite(tensor, content)
        for parameter in self._parameters:
            parameter.restore()
        self._attributes.restore()

    def written(self) -> dict[str, Any]:
        return {}  # momentum follows from the release


class _Stateful:
    """An object with a state_dict, such as a loss scaler, a scheduler or a moving average."""

    def __init__(self, thing: Any) -> None:
        self._thing, self._state = thing, copy.deepcopy(thing.state_dict())

    def restore(self) -> None:
        self._thing.load_state_dict(copy.deepcopy(self._state))

    def written(self) -> dict[str, Any]:
        return {str(name): _copied(value) for name, value in self._thing.state_dict().items() if _is_value(value)}


class _Mapped:
    """A dictionary of arrays and numbers."""

    def __init__(self, thing: MutableMapping[Any, Any]) -> None:
        self._thing, self._references = thing, dict(thing)
        self._contents = {name: _copied(value) for name, value in thing.items()}

    def restore(self) -> None:
        for name in [name for name in self._thing if name not in self._references]:
            del self._thing[name]
        for name, value in self._references.items():
            self._thing[name] = value
            _refill(value, self._contents[name])

    def written(self) -> dict[str, Any]:
        return {str(name): _copied(value) for name, value in self._thing.items() if _is_value(value)}


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return groups


def _is_value(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, np.ndarray | int | float) or type(value).__module__.startswith("jax")


def _count(value: Any, depth: int = 0) -> int:
    """How many numbers and entries a copy would hold; too many for what contains itself."""
    if isinstance(value, list | dict):
        items = list(value.values() if isinstance(value, dict) else value)
        if depth > DEEPEST or len(items) > LONGEST:
            return MOST_COPIED + 1
        total = len(items)
        for item in items:
            total += _count(item, depth + 1)
            if total > MOST_COPIED:
                break
        return total
    return int(value.numel() if is_tensor(value) else np.size(value)) if _is_mutable(value) else 1


def _is_mutable(value: Any) -> bool:
    return is_tensor(value) or isinstance(value, np.ndarray | list | dict)


def _copied(value: Any) -> Any:
    """A copy that later changes in place do not reach. Objects that are neither arrays nor containers are shared.

    So are parameters, which their module saves.
    """
    if is_tensor(value):
        if type(value).__name__ == "Parameter":
            return value
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value


def _refill(value: Any, content: Any) -> None:
    """Give a mutable object its former content back, in place."""
    if is_tensor(value):
        _overwrite(value, content)
    elif isinstance(value, np.ndarray):
        np.copyto(value, content)
    elif isinstance(value, list):
        value[:] = [_kept(old, new) for old, new in zip(_padded(value, len(content)), content, strict=True)]
    elif isinstance(value, dict):
        for name in [name for name in value if name not in content]:
            del value[name]
        for name, item in content.items():
            value[name] = _kept(value.get(name), item)


def _kept(old: Any, content: Any) -> Any:
    """The same object with its former content where it is a tensor or an array of that shape, else the content."""
    same = type(old) is type(content) and getattr(old, "shape", None) == getattr(content, "shape", ())
    if same and (is_tensor(old) or isinstance(old, np.ndarray)):
        _refill(old, content)
        return old
    return content


def _padded(values: list[Any], count: int) -> list[Any]:
    return [*values[:count], *[None] * (count - len(values))]


def _overwrite(tensor: Any, content: Any) -> None:
    tensor.data.copy_(content)  # through .data: a graph that still refers to the tensor stays valid


def moved(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """Names of the values that differ, and by how much relative to the larger one (1 if shapes or types differ)."""
    changes = {}
    for name in {**before, **after}:
        change = _change(before.get(name), after.get(name))
        if change > 0:
            changes[name] = change
    return changes


def _change(one: Any, other: Any) -> float:
    first, second = (_numbers(value) for value in (one, other))
    if first is None or second is None or first.shape != second.shape:
        return float(not (first is None and second is None))
    if np.array_equal(first, second, equal_nan=True):
        return 0.0
    finite = np.isfinite(first) & np.isfinite(second)
    if not finite.all():
        return 1.0
    return float(np.linalg.norm(first - second) / max(np.linalg.norm(first), np.linalg.norm(second)))


def _numbers(value: Any) -> "np.ndarray[Any, np.dtype[np.float64]] | None":
    if value is None:
        return None
    if isinstance(value, list | dict):
        parts = [_numbers(item) for item in (value.values() if isinstance(value, dict) else value)]
        return np.concatenate([np.zeros(0), *(part for part in parts if part is not None)])
    if is_tensor(value):
        value = value.detach().cpu()
        value = value.double().numpy() if value.is_floating_point() else value.numpy()
    return np.asarray(value, dtype=np.float64).reshape(-1)
