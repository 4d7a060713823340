"""Delta between two Gaussians in high-precision arithmetic; shares no code with the package.

Appendix A as printed: roots of the quadratic and normal cdfs, with enough digits to avoid cancellation.
"""

from mpmath import mp, mpf


def exact_delta(null_mean, null_std, mean, std, epsilon, digits=60):
    first = tuple(mpf(float(v)) for v in (null_mean, null_std, mean, std))
    second = (first[2], first[3], first[0], first[1])
    with mp.workdps(digits):
        return max(_hockey_stick(*first, mpf(float(epsilon))), _hockey_stick(*second, mpf(float(epsilon))))  # type: ignore[call-arg]


def _cdf(x, mean, std):
    return mp.ncdf((x - mean) / std)


def _hockey_stick(m1, s1, m2, s2, epsilon):
    a = (1 / s2**2 - 1 / s1**2) / 2
    b = m1 / s1**2 - m2 / s2**2
    c = ((m2 / s2) ** 2 - (m1 / s1) ** 2) / 2 + mp.log(s2 / s1) - epsilon
    if a == 0 and b == 0:
        return mpf(0)
    if a == 0:
        low, high = (-c / b, mp.inf) if b > 0 else (-mp.inf, -c / b)
        outside = False
    else:
        disc = b * b - 4 * a * c
        if disc <= 0:
            return max(1 - mp.exp(epsilon), mpf(0)) if a > 0 else mpf(0)
        low, high = sorted([(-b - mp.sqrt(disc)) / (2 * a), (-b + mp.sqrt(disc)) / (2 * a)])
        outside = a > 0

    def mass(mean, std):
        lower = _cdf(low, mean, std) if low != -mp.inf else mpf(0)
        upper = _cdf(-high, -mean, std) if high != mp.inf else mpf(0)
        if outside:
            return lower + upper
        if low == -mp.inf:
            return _cdf(high, mean, std)
        if high == mp.inf:
            return _cdf(-low, -mean, std)
        # between the roots: computed from the side where both tails are small
        return _cdf(high, mean, std) - lower if (low + high) / 2 < mean else _cdf(-low, -mean, std) - upper

    return max(mass(m1, s1) - mp.exp(epsilon) * mass(m2, s2), mpf(0))
