"""What tasks of text have in common."""

from typing import Any

from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.tasks.cache import tensor


def next_symbols(rows: Any) -> Examples:
    """Rows of length + 1 symbols as `length` inputs and their labels: two views of the same memory."""
    symbols = tensor(rows)
    return Examples(symbols[:, :-1], symbols[:, 1:])
