"""A finding of any class, with made-up facts."""

from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from coalmine.verdict.findings.finding import Finding
from coalmine.verdict.findings.noise import LessThanStated, MeanTooHigh

F = TypeVar("F", bound=Finding)
VALUES = {float: 0.5, int: 3, str: "some words", bool: True, tuple[float, float]: (0.5, 0.75)}


def example(cls: type[F], **facts: Any) -> F:
    """A finding of this class. Facts that are not given, and that it cannot do without, have a value of their type."""
    named: dict[str, Any] = {"seen": "clumped", "gauge": "pooled residual"}
    if cls is LessThanStated:
        named["refuted"] = example(MeanTooHigh)
    hints = get_type_hints(cls)
    needed = [field.name for field in fields(cls) if field.default is MISSING]
    return cls(**{name: named.get(name, VALUES.get(hints[name])) for name in needed} | facts)
