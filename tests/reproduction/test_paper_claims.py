"""Each claim of the paper holds on numbers that support it and fails on numbers that do not."""

import math

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("torch")

from coalmine.estimators.mechanism import mechanism_epsilon
from reproduction import appendix_d_multirun as multirun
from reproduction import paper_claims
from reproduction import table_3_accuracy as accuracy
from reproduction.experiment import all_of, shown


def row(name, epsilon, **changes):
    made = {
        "rung": name,
        "presentations": None if name in ("final", "all-iterates") else 1,
        "epsilon": epsilon,
        "interval": [0.9 * epsilon, 1.1 * epsilon],
        "interval_99": [0.8 * epsilon, 1.2 * epsilon],
        "lower_bound": 0.5 * epsilon,
        "floor": 0.4,
        "analytical": 10.0,
    }
    return made | changes


def reading(noise, *rows):
    return {"noise_multiplier": noise, "task": "digits", "rows": list(rows)}


def test_the_interval_of_known_others_must_contain_the_analytical_epsilon():
    good, bad = row("known-others", 10.5), row("known-others", 13.0)
    assert paper_claims.covers_analytical([reading(0.5, good)]).holds
    check = paper_claims.covers_analytical([reading(0.5, good), reading(1.0, bad)])
    assert check.holds is False
    assert "noise 1, known-others" in check.detail
    assert paper_claims.covers_analytical([reading(0.0, bad)]).holds is None  # no analytical epsilon without noise


def test_no_bound_may_exceed_the_epsilon_of_its_presentations():
    once = row("known-others", 10.0, lower_bound=9.0)
    often = row("known-others", 30.0, lower_bound=25.0, presentations=4, analytical=28.0)
    pooled = row("final", 20.0, lower_bound=20.0)
    assert paper_claims.bounds_hold([reading(0.5, once, often, pooled)]).holds  # four presentations may leak 20
    assert paper_claims.bounds_hold([reading(0.5, once, pooled)]).holds is False
    assert paper_claims.bounds_hold([reading(0.5, row("known-others", 30.0, lower_bound=10.1))]).holds is False


@pytest.mark.parametrize(
    ("finals", "holds"),
    [
        ([4.0, 2.0, 1.0], True),
        ([4.0, 4.2, 1.0], True),  # rises within its error
        ([4.0, 6.0, 1.0], False),
        ([1.0, 1.1, 1.2], False),  # never falls
        ([0.1, 0.2, 0.3], True),  # all at the floor
        ([4.0], None),
    ],
)
def test_final_falls_with_noise(finals, holds):
    readings = [reading(number / 10, row("final", value)) for number, value in enumerate(finals)]
    assert paper_claims.final_falls(readings[::-1]).holds is holds


def test_final_lies_below_all_iterates_above_the_noise_floor():
    below = reading(0.1, row("final", 1.0), row("all-iterates", 50.0))
    above = reading(0.2, row("final", 60.0), row("all-iterates", 50.0))
    blind = reading(0.3, row("final", 0.5), row("all-iterates", 0.3))
    assert paper_claims.final_below_all([below, blind]).holds
    assert paper_claims.final_below_all([below, above]).holds is False
    assert paper_claims.final_below_all([blind]).holds is None


def test_epsilon_must_fall_with_noise():
    readings = [reading(noise, row("known-others", 3 / noise)) for noise in (0.3, 0.1, 0.2)]
    assert paper_claims.known_others_falls(readings).holds
    assert paper_claims.known_others_falls([*readings, reading(0.4, row("known-others", 99.0))]).holds is False


def test_epsilon_must_grow_with_presentations():
    def groups(*values):
        return reading(0.1, *(row("final", value, presentations=2**place) for place, value in enumerate(values)))

    assert paper_claims.grows_with_presentations([groups(1.0, 2.0, 4.0, 8.0)]).holds
    assert paper_claims.grows_with_presentations([groups(1.0, 2.0, 0.9, 8.0)]).holds is False
    assert paper_claims.grows_with_presentations([groups(3.0, 2.9, 2.9)]).holds is False
    assert paper_claims.grows_with_presentations([reading(0.1, row("final", 1.0))]).holds is None


