"""μ, the trade-off function and the privacy profile of a result."""

import numpy as np
import pytest
from frozen import stored
from scipy.optimize import brentq
from scipy.stats import norm
from training import train


@pytest.fixture(scope="module")
def result():
    return train(dim=2_000, canaries=400, rounds=8).result(claim=4.9, analytical_epsilon=4.886554117462212)


def test_the_interval_of_mu_is_that_of_the_mean_score(result):
    """Noise multiplier 1 means μ = 1, and 400 canaries measure it to about 1.96/√400."""
    mu = result.mu
    assert (mu.rung, mu.participations, mu.confidence) == ("known-others", 1, 0.95)
    assert mu.low < 1 < mu.high
    assert mu.high - mu.low == pytest.approx(2 * 1.96 / 20, rel=0.1)
    assert mu.analytical == pytest.approx(1)


def test_the_curve_is_that_of_two_gaussians_and_its_band_contains_it(result):
    curve = result.tradeoff([1e-6, 0.01, 0.5, 1.0])
    assert curve.analytical == pytest.approx(norm.cdf(norm.isf(curve.false_positives) - 1))
    assert (curve.low <= curve.false_negatives).all()
    assert (curve.false_negatives <= curve.high).all()
    assert result.tradeoff().false_positives.size == 200


def test_the_profile_is_the_conjugate_of_the_curve(result):
    """δ(ε) = max over α of 1 - e^ε·α - f(α), and at the audit's δ the band ends at the interval of ε."""
    alphas = np.linspace(0, 1, 200_001)[1:-1]
    profile = result.privacy_profile([0.0, 1.0, 3.0])
    f = result.tradeoff(alphas)
    for epsilon, delta in zip(profile.epsilons, profile.deltas, strict=True):
        assert delta == pytest.approx(np.max(1 - np.exp(epsilon) * alphas - f.false_negatives), abs=1e-5)
    low, high = result.headline.gaussian.interval
    for end, band in ((low, "low"), (high, "high")):
        crossing = brentq(lambda x, band=band: float(getattr(result.privacy_profile([x]), band)[0]) - 1e-6, 0.1, 30)
        assert crossing == pytest.approx(end, rel=1e-6)


def test_without_the_bound_there_is_no_curve():
    with pytest.raises(ValueError, match=r"withheld: the shape gauge is outside its limits"):
        stored("laplace").tradeoff()


def test_bad_points_are_rejected(result):
    with pytest.raises(ValueError, match=r"rates must lie in \[0, 1\], got 0.5 to 2"):
        result.tradeoff([0.5, 2])
    with pytest.raises(ValueError, match=r"epsilons must be at least 0, got -1"):
        result.privacy_profile([-1])


@pytest.mark.parametrize("kind", ["curve", "profile"])
def test_both_can_be_drawn(result, kind):
    pytest.importorskip("matplotlib")
    labels = [text.get_text() for text in result.plot(kind).get_legend().get_texts()]
    assert any("band" in label for label in labels)


def test_the_report_describes_the_picture_in_words(result):
    pytest.importorskip("matplotlib")
    from coalmine.report.figures import profile_pictures

    (picture,) = profile_pictures(result)
    low, high = result.headline.gaussian.interval
    assert "for known-others 1×: μ 1" in picture.alt
    assert f"ε lies between {low:.3g} and {high:.3g}. μ of the stated noise is 1." in picture.alt
    assert f'aria-label="{picture.alt}"' in picture.svg
    assert profile_pictures(stored("laplace")) == []
