"""A case of the fuzzer: its input for coalmine, and the check that tells a fault from a proper answer."""

import contextlib
import io
import json
import random
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coalmine.cli.main import main

SECONDS = 10.0  # processor time allowed for one case
WAITING = 6.0  # allowed wall time, as a multiple: a busy machine is not a hang
QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|^- nan$', re.IGNORECASE | re.MULTILINE)  # quoted text, or a note of the file
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
VIOLATION = re.compile(r"VIOLATION|Alarm in round|DOES NOT HOLD|\"held\": false|missed")
LOG_LINE = re.compile(r"^(WARNING|INFO|ERROR|DEBUG| {9})")


class FaultError(Exception):
    """coalmine gave an answer that it must not give."""


class HangError(BaseException):
    """A case took too long. No `except Exception` may swallow it."""


@dataclass(frozen=True)
class Case:
    """One input. `run` raises an error if coalmine answers wrongly; `given` describes the input for a person."""

    given: str
    run: Callable[[], None]
    seconds: float = SECONDS


@dataclass(frozen=True)
class Fault:
    """A case that failed."""

    part: str
    number: int
    given: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


def case_rng(seed: int, part: str, number: int) -> random.Random:
    """The random numbers of one case, independent of earlier cases."""
    return random.Random(f"{seed}/{part}/{number}")


def run_case(part: str, number: int, case: Case) -> Fault | None:
    """Run one case within its time limit; None if coalmine answered properly."""
    try:
        with _time_limit(case.seconds), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            case.run()
    except FaultError as fault:
        return Fault(part, number, case.given, "wrong answer", str(fault))
    except HangError:
        return Fault(
            part,
            number,
            case.given,
            "hang",
            f"more than {case.seconds:g} s of work or {WAITING * case.seconds:g} s of waiting",
        )
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        return Fault(part, number, case.given, "exception", f"{type(error).__name__}: {error} ({where})")
    return None


def allow(*allowed: type[BaseException]) -> contextlib.AbstractContextManager[None]:
    """Accept these errors as proper answers if they have a one-line message."""
    return _allowed(allowed)


@contextlib.contextmanager
def _allowed(allowed: tuple[type[BaseException], ...]) -> Iterator[None]:
    try:
        yield
    except allowed as error:
        text = str(error)
        if not text.strip() or len(text.splitlines()) > 1:
            raise FaultError(f"{type(error).__name__} without a message of one line: {text!r}") from None


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def command(*arguments: str, stdin: bytes = b"") -> Outcome:
    """Run `coalmine` in this process."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", "replace"), io.TextIOWrapper(io.BytesIO(), "utf-8", "replace")
    given = io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = given, out, err
    code = 0
    try:
        main(list(arguments))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return Outcome(code, *texts)


def check_command(*arguments: str, stdin: bytes = b"") -> Outcome:
    """Run a command and check that its answer is one that docs/reference/exit-codes.md allows."""
    found = command(*arguments, stdin=stdin)
    if found.code not in (0, 1, 2, 3):
        last = found.err.strip().splitlines()[-1:] or [""]
        raise FaultError(f"exit code {found.code}: {last[0][:300]}")
    if "Traceback" in found.err:
        raise FaultError(f"a traceback: {found.err.strip().splitlines()[-1][:300]}")
    for name, text in (("stdout", found.out), ("stderr", found.err)):
        if mark := CONTROL.search(text):
            raise FaultError(f"the control character {mark.group()!r} on {name}")
    if found.code == 1 and not VIOLATION.search(found.out):
        raise FaultError("exit code 1 without a VIOLATION")
    lines = found.err.splitlines()
    if found.code == 2 and not found.out.startswith("Usage:"):
        if not any(line.startswith("coalmine: ") for line in lines):
            raise FaultError("exit code 2 without a line that says why")
        strange = [line for line in lines if not line.startswith("coalmine: ") and not LOG_LINE.match(line)]
        if strange:
            raise FaultError(f"a line on stderr that is no message of coalmine: {strange[0][:200]!r}")
    asked = any(
        text == "--json" and before != "--format" for before, text in zip(["", *arguments], arguments, strict=False)
    )
    if asked and found.code != 2:
        _check_json(found.out)
    elif "nan" not in arguments and re.search(
        r"(?<![\w'\"-])nan(?![\w'\"-])", QUOTED.sub("", found.out), re.IGNORECASE
    ):
        raise FaultError(
            f"NaN in the output: {next(line for line in found.out.splitlines() if 'nan' in line.lower())[:200]}"
        )
    return found


def _check_json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise FaultError(f"{constant} in the JSON output")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError as error:
        raise FaultError(f"--json printed something that is not JSON: {error}") from None