def test_a_check_names_what_fails():
    check = all_of("all is well", [("one", True), ("two", False)], nothing="-")
    assert (check.outcome, check.detail) == ("does not hold", "not in 1 of 2: two")
    assert all_of("all is well", [], nothing="nothing was run").outcome == "not decided"


def test_the_cost_in_accuracy_is_a_t_interval():
    rng = np.random.default_rng(1)
    lost = rng.normal(0.05, 0.2, 12)
    found = {
        "pairs": [
            {"noise_multiplier": 0.1, "without": 0.9, "with": 0.9 - value / 100, "share": 0.003} for value in lost
        ]
    }
    expected = stats.ttest_1samp(lost, 0).confidence_interval(0.95)
    assert accuracy.cost(found) == pytest.approx((lost.mean(), expected.low, expected.high))


@pytest.mark.parametrize(
    ("lost", "share", "holds"),
    [
        ([0.0, 0.01, 0.02], 0.003, True),
        ([0.9, 1.0, 1.1], 0.003, False),
        ([0.0, 0.4], 0.003, None),
        ([0.0, 0.0], 0.2, None),
    ],
)
def test_the_cost_is_judged_only_with_few_canaries_and_a_decisive_interval(lost, share, holds):
    pairs = [{"noise_multiplier": 0.1, "without": 0.9, "with": 0.9 - value / 100, "share": share} for value in lost]
    assert accuracy.checks({"pairs": pairs})[0].holds is holds


def test_a_diverged_pair_is_named_and_excluded_from_the_cost():
    pairs = [
        {"noise_multiplier": noise, "without": without, "with": mixed, "share": 0.003, "absent_epsilon": None}
        for noise, without, mixed in ((0.0, 0.174, 0.173), (0.064, 0.17, 0.171), (0.234, 0.018, 0.143))
    ]
    found = {"pairs": pairs, "delta": 1e-6, "data": "words", "dim": 10, "rounds": 5}
    assert accuracy.cost(found)[0] == pytest.approx(0.0)
    assert math.isnan(accuracy.cost(found, 0.234)[0])
    assert "over 2 pairs" in accuracy.checks(found)[0].detail
    assert accuracy.tables(found)[0].rows[-1][-2:] == ("- / 0.1", "0 of 1")
    epsilon = shown(float(mechanism_epsilon(0.234, delta=1e-6)))
    assert accuracy.tables_of_ours(found)[0].rows[-1] == ("0.234", epsilon, "1.8", "14.3", "-", "0 of 1")
    assert "1.8% without canaries and 14.3% with them at noise 0.234" in accuracy.conclusion(found)


def test_one_run_against_ten_uses_welchs_interval():
    rng = np.random.default_rng(2)
    one, ten = rng.normal(2.0, 0.3, 20), rng.normal(1.9, 0.5, 20)
    repeats = [
        {"noise_multiplier": 0.05, "one": a, "ten": b, "repeat": place}
        for place, (a, b) in enumerate(zip(one, ten, strict=True))
    ]
    expected = stats.ttest_ind(ten, one, equal_var=False).confidence_interval(0.95)
    gap, low, high = multirun.difference({"repeats": repeats}, 0.05)
    scale = one.mean()
    assert (gap * scale, low * scale, high * scale) == pytest.approx((ten.mean() - scale, expected.low, expected.high))
    assert multirun.difference({"repeats": repeats}, 0.2) is None


def test_numbers_are_formatted_for_tables():
    assert [shown(value) for value in (None, math.nan, math.inf, 0.12345, 999.4, 999.6, 12345.6)] == [
        "-",
        "-",
        "inf",
        "0.123",
        "999",
        "1,000",
        "12,346",
    ]
