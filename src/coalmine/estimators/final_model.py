"""Algorithm 2: epsilon from the final model alone."""

import numpy.typing as npt

from coalmine.argument_checks import whole_number
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate
from coalmine.estimators.null import CosineNull


def estimate_from_final(cosines: npt.ArrayLike, *, dim: int, delta: float) -> EpsilonEstimate:
    """Epsilon from the observed canaries' cosines with the final model (Algorithm 2).

    A Gaussian with its own mean and std is fitted to the cosines and compared with the null N(0, 1/dim).
    """
    dim = whole_number("dim", dim, minimum=2)
    return epsilon_estimate(cosines, null=CosineNull(dim), delta=delta, variance="fitted")
