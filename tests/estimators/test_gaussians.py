from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import exact_delta

from coalmine import Gaussian, gaussian_delta, gaussian_epsilon

GOLDEN = Path(__file__).parents[1] / "golden" / "gaussian_epsilon.csv"
finite = st.floats(-1e300, 1e300)
positive = st.floats(5e-324, 1e308)
small = st.floats(-10, 10).filter(lambda x: x == 0 or abs(x) > 1e-6)
stds = st.floats(0.05, 20)
deltas = st.floats(1e-30, 0.4)


def hard_rows(rng, count):
    """Rows that break the formulas as printed; all floats are exact inputs of the oracle."""
    for index in range(count):
        kind = ("near", "apart", "equal", "no shift", "both small")[index % 5]
        delta = 10 ** rng.uniform(-30, np.log10(0.4))
        null_std, null_mean = 10 ** rng.uniform(-3, 3), rng.normal() * rng.choice([0, 1, 100])
        sign, shift = rng.choice([-1, 1]), 10 ** rng.uniform(-10, np.log10(300))
        ratio = 1 + sign * 10 ** rng.uniform(-15, -5)
        if kind == "apart":
            ratio = 10 ** rng.uniform(-2, 2)
        elif kind == "equal":
            ratio = 1.0
        elif kind == "no shift":
            shift = 0.0
        elif kind == "both small":
            shift = abs(ratio - 1) * 10 ** rng.uniform(-2, 2)
        yield null_mean, null_std, null_mean + sign * shift * null_std, null_std * ratio, delta


def test_epsilon_matches_the_golden_rows():
    """Every row of the table computed at 70 to 400 digits, to 1e-9 (reached: 1e-13)."""
    rows = np.genfromtxt(GOLDEN, delimiter=",", names=True)
    null = Gaussian(rows["null_mean"], rows["null_std"])
    alternative = Gaussian(rows["alternative_mean"], rows["alternative_std"])
    epsilon = gaussian_epsilon(null, alternative, delta=rows["delta"])
    np.testing.assert_allclose(epsilon, rows["epsilon"], rtol=1e-9, atol=0)


def test_epsilon_matches_high_precision_on_random_hard_rows():
    """Nearly equal stds, stds 1e±2 apart, means to 300 stds, delta 1e-30 to 0.4, against Appendix A at 150 digits.

    The exact delta decreases with epsilon, so within 1e-9 of the right epsilon it lies on both sides of the row's delta.
    """
    some = 0
    for row in hard_rows(np.random.default_rng(20240), 200):
        *pair, delta = row
        epsilon = float(gaussian_epsilon(Gaussian(*pair[:2]), Gaussian(*pair[2:]), delta=delta))
        assert exact_delta(*pair, epsilon * (1 + 1e-9), digits=150) <= delta, (row, epsilon)
        if epsilon:
            assert exact_delta(*pair, epsilon * (1 - 1e-9), digits=150) >= delta, (row, epsilon)
            some += 1
    assert some > 50


def test_delta_agrees_with_high_precision():
    rng = np.random.default_rng(7)
    for row in hard_rows(rng, 60):
        epsilon = 10 ** rng.uniform(-3, 2)
        delta = gaussian_delta(Gaussian(*row[:2]), Gaussian(*row[2:4]), epsilon=epsilon)
        exact = exact_delta(*row[:4], epsilon, digits=150)
        assert abs(delta - exact) <= 1e-9 * exact + 1e-300, (row, epsilon, delta, float(exact))


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.541, 10.0), (1.54, 3.0), (4.22, 1.0)])
def test_equal_variances_recover_the_gaussian_mechanism(sigma, epsilon):
    """Table 2: noise calibrated to epsilon at delta = 1e-6 gives that epsilon back."""
    assert gaussian_epsilon(Gaussian(0.0, sigma), Gaussian(1.0, sigma), delta=1e-6) == pytest.approx(epsilon, rel=0.01)


@given(finite, finite, positive, positive, st.floats(5e-324, 1, exclude_max=True))
def test_epsilon_is_defined_for_any_finite_input(mean, other, std, other_std, delta):
    """Never an exception, a warning or a NaN."""
    epsilon = gaussian_epsilon(Gaussian(mean, std), Gaussian(other, other_std), delta=delta)
    assert epsilon >= 0
    if np.isfinite(epsilon):
        assert 0 <= gaussian_delta(Gaussian(mean, std), Gaussian(other, other_std), epsilon=epsilon) <= 1


