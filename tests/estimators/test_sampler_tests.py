"""Tests of a sampler, against enumeration, Monte Carlo, and deliberately broken samplers."""

import itertools
import time

import numpy as np
import pytest
from scipy.stats import binom

from coalmine.estimators.sampler_tests import LEVEL, count_laws, independent_rounds, rate_power, read_sampler
from coalmine.estimators.sampler_tests.picks import Picks
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Shuffled


def read(table, sampling, sizes=None, numbers=None):
    """The sampler reading of a table of rounds × canaries."""
    numbers = np.arange(1, len(table) + 1) if numbers is None else numbers
    return read_sampler([np.flatnonzero(row) for row in table], numbers, table.shape[1], sampling, sizes)


def named_test(reading, name):
    return next(test for test in reading.tests if test.name == name)


def coins(seed, canaries, rounds, rate):
    return np.random.default_rng(seed).random((rounds, canaries)) < rate


def shuffled(seed, canaries, length, epochs, order=None):
    rng = np.random.default_rng(seed)
    table = np.zeros((length * epochs, canaries), dtype=bool)
    for epoch in range(epochs):
        places = rng.permutation(canaries) * length // canaries if order is None else order
        table[epoch * length + places, np.arange(canaries)] = True
    return table


def allocated(seed, canaries, length, epochs):
    rng = np.random.default_rng(seed)
    table = np.zeros((length * epochs, canaries), dtype=bool)
    for epoch in range(epochs):
        table[epoch * length + rng.integers(length, size=canaries), np.arange(canaries)] = True
    return table


def all_tables(canaries, rounds, picks):
    for cells in itertools.combinations(range(canaries * rounds), picks):
        table = np.zeros(canaries * rounds, dtype=bool)
        table[list(cells)] = True
        yield table.reshape(rounds, canaries)


