"""`coalmine`: the commands, how much they say, and what their exit codes mean (docs/exit-codes.md)."""

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

from coalmine.cli.compare import compare
from coalmine.cli.data import data
from coalmine.cli.estimate import estimate
from coalmine.cli.gaussian import gaussian
from coalmine.cli.mechanism import mechanism
from coalmine.cli.output import Commands
from coalmine.cli.plan import plan
from coalmine.cli.report import report
from coalmine.cli.reproduce import reproduce
from coalmine.cli.resume import resume
from coalmine.cli.run import run
from coalmine.cli.selftest import selftest
from coalmine.cli.sweep import sweep
from coalmine.cli.verdict import verdict
from coalmine.cli.verify import seed, verify
from coalmine.cli.watch import watch
from coalmine.version import __version__

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130
LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


class _ToAnyReader(io.FileIO):
    """An output that outlives its reader: after `coalmine … | head` has gone, the exit code is still the command's own.

    Where it cannot be written for another reason, that is an error once; Python would try again at the end.
    """

    lost = False

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        try:
            return size if self.lost else super().write(data)
        except BrokenPipeError:
            return size
        except OSError:
            self.lost = True
            raise


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coalmine", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Print progress messages; twice for all details.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the result and errors.")
@click.pass_context
def app(context: click.Context, verbose: int, quiet: bool) -> None:
    """Measure how much privacy a trained model gives away.

    Exit codes: 0 success or PASS, 1 VIOLATION, 2 bad input, 3 UNDERPOWERED, 70 internal error, 130 interrupted.
    """
    context.obj = {"quiet": quiet}
    logger = logging.getLogger("coalmine")
    logger.setLevel(LEVELS[-1 if quiet else min(verbose, 2)])
    logger.handlers = [RichHandler(console=Console(stderr=True), show_path=False, show_time=False)]


for command in (
    run,
    resume,
    sweep,
    compare,
    data,
    estimate,
    plan,
    mechanism,
    gaussian,
    reproduce,
    report,
    watch,
    selftest,
    verdict,
    verify,
    seed,
):
    app.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; an error is one line on stderr."""
    _outlive_readers()
    try:
        code = app.main(
            args=None if arguments is None else list(arguments), prog_name="coalmine", standalone_mode=False
        )
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(BAD_INPUT)
    except click.ClickException as error:
        _fail(BAD_INPUT, error.format_message())
    except (click.Abort, KeyboardInterrupt):
        _fail(INTERRUPTED, "interrupted")
    except (ValueError, OSError, ImportError) as error:
        if "-v" in sys.argv or "-vv" in sys.argv:
            traceback.print_exc()
        _fail(BAD_INPUT, _said(error))
    except Exception as error:
        traceback.print_exc()
        _fail(
            INTERNAL_ERROR,
            f"internal error ({type(error).__name__}: {error}). This is a fault of coalmine {__version__}: please report it "
            "with the lines above and the command (see CONTRIBUTING.md)",
        )


def _outlive_readers() -> None:
    """Let this process write on where nobody reads; a caller's own streams are left alone."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started this
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
        if stream is not getattr(sys, f"__{name}__") or not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        lines = stream.line_buffering or stream.write_through
        raw = io.BufferedWriter(_ToAnyReader(stream.fileno(), "w", closefd=False))
        errors = "replace" if stream.errors == "strict" else stream.errors  # a missing ε must not hide the verdict
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, errors, line_buffering=lines))


def _said(error: Exception) -> str:
    """Its message; what the system says of a file without the number."""
    if not isinstance(error, OSError) or error.errno is None or error.strerror is None:
        return str(error)
    files = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{files or 'the output'}: {error.strerror}"


def _fail(code: int, message: str) -> NoReturn:
    click.echo(f"coalmine: {' '.join(message.split())}", err=True)
    sys.exit(code)
