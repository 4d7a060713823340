"""Several canaries on one node: the node takes their roles in turn, one in each round."""

import re
from collections.abc import Sequence

from coalmine.checks import shown

PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


def canary_in_round(canaries: Sequence[int], round_number: int) -> int:
    """The canary whose role a node takes in a round, counted from 1: the first in round 1, then the next, and so on.

    >>> [canary_in_round([4, 5, 6], number) for number in (1, 2, 3, 4)]
    [4, 5, 6, 4]
    """
    return canaries[(round_number - 1) % len(canaries)]


def parse_canaries(value: object, *, count: int) -> tuple[int, ...]:
    """The canaries that `canary-id` names in a node config: 3, "3", "0-49" or "0,7,20-29"; `count` is how many exist.

    >>> parse_canaries("0-2,7", count=10)
    (0, 1, 2, 7)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"canary-id must be a number or text such as '0-49' or '0,3,7', got {shown(value)}")
    found: list[int] = []
    for part in str(value).split(","):
        match = PART.fullmatch(part)
        if match is None:
            raise ValueError(f"canary-id must be a number or text such as '0-49' or '0,3,7', got {shown(value)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise ValueError(f"canary-id must lie in 0..{count - 1}, got {part.strip()}")
        found.extend(range(first, last + 1))
    if len(set(found)) < len(found):
        raise ValueError(f"canary-id must name each canary once, got {shown(value)}")
    return tuple(found)
