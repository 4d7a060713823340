"""The three outcomes of a verdict."""

from enum import StrEnum


class Outcome(StrEnum):
    """The outcome of a verdict: a string, which prints as one."""

    PASS = "PASS"
    VIOLATION = "VIOLATION"
    UNDERPOWERED = "UNDERPOWERED"


PASS, VIOLATION, UNDERPOWERED = Outcome.PASS, Outcome.VIOLATION, Outcome.UNDERPOWERED
