"""HTML by function: whatever is not Markup is text, and is escaped."""

import unicodedata
from html import escape
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def element(name: str, *parts: Any, **attributes: Any) -> Markup:
    """An element with its parts; an attribute that is None or False is left out, one that is True stands alone.

    >>> element("p", "1 < 2", class_="note", data_value=3)
    '<p class="note" data-value="3">1 &lt; 2</p>'
    """
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        own = key.rstrip("_").replace("_", "-")
        written.append(f" {own}" if value is True else f' {own}="{escape(str(value), quote=True)}"')
    return Markup(f"<{name}{''.join(written)}>{together(*parts)}</{name}>")


def together(*parts: Any) -> Markup:
    """Parts one after another; lists are opened, None is nothing."""
    text: list[str] = []
    for part in parts:
        if isinstance(part, list | tuple):
            text.append(together(*part))
        elif part is not None:
            text.append(part if isinstance(part, Markup) else escape(str(part), quote=False))
    return Markup("".join(text))


def foreign(text: Any) -> Markup:
    """Text that others wrote: shown as it is, its direction kept to itself."""
    return element("bdi", "".join("�" if _unseen(letter) else letter for letter in str(text)))


def _unseen(letter: str) -> bool:
    """Whether no font can show it: a control character or half of a pair."""
    return letter not in "\n\t" and unicodedata.category(letter) in ("Cc", "Cs")