@given(finite, positive, st.floats(5e-324, 1, exclude_max=True))
def test_identical_gaussians_give_exactly_zero(mean, std, delta):
    assert gaussian_epsilon(Gaussian(mean, std), Gaussian(mean, std), delta=delta) == 0


@given(small, stds, small, stds, deltas)
def test_epsilon_is_symmetric_in_its_arguments(mean, std, other, other_std, delta):
    first, second = Gaussian(mean, std), Gaussian(other, other_std)
    assert gaussian_epsilon(first, second, delta=delta) == gaussian_epsilon(second, first, delta=delta)


@given(small, stds, small, stds, deltas, st.floats(0.01, 100), st.integers(-64, 64))
def test_epsilon_is_invariant_under_shift_and_scale(mean, std, other, other_std, delta, scale, shift):
    reference = gaussian_epsilon(Gaussian(mean, std), Gaussian(other, other_std), delta=delta)
    moved = Gaussian(scale * (mean + shift), scale * std), Gaussian(scale * (other + shift), scale * other_std)
    # the shifted means are rounded: for small stds their difference is off by up to 1e-13 stds
    assert gaussian_epsilon(*moved, delta=delta) == pytest.approx(reference, rel=1e-9, abs=1e-9)


@given(small, stds, small, stds, deltas)
def test_epsilon_inverts_gaussian_delta(mean, std, other, other_std, delta):
    null, alternative = Gaussian(mean, std), Gaussian(other, other_std)
    epsilon = gaussian_epsilon(null, alternative, delta=delta)
    assume(0 < epsilon < 1e6)
    assert gaussian_delta(null, alternative, epsilon=epsilon) == pytest.approx(delta, rel=1e-8)


@given(small, stds, small, stds, deltas, st.floats(1.01, 10))
def test_epsilon_decreases_with_delta(mean, std, other, other_std, delta, factor):
    null, alternative = Gaussian(mean, std), Gaussian(other, other_std)
    less = gaussian_epsilon(null, alternative, delta=delta / factor)
    more = gaussian_epsilon(null, alternative, delta=delta)
    assert less >= more
    assert less > more or more == 0


def test_arrays_broadcast():
    epsilon = gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian([[0.0], [1.0]], [1.0, 2.0, 3.0]), delta=1e-5)
    assert epsilon.shape == (2, 3)
    assert epsilon[1, 2] == gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(1.0, 3.0), delta=1e-5)
    assert isinstance(gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=0.1), float)
    assert gaussian_epsilon(Gaussian(0, 1), Gaussian(np.zeros(0), 1), delta=0.1).shape == (0,)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, np.nan, np.inf])
def test_delta_must_lie_between_0_and_1(delta):
    with pytest.raises(ValueError, match=r"delta must (lie in \(0, 1\)|be finite), got"):
        gaussian_epsilon(Gaussian(0, 1), Gaussian(1, 1), delta=delta)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        (0, 0, "std must be above 0, got 0"),
        (0, -1, "std must be above 0, got -1"),
        (np.nan, 1, "mean must be finite, got nan"),
        (0, np.inf, "std must be finite, got inf"),
        ("a", 1, "mean must be numbers, got 'a'"),
        ([1, 2], [1, 2, 3], "shapes must broadcast"),
    ],
)
def test_bad_gaussians_are_rejected(mean, std, message):
    with pytest.raises(ValueError, match=message):
        Gaussian(mean, std)


def test_shapes_that_do_not_broadcast_are_named():
    with pytest.raises(ValueError, match=r"shapes must broadcast .* delta \(3,\)"):
        gaussian_epsilon(Gaussian(0, 1), Gaussian([1, 2], 1), delta=[0.1, 0.2, 0.3])


def test_epsilon_must_not_be_negative():
    with pytest.raises(ValueError, match="epsilon must be at least 0, got -1"):
        gaussian_delta(Gaussian(0, 1), Gaussian(1, 1), epsilon=-1)
