"""`coalmine`: the list of commands."""

from collections.abc import Sequence
from typing import NoReturn

import click

from coalmine.cli.audit import audit, canaries
from coalmine.cli.check import check
from coalmine.cli.compare import compare
from coalmine.cli.data import data
from coalmine.cli.epsilon import epsilon
from coalmine.cli.estimate import estimate
from coalmine.cli.options import Commands
from coalmine.cli.plan import plan
from coalmine.cli.program import SETTINGS, run_program, start_log
from coalmine.cli.receipt import receipt
from coalmine.cli.replay import replay
from coalmine.cli.report import report
from coalmine.cli.run import run
from coalmine.cli.selftest import selftest
from coalmine.cli.statement import statement
from coalmine.cli.sweep import sweep
from coalmine.cli.verdict import verdict
from coalmine.cli.verify import seed, verify
from coalmine.cli.watch import watch
from coalmine.version import __version__

TOPICS = {
    "Train and audit": (run, watch, sweep, check, data),
    "Audit a pipeline that runs elsewhere": (canaries, audit),
    "Read finished audits": (report, statement, receipt, compare, verdict, verify, replay),
    "Plan and compute": (plan, estimate, epsilon),
    "Set up and check coalmine": (seed, selftest),
}


@click.group(cls=Commands, topics=TOPICS, context_settings=SETTINGS)
@click.version_option(__version__, prog_name="coalmine", message="%(prog)s %(version)s", help="Print the version.")
@click.pass_context
def app(context: click.Context) -> None:
    """Measure how much privacy a trained model leaks.

    `coalmine run` audits a small built-in training run. `coalmine COMMAND --help` explains a command.

    Exit codes: 0 success or PASS, 1 VIOLATION, 2 bad input, 3 UNDERPOWERED, 70 internal error,
    130 interrupted (by SIGTERM 143, by SIGHUP 129).
    """
    start_log(context)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    run_program(app, "coalmine", arguments)
