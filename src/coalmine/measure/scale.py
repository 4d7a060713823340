"""The scale of an absent canary's projection on a vector."""

import math

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.measure.settings import Settings

SMALLEST = 1e-14  # share of a squared norm that is left without any noise


def block_scale(rests: Floats, settings: Settings) -> tuple[float, float, float]:
    """The std of an absent canary's projection on a vector in blocks, and the directions from which it is estimated.

    `rests` are the norms of its blocks orthogonal to the observed canaries. The first number of directions gives a variance
    with the same error. The second is safe in the far tail, which the block with the most variance on the fewest directions
    dominates.
    """
    sizes = np.array(settings.block_sizes, dtype=np.float64)
    free = sizes - settings.canaries
    parts = sizes / settings.dim * rests**2 / free
    variance = float(parts.sum())
    shares = parts / variance
    dof = 1 / float(np.sum(shares**2 / free))
    tail_dof = math.floor(float((free[shares > 0] / shares[shares > 0]).min()))
    return math.sqrt(variance), dof, float(tail_dof)
