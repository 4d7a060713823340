"""Docstrings in plain text, as they are written here, for autodoc, which expects reStructuredText."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]*`)")


def setup(app: "Sphinx") -> dict[str, Any]:
    """Convert every docstring before autodoc reads it."""
    app.connect("autodoc-process-docstring", lambda _, __, ___, ____, _____, lines: convert(lines))
    return {"parallel_read_safe": True}


def convert(lines: list[str]) -> None:
    """Turn indented blocks into code and characters that have a meaning in reStructuredText into plain ones, in place."""
    text = "".join(part if part.startswith("`") else _outside_code(part) for part in CODE.split("\n".join(lines)))
    converted: list[str] = []
    for line in text.split("\n"):
        indented = line.startswith("    ")
        if indented and converted and not converted[-1].strip() and not _in_block(converted):
            converted += ["::", ""]
        converted.append(line)
    lines[:] = converted


def _in_block(before: list[str]) -> bool:
    """Whether the last line that is not empty belongs to an indented block, or is the item of a list."""
    last = next((line for line in reversed(before) if line.strip()), "")
    return last.startswith("    ") or last == "::" or bool(re.match(r"\s*(\d+\.|[-*]) ", last))


def _outside_code(text: str) -> str:
    """Text without emphasis, substitutions and references."""
    text = re.sub(r"([*|\\])", r"\\\1", text)
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)
