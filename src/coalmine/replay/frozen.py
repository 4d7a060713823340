"""What a function keeps between its calls, so that a call can be repeated: generators, closures, globals, attributes."""

import functools
import sysconfig
import types
from collections.abc import Callable, Mapping
from typing import Any

from coalmine.replay.randomness import Randomness, is_generator
from coalmine.replay.state import Contents

DEEPEST, MOST, LONGEST = 8, 5_000, 1_000  # of the search: links from the function, objects, and entries of a container
FOREIGN = ("logging", "threading", "_thread", "_pytest", "pytest", "multiprocessing", "concurrent", "weakref")
INSTALLED = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), "<frozen")


class Frozen:
    """The state of a function at one moment: what it refers to, and every random generator that it can reach.

    Generators that are made in each call, and those of the operating system, cannot be frozen.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._restores: list[Callable[[], None]] = []
        self._generators: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._visit(function, 0)
        self._first = self._randomness = Randomness(self._generators)

    def restore(self) -> None:
        """Put everything back."""
        for restore in self._restores:
            restore()
        self._randomness.restore()

    def advance(self) -> None:
        """Restore other random numbers from now on: those that follow the present ones."""
        self._randomness = Randomness(self._generators)

    def rewind(self) -> None:
        """Put everything back as it was at first."""
        self._randomness = self._first
        self.restore()

    def _visit(self, thing: Any, depth: int) -> None:
        if id(thing) in self._seen or depth > DEEPEST or len(self._seen) > MOST:
            return
        self._seen[id(thing)] = thing
        if is_generator(thing):
            self._generators.append(thing)
        elif isinstance(thing, types.FunctionType):
            self._visit_function(thing, depth + 1)
        elif isinstance(thing, types.MethodType):
            self._visit_all((thing.__self__, thing.__func__), depth)
        elif isinstance(thing, functools.partial):
            self._visit_all((thing.func, *thing.args, *thing.keywords.values()), depth)
        elif isinstance(thing, Mapping):
            self._visit_all(list(thing.values())[:LONGEST], depth)
        elif isinstance(thing, list | tuple | set | frozenset):
            self._visit_all(list(thing)[:LONGEST], depth)
        elif _has_state(thing):
            self._keep(vars(thing), vars(thing))
            self._visit_all(vars(thing).values(), depth)

    def _visit_all(self, things: Any, depth: int) -> None:
        for each in list(things):
            self._visit(each, depth + 1)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        held = []
        for cell in function.__closure__ or ():
            try:
                held.append((cell, Contents(cell.cell_contents)))
            except ValueError:  # an empty cell
                continue
        self._restores += [functools.partial(_refill_cell, cell, content) for cell, content in held]
        self._visit_all((content.value for _, content in held), depth)
        self._visit_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth)
        self._keep(vars(function), vars(function))
        if not _is_installed(function):
            names = _names(function.__code__) & function.__globals__.keys()
            used = {name: function.__globals__[name] for name in names}
            self._keep(function.__globals__, used, remove=False)
            self._visit_all(used.values(), depth)
            for module in [each for each in used.values() if isinstance(each, types.ModuleType)]:
                if not _is_at(getattr(module, "__file__", None) or INSTALLED[0]):  # a module of the user's
                    self._visit_all(
                        [vars(module)[name] for name in _names(function.__code__) & vars(module).keys()], depth
                    )

    def _keep(self, owner: dict[str, Any], used: Mapping[str, Any], *, remove: bool = True) -> None:
        """Restore these entries of a dictionary; `remove` those that are new."""
        kept = {name: Contents(value) for name, value in used.items()}

        def restore() -> None:
            for name in [name for name in owner if remove and name not in kept]:
                del owner[name]
            for name, content in kept.items():
                owner[name] = content.restored()

        self._restores.append(restore)


def _refill_cell(cell: Any, content: Contents) -> None:
    cell.cell_contents = content.restored()


def _has_state(thing: Any) -> bool:
    """Whether an object's attributes may be what a function keeps."""
    if isinstance(thing, type | types.ModuleType | types.BuiltinFunctionType) or not hasattr(thing, "__dict__"):
        return False
    module = str(type(thing).__module__)
    return isinstance(vars(thing), dict) and module.partition(".")[0] not in FOREIGN


def _is_installed(function: types.FunctionType) -> bool:
    return _is_at(function.__code__.co_filename)


def _is_at(path: str) -> bool:
    """Whether a file belongs to an installed package or to Python."""
    return any(part in path for part in INSTALLED)


def _names(code: types.CodeType) -> set[str]:
    """The global names that a function's code uses, those of its inner functions included."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
