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
    """Mark indented blocks as code, and escape what has a meaning in reStructuredText elsewhere; in place."""
    converted: list[str] = []
    prose: list[str] = []
    block = False
    for place, line in enumerate(lines):
        if not line.strip():
            (converted if block else prose).append("")
            continue
        starts = line.startswith("    ") and place and not lines[place - 1].strip() and not _in_list(lines[:place])
        if starts and not block:
            converted += [*_escaped(prose), "::", ""]
            prose = []
        block = bool(line.startswith("    ") and (block or starts))
        (converted if block else prose).append(line)
    lines[:] = [*converted, *_escaped(prose)]


def _in_list(before: list[str]) -> bool:
    """Whether the last line that does not stand further in is the item of a list."""
    last = next((line for line in reversed(before) if line.strip() and not line.startswith("    ")), "")
    return bool(re.match(r"\s*(\d+\.|-) ", last))


def _escaped(lines: list[str]) -> list[str]:
    """Prose without emphasis, substitutions and references; names between backticks stay."""
    parts = CODE.split("\n".join(lines))
    text = "".join(part if part.startswith("`") else _outside_code(part) for part in parts)
    return text.split("\n") if lines else []


def _outside_code(text: str) -> str:
    text = re.sub(r"([*|\\])", r"\\\1", text)
    return re.sub(r"(\w)_(?=\W|$)", r"\1\\_", text)
