"""Shared by all commands: -v and -q, a --help that lists options by topic, and options of several commands."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, TypeVar

import click

from coalmine.argument_checks import hint_of

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
MOST_DIGITS = 24
LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)  # by the number of -v

DETAILS = click.option("--details", is_flag=True, help="Print every attacker, every gauge and all notes.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the data sets.  [default: COALMINE_DATA_DIR, else the folder of `coalmine data`]",
)


@dataclass
class Verbosity:
    """How much a command prints: the number of -v, and whether -q was given."""

    verbose: int = 0
    quiet: bool = False

    def apply(self) -> None:
        """Set the level of coalmine's log."""
        level = logging.ERROR if self.quiet else LEVELS[min(self.verbose, len(LEVELS) - 1)]
        logging.getLogger("coalmine").setLevel(level)


def topic(title: str, *options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """A decorator that adds `options` to a command and lists them under `title` in its --help."""

    def decorate(function: Decorated) -> Decorated:
        for option in reversed(options):
            function = option(function)
            function.__click_params__[-1].topic = title  # type: ignore[attr-defined]
        return function

    return decorate


class Argument(click.Argument):
    """An argument with a help text."""

    def __init__(self, *declarations: Any, help: str, **attributes: Any) -> None:  # noqa: A002 - click's name
        super().__init__(*declarations, **attributes)
        self.help = help


ALL_OF_THEM = "Run directories; a directory of runs, such as that of a sweep, means all its runs."


def argument(name: str, *, help: str, **attributes: Any) -> Callable[[Decorated], Decorated]:  # noqa: A002
    """Like click.argument, with a help text."""
    return click.argument(name, cls=Argument, help=help, **attributes)


def run_directories(help: str = ALL_OF_THEM) -> Callable[[Decorated], Decorated]:  # noqa: A002
    """The argument of a command that reads any number of run directories."""
    return argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path), help=help)


class Command(click.Command):
    """A command that takes -v and -q, and whose --help explains its arguments and lists its options by topic."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += [_verbose(), _quiet()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; for an unknown option, name the one that other libraries call so."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [option for param in self.params for option in param.opts if option.startswith("--")]
            if hint := hint_of(error.option_name, known):
                raise click.UsageError(f"No such option {error.option_name!r}{hint}.", error.ctx) from None
            raise

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Do nothing: format_options lists the arguments in every version of click."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        topics = [getattr(param, "topic", None) for param in self.params]
        for param in self.get_params(ctx):
            if isinstance(param, click.Argument):
                row = (param.human_readable_name, getattr(param, "help", None) or "")
                sections.setdefault("Arguments", []).append(row)
                continue
            title = getattr(param, "topic", "Other options" if any(topics) else "Options")
            if (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class Commands(Command, click.Group):
    """A group of commands, listed by topic if `topics` is given. The error for an unknown name lists the known ones."""

    command_class = Command

    def __init__(self, *arguments: Any, topics: Mapping[str, Sequence[click.Command]] | None = None, **attributes: Any):
        super().__init__(*arguments, **attributes)
        self.topics = topics or {}
        for commands in self.topics.values():
            for command in commands:
                self.add_command(command)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        topics = self.topics or {"Commands": [self.commands[name] for name in self.list_commands(ctx)]}
        width = max(len(command.name or "") for commands in topics.values() for command in commands)
        for title, commands in topics.items():
            rows = [((command.name or "").ljust(width), command.get_short_help_str(limit=80)) for command in commands]
            with formatter.section(title):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            known = ", ".join(self.list_commands(ctx))
            raise click.UsageError(f"{error.message} The commands are {known}.", ctx) from None


class FiniteRange(click.FloatRange):
    """A range of numbers that rejects NaN, which passes every comparison."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number


class CountType(click.types.IntParamType):
    """A whole number, which may be written as 1e8."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = Decimal(str(value))
        except InvalidOperation:
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        if not number.is_finite():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        if number.adjusted() >= MOST_DIGITS:  # 1e999999999 as an integer would fill the memory
            self.fail(f"{value!r} has more than {MOST_DIGITS} digits.", param, ctx)
        if number != number.to_integral_value():
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return int(number)


COUNT = CountType()


def _verbose() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_more_verbose,
        help="Print progress messages, and the traceback of an error; twice for all details.",
    )


def _quiet() -> click.Option:
    return click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_quieter, help="Print only the result and errors."
    )


def _more_verbose(context: click.Context, _: click.Parameter, times: int) -> None:
    verbosity = context.ensure_object(Verbosity)
    verbosity.verbose += times
    verbosity.apply()


def _quieter(context: click.Context, _: click.Parameter, quiet: bool) -> None:
    verbosity = context.ensure_object(Verbosity)
    verbosity.quiet |= quiet
    verbosity.apply()
