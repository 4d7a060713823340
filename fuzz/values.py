"""Values that often break programs: numbers at the ends of their range, text with markup, wrong types, damaged bytes."""

import random
from typing import Any

NUMBERS = (
    "0", "-0.0", "1", "-1", "2", "3", "10", "100", "0.5", "1e-6", "1e-5", "0.95", "1e-200", "1e-308", "5e-324", "1e308",
    "1.8e308", "-1e308", "inf", "-inf", "nan", "1e-16", "0.9999999999999999", "1e15", "1e18", "9223372036854775808",
    "18446744073709551616", "-9223372036854775809", "1_000", "1,5", "0x10", "1e", "", " ", "１２", "²", "true", "None",
)  # fmt: skip
TEXTS = (
    "", " ", "a", "[/b]", "[red]x[/red]", "[/]", "[bold", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "a\nb", "a\rb", "a\tb",
    "\u202egnp.exe", "é", "日本", "💣", "%s%n", "{0}", "{x}", "../..", "/", "-", "--", "-x", "--json", "a" * 300, "\x7f",
    "\x9b31m", "<script>alert(1)</script>", "'; DROP", "|a|b|", "`rm`", "$(id)", "nul", "con", "~", "*", "\udc80",
)  # fmt: skip
TINY_AND_HUGE = (0.0, -0.0, 5e-324, 1e-308, 1e-200, 1e-60, 1e-30, 1e30, 1e60, 1e200, 1e308, -1e308, -1.0)
DEEPEST = 40  # deepest place that is edited; values may be nested more deeply
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


def number_text(rng: random.Random) -> str:
    """A number as a user might type it, in most cases invalid."""
    if rng.random() < 0.4:
        return rng.choice(NUMBERS)
    if rng.random() < 0.5:
        return str(rng.randint(-5, 5000))
    return f"{rng.choice((1, -1)) * 10 ** rng.uniform(-12, 12):.{rng.randint(1, 17)}g}"


def text(rng: random.Random) -> str:
    """Text with markup, control characters or nothing at all."""
    return rng.choice(TEXTS)


def safe_text(rng: random.Random) -> str:
    """Text that a JSON or TOML file can hold."""
    return rng.choice([each for each in TEXTS if "\udc80" not in each])


def plain_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, including NaN, usually of the wrong type."""
    kind = rng.randrange(12 if depth < 3 else 8)
    if kind == 0:
        return None
    if kind == 1:
        return rng.choice((True, False))
    if kind == 2:
        return rng.choice((0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, rng.randint(-10, 10_000)))
    if kind == 3:
        return rng.choice(TINY_AND_HUGE)
    if kind == 4:
        return rng.choice(NOT_FINITE)
    if kind in (5, 6):
        return rng.choice((safe_text(rng), "inf", "-inf", "nan", "1"))
    if kind == 7:
        return rng.choice(([], {}, "PASS", "VIOLATION", "rotated", "known-others"))
    if kind == 8:
        return [plain_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 9:
        return {safe_text(rng): plain_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    if kind == 10:
        return nested(rng.choice((10, 200, 600)))
    return [[1, 2], [3]]


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def edited(values: Any, rng: random.Random) -> Any:
    """A copy of nested dicts and lists with one entry changed, removed, renamed, duplicated or swapped."""
    places = list(_places(values, ()))
    if not places:
        return plain_value(rng)
    place = rng.choice(places)
    return _edit_at(values, place, rng)


def _places(value: Any, place: tuple[Any, ...]) -> Any:
    if len(place) > DEEPEST:
        return
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*place, name)
            yield from _places(item, (*place, name))
    elif isinstance(value, list):
        for number, item in enumerate(value[:20]):
            yield (*place, number)
            yield from _places(item, (*place, number))


def _edit_at(value: Any, place: tuple[Any, ...], rng: random.Random) -> Any:
    copy = dict(value) if isinstance(value, dict) else list(value)
    first = place[0]
    if len(place) > 1:
        copy[first] = _edit_at(value[first], place[1:], rng)
        return copy
    kind = rng.randrange(8)
    old = value[first]
    if kind == 0:
        del copy[first]
    elif kind == 1 and isinstance(copy, dict):
        copy[safe_text(rng)] = copy.pop(first)
    elif kind == 2 and isinstance(copy, dict):
        copy[first] = copy[rng.choice(list(copy))]
    elif kind == 3 and isinstance(old, int | float) and not isinstance(old, bool) and abs(old) < 1e290:
        copy[first] = rng.choice((-old, old + 1, old * 1e9, str(old), [old], float(old)))
    elif kind == 4 and isinstance(old, str):
        copy[first] = old + safe_text(rng)
    else:
        copy[first] = plain_value(rng)
    return copy


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with flipped bits, a piece removed, inserted or duplicated, or the end missing."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kind, place = rng.randrange(7), rng.randrange(len(data) + 1) if data else 0
        end = min(len(data), place + rng.choice((1, 2, 8, 100)))
        if kind == 0:
            data = data[:place]
        elif kind == 1:
            data = data[:place] + data[end:]
        elif kind == 2:
            data = data[:place] + rng.randbytes(end - place) + data[end:]
        elif kind == 3:
            data = data[:place] + data[place:end] * 2 + data[end:]
        elif kind == 4 and data:
            place = min(place, len(data) - 1)
            data = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        elif kind == 5:
            data = (
                data[:place]
                + rng.choice((b"\0", b"\xff\xfe", b"\x1b[31m", b"{", b"]", b'"', b"\n\n", b"[" * 3000))
                + data[place:]
            )
        else:
            data = data + rng.randbytes(rng.choice((1, 16, 300)))
    return data
