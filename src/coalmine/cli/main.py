"""`coalmine`: the commands, how much they say, and what their exit codes mean (docs/exit-codes.md)."""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click
from rich.console import Console
from rich.logging import RichHandler

from coalmine.cli.compare import compare
from coalmine.cli.data import data
from coalmine.cli.estimate import estimate
from coalmine.cli.gaussian import gaussian
from coalmine.cli.mechanism import mechanism
from coalmine.cli.plan import plan
from coalmine.cli.report import report
from coalmine.cli.reproduce import reproduce
from coalmine.cli.resume import resume
from coalmine.cli.run import run
from coalmine.cli.selftest import selftest
from coalmine.cli.sweep import sweep
from coalmine.cli.verify import seed, verify
from coalmine.cli.watch import watch
from coalmine.version import __version__

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 70, 130
LEVELS = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG}


class ReaderGoneError(Exception):
    """The reader of our output has gone, as in `coalmine … | head`."""


class Commands(click.Group):
    """The commands; a closed pipe is told from an error of theirs, which click takes for exit code 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        return result


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="coalmine", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="Say more; twice for everything.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but the result and errors.")
@click.pass_context
def app(context: click.Context, verbose: int, quiet: bool) -> None:
    """Tell how much privacy a trained model gives away.

    Exit codes: 0 fine, 1 VIOLATION, 2 bad input, 3 UNDERPOWERED, 70 an internal error.
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
    verify,
    seed,
):
    app.add_command(command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code; an error is one line on stderr."""
    try:
        code = app.main(
            args=None if arguments is None else list(arguments), prog_name="coalmine", standalone_mode=False
        )
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)
    except (ReaderGoneError, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
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
        _fail(BAD_INPUT, str(error))
    except Exception as error:
        traceback.print_exc()
        _fail(
            INTERNAL_ERROR,
            f"internal error ({type(error).__name__}: {error}). This is a fault of coalmine {__version__}: please report it "
            "with the lines above and the command (see CONTRIBUTING.md)",
        )


def _fail(code: int, message: str) -> NoReturn:
    click.echo(f"coalmine: {' '.join(message.split())}", err=True)
    sys.exit(code)
