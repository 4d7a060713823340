"""What other ranks get in place of the result."""

from typing import NoReturn


class ResultOnRank0:
    """Stands for the result of an audit on a rank that does not hold it. It is false, and has no entries.

    >>> result = ResultOnRank0(1)
    >>> print(result)
    rank 0 holds the result of this audit; this is rank 1
    >>> bool(result)
    False
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"rank 0 holds the result of this audit; this is rank {self.rank}"

    __repr__ = __str__

    def __getattr__(self, name: str) -> NoReturn:
        if name == "rank":  # not set yet, for example while unpickling
            raise AttributeError(name)
        raise AttributeError(f"{name!r} cannot be read: {self}")
