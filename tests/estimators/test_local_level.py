"""The local level at which a band of order statistics holds simultaneously at every threshold."""

import time
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import beta

from coalmine.estimators.local_level import _interpolated_local_level, local_level, order_statistic_band, total_level


def holds_exactly(band: list[Fraction]) -> Fraction:
    """Pr(U_(i) <= b_i for all i) as an iterated integral of polynomials, from the largest order statistic inwards."""
    inner = [Fraction(1)]  # coefficients in x of the integral over the order statistics above x
    for number, high in enumerate(reversed(band), start=1):
        primitive = [Fraction(0), *(c / (power + 1) for power, c in enumerate(inner))]
        at_high = sum(c * high**power for power, c in enumerate(primitive))
        inner = [number * c for c in [at_high - primitive[0], *(-c for c in primitive[1:])]]
    return inner[0]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 15])
@pytest.mark.parametrize("local", [0.3, 0.01, 1e-6])
def test_total_level_agrees_with_the_iterated_integral(count, local):
    """Exact rational arithmetic over Beta quantiles, which scipy.stats computes with a different method."""
    band = [Fraction(float(beta.isf(local, i, count - i + 1))) for i in range(1, count + 1)]
    assert total_level(count, local) == pytest.approx(float(1 - holds_exactly(band)), rel=1e-8)


def test_two_order_statistics_have_a_closed_form():
    low, high = order_statistic_band(2, 0.1)
    assert total_level(2, 0.1) == pytest.approx(1 - (2 * low * high - low * low), rel=1e-12)


@pytest.mark.parametrize(("count", "at_5", "at_2_5"), [
    (10, 0.007943, 0.003734), (100, 0.002461, 0.001110), (300, 0.001688, 0.000754),
    (1_000, 0.001217, 0.000541), (5_000, 0.000864, 0.000383),
])  # fmt: skip
def test_local_levels_agree_with_an_independent_recursion(count, at_5, at_2_5):
    """A Poissonised recursion gives these values for a total of 5 % and for each half of two samples at 5 %."""
    assert local_level(count, 0.05) == pytest.approx(at_5, abs=6e-7)
    assert local_level(count, 1 - 0.95**0.5) == pytest.approx(at_2_5, abs=6e-7)


@pytest.mark.parametrize(("count", "total"), [(30, 0.05), (300, 0.2), (3_000, 0.05)])
def test_the_band_fails_at_its_stated_rate(count, total):
    rng = np.random.default_rng(count)
    band, runs = order_statistic_band(count, local_level(count, total)), 4_000
    sums = np.cumsum(rng.standard_exponential((runs, count + 1)), axis=1)  # sorted uniforms without sorting
    failed = np.mean((sums[:, :-1] / sums[:, -1:] > band).any(axis=1))
    assert abs(failed - total) < 4 * np.sqrt(total * (1 - total) / runs)


@pytest.mark.parametrize("count", [1_100, 2_500, 5_000])
@pytest.mark.parametrize("total", [0.5, 0.05, 0.0253, 0.01, 0.001, 0.0005, 1e-6])
def test_the_table_agrees_with_the_recursion(count, total):
    """At interpolated levels the band fails with the wanted probability to a relative error of 2e-4."""
    assert total_level(count, _interpolated_local_level(count, total)) == pytest.approx(total, rel=2e-4)


@pytest.mark.parametrize(("count", "local", "total"), [
    (20_000, 1e-3, 0.06818847554740), (20_000, 3e-4, 0.02516268999506), (20_000, 1e-5, 0.001247915581620),
    (200_000, 1e-3, 0.08756800860257), (200_000, 3e-4, 0.03277150621370), (200_000, 1e-5, 0.001658632995433),
])  # fmt: skip
def test_the_table_agrees_with_long_recursions(count, local, total):
    """Between the table's counts, against total_level, which takes up to a quarter of a minute there."""
    assert local_level(count, total) == pytest.approx(local, rel=2e-4)


def test_more_order_statistics_need_a_smaller_level():
    counts = [1, 2, 10, 100, 1_999, 2_000, 2_001, 10_000, 10**6, 10**7, 10**8]
    levels = [local_level(count, 0.05) for count in counts]
    assert levels[0] == 0.05
    assert (np.diff(levels) < 0).all()


def test_beyond_the_table_the_level_is_conservative():
    assert local_level(10**5, 1e-12) == pytest.approx(1e-17)  # Bonferroni
    assert local_level(10**5, 0.9999999) == pytest.approx(0.5)


def test_any_level_at_10_000_is_quick():
    started = time.process_time()
    local_level(10_000, 0.0123456)
    local_level(1_000, 0.0123456)
    assert time.process_time() - started < 1


@pytest.mark.parametrize(("count", "total"), [(0, 0.05), (10.5, 0.05), (10, 0.0), (10, 1.0), (10, float("nan"))])
def test_bad_input_is_rejected(count, total):
    with pytest.raises(ValueError, match=r"count must|total must"):
        local_level(count, total)


@pytest.mark.parametrize("count", [2_001, 3_777, 9_210, 10**7])
def test_repeated_calls_give_the_same_level_bit_for_bit(count):
    """Verification derives a result again and compares it, and resumed runs must end identically."""
    assert len({_interpolated_local_level(count, 0.0253) for _ in range(20)}) == 1
