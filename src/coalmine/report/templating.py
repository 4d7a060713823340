"""The Jinja environment of the pages: every value is escaped, and a missing one is an error."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from coalmine.argument_checks import printable


def new_environment() -> Environment:
    """An environment with the templates of this package."""
    environment = Environment(
        loader=PackageLoader("coalmine.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["printable"] = printable
    return environment
