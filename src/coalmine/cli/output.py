"""How commands print: a table for people, JSON for programs."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def json_ready(value: Any) -> Any:
    """`value` with inf as the string "inf" and NaN as null, which JSON has no words for."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        return float(value)
    return value


def print_json(value: Any) -> None:
    """`value` as JSON to stdout."""
    click.echo(json.dumps(json_ready(value), indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> None:
    """A table to stdout; numbers to the right, colour only in a terminal."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    if title:
        console.print(title, style="bold", highlight=False, soft_wrap=True)
    console.print(table)


def shown_number(value: float, digits: int = 4) -> str:
    """A number as tables show it."""
    return "inf" if math.isinf(value) else "-" if math.isnan(value) else f"{value:.{digits}g}"
