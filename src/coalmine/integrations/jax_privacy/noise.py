"""The noise that a privatizer of jax_privacy states: its standard deviation by step, and its correlation between steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

from coalmine.argument_checks import nonnegative, positive, whole_number
from coalmine.estimators.correlated import BandedNoise

MOST_BANDS = 256  # the coefficients of a strategy matrix are read from its first 256 steps
SAME = 1e-4  # relative to the length of a column: smaller coefficients are rounding errors
STREAMS_SAME = 1e-3  # in standard deviations: smaller differences in the noise are single-precision rounding
Stddev = float | Callable[[int], Any]


class NoiseMechanism(NamedTuple):
    """The stated noise.

    `unit_std` is the std of the noise before it is correlated, for columns of length 1, or a schedule: a function of the
    number of steps before, as optax's are.
    """

    unit_std: Stddev
    clip_norm: float
    law: BandedNoise | None

    @classmethod
    def of(cls, stddev: Any, clip_norm: Any, law: BandedNoise | None, column: float) -> "NoiseMechanism":
        clip = positive("clip_norm", clip_norm)
        if not callable(stddev):
            return cls(nonnegative("stddev", stddev) / column, clip, law)
        if law is not None:
            raise ValueError("stddev must be one number under correlated noise, got a schedule")
        mechanism = cls(lambda step: stddev(step) / column, clip, law)
        mechanism.noise_std(1)
        return mechanism

    @property
    def scheduled(self) -> bool:
        """Whether the noise may change from step to step."""
        return callable(self.unit_std)

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the first step, before its noise is correlated."""
        return self.unit(1) / self.clip_norm

    def unit(self, step: int) -> float:
        """The std of a step's noise before it is correlated; steps are counted from 1."""
        return nonnegative("stddev(step)", self.unit_std(step - 1)) if callable(self.unit_std) else self.unit_std

    def noise_std(self, step: int) -> float:
        """The std of a step's noise."""
        return self.unit(step) * (1.0 if self.law is None else self.law.std(step))


def banded_noise(noising_matrix: Any, steps: int | None) -> tuple[BandedNoise | None, float]:
    """The noise of a privatizer for an `Audit`, and the length of a column of its strategy matrix C.

    `noising_matrix` is C⁻¹, a StreamingMatrix or an array. The noise is None if it is independent in every step.
    """
    if isinstance(noising_matrix, StreamingMatrix):
        if steps is None:
            raise TypeError("audited() needs the number of steps that the noising matrix is for: pass steps=")
        rounds = whole_number("steps", steps, minimum=1)
        inverse = np.asarray(noising_matrix.materialize(min(rounds, MOST_BANDS)), np.float64)
    else:
        inverse = np.asarray(noising_matrix, np.float64)
        if inverse.ndim != 2 or inverse.shape[0] != inverse.shape[1]:
            raise ValueError(f"noising_matrix must be a square matrix, got shape {inverse.shape}")
        rounds = len(inverse)
    if not np.isfinite(inverse).all() or np.triu(inverse, 1).any() or not np.diag(inverse).all():
        raise ValueError("noising_matrix must be finite and lower triangular, without zeros on its diagonal")
    first = np.linalg.inv(inverse[:MOST_BANDS, :MOST_BANDS])[:, 0]
    length = float(np.linalg.norm(first))
    bands = int(np.flatnonzero(np.abs(first) > SAME * length).max()) + 1
    # The matrix is identified by its effect on a few random streams.
    streams = np.random.default_rng(0).normal(size=(rounds, 4)).astype(np.float32)
    noised = np.asarray(noising_matrix @ jnp.asarray(streams), np.float64) * length
    if bands == 1 and np.allclose(noised, streams, atol=STREAMS_SAME):
        return None, length
    falling = np.minimum.accumulate(
        np.maximum(first[:bands], 0.0)
    )  # removes rounding; a real rise makes the streams differ below
    # The last step cuts off some columns. They are shorter, unless the strategy normalises every column.
    for planned in (rounds + bands - 1, rounds):
        noise = BandedNoise(rounds=planned, coefficients=tuple(falling))
        encoder = noise.encoder()
        decoded = np.array([encoder.add(number, row) for number, row in enumerate(noised, start=1)])
        if np.allclose(decoded, streams, atol=STREAMS_SAME):
            return noise, length
    raise ValueError(
        "the inverse of noising_matrix must be a banded Toeplitz matrix whose coefficients are positive and do not "
        "increase; other correlated noise cannot be audited yet"
    )
