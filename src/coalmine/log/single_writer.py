"""A guard for data that only one thread of one process may write."""

import os
import threading
from typing import NoReturn


class SingleWriterLock:
    """A context that one thread at a time can enter, in the process that made it; all others get a RuntimeError."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        self._lock = threading.RLock()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that may write: a forked one is not."""
        return self._process == os.getpid()

    def __enter__(self) -> None:
        if not self.is_here:
            raise RuntimeError(
                f"{self._name} belongs to the process that made it, and a forked process may only read it; observe rounds "
                "there, or make a separate audit in this process, in another directory"
            )
        if not self._lock.acquire(blocking=False):  # waiting would hide that the order of rounds is random
            raise RuntimeError(f"{self._name} is in use by another thread; observe one round at a time")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def refuse_copy(name: str, instead: str) -> NoReturn:
    """For `__reduce__`, which copy and pickle call: a TypeError that says what to do instead."""
    raise TypeError(f"{name} cannot be copied or pickled: the copy would write into the same file; {instead}")
