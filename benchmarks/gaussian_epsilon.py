"""A batch of 10,000 epsilons against a scalar brentq loop over Appendix A's formulas.

The floor: an epsilon needs the masses of two Gaussians on either side of an edge, four special functions of about 30 ns
each, at every step of a root search. Newton's method needs about six steps, in each of two directions: 1.5 µs.
"""

import math
import time

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon

BAR = 100


def scalar_epsilon(null_mean: float, null_std: float, mean: float, std: float, delta: float) -> float:
    """Appendix A as printed: roots of the quadratic, log cdfs, a line search over epsilon; the larger of two directions."""
    return max(_direction(null_mean, null_std, mean, std, delta), _direction(mean, std, null_mean, null_std, delta))


def _direction(m1: float, s1: float, m2: float, s2: float, delta: float) -> float:
    def gap(epsilon: float) -> float:
        return log_hockey_stick(m1, s1, m2, s2, epsilon) - math.log(delta)

    if gap(0.0) <= 0:
        return 0.0
    high = 1.0
    while gap(high) > 0:
        high *= 2
    return float(brentq(gap, 0.0, high))


def log_hockey_stick(m1: float, s1: float, m2: float, s2: float, epsilon: float) -> float:
    """log(Pr[Z1 > epsilon] - e^epsilon·Pr[-Z2 > epsilon]), -inf where that is not positive."""
    a = (1 / s2**2 - 1 / s1**2) / 2
    b = m1 / s1**2 - m2 / s2**2
    c = ((m2 / s2) ** 2 - (m1 / s1) ** 2) / 2 + math.log(s2 / s1) - epsilon
    discriminant = b * b - 4 * a * c
    if a == 0:
        root = -c / b
        log_p, log_q = (_log_tail(root, m, s, upper=b > 0) for m, s in ((m1, s1), (m2, s2)))
    elif discriminant <= 0:
        return -math.inf
    else:
        q = -(b + math.copysign(math.sqrt(discriminant), b)) / 2
        low, high = sorted((q / a, c / q))
        combine = _outside if a > 0 else _between
        log_p, log_q = (combine(low, high, m, s) for m, s in ((m1, s1), (m2, s2)))
    ratio = epsilon + log_q - log_p
    return -math.inf if ratio >= 0 or log_p == -math.inf else log_p + math.log1p(-math.exp(ratio))


def _log_tail(x: float, mean: float, std: float, *, upper: bool) -> float:
    return float(log_ndtr((mean - x) / std if upper else (x - mean) / std))


def _outside(low: float, high: float, mean: float, std: float) -> float:
    return float(np.logaddexp(_log_tail(low, mean, std, upper=False), _log_tail(high, mean, std, upper=True)))


def _between(low: float, high: float, mean: float, std: float) -> float:
    upper = (low + high) / 2 > mean
    large, small = (low, high) if upper else (high, low)
    first, second = _log_tail(large, mean, std, upper=upper), _log_tail(small, mean, std, upper=upper)
    return first + math.log1p(-math.exp(second - first)) if second < first else -math.inf


def measure(batch: int = 10_000, scalars: int = 200) -> dict[str, float]:
    """Seconds per epsilon, batch and scalar, on the same rows; they alternate, so that a noisy machine affects both."""
    rng = np.random.default_rng(0)
    mean, std = 3 * rng.normal(size=batch), np.exp(0.3 * rng.normal(size=batch))
    delta = 10 ** rng.uniform(-10, -2, size=batch)
    batched, single, worst = [], [], 0.0
    for part in np.array_split(np.arange(scalars), 4):
        start = time.perf_counter()
        epsilon = gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mean, std), delta=delta)
        batched.append((time.perf_counter() - start) / batch)
        start = time.perf_counter()
        reference = [scalar_epsilon(0.0, 1.0, mean[i], std[i], delta[i]) for i in part]
        single.append((time.perf_counter() - start) / len(part))
        worst = max(worst, float(np.max(np.abs(epsilon[part] - reference) / np.maximum(reference, 1e-9))))
    return {
        "batch_s": min(batched),
        "scalar_s": min(single),
        "ratio": min(single) / min(batched),
        "disagreement": worst,
    }


def main() -> int:
    found = measure()
    batch, scalar = found["batch_s"] * 1e6, found["scalar_s"] * 1e6
    print(f"gaussian_epsilon: {batch:.2f} µs in a batch of 10,000, {scalar:.0f} µs by a scalar brentq loop:")
    print(f"ratio {found['ratio']:.0f} (bar {BAR}); largest disagreement {found['disagreement']:.1e}")
    return 0 if found["ratio"] >= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
