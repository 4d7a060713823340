"""Seeds as bytes, and whether one can be guessed."""

import operator
from typing import SupportsIndex

from coalmine.canaries.philox import key_from_seed

GUESSABLE = 1 << 64


def seed_bytes(seed: SupportsIndex | bytes) -> bytes:
    """A seed as the commitment and the schedule use it; no integer collides with any bytes. Errors never show it."""
    key_from_seed(seed)  # rejects an invalid seed
    if isinstance(seed, bytes | bytearray):
        return b"bytes:" + bytes(seed)
    return b"number:" + str(operator.index(seed)).encode()


def is_guessable(seed: SupportsIndex | bytes) -> bool:
    """Whether an attacker could find the seed by trying: a whole number below 2^64, or fewer than 8 bytes.

    A commitment hides only a seed that cannot be guessed: salt and settings are public.
    """
    key_from_seed(seed)  # rejects an invalid seed without showing it
    if isinstance(seed, bytes | bytearray):
        text = bytes(seed).lstrip(b"0")
        return len(seed) < 8 or not text or (text.isdigit() and len(text) <= 20 and int(text) < GUESSABLE)
    return abs(operator.index(seed)) < GUESSABLE
