"""The exact law of an unobserved cosine (Propositions 3.1 and 3.2), in any dimension and deep in its tails."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import betaincc, betainccinv, betaincinv, gammaln

from coalmine.argument_checks import Floats, finite_array, one_number, whole_number

TAIL = 1e-200  # below this the incomplete beta function is computed in logs
TERMS = 200  # terms of its continued fraction; in that tail at most 40 are needed


@dataclass(frozen=True)
class CosineNull:
    """The law of the cosine between an unobserved canary and any independent vector in R^dim (Proposition 3.1).

    Its square is Beta(1/2, (dim - 1)/2), for every dim >= 2: no normal approximation at any dimension. `scale`
    stretches the law, and `dof` is the number of directions from which the scale was estimated (inf if it is known); see
    `conditional_null`.

    >>> f"{CosineNull(1_000_000).logsf(0.9):.3f}"
    '-830372.494'
    """

    dim: int
    scale: float = 1.0
    dof: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", whole_number("dim", self.dim, minimum=2))
        scale = one_number("scale", self.scale)
        if scale <= 0:
            raise ValueError(f"scale must be above 0, got {scale}")

    @property
    def mean(self) -> float:
        return 0.0

    @property
    def std(self) -> float:
        """Exactly scale/√dim (the paper's Lemma B.1)."""
        return self.scale / math.sqrt(self.dim)

    def logpdf(self, cosine: npt.ArrayLike) -> Any:
        """Log of the density (Proposition 3.1)."""
        t = self._unscaled(cosine)
        inside = np.abs(t) <= 1
        with np.errstate(divide="ignore", invalid="ignore"):
            shape = np.where(inside, (self.dim - 3) / 2 * np.log1p(-(np.where(inside, t, 0) ** 2)), -np.inf)
        if self.dim == 3:
            shape = np.where(inside, 0.0, -np.inf)
        return (self._log_constant - math.log(self.scale) + shape)[()]

    def pdf(self, cosine: npt.ArrayLike) -> Any:
        return np.exp(self.logpdf(cosine))

    def logsf(self, cosine: npt.ArrayLike) -> Any:
        """log Pr(T > cosine), accurate even if the probability is far below the smallest float."""
        t = self._unscaled(cosine)
        upper = self._log_upper_tail(np.abs(t))
        with np.errstate(divide="ignore"):
            return np.where(t >= 0, upper, np.log1p(-np.exp(upper)))[()]

    def sf(self, cosine: npt.ArrayLike) -> Any:
        t = self._unscaled(cosine)
        upper = self._upper_tail(np.abs(t))
        return np.where(t >= 0, upper, 1 - upper)[()]

    def logcdf(self, cosine: npt.ArrayLike) -> Any:
        return self.logsf(-finite_array("cosine", cosine))

    def cdf(self, cosine: npt.ArrayLike) -> Any:
        return self.sf(-finite_array("cosine", cosine))

    def ppf(self, probability: npt.ArrayLike) -> Any:
        """The cosine below which `probability` of the law lies."""
        q = finite_array("probability", probability)
        if q.size and not ((q >= 0) & (q <= 1)).all():
            raise ValueError(f"probability must lie in [0, 1], got {q[(q < 0) | (q > 1)].flat[0]}")
        tail, middle = 2 * np.minimum(q, 1 - q), np.abs(2 * q - 1)
        b = (self.dim - 1) / 2
        square = np.where(middle < 0.5, betaincinv(0.5, b, middle), betainccinv(0.5, b, tail))
        return (self.scale * np.copysign(np.sqrt(square), q - 0.5))[()]

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...] | None = None) -> Any:
        """Exact draws: one coordinate of a normal vector over the vector's norm."""
        first = rng.standard_normal(size)
        rest = rng.chisquare(self.dim - 1, size)
        return self.scale * first / np.sqrt(first * first + rest)

    @cached_property
    def _log_constant(self) -> float:
        """log Γ(d/2) / (Γ((d-1)/2)·√π)."""
        return _log_gamma_ratio((self.dim - 1) / 2) - math.log(math.pi) / 2

    def _unscaled(self, cosine: npt.ArrayLike) -> Floats:
        return finite_array("cosine", cosine) / self.scale

    def _upper_tail(self, t: Floats) -> Floats:
        tail: Floats = betaincc(0.5, (self.dim - 1) / 2, np.minimum(t, 1.0) ** 2) / 2
        return tail

    def _log_upper_tail(self, t: Floats) -> Floats:
        tail = np.atleast_1d(self._upper_tail(t))
        answer = np.full(tail.shape, -np.inf)
        with np.errstate(divide="ignore"):
            np.log(tail, out=answer, where=tail > TAIL)
        deep = (tail <= TAIL) & (np.atleast_1d(t) < 1)
        if deep.any():
            answer[deep] = self._log_deep_tail(np.atleast_1d(t)[deep])
        return answer.reshape(t.shape)

    def _log_deep_tail(self, t: Floats) -> Floats:
        """The incomplete beta function's leading factor in logs times its continued fraction (DLMF 8.17.22)."""
        a, x = (self.dim - 1) / 2, (1 - t) * (1 + t)
        fraction = np.ones_like(t)
        for term in range(TERMS, 0, -1):
            m, odd = divmod(term, 2)
            top = -(a + m) * (a + 0.5 + m) if odd else m * (0.5 - m)
            fraction = 1 + top / ((a + term - 1) * (a + term)) * x / fraction
        leading = a * np.log1p(-t * t) + np.log(t) + self._log_constant - math.log(2 * a)
        return leading - np.log(fraction)


def conditional_null(cosines: npt.ArrayLike, dim: int) -> CosineNull:
    """The null of an unobserved canary given the cosines of all k observed ones, when canaries are orthonormal.

    Such a canary is uniform in the orthogonal complement of the observed ones, so its cosine with the same vector is
    √(1 - Σg²)·CosineNull(dim - k), for every k < dim - 1; the paper needs k = o(d). `cosines` must be those of all
    observed canaries of the run, present in the round or not. The scale is estimated from dim - k directions,
    the null's `dof`.
    """
    g = finite_array("cosines", cosines)
    dim = whole_number("dim", dim, minimum=2)
    if g.ndim != 1:
        raise ValueError(f"cosines must be one row of numbers, got shape {g.shape}")
    if dim - g.size < 2:
        raise ValueError(f"dim must exceed the number of cosines by at least 2, got dim {dim} and {g.size} cosines")
    rest = 1 - float(g @ g)
    if rest <= 0:
        raise ValueError(f"the squares of orthonormal canaries' cosines add up to less than 1, got {1 - rest:.6g}")
    return CosineNull(dim - g.size, scale=math.sqrt(rest), dof=float(dim - g.size))


def _log_gamma_ratio(x: float) -> float:
    """log Γ(x + 1/2)/Γ(x): for large x by its asymptotic series, where a difference of two logs would cancel."""
    if x < 30:
        return float(gammaln(x + 0.5) - gammaln(x))
    return math.log(x) / 2 - 1 / (8 * x) + 1 / (192 * x**3) - 1 / (640 * x**5) + 17 / (14336 * x**7)
