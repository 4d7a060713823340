"""Ctrl-C, SIGTERM and SIGHUP: one exception for all three, and a line that says how to continue."""

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIGNALS = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP


class StoppedError(KeyboardInterrupt):
    """A signal other than that of Ctrl-C stopped the process."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def stopping_signals() -> Iterator[None]:
    """Raise StoppedError on SIGTERM and SIGHUP, unless they are ignored (as under nohup) or handled by a caller."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: object) -> None:
    raise StoppedError(number)


@contextmanager
def resumable(command: str, named: Path, run: Path | None = None) -> Iterator[None]:
    """On an interruption, say that `command` with the path continues, once there is a `run` (default: at that path)."""
    directory = run or named
    try:
        yield
    except KeyboardInterrupt as stop:
        if directory.is_dir() and any(directory.iterdir()):
            stop.add_note(f"continue with: {command} {shlex.quote(str(named))}")
        raise


def interruption(stop: BaseException) -> tuple[int, str]:
    """The exit code of an interruption and the line to print."""
    number = stop.number if isinstance(stop, StoppedError) else int(signal.SIGINT)
    name = f"interrupted by {signal.Signals(number).name}" if isinstance(stop, StoppedError) else "interrupted"
    return 128 + number, "; ".join([name, *getattr(stop, "__notes__", ())])
