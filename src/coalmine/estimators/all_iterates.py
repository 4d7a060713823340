"""Algorithm 3: epsilon from all iterates, that is from the model delta of every round."""

import numpy.typing as npt

from coalmine.estimators.bounds import score_array
from coalmine.estimators.gaussian_fit import EpsilonEstimate, epsilon_estimate


def estimate_from_iterates(observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float) -> EpsilonEstimate:
    """Epsilon from each canary's largest cosine over all rounds (Algorithm 3).

    One Gaussian is fitted to the observed canaries and one to the unobserved ones. There is no interval, because maxima
    over rounds are not normal.
    """
    unobserved = score_array("unobserved", unobserved)
    return epsilon_estimate(observed, null=unobserved, delta=delta, variance="fitted", confidence=None)