def pairs(counts):
    return int((counts * (counts - 1) // 2).sum())


@pytest.mark.parametrize(("name", "axis"), [("canaries", 0), ("rounds", 1)])
def test_dispersion_of_few_picks_is_exact(name, axis):
    """Oracle: enumerate all ways to place 4 picks in 4 rounds × 3 canaries."""
    statistics = np.array([pairs(table.sum(axis=axis)) for table in all_tables(3, 4, 4)])
    for table in itertools.islice(all_tables(3, 4, 4), 0, None, 37):
        seen = pairs(table.sum(axis=axis))
        tails = np.mean(statistics <= seen), np.mean(statistics >= seen)
        test = named_test(read(table, Poisson(0.5, rounds=4)), name)
        assert test.p_value == pytest.approx(min(1, 2 * min(tails)), abs=1e-12)
        assert test.expected == pytest.approx(statistics.mean(), rel=1e-12)


@pytest.mark.parametrize("capacity", [3, None])
def test_moments_of_pairs_agree_with_enumeration(capacity):
    """5 picks in 4 groups of 3 places each, and in 4 groups without a limit."""
    if capacity is None:
        counts = [np.bincount(draws, minlength=4) for draws in itertools.product(range(4), repeat=5)]
    else:
        counts = [np.bincount(np.array(cells) // 3, minlength=4) for cells in itertools.combinations(range(12), 5)]
    values = np.array([pairs(one) for one in counts], dtype=float)
    about = values - values.mean()
    expected = values.mean(), (about**2).mean(), (about**3).mean()
    assert count_laws.pair_moments(5, 4, capacity) == pytest.approx(expected, rel=1e-12)


def test_law_of_shared_canaries_is_exact():
    """Rounds of 2, 1 and 3 of 4 canaries: enumerates every choice of the three subsets."""
    rounds = [[set(one) for one in itertools.combinations(range(4), size)] for size in (2, 1, 3)]
    shared = np.array([len(a & b) + len(b & c) for a, b, c in itertools.product(*rounds)])
    for seen in range(3):
        law = count_laws.shared_law(np.array([2, 1]), np.array([1, 3]), 4, seen)
        assert law == pytest.approx((np.mean(shared <= seen), np.mean(shared >= seen)), abs=1e-12)


def test_the_meetings_statistic_has_its_stated_moments():
    """Uniform subsets of stated sizes: mean 0 and the stated variance, and a tail of the stated probability."""
    rng, sizes, canaries, runs = np.random.default_rng(3), [3, 5, 8, 2, 6, 4, 7, 5], 12, 3_000
    seen, small = np.empty(runs), 0
    for run in range(runs):
        table = np.zeros((len(sizes), canaries), dtype=bool)
        for row, size in zip(table, sizes, strict=True):
            row[rng.permutation(canaries)[:size]] = True
        picks = Picks.checked([np.flatnonzero(row) for row in table], np.arange(1, len(sizes) + 1), canaries, None)
        test = independent_rounds.together_test(picks)
        seen[run] = test.statistic
        small += test.p_value < 0.01
    variance, _ = independent_rounds.meeting_moments(np.array(sizes), canaries)
    assert abs(seen.mean()) < 4 * np.sqrt(variance / runs)
    assert seen.var() == pytest.approx(variance, rel=0.16)
    assert small < 0.01 * runs + 4 * np.sqrt(0.01 * runs)


@pytest.mark.parametrize(
    ("canaries", "rounds", "rate"),
    [(10, 12, 0.3), *(pytest.param(*case, marks=pytest.mark.full) for case in ((60, 40, 0.05), (40, 60, 0.2)))],
)
def test_p_values_of_honest_coins_are_not_too_small(canaries, rounds, rate):
    """At most 1 in 20 p-values lies below 5 %; for the dispersions and adjacent rounds not far fewer."""
    runs, below = 150, {}
    for seed in range(runs):
        table = coins((seed, 4), 3 * canaries, rounds, rate)
        for test in read(table[:, :canaries], Poisson(rate, rounds), table.sum(axis=1)).tests:
            below[test.name] = below.get(test.name, 0) + (test.p_value < 0.05)
    assert max(below.values()) < 0.05 * runs + 4 * np.sqrt(0.05 * runs)
    assert min(below[name] for name in ("rate", "canaries", "rounds")) > 0


@pytest.mark.parametrize("share", [1, 0.5])
def test_honest_samplers_pass(share):
    for seed in range(20):
        table = coins((seed, 5), 300, 100, 0.1 * share)
        reading = read(table[:, :100], Poisson(0.1, rounds=100), table.sum(axis=1))
        assert reading.passed
        assert reading.seen == "poisson"
        assert reading.seen_sampling == Poisson(0.1, rounds=100)
        assert read(allocated((seed, 6), 50, 20, 4), RandomAllocation(20, epochs=4)).seen == "random_allocation"
        assert read(shuffled((seed, 7), 40, 20, 4), Shuffled(20, epochs=4), [2] * 80).passed


def test_honest_fixed_size_passes_where_canaries_are_the_population():
    rng = np.random.default_rng(8)
    for _ in range(20):
        present = [rng.permutation(50)[:5] for _ in range(100)]
        reading = read_sampler(present, range(1, 101), 50, FixedSize(5, 50, rounds=100), [5] * 100)
        assert reading.passed
        assert read_sampler(present, range(1, 101), 50, Poisson(0.1, rounds=100)).seen == "fixed_size"


def test_shuffling_called_poisson_is_named():
    table = shuffled(9, 3_000, 10, 10)
    known = read(table[:, :1_000], Poisson(0.1, rounds=100), table.sum(axis=1))
    assert (known.seen, known.seen_sampling) == ("shuffled", Shuffled(10, epochs=10))
    unknown = read(table[:, :1_000], Poisson(0.1, rounds=100))
    assert unknown.seen == "random_allocation or shuffled"
    assert unknown.seen_sampling is None
    assert unknown.candidates == (RandomAllocation(10, epochs=10), Shuffled(10, epochs=10))


def test_epochs_that_start_later_are_detected():
    table = shuffled(10, 900, 10, 11)[7:-3]
    reading = read(table[:, :300], Poisson(0.1, rounds=100), table.sum(axis=1))
    assert reading.seen_sampling == Shuffled(10, epochs=10)


def test_allocation_called_poisson_is_named():
    table = allocated(11, 900, 20, 5)
    reading = read(table[:, :300], Poisson(0.05, rounds=100), table.sum(axis=1))
    assert (reading.seen, reading.seen_sampling) == ("random_allocation", RandomAllocation(20, epochs=5))


def test_shuffling_called_allocation_is_detected_only_by_cohort_sizes():
    table = shuffled(12, 3_000, 200, 1)
    claim = RandomAllocation(200)
    assert read(table[:, :300], claim).passed
    reading = read(table[:, :300], claim, table.sum(axis=1))
    assert [test.name for test in reading.failed] == ["cohort sizes"]
    assert reading.seen == "shuffled"


def test_poisson_called_allocation_is_named():
    reading = read(coins(13, 100, 200, 0.05), RandomAllocation(20, epochs=10))
    assert not named_test(reading, "once an epoch").passed
    assert reading.seen == "poisson"


def test_faster_sampling_is_named_with_its_rate():
    reading = read(coins(14, 100, 300, 0.06), Poisson(0.02, rounds=300))
    assert not named_test(reading, "rate").passed
    assert reading.seen == "poisson"
    assert reading.seen_sampling.probability == reading.rate == pytest.approx(0.06, abs=0.006)
    low, high = reading.rate_interval
    assert low < 0.06 < high


def test_fixed_size_called_poisson_is_named_with_its_population():
    rng = np.random.default_rng(15)
    table = np.zeros((200, 1_000), dtype=bool)
    for row in table:
        row[rng.permutation(1_000)[:50]] = True
    claim = Poisson(0.05, rounds=200)
    assert read(table[:, :100], claim).passed
    seen = read(table[:, :100], claim, [50] * 200).seen_sampling
    assert (seen.size, seen.rounds) == (50, 200)
    assert seen.population == pytest.approx(1_000, rel=0.1)


def block_coins(rng):
    return np.repeat(rng.random((20, 200)) < 0.1, 5, axis=0)


def some_rows_always(rng):
    return rng.random((100, 200)) < np.where(np.arange(200) < 10, 1.0, 0.05)


BROKEN = {
    "clumped": lambda rng: np.repeat(rng.random((100, 1)) < 0.1, 200, axis=1),
    "repeated order": lambda rng: np.tile(rng.integers(10, size=200) == np.arange(10)[:, None], (10, 1)),
    "adjacent rounds": block_coins,
    "uneven": some_rows_always,
    "changing rate": lambda rng: rng.random((100, 200)) < np.repeat([0.05, 0.15], 50)[:, None],
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_samplers_of_the_right_rate_are_named(name):
    for seed in range(5):
        reading = read(BROKEN[name](np.random.default_rng((seed, 16))), Poisson(0.1, rounds=100))
        assert reading.seen == name
        assert reading.meaning


def test_the_rate_counts_rows_that_are_always_sampled():
    reading = read(some_rows_always(np.random.default_rng(17)), Poisson(0.1, rounds=100))
    assert 0.8 < reading.worst_rate < 1
    assert reading.seen_sampling == Poisson(reading.worst_rate, rounds=100)


def test_the_same_order_in_every_epoch_is_not_allocation():
    order = np.random.default_rng(18).integers(20, size=100)
    reading = read(shuffled(18, 100, 20, 5, order=order), RandomAllocation(20, epochs=5))
    assert not named_test(reading, "order").passed
    assert reading.seen == "repeated order"


def test_fixed_batches_are_not_shuffling():
    rng, once = np.random.default_rng(19), shuffled(19, 100, 20, 1)
    table = np.concatenate([once[rng.permutation(20)] for _ in range(6)])
    reading = read(table, Shuffled(20, epochs=6))
    assert not named_test(reading, "together").passed
    assert reading.seen == "clumped"


def test_a_canary_twice_in_one_round_is_reported():
    present = [[0, 0, 1], [2], [1]]
    assert read_sampler(present, [1, 2, 3], 3, Poisson(0.5, rounds=3)).seen == "too many"


def test_dropouts_pass_under_schemes_with_epochs_and_fixed_sizes():
    rng = np.random.default_rng(20)
    table = shuffled(20, 100, 20, 5) & (rng.random((100, 100)) < 0.9)
    assert read(table, Shuffled(20, epochs=5), np.minimum(table.sum(axis=1) + 50, 54)).passed


def test_missing_rounds_do_not_matter():
    table, rng = coins(21, 200, 300, 0.1), np.random.default_rng(21)
    observed = np.sort(rng.permutation(300)[:180])
    assert read(table[observed], Poisson(0.1, rounds=300), numbers=observed + 1).passed
    blocks = np.repeat(coins(22, 200, 60, 0.1), 5, axis=0)
    seen = read(blocks[observed], Poisson(0.1, rounds=300), numbers=observed + 1)
    assert not named_test(seen, "adjacent rounds").passed
    order = np.random.default_rng(23).permutation(180)
    again = read(blocks[observed][order], Poisson(0.1, rounds=300), numbers=observed[order] + 1)
    assert again == seen


@pytest.mark.parametrize(("canaries", "rounds", "rate"), [(1, 1, 0.5), (10, 3, 0.5), (5, 1, 0.3), (3, 50, 1e-4)])
@pytest.mark.parametrize("picked", ["none", "coins", "all"])
def test_tiny_runs_have_a_reading(canaries, rounds, rate, picked):
    table = {"none": np.zeros, "coins": lambda shape: coins(24, shape[1], shape[0], rate), "all": np.ones}[picked](
        (rounds, canaries)
    )
    for sampling in (
        Poisson(rate, rounds), RandomAllocation(rounds), Shuffled(rounds), FixedSize(1, 20, rounds), Poisson(1.0, rounds),
    ):  # fmt: skip
        reading = read(table, sampling, table.sum(axis=1))
        assert all(0 <= test.p_value <= 1 for test in reading.tests)
        assert reading.passed or picked != "none"
    assert read(np.ones((rounds, canaries)), Poisson(1.0, rounds), [canaries] * rounds).passed


def test_cohort_sizes_may_be_known_for_some_rounds():
    table = coins(25, 100, 50, 0.2)
    sizes = [None if t % 2 else float(n) for t, n in enumerate(table.sum(axis=1))]
    assert read(table, Poisson(0.2, rounds=50), sizes).cohort_sizes_known
    assert not read(table, Poisson(0.2, rounds=50), [np.nan] * 50).cohort_sizes_known


@pytest.mark.full
def test_power_of_the_rate_test_is_its_rejection_rate():
    claimed, alarms = Poisson(0.1, rounds=40), 0
    for seed in range(100):
        alarms += not named_test(read(coins((seed, 26), 10, 40, 0.16), claimed), "rate").passed
    power = rate_power(claimed, 40, 10, 0.16)
    assert 0.2 < power < 0.8
    assert abs(alarms / 100 - power) < 4 * np.sqrt(power * (1 - power) / 100)
    assert rate_power(claimed, 40, 10, 0.1) <= LEVEL
    smallest = next(n for n in range(401) if binom.sf(n - 1, 400, 0.1) <= LEVEL)
    assert power == pytest.approx(binom.sf(smallest - 1, 400, 0.16), rel=1e-12)
    assert rate_power(Poisson(1.0, rounds=4), 4, 2, 1.0) == 0


@pytest.mark.parametrize(("changed", "words"), [
    ({"numbers": [1, 1]}, "one twice"), ({"numbers": [0, 1]}, "counted from 1"),
    ({"numbers": [1, 10**12]}, "number them in order"),
    ({"present": [[0]]}, "an entry for each"),
    ({"present": [[0], [7]]}, "canaries from 0 to 2"), ({"participants": [1]}, "an entry for each"),
    ({"participants": [1, -2]}, "at least 0"),
])  # fmt: skip
def test_invalid_input_is_rejected(changed, words):
    arguments = {"present": [[0], [1]], "numbers": [1, 2], "canaries": 3, "sampling": Poisson(0.5, rounds=2)} | changed
    with pytest.raises(ValueError, match=words):
        read_sampler(**arguments)


def test_a_large_reading_is_quick():
    table = coins(27, 1_000, 2_000, 0.01)
    present = [np.flatnonzero(row) for row in table]
    start = time.process_time()
    read_sampler(present, range(1, 2_001), 1_000, Poisson(0.01, rounds=2_000), table.sum(axis=1) + 1_000)
    assert time.process_time() - start < 1.5
