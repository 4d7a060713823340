"""The measurements of a noise vector and the null laws of their gauges, against independent oracles."""

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.fft import next_fast_len

from coalmine import Audit
from coalmine.estimators.normality import anscombe_glynn
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.gaussian import _cell_probabilities
from coalmine.evidence.gauges.repetition import Repetition, _agreement
from coalmine.evidence.gauges.shared_draws import repeated_share
from coalmine.measure.noise_law import (
    CELL,
    CELLS,
    NoiseParts,
    measure_law,
    resolution_of,
    rounding_step,
)
from coalmine.measure.round import Round

DIM = 4_096
WHOLE = NoiseParts.of([], DIM)


def normal(seed=0, dim=DIM):
    return np.random.default_rng(seed).standard_normal(dim)


def law(noise, release=None, parts=WHOLE, **options):
    return measure_law(noise, noise if release is None else release, parts, full=True, exact=True, **options)


def test_small_layers_are_standardised_together():
    parts = NoiseParts.of([("a", 10), ("b", 300), ("c", 5), ("d", 2_000), ("e", 7)], 2_322)
    sizes = [place.stop - place.start for place in parts.groups]
    assert sum(sizes) == 2_322
    assert min(sizes) >= 256


def test_layers_of_equal_size_are_compared_even_when_others_lie_between():
    parts = NoiseParts.of([("a", 100), ("b", 30), ("c", 100)], 230)
    starts = {(one.start, two.start, one.stop - one.start) for one, two in parts.pairs}
    assert (0, 130, 100) in starts
    assert (0, 100, 30) in starts


def test_moments_agree_with_numpy():
    noise = normal()
    moments = law(noise)["law_moments"]
    expected = [np.abs(noise).sum(), (noise**2).sum(), (noise**4).sum()]
    np.testing.assert_allclose(moments, expected, rtol=1e-12)


@pytest.mark.full
def test_the_standardised_kurtosis_is_standard_normal():
    """Two-sided tails at 1e-3 of 40,000 draws with a known mean, compared with scipy's test for an estimated mean."""
    rng = np.random.default_rng(1)
    draws = rng.standard_normal((40_000, 500))
    values = (draws**4).mean(axis=1) / (draws**2).mean(axis=1) ** 2
    scores = anscombe_glynn(values, np.full(len(values), 500.0))
    assert abs(scores.mean()) < 0.03
    assert scores.std() == pytest.approx(1.0, abs=0.02)
    beyond = (np.abs(scores) > stats.norm.isf(5e-4)).sum()
    assert 15 <= beyond <= 70  # 40 expected
    ours = anscombe_glynn(stats.kurtosis(draws[:50], axis=1, fisher=False), np.full(50, 499.0))
    np.testing.assert_allclose(ours, stats.kurtosistest(draws[:50], axis=1).statistic, rtol=1e-9)


