"""Seeds and keys that no message, log or traceback shows: they behave as usual, but print as <secret>."""

import operator
from typing import NoReturn, Self, SupportsIndex

from coalmine.argument_checks import WrongTypeError

PLACEHOLDER = "<secret>"


class _NotStored:
    """A secret that cannot be pickled, which would write it in plain; a copy is the secret itself."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a seed cannot be pickled, as the copy would be in plain text: pass the path of its file instead"
        )


class SecretInt(_NotStored, int):
    """An integer that prints as <secret>."""

    def __repr__(self) -> str:
        return PLACEHOLDER

    __str__ = __repr__

    def __format__(self, format_spec: str, /) -> str:
        return PLACEHOLDER


class SecretBytes(_NotStored, bytes):
    """Bytes that print as <secret>."""

    def __repr__(self) -> str:
        return PLACEHOLDER

    __str__ = __repr__


def secret_seed(seed: SupportsIndex | bytes) -> SecretInt | SecretBytes:
    """The seed in a type that prints as <secret>, for tracebacks that show local variables; ValueError if it is no seed."""
    if isinstance(seed, bytes | bytearray):
        return SecretBytes(seed)
    try:
        if isinstance(seed, bool):
            raise TypeError
        return SecretInt(operator.index(seed))
    except TypeError:
        kind = type(seed).__name__
        raise WrongTypeError(f"seed must be an integer of up to 128 bits, or bytes, got {kind}") from None
