"""Epsilon amplified by sampling, for each scheme."""

import copy
import math
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from coalmine import (
    AmplifiedEpsilon,
    FixedSize,
    Poisson,
    RandomAllocation,
    Shuffled,
    amplified_epsilon,
    amplified_noise,
    mechanism_epsilon,
    mechanism_noise,
)

SCHEMES = [Poisson(0.1, 50), RandomAllocation(50), Shuffled(50), FixedSize(5, 50, 50)]


@pytest.mark.parametrize(
    ("noise", "sampling", "delta"),
    [
        (1.0, Poisson(0.1, 100), 1e-5),
        (1.0, Poisson(0.01, 1000), 1e-6),
        (0.6, Poisson(0.05, 50), 1e-8),
        (2.0, Poisson(0.2, 200), 1e-5),
        (5.0, Poisson(0.001, 10_000), 1e-3),
    ],
)
def test_poisson_agrees_with_dp_accounting(noise, sampling, delta):
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.pld import PLDAccountant

    event = SelfComposedDpEvent(PoissonSampledDpEvent(sampling.probability, GaussianDpEvent(noise)), sampling.rounds)
    direct = PLDAccountant().compose(event).get_epsilon(delta)
    assert amplified_epsilon(noise, sampling, delta) == pytest.approx(direct, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("noise", [0.4, 1.0, 20.0])
@pytest.mark.parametrize("probability", [0.0005, 0.1, 0.99])
def test_a_rounds_losses_are_those_of_dp_accounting(noise, probability):
    """On the same grid, of which dp-accounting computes one point after another."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    from coalmine.estimators.amplification.poisson import loss_interval, poisson_pld

    sampling = Poisson(probability, rounds=3)
    interval = loss_interval(noise, sampling)
    theirs = from_gaussian_mechanism(noise, value_discretization_interval=interval, sampling_prob=probability)
    for delta in (1e-3, 1e-6):
        expected = theirs.self_compose(3).get_epsilon_for_delta(delta)
        assert poisson_pld(noise, sampling, delta) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_values_agree_with_published_figures():
    poisson = amplified_epsilon(1.0, Poisson(0.1, 100), 1e-5)
    assert poisson == pytest.approx(7.047, abs=5e-4)
    assert (poisson.low, poisson.kind, poisson.adjacency) == (poisson, "upper bound", "add or remove one")
    for delta, upper, lower in ((1e-3, 0.307, 0.291), (1e-6, 0.874, 0.844)):  # from PLD_accounting's adaptive search
        found = amplified_epsilon(1.0, RandomAllocation(100), delta)
        assert found.low < upper
        assert found > lower
        assert found / found.low < 1.1
    assert amplified_epsilon(1.0, Shuffled(100), 1e-5).low == pytest.approx(4.063, abs=1e-3)
    assert amplified_epsilon(0.5, Shuffled(100), 1e-6).low == pytest.approx(10.997, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "sampling", "delta"), [(0.5, RandomAllocation(10, epochs=2), 1e-4)])
def test_random_allocation_brackets_a_finer_grid(noise, sampling, delta):
    """Oracle: PLD_accounting called directly, on a geometric grid of three times the resolution."""
    from PLD_accounting import (
        AllocationSchemeConfig,
        BoundType,
        PrivacyParams,
        gaussian_allocation_epsilon_configurable,
    )

    params = PrivacyParams(sigma=noise, num_steps=sampling.rounds, num_epochs=sampling.epochs, delta=delta)
    upper, lower = (
        gaussian_allocation_epsilon_configurable(
            params=params, config=AllocationSchemeConfig(loss_discretization=0.03), bound_type=bound
        )
        for bound in (BoundType.DOMINATES, BoundType.IS_DOMINATED)
    )
    found = amplified_epsilon(noise, sampling, delta)
    assert found.low <= upper
    assert found >= lower
    assert found == pytest.approx(upper, rel=0.02)
    assert found.low == pytest.approx(lower, rel=0.05)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 10), (0.3, 100), (1.0, 100)])
def test_random_allocation_is_the_epsilon_of_its_dominating_pair(noise, rounds):
    """Monte Carlo of the mixture of unit shifts against N(0, z²I), both directions."""
    delta = 1e-3
    epsilon = amplified_epsilon(noise, RandomAllocation(rounds), delta)
    rng = np.random.default_rng(0)
    runs = 200_000
    log_ratio = {}
    for present in (0, 1):
        total = np.zeros(runs)
        for index in range(rounds):
            x = rng.normal(size=runs) * noise + (present and index == 0)
            total += np.exp((x - 0.5) / noise**2)
        log_ratio[present] = np.log(total / rounds)

    def sampled_delta(level):
        removing = np.maximum(-np.expm1(level - log_ratio[1]), 0)
        adding = np.maximum(-np.expm1(level + log_ratio[0]), 0)
        return max((w.mean(), w.std() / math.sqrt(runs)) for w in (removing, adding))

    mean, error = sampled_delta(epsilon.high)
    assert mean <= delta + 4 * error
    mean, error = sampled_delta(epsilon.low)
    assert mean >= delta - 4 * error
    mean, error = sampled_delta(0.8 * epsilon)
    assert mean > delta + 4 * error


@pytest.mark.full
def test_at_low_noise_random_allocation_saves_the_log_of_the_rounds():
    """Section 5's footnote: at low noise, knowing the round is worth log T."""
    delta = 341_000**-1.1
    plain = mechanism_epsilon(0.0496, delta=delta)
    found = amplified_epsilon(0.0496, RandomAllocation(2048), delta)
    assert plain - found.low == pytest.approx(math.log(2048), abs=0.1)
    assert plain - found == pytest.approx(math.log(2048), abs=0.6)


@pytest.mark.full
@pytest.mark.parametrize(("noise", "rounds", "epochs"), [(1.0, 10, 1), (0.5, 40, 1), (1.0, 10, 3), (3.0, 2, 1)])
def test_shuffling_leaks_as_much_as_its_lower_end(noise, rounds, epochs):
    """Permute clients into cohorts, add noise, and test with the likelihood ratio of the two data sets."""
    delta = 1e-3
    found = amplified_epsilon(noise, Shuffled(rounds, epochs), delta)
    rng = np.random.default_rng(1)
    runs, size = 200_000, 3

    def draws(target):
        log_ratio = np.zeros(runs)
        for _ in range(epochs):
            sums = np.full((runs, rounds), -float(size))  # all others send -1
            sums[np.arange(runs), rng.integers(rounds, size=runs)] += 1 + target  # replaces one of them
            x = sums + size + noise * rng.normal(size=sums.shape)
            top, changed = (np.logaddexp.reduce((mean * x - mean**2 / 2) / noise**2, axis=1) for mean in (2, 1))
            log_ratio += top - changed
        return log_ratio

    loss = draws(1.0)
    advantage = np.maximum(-np.expm1(found.low - loss), 0)
    error = advantage.std() / math.sqrt(runs)
    assert advantage.mean() >= delta - 4 * error
    back = draws(0.0)  # the mirrored direction, as a check of the upper end
    for values in (loss, -back):
        kept = np.maximum(-np.expm1(found.high - values), 0)
        assert kept.mean() <= delta + 4 * kept.std() / math.sqrt(runs)
    assert found.high == mechanism_epsilon(noise, delta=delta, participations=epochs)
    assert (found.kind, found.adjacency) == ("range", "zero out one")


def test_shuffling_permutes_the_target_into_a_uniform_round():
    """The test above samples the target's round directly; a permutation of all clients gives the same law."""
    rng = np.random.default_rng(2)
    rounds, size, runs = 4, 3, 20_000
    where = np.array([np.flatnonzero(rng.permutation(rounds * size) == 0)[0] // size for _ in range(runs)])
    counts = np.bincount(where, minlength=rounds)
    assert ((counts - runs / rounds) ** 2).sum() / (runs / rounds) < 21.1  # chi-squared, 3 degrees of freedom, 1e-4


def test_the_lower_end_of_shuffling_matches_its_formula():
    for noise, rounds, delta in ((1.0, 100, 1e-5), (0.7, 1000, 1e-6)):
        c = np.linspace(0, 6, 200_001)
        others = norm.cdf(c / noise) ** (rounds - 1)
        p, changed = (1 - norm.cdf((c - mean) / noise) * others for mean in (2, 1))
        keep = (p > delta) & (changed > 1e-9)
        best = np.max(np.log((p[keep] - delta) / changed[keep]))
        assert amplified_epsilon(noise, Shuffled(rounds), delta).low == pytest.approx(best, rel=1e-5)


def test_fixed_size_lies_between_an_attack_and_dp_accounting_s_rdp():
    from dp_accounting import GaussianDpEvent, SampledWithoutReplacementDpEvent, SelfComposedDpEvent
    from dp_accounting.privacy_accountant import NeighboringRelation
    from dp_accounting.rdp import RdpAccountant

    found = amplified_epsilon(2.0, FixedSize(10, 1000, 100), 1e-5)
    event = SelfComposedDpEvent(SampledWithoutReplacementDpEvent(1000, 10, GaussianDpEvent(1.0)), 100)
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    assert found == pytest.approx(accountant.compose(event).get_epsilon(1e-5), rel=1e-3)
    assert amplified_epsilon(2.0, Poisson(0.01, 100), 1e-5) < found.low < found
    assert (found.kind, found.adjacency) == ("range", "replace one")
    small = amplified_epsilon(0.05, FixedSize(10, 1000, 1), 1e-5)
    assert small == mechanism_epsilon(0.025, delta=1e-5)
    assert "no amplification" in small.note


@pytest.mark.full
def test_fixed_size_s_lower_end_is_the_epsilon_of_a_pair_of_neighbours():
    """All others at -1: the target at 1 moves its round by 2, and at 0 by 1. One round by quadrature, thirty by sampling."""
    noise, rate, delta = 1.0, 0.1, 1e-3
    x = np.linspace(-12, 14, 400_001)
    first, second = (rate * norm.pdf(x, mean, noise) + (1 - rate) * norm.pdf(x, 0, noise) for mean in (2, 1))

    def one_round(epsilon):
        forth, back = (
            np.maximum(first - math.exp(epsilon) * second, 0),
            np.maximum(second - math.exp(epsilon) * first, 0),
        )
        return max(np.trapezoid(forth, x), np.trapezoid(back, x)) - delta

    found = amplified_epsilon(noise, FixedSize(100, 1_000, 1), delta).low
    assert found == pytest.approx(brentq(one_round, 0, 10), rel=5e-3)
    rounds, rng = 30, np.random.default_rng(1)
    picked = rng.random((200_000, rounds)) < rate
    seen = 2.0 * picked + rng.normal(scale=noise, size=picked.shape)
    loss = np.log(np.interp(seen, x, first) / np.interp(seen, x, second)).sum(axis=1)
    low = amplified_epsilon(noise, FixedSize(100, 1_000, rounds), delta).low
    assert low > 1.5 * amplified_epsilon(noise, Poisson(rate, rounds), delta)
    terms = -np.expm1(np.minimum(low - loss, 0.0))
    assert terms.mean() == pytest.approx(delta, abs=4 * terms.std() / math.sqrt(len(terms)) + 0.05 * delta)


def test_full_participation_gives_no_amplification():
    assert amplified_epsilon(1.0, Poisson(1.0, 4), 1e-6) == mechanism_epsilon(1.0, delta=1e-6, participations=4)
    for scheme in (RandomAllocation, Shuffled):
        found = amplified_epsilon(1.0, scheme(1, 4), 1e-6)
        assert found == found.low == mechanism_epsilon(1.0, delta=1e-6, participations=4)
    found = amplified_epsilon(1.0, FixedSize(9, 9, 4), 1e-6)
    assert found == found.low == mechanism_epsilon(0.5, delta=1e-6, participations=4)


@pytest.mark.full
@pytest.mark.parametrize("sampling", SCHEMES, ids=lambda sampling: sampling.scheme)
def test_epsilon_decreases_with_noise_and_is_never_nan(sampling):
    noises = (0, 1e-300, 1e-9, 0.01, 0.06, 2, 1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [amplified_epsilon(noise, sampling, 1e-5) for noise in noises]
    assert found[0] == math.inf
    assert found[-1] == 0
    assert all(0 <= item.low <= item.high == item for item in found)
    for name in ("low", "high"):
        values = [getattr(item, name) for item in found]
        assert values == sorted(values, reverse=True)


def test_too_little_noise_for_the_accountant_is_reported():
    for sampling in (Poisson(0.1, 50), RandomAllocation(50)):
        found = amplified_epsilon(0.01, sampling, 1e-5)
        assert "not amplified" in found.note
        assert found.kind == "range"
        assert 0 < found.low < found
    assert found == mechanism_epsilon(0.01, delta=1e-5)
    assert found - found.low < math.log(50) + 5


def test_a_million_rounds_agree_with_the_central_limit_theorem():
    """Its parameter is q√(T(e^(1/z²) - 1)) (Dong et al., arXiv 1905.02383)."""
    rounds, probability = 1_000_000, 0.001
    limit = probability * math.sqrt(rounds * math.expm1(1.0))
    expected = mechanism_epsilon(1 / limit, delta=1e-6)
    assert amplified_epsilon(1.0, Poisson(probability, rounds), 1e-6) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("epsilon", "sampling", "delta"),
    [
        (7.047, Poisson(0.1, 100), 1e-5),
        (0.5, Poisson(0.01, 1000), 1e-8),
        pytest.param(0.3, RandomAllocation(100), 1e-3, marks=pytest.mark.full),
        pytest.param(10.0, RandomAllocation(100), 1e-5, marks=pytest.mark.full),
        pytest.param(30.0, FixedSize(10, 100, 50), 1e-5, marks=pytest.mark.full),
        (2.0, Shuffled(50, 2), 1e-5),
    ],
)
def test_noise_inverts_epsilon(epsilon, sampling, delta):
    noise = amplified_noise(epsilon, sampling, delta)
    found = amplified_epsilon(noise, sampling, delta)
    assert found <= epsilon * (1 + 1e-12)
    assert found == pytest.approx(epsilon, rel=1.1e-3 if isinstance(sampling, RandomAllocation) else 1.1e-4)


@pytest.mark.full
def test_noise_is_right_at_the_limits():
    assert amplified_noise(math.inf, Poisson(0.1, 10), 1e-5) == 0
    assert amplified_noise(3.0, Shuffled(100, 2), 1e-5) == mechanism_noise(3.0, delta=1e-5, participations=2)
    # The accountant of random allocation stops at about this epsilon: the answer lies beyond the jump.
    noise = amplified_noise(290.0, RandomAllocation(50), 1e-5)
    assert amplified_epsilon(noise, RandomAllocation(50), 1e-5) <= 290


def test_an_epsilon_records_its_accountant():
    found = amplified_epsilon(1.0, Shuffled(10), 1e-5)
    for same in (copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(same) is AmplifiedEpsilon
        assert same.to_dict() == found.to_dict()
    assert f"{found:.3f} {found}" == f"{float(found):.3f} {float(found)}"
    assert set(found.to_dict()) == {"epsilon", "low", "accountant", "adjacency", "kind", "note"}
    assert all(str(value) in repr(found) for value in found.to_dict().values())
    assert amplified_epsilon(1.0, Shuffled(10), 1e-5) is found


def test_importing_coalmine_imports_no_accountant():
    code = "import sys, coalmine; sys.exit(any(name in sys.modules for name in ('dp_accounting', 'PLD_accounting')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amplified_epsilon(1, Poisson(0.1, 5), 0), r"delta must lie in \(0, 1\), got 0"),
        (lambda: amplified_epsilon(-1, Poisson(0.1, 5), 0.1), "noise_multiplier must be at least 0, got -1"),
        (lambda: amplified_epsilon([1, 2], Poisson(0.1, 5), 0.1), "noise_multiplier must be one number"),
        (lambda: amplified_epsilon(math.nan, Poisson(0.1, 5), 0.1), "noise_multiplier must be finite"),
        (lambda: amplified_noise(0, Poisson(0.1, 5), 0.1), "epsilon must be above 0, got 0"),
        (lambda: amplified_noise(1, Poisson(0.1, 5), 1.5), r"delta must lie in \(0, 1\), got 1.5"),
    ],
)
def test_bad_input_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_an_unknown_scheme_is_rejected():
    with pytest.raises(
        TypeError, match="sampling must be one of Poisson, RandomAllocation, Shuffled, FixedSize, got 'poi"
    ):
        amplified_epsilon(1.0, "poisson", 1e-5)


def test_epsilon_grows_as_delta_falls_below_the_resolution_of_a_loss_distribution():
    """Below about 1e-15 a privacy loss distribution is only rounding error; Rényi accounting replaces it."""
    found = [amplified_epsilon(1.0, Poisson(0.01, rounds=100), delta) for delta in (1e-12, 1e-13, 3e-15, 1e-16, 1e-18)]
    assert [float(each) for each in found] == sorted(float(each) for each in found)
    assert float(found[-1]) < 2 * float(found[0])
    assert all(each.low <= each.high for each in found)
    assert math.isfinite(amplified_epsilon(1.0, RandomAllocation(100), 1e-300))


@pytest.mark.parametrize("noise", [0.5, 1.0])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_others_who_point_away_from_the_target_are_the_worst_for_two_shuffled_batches(noise, epsilon):
    """Exact, by quadrature: the target and one other, in two batches in either order, one coordinate."""
    side = np.linspace(-6, 6, 241)
    first, second = np.meshgrid(side, side)

    def batches(one, other):
        orders = ((one, other), (other, one))
        squares = [(first - a) ** 2 + (second - b) ** 2 for a, b in orders]
        return sum(np.exp(-square / (2 * noise**2)) for square in squares) / (4 * np.pi * noise**2)

    def delta(other):
        pair = batches(1.0, other), batches(0.0, other)
        gaps = [np.maximum(a - np.exp(epsilon) * b, 0).sum() for a, b in (pair, pair[::-1])]
        return max(gaps) * (side[1] - side[0]) ** 2

    others = np.linspace(-1, 1, 9)
    deltas = [delta(other) for other in others]
    assert others[np.argmax(deltas)] == -1


def exact_allocation(noises, epochs, delta, cells=1_500):
    """Epsilon of random allocation over two rounds with these noises: quadrature on a grid, losses convolved by epochs."""
    edges = [np.linspace(-9.0, 9.0 + 1 / noise, cells + 1) for noise in noises]
    absent = [np.diff(norm.cdf(edge)) for edge in edges]
    joined = [np.diff(norm.cdf(edge - 1 / noise)) for edge, noise in zip(edges, noises, strict=True)]
    without = np.outer(*absent)
    target = (np.outer(joined[0], absent[1]) + np.outer(absent[0], joined[1])) / 2
    kept = (without > 0) & (target > 0)
    loss = np.log(target[kept]) - np.log(without[kept])
    first, step = float(loss.min()), 2e-3
    places = np.rint((loss - first) / step).astype(np.int64)
    laws = [np.bincount(places, law[kept]) for law in (target, without)]
    for _ in range(epochs - 1):
        laws = [np.convolve(law, law) for law in laws]
    losses = epochs * first + step * np.arange(laws[0].size)

    def excess(epsilon):
        removed = laws[0] @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0)
        added = laws[1] @ np.maximum(-np.expm1(np.minimum(epsilon + losses, 0)), 0)
        return max(removed, added) - delta

    return brentq(excess, 0, 200)


@pytest.mark.full
@pytest.mark.parametrize("noises", [(0.5, 1.0), (1.0, 0.8), (0.4, 4.0), (1.0, 1.0)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_random_allocation_with_changing_noise_lies_in_its_range(noises, epochs):
    """A range, and no exact value: its lower end is an attack, and its upper end takes all noise for the least."""
    exact = exact_allocation(noises, epochs, 1e-5)
    strengths = tuple((1 / noise, epochs) for noise in noises)
    epsilon = amplified_epsilon(1.0, RandomAllocation(2, epochs, strengths=strengths), 1e-5)
    assert epsilon.low <= 1.002 * exact
    assert exact <= 1.002 * epsilon.high
    if epochs == 1:
        assert epsilon.low > 0.97 * exact


@pytest.mark.parametrize("kind", [pytest.param(RandomAllocation, marks=pytest.mark.full), Shuffled])
@pytest.mark.parametrize("epochs", [1, 3])
def test_rounds_without_information_only_lower_the_lower_end(kind, epochs):
    """A strength of 0 is that of a round of which nothing is known. One epoch has at least one of four such rounds."""
    plain = amplified_epsilon(0.5, kind(10, epochs), 1e-5)
    few = amplified_epsilon(0.5, kind(10, epochs, strengths=((1.0, 4), (0.0, 10 * epochs - 4))), 1e-5)
    rarer = amplified_epsilon(0.5, kind(10, epochs, strengths=((1.0, 3), (0.0, 10 * epochs - 3))), 1e-5)
    assert 0 < rarer.low <= few.low < plain.low
    assert few.high <= plain.high


def test_a_shuffled_round_with_little_noise_is_seen_by_its_own_threshold():
    """One of 20 rounds has noise 0.3: at worst the target is in it, with probability 1/20, beside -1 from everybody."""
    one = amplified_epsilon(1.0, Shuffled(20, strengths=((1.0, 19), (1 / 0.3, 1))), 1e-5)
    many = amplified_epsilon(1.0, Shuffled(20), 1e-5)
    thresholds = np.linspace(1, 6, 5_001)
    power, error = (norm.sf(thresholds, mean, 0.3) / 20 for mean in (2, 1))
    error = error + 0.95 * norm.sf(thresholds, 0, 0.3)
    power = power + 0.95 * norm.sf(thresholds, 0, 0.3)
    reached = power > 1e-5
    alone = np.log((power[reached] - 1e-5) / error[reached]).max()
    assert many.low < alone <= one.low + 1e-2 <= one.high
