"""The closed-form power of the gauges that follow each coordinate over the rounds."""

from scipy import stats


def power(dim, rounds, count, std):
    """The least chance that a gauge sees `count` coordinates with this standard deviation, whose test has most power."""
    level, chances = 1e-4 / 2, []
    for probability in (1e-3, 1e-2):
        limit = stats.chi2.ppf(probability, rounds)
        most = stats.binom.isf(level / 8, dim, stats.chi2.cdf(limit / 0.995**2, rounds))
        share = ((dim - count) * probability + count * stats.chi2.cdf(limit / max(std, 1e-9) ** 2, rounds)) / dim
        chances.append(stats.binom.sf(most, dim, share))
    limit = 0.995**2 * stats.chi2.ppf(level / 4 / dim, rounds)
    chances.append(1 - stats.chi2.sf(limit / max(std, 1e-9) ** 2, rounds) ** count)
    return max(chances)
