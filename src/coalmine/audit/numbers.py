"""Numbers that JSON has no words for."""

import math
from typing import Any


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