def test_histogram_cells_have_the_probabilities_of_a_standardised_coordinate():
    """Monte Carlo in few dimensions, where the law differs from a Gaussian."""
    rng = np.random.default_rng(2)
    draws = rng.standard_normal((20_000, 20))
    draws /= np.sqrt((draws**2).mean(axis=1, keepdims=True))
    edges = (np.arange(CELLS + 1) - CELLS // 2) * CELL
    counts, _ = np.histogram(draws, np.concatenate([[-np.inf], edges, [np.inf]]))
    expected = _cell_probabilities(20) * draws.size
    large = expected > 50
    statistic = ((counts - expected)[large] ** 2 / expected[large]).sum()
    assert statistic < stats.chi2.isf(1e-3, large.sum())
    assert counts[~large].sum() == pytest.approx(expected[~large].sum(), abs=60)


def test_the_histogram_counts_every_coordinate_once():
    noise = np.array([0.0, 0.01, -0.01, 7.0, -7.0, 1.0, -1.0, 2.0] * 512)
    counts = law(noise)["law_counts"]
    standard = noise / np.sqrt((noise**2).mean())
    edges = (np.arange(CELLS + 1) - CELLS // 2) * CELL
    expected, _ = np.histogram(standard, np.concatenate([[-np.inf], edges, [np.inf]]))
    assert counts.sum() == noise.size
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize("dim", [4_096, 4_099, 5_003])
def test_the_spectrum_finds_the_largest_autocorrelation(dim):
    """At lag 600, against the direct sum, including the products that wrap around the padded end of the vector."""
    noise = normal(3, dim)
    noise[700:1_700] = noise[100:1_100]
    score, lag = measure_law(noise, noise, NoiseParts.of([], dim), full=True, exact=True)["law_spectrum"]
    padded = np.zeros(next_fast_len(dim, real=True))
    padded[:dim] = noise
    product = padded @ np.roll(padded, 600)
    terms = np.count_nonzero(padded * np.roll(padded, 600))
    assert lag == 600
    assert score == pytest.approx(abs(product) / np.sqrt(terms) / (noise @ noise / dim), rel=1e-9)


def test_a_grid_is_found_at_its_own_frequency():
    values = np.round(normal(4) * 4) / 4
    strength, frequency, own, beside = law(values, release=values + normal(5))["law_grid"]
    std = np.sqrt((values**2).mean())
    assert strength > 0.9
    assert frequency * 0.25 / std == pytest.approx(round(frequency * 0.25 / std), abs=0.05)
    assert own < 0.1
    assert beside < 0.1
    rounded_after = law(values, release=values + 0.25 * np.arange(DIM))["law_grid"]
    assert rounded_after[2] > 0.9


def test_noise_that_follows_another_vector_is_detected():
    others = np.abs(normal(6))
    follows = law(normal(7) * others, sizes=[others, normal(8)])["law_follows"]
    assert follows[0] > 20
    assert follows[1] > 0.5
    assert abs(follows[2]) < 4


def test_repeated_values_are_counted():
    tail = np.sort(np.abs(normal(9, 40_000)))[-500:]
    assert repeated_share(tail, 1e-6)[0] < 0.02
    share, p_value = repeated_share(np.sort(np.repeat(tail[::2], 2)), 1e-6)
    assert share == pytest.approx(0.5, abs=0.03)
    assert p_value < 1e-12
    coarse = np.sort(np.round(tail * 64) / 64)  # half precision repeats by itself
    assert repeated_share(coarse, 1e-6) == (0.0, 1.0)


def _peaked(noise, number):
    return Round(number=number, law_peaks=law(noise)["law_peaks"])


def test_noise_cut_twice_from_one_source_is_detected_at_its_shift():
    """The share of repeated largest values equals the overlap, wherever the two pieces lie."""
    source = normal(7, 3 * DIM)
    for shift in (1, 700, DIM // 2, -1_500):
        start = 2_000
        pair = [_peaked(source[at : at + DIM], number) for number, at in enumerate((start, start + shift), 1)]
        share, p_value = _agreement(*pair, 2 * DIM)  # type: ignore[call-arg]
        assert share == pytest.approx(1 - abs(shift) / DIM, abs=0.12)
        assert p_value < 1e-9


def test_signs_of_fresh_noise_agree_only_by_chance():
    """The p-value of the best shift, times the number of shifts, is rarely small; opposite signs are detected."""
    p_values = [_agreement(_peaked(normal(2 * s), 1), _peaked(normal(2 * s + 1), 2), 2 * DIM)[1] for s in range(60)]
    assert min(p_values) * 2 * DIM * 60 > 1e-3
    assert _agreement(_peaked(normal(3), 1), _peaked(-np.roll(normal(3), 50), 2), 2 * DIM)[1] < 1e-9


def test_shift_zero_is_left_to_other_gauges():
    """Correlated noise repeats at shift zero by design."""
    assert _agreement(_peaked(normal(3), 1), _peaked(normal(3), 2), 2 * DIM)[1] * 2 * DIM > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_recognised_in_any_dtype(dtype):
    values = torch.from_numpy(normal(10)).to(dtype)
    found = resolution_of(values.double().numpy())
    exact = torch.from_numpy(normal(10))
    assert found == pytest.approx(float(((values.double() - exact) ** 2).mean()), rel=0.2)
    assert resolution_of(values) == found
    assert resolution_of(normal(10).astype(np.float32)) == 0.0
    assert resolution_of(np.zeros(100)) is None


def test_steps_of_rounding_do_not_depend_on_how_numbers_are_held():
    """Single precision is looked at as it is; the same numbers in double precision have the same steps."""
    plain = normal(3_000).astype(np.float32)
    coarse = torch.from_numpy(plain).bfloat16().float().numpy()
    grid = (np.round(plain * 64) / 64).astype(np.float32)
    for values in (plain, coarse, grid, plain[::3], np.zeros(9, np.float32)):
        for with_grid in (True, False):
            found = rounding_step(values, grid=with_grid)
            assert found == rounding_step(values.astype(np.float64), grid=with_grid)
    assert rounding_step(coarse)[0] == 2.0**-7
    assert rounding_step(grid)[1] == pytest.approx(1 / 64)


def test_torch_and_numpy_give_the_same_measurements():
    noise = normal(11).astype(np.float32)
    here, there = law(noise), law(torch.from_numpy(noise))
    assert here.keys() == there.keys()
    for name, values in here.items():
        np.testing.assert_array_equal(values, there[name])


def test_rounds_without_largest_values_are_not_compared():
    """An edited log may hold none."""
    rounds = [Round(number=number, law_peaks=np.zeros(0, np.int32)) for number in (1, 2)]
    settings = Audit(100, canaries=10, seed=1, delta=1e-5).settings
    gauge = Repetition(GaugedRounds(settings, 2))
    assert gauge._shifted(rounds, 100, 1e-4).status == "ok"
