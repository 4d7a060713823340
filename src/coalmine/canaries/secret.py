"""Seeds and keys that no message, log or traceback shows: they compute like any other, and print as <secret>."""

import operator
from typing import SupportsIndex

SHOWN = "<secret>"


class SecretInt(int):
    """An integer that prints as <secret>."""

    def __repr__(self) -> str:
        return SHOWN

    __str__ = __repr__

    def __format__(self, format_spec: str, /) -> str:
        return SHOWN


class SecretBytes(bytes):
    """Bytes that print as <secret>."""

    def __repr__(self) -> str:
        return SHOWN

    __str__ = __repr__


def secret_seed(seed: SupportsIndex | bytes) -> SecretInt | SecretBytes:
    """The seed as it may stand in a frame that a traceback shows with its locals; ValueError where it is no seed."""
    if isinstance(seed, bytes | bytearray):
        return SecretBytes(seed)
    try:
        return SecretInt(operator.index(seed))
    except TypeError:
        kind = type(seed).__name__
        raise ValueError(f"seed must be an integer of up to 128 bits, or bytes, got {kind}") from None
