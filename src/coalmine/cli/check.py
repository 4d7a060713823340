"""`coalmine check`: the privacy unit test of one aggregation function, from the command line."""

import importlib
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args

import click

from coalmine.argument_checks import one_line
from coalmine.cli.exit_codes import VERDICT_CODES
from coalmine.cli.github import GITHUB, add_summary, annotate, source_of, summary_file
from coalmine.cli.junit import Case, write_junit
from coalmine.cli.options import COUNT, JSON, Command, Verbosity, argument, topic
from coalmine.cli.output import print_json, print_lines, progress_of
from coalmine.report.brief import brief
from coalmine.result.audit_result import AuditResult
from coalmine.testing.assertion import describe_failure, properties
from coalmine.testing.mechanism_check import check_private
from coalmine.testing.tested_mechanism import Adjacency, Aggregate
from coalmine.testing.update_arrays import LIBRARIES
from coalmine.verdict.outcome import Outcome

Function = Callable[..., Any]


@click.command(cls=Command)
@argument("function", metavar="MODULE:FUNCTION", help="Function to check, as package.module:function.")
@topic(
    "Claim",
    click.option("--epsilon", type=float, required=True, metavar="E", help="Claimed epsilon of one call."),
    click.option("--delta", type=float, required=True, metavar="D", help="The delta of (epsilon, delta), in (0, 1)."),
    click.option(
        "--clip-norm", type=float, default=1.0, show_default=True, metavar="C", help="Clip norm of an update."
    ),
    click.option(
        "--adjacency",
        type=click.Choice(get_args(Adjacency)),
        default="zero-out",
        show_default=True,
        help="Adjacency of the claim: one client's update is zeroed, added or removed, or replaced.",
    ),
)
@topic(
    "Function",
    click.option("--dim", type=COUNT, required=True, help="Number of coordinates of an update."),
    click.option(
        "--clients",
        type=COUNT,
        metavar="N",
        help="Number of clients that the function is configured for.  [default: 100, or dim / 2 if that is less]",
    ),
    click.option(
        "--aggregate",
        type=click.Choice(get_args(Aggregate)),
        help="Return value of the function; if given, even a few percent of missing noise is detected.",
    ),
    click.option(
        "--updates",
        type=click.Choice(["matrix", "list"]),
        default="matrix",
        show_default=True,
        help="Form of the function's argument: one matrix, or a list of vectors.",
    ),
    click.option(
        "--like",
        type=click.Choice(LIBRARIES),
        default="numpy",
        show_default=True,
        help="Array library of the function's argument.",
    ),
)
@topic(
    "Check",
    click.option(
        "--scale",
        type=float,
        default=10.0,
        show_default=True,
        help="Length of most updates in clip norms; above 1, the clip is checked.",
    ),
    click.option(
        "--most-calls",
        type=COUNT,
        metavar="N",
        help="Largest number of calls of one kind.  [default: enough to detect 1.2 times the claim, at most 1,000, or 200 "
        "for a claim below 2]",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the canaries."),
    click.option(
        "--junit",
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="File for a JUnit report with one test.",
    ),
    GITHUB,
    JSON,
)
@click.pass_context
def check(
    context: click.Context,
    /,
    function: str,
    as_json: bool,
    junit: Path | None,
    github: bool,
    epsilon: float,
    delta: float,
    **options: Any,
) -> int:
    """Check an aggregation function against its claimed epsilon.

    The function takes the clients' updates, an array of shape (clients, dim), and returns their noised sum or mean. All
    clients are canaries. Modules in the current directory can be imported.

    Exit codes: 0 PASS, 1 VIOLATION, 3 UNDERPOWERED, 2 bad input, also if the function fails.
    """
    verbosity = context.ensure_object(Verbosity)
    if github:
        summary_file()  # before the check, which takes a while
    loaded = _load(function)
    release = _guarded(loaded, function)
    with progress_of("checking", hidden=verbosity.quiet) as progress:
        result = check_private(release, epsilon=epsilon, delta=delta, progress=progress, **options)
    assert result.verdict is not None
    if junit is not None:
        write_junit(junit, "coalmine check", [_junit_case(result, function)])
    text = brief(result, subject=f"{function} in one call")
    if github:
        add_summary("coalmine check", {function: text})
        file, line = source_of(loaded)
        annotate(str(result.verdict.outcome), text.partition("\n")[0], file=file, line=line)
    if as_json:
        print_json(result.to_dict())
    else:
        print_lines(text)
    return VERDICT_CODES[result.verdict.outcome]


def _load(name: str) -> Function:
    """The function named by package.module:function; click.UsageError if there is none."""
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise click.UsageError(f"name the function as package.module:function, got {one_line(name)!r}")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise click.UsageError(
                f"there is no module {module_name!r} in the current directory or among the installed packages"
            ) from None
        raise click.UsageError(f"{module_name} cannot be imported: {one_line(str(error))}") from error
    except (Exception, SystemExit) as error:
        raise click.UsageError(f"{module_name} cannot be imported: {_described(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise click.UsageError(f"{module_name} has no {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise click.UsageError(f"{name} must be a function, got {type(found).__name__}")
    return found


def _guarded(function: Function, name: str) -> Function:
    """The function with its errors turned into bad input and its output sent to stderr, away from JSON."""

    def release(*arguments: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):
                return function(*arguments)
        except (Exception, SystemExit, GeneratorExit) as error:
            raise click.UsageError(f"{name} raised {_described(error)}") from error

    release.__name__ = name
    return release


def _described(error: BaseException) -> str:
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _junit_case(result: AuditResult, name: str) -> Case:
    """The test of a JUnit report: a failure if the verdict is not PASS, and the numbers as properties."""
    failed = result.verdict is None or result.verdict.outcome != Outcome.PASS
    module, _, function = name.partition(":")
    return Case(
        classname=module,
        name=function,
        problem="failure" if failed else None,
        text=describe_failure(result, name) if failed else "",
        properties=properties(result),
    )
