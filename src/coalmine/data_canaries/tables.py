"""Canaries for tables: outliers within the declared ranges of the columns."""

from typing import Any, SupportsIndex

import numpy as np

from coalmine.argument_checks import finite_array, whole_number
from coalmine.canaries.secret import secret_seed
from coalmine.data_canaries.canaries import DataCanaries
from coalmine.measure.schedule import keyed_stream, schedule_key


def outliers(
    low: Any, high: Any, *, count: int, classes: int, seed: SupportsIndex | bytes, **options: Any
) -> DataCanaries:
    """Rows whose columns lie at one end of their declared range each, with random labels."""
    least, most = finite_array("low", low), finite_array("high", high)
    if least.ndim != 1 or least.shape != most.shape or not (least < most).all():
        raise ValueError(f"low must lie below high in each column, got shapes {least.shape} and {most.shape}")
    rng, number = keyed_stream(schedule_key(secret_seed(seed)), b"records"), whole_number("count", count, minimum=1)
    rows = np.where(rng.random((number, least.size)) < 0.5, least, most).astype(np.float32)
    labels = rng.integers(whole_number("classes", classes, minimum=2), size=number)
    return DataCanaries(inputs=rows, labels=labels, seed=seed, **{"kind": "outliers"} | options)
