"""Algorithm 1: one-shot privacy estimation for the Gaussian mechanism."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import (
    Floats,
    delta_array,
    finite_array,
    nonnegative,
    one_number,
    positive,
    whole_number,
)
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.null import conditional_null

Kind = Literal["rotated", "sphere"]
MOST_RUNS = 10**7  # more would take too much memory and many hours
LARGEST = 1e100  # largest norm of the data: its square does not overflow


@dataclass(frozen=True)
class GaussianMechanismAudit:
    """Estimates of epsilon for the Gaussian mechanism, one of each sort per run (Algorithm 1).

    `fitted` takes the alternative's std from the observed cosines, as in the paper's algorithm; `null` takes the null's, as
    in its Table 2. `analytical` is the true value.
    """

    noise_multiplier: float
    dim: int
    canaries: int
    delta: float
    kind: Kind
    analytical: float
    fitted: Floats
    null: Floats

    @property
    def runs(self) -> int:
        return len(self.null)

    def to_dict(self) -> dict[str, Any]:
        """The audit, for JSON."""
        estimates = {
            name: {"mean": float(values.mean()), "std": float(values.std()), "values": values.tolist()}
            for name, values in (("null", self.null), ("fitted", self.fitted))
        }
        return vars(self) | {"runs": self.runs} | estimates


def audit_gaussian_mechanism(
    noise_multiplier: float,
    *,
    dim: int,
    canaries: int,
    delta: float,
    runs: int = 1,
    kind: Kind = "rotated",
    seed: int,
    vectors: npt.ArrayLike | None = None,
    signal_norm: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> GaussianMechanismAudit:
    """Audit the Gaussian mechanism with canaries, `runs` times (Algorithm 1).

    Without `vectors` the cosines are drawn from their exact joint law and no vector of length `dim` ever exists, so
    dim = 10^7 costs seconds; `signal_norm` is then the norm of the sum of the data, ‖X‖. With `vectors`, rows of norm at
    most 1, the mechanism runs on them. `progress` is called with the number of each finished run, from 1.

    >>> audit = audit_gaussian_mechanism(0.541, dim=10_000, canaries=5_000, delta=1e-6, runs=10, seed=1)
    >>> round(audit.analytical, 1), round(float(audit.null.mean()), 1)
    (10.0, 10.0)
    """
    noise = positive("noise_multiplier", noise_multiplier)
    dim, runs = whole_number("dim", dim, minimum=2), whole_number("runs", runs, minimum=1)
    if runs > MOST_RUNS:
        raise ValueError(f"runs must be at most {MOST_RUNS:,}, got {runs:,}")
    count, seed = whole_number("canaries", canaries, minimum=FEWEST), whole_number("seed", seed, minimum=0)
    delta = float(delta_array(one_number("delta", delta)))
    norm = nonnegative("signal_norm", signal_norm)
    _check_sizes(dim, count, {"signal_norm": norm, "noise_multiplier": noise})
    if kind not in ("rotated", "sphere"):
        raise ValueError(f"kind must be 'rotated' or 'sphere', got {kind!r}")
    if vectors is not None and norm:
        raise ValueError("pass either vectors or signal_norm: the vectors have their own norm")

    total = None if vectors is None else _summed(vectors, dim)

    def draw(run: int) -> Floats:
        if total is None:
            return _sample_cosines(kind, noise, dim, count, norm, np.random.default_rng([seed, run]))
        return _measured_cosines(kind, noise, total, count, seed, run)

    estimates = []
    for run in range(1, runs + 1):
        estimates.append(_summary(kind, draw(run), dim))
        if progress:
            progress(run)
    mean, std, null_std = np.array(estimates).T
    null = Gaussian(0.0, null_std)
    return GaussianMechanismAudit(
        noise_multiplier=noise,
        dim=dim,
        canaries=count,
        delta=delta,
        kind=kind,
        analytical=mechanism_epsilon(noise, delta=delta),
        fitted=gaussian_epsilon(null, Gaussian(mean, std), delta=delta),
        null=gaussian_epsilon(null, Gaussian(mean, null_std), delta=delta),
    )


def _check_sizes(dim: int, canaries: int, lengths: dict[str, float]) -> None:
    for name, value in lengths.items():
        if value > LARGEST:
            raise ValueError(f"{name} must be at most {LARGEST:g}, got {value:g}")
    if canaries > dim - 2:
        raise ValueError(f"canaries must be at most dim - 2, got {canaries} canaries in dimension {dim}")


def _summary(kind: Kind, cosines: Floats, dim: int) -> tuple[float, float, float]:
    """Mean and std of the observed cosines, and the null's std: 1/√d for i.i.d. canaries, otherwise conditional."""
    null_std = conditional_null(cosines, dim).std if kind == "rotated" else 1 / math.sqrt(dim)
    return cosines.mean(), cosines.std(), null_std  # ddof=0: the paper divides by k (Algorithm 1, line 9)


