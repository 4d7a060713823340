import inspect
import time

import numpy as np
import pytest
from scipy.stats import norm

import coalmine
from coalmine import CosineNull, compare_estimators
from coalmine.estimators.literature.all_estimators import TWO_SAMPLE_ESTIMATORS

QUANTILES = norm.ppf((np.arange(1_000) + 0.5) / 1_000)
EVERY = [
    "coalmine's estimate",
    "coalmine's lower bound",
    "paper's ε",
    "paper's ε_lo",
    "Jagielski 2020, best threshold",
    "Jagielski 2020, split",
    "Zanella-Béguelin 2023, best threshold",
    "Steinke 2023, ROC hull",
    "Steinke 2023, fixed guesses",
    "Mahloujifar 2024, ROC hull",
    "Mahloujifar 2024, fixed guesses",
    "Xiang 2025",
    "Nasr 2023, best threshold",
    "Nasr 2023, all thresholds",
    "Agrawal 2026, Bonferroni box",
    "Pillutla 2023, order 1",
    "Pillutla 2023, order 2",
    "Pillutla 2023, order 4",
    "Jagielski 2023, delta",
    "Jagielski 2023, back-front",
    "CANIFE 2022",
]


def rows(*arguments, **settings):
    return {row.name: row for row in compare_estimators(*arguments, delta=1e-6, **settings)}


def test_every_estimator_has_a_row():
    found = rows(QUANTILES + 1, QUANTILES)
    assert list(found) == EVERY
    assert all(row.value is not None for row in list(found.values())[:15])
    assert all(row.needs for row in list(found.values())[15:])


def test_own_rows_equal_the_estimate_and_bound_functions():
    found = rows(QUANTILES + 1, QUANTILES, confidence=0.9)
    assert (
        found["coalmine's estimate"].value
        == coalmine.epsilon_estimate(QUANTILES + 1, null=QUANTILES, delta=1e-6).epsilon
    )
    bound = coalmine.epsilon_lower_bound(QUANTILES + 1, null=QUANTILES, delta=1e-6, confidence=0.9)
    assert found["coalmine's lower bound"].value == bound
    assert found["paper's ε"].value == coalmine.estimate_from_iterates(QUANTILES + 1, QUANTILES, delta=1e-6).epsilon
    assert found["coalmine's lower bound"].confidence == 0.9


def test_bounds_lie_below_and_estimates_near_the_true_epsilon():
    """N(1, 1) against N(0, 1) has a true epsilon of 4.89: valid bounds lie below it, and not far below."""
    truth = coalmine.mechanism_epsilon(1.0, delta=1e-6)
    found = rows(QUANTILES + 1, QUANTILES)
    for row in found.values():
        if row.kind == "valid bound":
            assert 1.0 < row.value < truth, row.name
    assert found["coalmine's estimate"].value == pytest.approx(truth, rel=1e-2)


def test_all_rows_have_values_if_all_inputs_are_given():
    rng = np.random.default_rng(0)
    tables = rng.normal(1, 1, (40, 20)), rng.normal(0, 1, (40, 20))
    found = rows(
        QUANTILES + 1, QUANTILES, trials=tables, checkpoints=tables, audited_rounds=tables, sampling_probability=0.1,
        rounds=400,
    )  # fmt: skip
    assert all(row.value is not None for row in found.values())


def test_a_known_null_replaces_unobserved_scores_in_own_rows_only():
    scores = (QUANTILES + 1) / 1_000
    law = rows(scores, None, null=CosineNull(1_000_000))
    both = rows(scores, QUANTILES / 1_000, null=CosineNull(1_000_000))
    for name in EVERY[:4]:
        assert law[name].value == both[name].value
    assert all(law[name].needs == "needs scores of unobserved canaries" for name in EVERY[4:15])
    assert all(both[name].value is not None for name in EVERY[:15])


@pytest.mark.parametrize("change", [lambda x: 3 * x - 7, lambda x: x / 1e6])
def test_rows_do_not_depend_on_units(change):
    scores, others = (QUANTILES + 1)[::7], QUANTILES[::5]
    plain, changed = (rows(f(scores), f(others)) for f in (lambda x: x, change))
    for name in EVERY[:15]:
        assert changed[name].value == pytest.approx(plain[name].value, abs=1e-6), name


