"""The guard of the methods that change an audit."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
Guarded = TypeVar("Guarded", bound=Any)


def one_thread(
    method: Callable[Concatenate[Guarded, Parameters], Returned],
) -> Callable[Concatenate[Guarded, Parameters], Returned]:
    """Guard a method that changes the audit: one thread at a time may call it, and no forked process."""

    @wraps(method)
    def guarded(self: Guarded, /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Returned:
        with self._writer:
            returned = method(self, *arguments, **options)
        self.watch.react(self.rank)
        return returned

    return guarded
