"""The Jinja environment of the pages: every value is escaped, and a missing one is an error."""

from coalmine.argument_checks import printable

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
except ImportError as error:
    raise ImportError("an HTML page needs: pip install 'coalmine[report]'") from error

__all__ = ["Environment", "Markup", "new_environment"]


def new_environment() -> Environment:
    """An environment with the templates of this package."""
    environment = Environment(
        loader=PackageLoader("coalmine.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["printable"] = printable
    return environment