def test_a_larger_leak_gives_larger_values():
    found = [rows(QUANTILES + shift, QUANTILES) for shift in (0.0, 0.5, 1.0, 2.0, 3.0)]
    for name in EVERY[:15]:
        values = [each[name].value for each in found]
        assert values == sorted(values), name


@pytest.mark.parametrize(
    ("observed", "unobserved", "settings", "message"),
    [
        (np.zeros(5), np.zeros(20), {}, "at least 10 observed scores, got 5"),
        (np.arange(20.0), np.arange(5.0), {}, "at least 10 unobserved scores, got 5"),
        (np.full(20, np.nan), np.arange(20.0), {}, "observed scores must be finite"),
        (np.arange(20.0), np.arange(20.0), {"delta": 0.0}, r"delta must lie in \(0, 1\)"),
        (np.arange(20.0), np.arange(20.0), {"confidence": 1.0}, r"confidence must lie in \(0, 1\)"),
        (np.arange(20.0), None, {}, "give unobserved scores, or their law as null="),
        (np.zeros(20), np.zeros(20), {}, "scores are equal"),
    ],
)
def test_bad_input_is_rejected(observed, unobserved, settings, message):
    with pytest.raises(ValueError, match=message):
        compare_estimators(observed, unobserved, **{"delta": 1e-6} | settings)


@pytest.mark.full
def test_ten_thousand_scores_take_less_than_five_seconds():
    """Every row, with ten thousand scores on each side for every input and each of ten checkpoints.

    Measured in processor time, which other load on the machine does not change.
    """
    rng = np.random.default_rng(0)
    for shift in (0.0, 1.0, 4.0):
        observed, unobserved = rng.normal(shift, 1, 10_000), rng.normal(0, 1, 10_000)
        runs = observed.reshape(1_000, 10), unobserved.reshape(1_000, 10)
        rounds = observed.reshape(100, 100), unobserved.reshape(100, 100)
        steps = [rng.normal(jump, 1, (10, 10_000)).cumsum(axis=0) for jump in (shift / 10, 0.0)]
        start = time.process_time()
        found = rows(
            observed, unobserved, trials=runs, checkpoints=steps, audited_rounds=rounds, sampling_probability=0.1,
            rounds=1_000,
        )  # fmt: skip
        seconds = time.process_time() - start
        assert list(found) == EVERY
        assert all(row.value is not None for row in found.values())
        assert seconds < 5


def test_rows_agree_with_table_1():
    """The paper's columns: what auditors control, and what they receive."""
    found = rows(QUANTILES + 1, QUANTILES)
    table = {
        "Jagielski 2020": ("train data", "final model"),
        "Zanella-Béguelin 2023": ("train data", "final model"),
        "Pillutla 2023": ("train data", "final model"),
        "Steinke 2023": ("train data", "final model"),
        "Jagielski 2023": ("train data", "intermediate models"),
        "Nasr 2023": ("train data, privacy noise, minibatch", "intermediate models"),
        "CANIFE 2022": ("client sample, privacy noise, minibatch", "intermediate models"),
        "paper's": ("client model update", "final model, or intermediate models"),
    }
    for name, (controls, receives) in table.items():
        matching = [row for row in found.values() if row.name.startswith(name)]
        assert matching
        assert all((row.controls, row.receives) == (controls, receives) for row in matching)


def test_each_estimator_takes_the_same_arguments():
    for estimator in TWO_SAMPLE_ESTIMATORS:
        assert list(inspect.signature(estimator).parameters) == ["observed", "unobserved", "delta", "confidence"]
        assert estimator(QUANTILES + 1, QUANTILES, delta=1e-6).reference


@pytest.mark.parametrize("name", ["trials", "checkpoints", "audited_rounds"])
@pytest.mark.parametrize("given", [np.zeros((3, 20)), (np.zeros((3, 20)),) * 3, 5])
def test_several_runs_are_given_as_a_pair_of_tables(name, given):
    scores = np.linspace(-1, 1, 20)
    with pytest.raises(ValueError, match=f"{name} must be a pair of tables"):
        compare_estimators(scores, scores, delta=1e-6, sampling_probability=0.1, **{name: given})
