from pathlib import Path

import numpy as np
import pytest
from scipy import integrate, stats

from coalmine import CosineNull, conditional_null

GOLDEN = Path(__file__).parents[1] / "golden" / "cosine_null.csv"
DIMS = [2, 3, 4, 5, 17, 1000, 10**6]


def test_log_tail_matches_the_golden_rows():
    """log P[cosine > t] at 60 digits, down to -1.4e9."""
    for dim, cosine, log_survival in np.genfromtxt(GOLDEN, delimiter=",", skip_header=1):
        assert CosineNull(int(dim)).logsf(cosine) == pytest.approx(log_survival, rel=1e-9)


@pytest.mark.parametrize("dim", DIMS)
def test_survival_is_the_integral_of_the_density(dim):
    """Proposition 3.1's density, integrated by quadrature over the angle."""
    null = CosineNull(dim)
    for t in np.array([-0.9, 0.0, 0.3, 0.8, 2.5]) * min(1.0, 3 / np.sqrt(dim)):
        if t < 1:
            mass, _ = integrate.quad(
                lambda angle: null.pdf(np.cos(angle)) * np.sin(angle),
                0,
                np.arccos(t),
                epsrel=1e-12,
                points=[np.arccos(t)],
            )
            assert null.sf(t) == pytest.approx(mass, rel=1e-7)


def test_known_closed_forms():
    t = np.linspace(-0.99, 0.99, 21)
    np.testing.assert_allclose(CosineNull(2).sf(t), np.arccos(t) / np.pi, rtol=1e-12)  # the circle
    np.testing.assert_allclose(CosineNull(3).sf(t), (1 - t) / 2, rtol=1e-12)  # Archimedes
    np.testing.assert_allclose(CosineNull(3).pdf([-1.0, 0.0, 1.0, 1.5]), [0.5, 0.5, 0.5, 0.0])


@pytest.mark.parametrize("dim", DIMS)
def test_ppf_inverts_cdf(dim):
    null = CosineNull(dim)
    q = np.concatenate([np.linspace(0.001, 0.999, 101), [0.5, 0.5 + 1e-12], 10.0 ** -np.arange(3.0, 12)])
    t = null.ppf(q)
    resolved = 1 - np.abs(t) > 1e-7  # closer to ±1, floats cannot resolve quantiles
    np.testing.assert_allclose(null.cdf(t[resolved]), q[resolved], rtol=1e-7)
    assert resolved.sum() > 100
    assert list(null.ppf([0.0, 1.0])) == [-1.0, 1.0]


def test_tails_agree_with_each_other():
    null = CosineNull(1000)
    t = np.linspace(-0.2, 0.2, 41)
    np.testing.assert_allclose(null.logcdf(t), null.logsf(-t), rtol=1e-12)
    np.testing.assert_allclose(np.exp(null.logsf(t)), null.sf(t), rtol=1e-12)
    np.testing.assert_allclose(null.cdf(t) + null.sf(t), 1)
    assert list(null.logsf([-2.0, -1.0, 1.0, 2.0])) == [0, 0, -np.inf, -np.inf]


def test_the_exact_tail_is_used_in_high_dimensions():
    """At d = 1000 and ten stds out the normal law's log-probability is off by more than 4 %."""
    null, t = CosineNull(1000), 10 / np.sqrt(1000)
    assert null.logsf(t) / stats.norm.logsf(t * np.sqrt(1000)) == pytest.approx(1.04, abs=0.02)


@pytest.mark.parametrize("dim", [2, 3, 7, 1000])
def test_samples_follow_the_law(dim):
    """Kolmogorov-Smirnov at a false-alarm rate of 1e-4 for this fixed seed."""
    sample = CosineNull(dim).sample(np.random.default_rng(dim), 20_000)
    assert stats.kstest(sample, CosineNull(dim).cdf).pvalue > 1e-4


def test_samples_are_cosines_of_random_directions():
    rng = np.random.default_rng(3)
    vectors = rng.normal(size=(20_000, 6))
    cosines = vectors[:, 0] / np.linalg.norm(vectors, axis=1)
    assert stats.kstest(cosines, CosineNull(6).cdf).pvalue > 1e-4
    assert np.std(cosines) == pytest.approx(CosineNull(6).std, rel=0.02)


def test_conditional_null_is_the_law_given_the_other_cosines():
    """Cosines of an orthonormal frame with a fixed vector: the last one, divided by the scale left by the first k."""
    rng = np.random.default_rng(11)
    dim, k = 12, 5
    scores = []
    for _ in range(4000):
        frame, upper = np.linalg.qr(rng.normal(size=(dim, dim)))
        cosines = (frame * np.sign(np.diag(upper)))[0]  # with the first unit vector
        null = conditional_null(cosines[:k], dim)
        assert (null.dim, null.dof) == (dim - k, dim - k)
        scores.append(null.cdf(cosines[k]))
    assert stats.kstest(scores, "uniform").pvalue > 1e-4


def test_bad_input_is_rejected():
    for dim in (1, 0, -3, 2.5, "x", np.nan):
        with pytest.raises(ValueError, match="dim must be"):
            CosineNull(dim)
    with pytest.raises(ValueError, match="cosine must be finite, got nan"):
        CosineNull(10).logsf([0.1, np.nan])
    with pytest.raises(ValueError, match=r"probability must lie in \[0, 1\], got 1.5"):
        CosineNull(10).ppf(1.5)
    with pytest.raises(ValueError, match="exceed the number of cosines by at least 2, got dim 10 and 9 cosines"):
        conditional_null(np.zeros(9), 10)
    with pytest.raises(ValueError, match="add up to less than 1"):
        conditional_null([0.9, 0.9], 10)
