"""The process of a command: its log, its streams, an error as one line, an exit code (docs/reference/exit-codes.md)."""

import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.logging import RichHandler

from coalmine.argument_checks import one_line, printable
from coalmine.cli.exit_codes import BAD_INPUT, INTERNAL_ERROR
from coalmine.cli.interruption import interruption, stopping_signals
from coalmine.cli.options import Verbosity
from coalmine.cli.output import print_error
from coalmine.version import __version__

logger = logging.getLogger("coalmine")
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _ToAnyReader(io.FileIO):
    """An output whose reader may stop early: after `coalmine … | head` the exit code is still that of the command.

    Any other failure to write to stdout is reported once; without this, Python would try again when the process ends. A
    failure on stderr is not reported at all, since there is no other place for it, and must not change the exit code.
    """

    lost = False
    reported = True

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            return size if self.lost else super().write(data)
        except BrokenPipeError:
            return size
        except OSError:
            self.lost = True
            if not self.reported:
                return size
            raise


class _OneLine(logging.Filter):
    """Replaces control characters in log messages, for example from file names, before they reach the terminal."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = one_line(record.getMessage()), ()
        return True


def start_log(context: click.Context) -> None:
    """Print coalmine's log to stderr, at the level of -v and -q."""
    context.ensure_object(Verbosity).apply()
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    handler.addFilter(_OneLine())
    logger.handlers = [handler]


def run_program(program: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one of the program's commands and exit with its code; an error is one line on stderr."""
    try:
        _outlive_readers()
        with stopping_signals():
            code = _run(program, name, None if arguments is None else list(arguments))
    except (click.Abort, KeyboardInterrupt) as stop:
        code, line = interruption(stop.__cause__ or stop)  # click raises Abort from it
        print_error(line)
    sys.exit(code)


def _run(program: click.Command, name: str, arguments: list[str] | None) -> int:
    """The exit code of a command. No error leaves this function: Python would exit with 1, which means VIOLATION."""
    try:
        code = program.main(args=arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return BAD_INPUT
    except click.ClickException as error:
        return _failed(BAD_INPUT, error.format_message())
    except click.Abort:
        raise
    except MemoryError:
        return _failed(BAD_INPUT, "not enough memory for this input; give smaller numbers or files")
    except (ValueError, OSError, ImportError) as error:
        if logger.isEnabledFor(logging.INFO):  # -v or --verbose
            _print_traceback()
        return _failed(BAD_INPUT, _message(error))
    except Exception as error:
        _print_traceback()
        return _failed(
            INTERNAL_ERROR,
            f"internal error ({type(error).__name__}: {error}). This is a fault of coalmine {__version__}: please report it "
            "with the lines above and the command (see CONTRIBUTING.md)",
        )


def _outlive_readers() -> None:
    """Keep writing to stdout and stderr after their reader is gone; streams that a caller replaced are not changed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        lines = stream.line_buffering or stream.write_through
        file = _ToAnyReader(stream.fileno(), "w", closefd=False)
        file.reported = name == "stdout"
        raw = io.BufferedWriter(file)
        errors = "replace" if stream.errors == "strict" else stream.errors  # a missing ε must not hide the verdict
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, errors, line_buffering=lines))


def _message(error: Exception) -> str:
    """The error's message; for a file that cannot be used, the file and the reason.

    A package that is there but cannot be loaded, as under a limit on memory, is not missing.
    """
    cause = error.__cause__
    if isinstance(error, ImportError) and isinstance(cause, ImportError) and not isinstance(cause, ModuleNotFoundError):
        return f"a package is installed but cannot be loaded: {cause}; is there enough memory (ulimit -v)?"
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error)
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{files or 'the output'}: {error.strerror}"


def _print_traceback() -> None:
    for line in traceback.format_exc().splitlines():
        click.echo(printable(line), err=True)


def _failed(code: int, message: str) -> int:
    print_error(message)
    return code