def _sample_cosines(kind: Kind, noise: float, dim: int, count: int, norm: float, rng: np.random.Generator) -> Floats:
    return (_sample_rotated if kind == "rotated" else _sample_sphere)(noise, dim, count, norm, rng)


def _sample_rotated(noise: float, dim: int, count: int, norm: float, rng: np.random.Generator) -> Floats:
    """Along k orthonormal canaries the noise is k normals; the rest of it matters only through its norm."""
    signal = norm * _sphere_part(count, dim, rng)
    along = 1.0 + signal + noise * rng.standard_normal(count)
    rest = math.sqrt(max(norm * norm - float(signal @ signal), 0.0))  # norm of X orthogonal to the canaries
    off = (rest + noise * rng.standard_normal()) ** 2 + noise * noise * rng.chisquare(dim - count - 1)
    return along / math.sqrt(float(along @ along) + off)


def _sample_sphere(noise: float, dim: int, count: int, norm: float, rng: np.random.Generator) -> Floats:
    """Bartlett: k + 1 normal vectors are, up to a rotation, a triangular matrix with chi diagonal.

    The first is the direction of X, so the Gram matrix of X, canaries and noise needs no vector of length `dim`.
    """
    size = count + 2
    if size > dim:
        raise ValueError(f"sphere canaries are drawn exactly up to dim - 2 of them, got {count} in dimension {dim}")
    total, along = np.zeros(size), np.zeros((count, size), dtype=np.float32)
    total[0] = norm
    for index in range(count):
        row = along[index]
        row[: index + 1] = rng.standard_normal(index + 1, dtype=np.float32)
        row[index + 1] = math.sqrt(rng.chisquare(dim - index - 1))
        row /= math.sqrt(float(np.square(row, dtype=np.float64).sum()))
        total += row
    total[: count + 1] += noise * rng.standard_normal(count + 1)
    total[count + 1] += noise * math.sqrt(rng.chisquare(dim - count - 1))
    return np.asarray(along @ total / np.linalg.norm(total), dtype=np.float64)


def _sphere_part(count: int, dim: int, rng: np.random.Generator) -> Floats:
    """The first `count` coordinates of a uniform unit vector of R^dim."""
    part = rng.standard_normal(count)
    return np.asarray(part / math.sqrt(float(part @ part) + rng.chisquare(dim - count)))


def _measured_cosines(kind: Kind, noise: float, total: Floats, count: int, seed: int, run: int) -> Floats:
    make = RotatedCanaries if kind == "rotated" else SphereCanaries
    canaries = make(count, total.size, seed=f"gaussian mechanism, seed {seed}, run {run}".encode())
    released = (
        total + canaries.combine(range(count)) + noise * np.random.default_rng([seed, run]).normal(size=total.size)
    )
    return np.asarray(canaries.cosines(released))


def _summed(vectors: npt.ArrayLike, dim: int) -> Floats:
    rows: Any = finite_array("vectors", vectors)
    if rows.ndim != 2 or rows.shape[1] != dim:
        raise ValueError(f"vectors must be rows of length dim = {dim}, got shape {rows.shape}")
    longest = float(np.linalg.norm(rows, axis=1).max(initial=0.0))
    if longest > 1 + 1e-6:
        raise ValueError(f"vectors must have norm at most 1, got one of {longest:.6g}; clip them first")
    return np.asarray(rows.sum(axis=0))
