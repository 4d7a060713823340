"""Rounds without other clients, drawn from their exact law, which takes far less time than a vector for each."""

import math
from collections.abc import Sequence

import numpy as np

from coalmine.measure.round import Round


def exact_round(
    number: int,
    present: Sequence[int] | np.ndarray,
    noise: float,
    stated: float | None,
    rng: np.random.Generator,
    participants: int | None = None,
    *,
    canaries: int,
    unobserved: int,
    dim: int,
) -> Round:
    """A round in units of the clip norm: its noise is `noise`, and the server states `stated`."""
    along = noise * rng.standard_normal(canaries + unobserved)
    off = noise**2 * rng.chisquare(dim - canaries - unobserved) + float(along[canaries:] @ along[canaries:])
    along[present] += 1
    norm, rest = math.sqrt(off + along[:canaries] @ along[:canaries]), math.sqrt(off)
    cosines = (along / norm).astype(np.float32)
    return Round(
        number=number,
        present=np.asarray(present, dtype=np.int32),
        clip_declared=True,
        noise_std=stated,
        participants=participants,
        norm=norm,
        rest=rest,
        cosines=cosines,
        residual_norm=norm,
        residual_rest=rest,
        residual_cosines=cosines,
    )
