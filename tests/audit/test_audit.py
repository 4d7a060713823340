import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from training import train

from coalmine import Audit, mechanism_epsilon
from coalmine.evidence.ladder import ladder
from coalmine.evidence.views import views

SETTINGS = {"canaries": 20, "seed": 1, "delta": 1e-5}


def scores(audit, rung, presentations=None):
    found = [s for s in ladder(audit.log, audit.settings) if s.rung == rung]
    return next(s for s in found if presentations in (None, s.presentations))


@pytest.mark.parametrize("noise_multiplier", [0.5, 1.0])
@pytest.mark.parametrize("presentations", [1, 4])
def test_known_others_recovers_the_analytical_epsilon(noise_multiplier, presentations):
    """known-others is within four standard errors of the analytical epsilon; weaker attackers estimate less."""
    audit = train(noise_multiplier=noise_multiplier, presentations=presentations, seed=presentations)
    result = audit.result()
    truth = mechanism_epsilon(noise_multiplier, delta=1e-6, participations=presentations)
    known = scores(audit, "known-others")
    mean = np.sqrt(presentations) / noise_multiplier
    error = np.sqrt(1 / known.observed.size + mean**2 / (2 * known.null_dof))
    assert known.observed.mean() == pytest.approx(mean, abs=4 * error)
    row = result.adversaries["known-others"].headline
    assert row.estimate.interval.low <= truth <= row.estimate.interval.high
    assert row.lower_bound < truth
    epsilon = {name: adversary.headline.estimate.epsilon for name, adversary in result.adversaries.items()}
    assert epsilon["final"] < epsilon["known-round"] < epsilon["known-others"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"presentations": 4},
        {"presentations": 4, "momentum": 0.9},
        {"momentum": 0.9},
        pytest.param(
            {"kind": "sphere", "dim": 600, "canaries": 60, "unobserved": 300, "rounds": 4}, marks=pytest.mark.full
        ),
    ],
    ids=str,
)
def test_unobserved_scores_are_standard_in_every_closed_form_rung(settings):
    """Mean 0 and std 1 within four standard errors, pooled over ten runs with a signal as large as the noise."""
    dim = {"dim": 2_000, "canaries": 200, "unobserved": 1_000, "rounds": 12} | settings
    pooled: dict[str, list[float]] = {}
    for seed in range(10):
        audit = train(seed=seed, **dim)
        for found in ladder(audit.log, audit.settings):
            if found.null is not None:
                pooled.setdefault(found.rung, []).extend(found.unobserved)
    assert set(pooled) == {"final", "final-update", "known-round", "known-others"}
    for rung, values in pooled.items():
        count = len(values)
        assert np.mean(values) == pytest.approx(0, abs=4 / np.sqrt(count)), rung
        # each run estimates the correlations between rounds from m unobserved canaries: √(2/m)/√10 of extra error
        shared = 2 * np.sqrt(2 / dim["unobserved"] / 10)
        assert np.std(values) == pytest.approx(1, abs=4 / np.sqrt(2 * count) + shared), rung


def test_scores_over_several_rounds_account_for_their_correlation():
    """Summed as if rounds were independent, unobserved scores have a std far above 1; divided by √(wᵀGw) they have 1."""
    audit = train(presentations=4, rounds=12, seed=1)
    owners = np.arange(audit.settings.unobserved) % audit.settings.canaries
    plain = np.zeros(audit.settings.unobserved)
    for view in views(audit.log, audit.settings):
        there = np.isin(owners, view.present)
        plain[there] += view.unobserved[there] / 2
    assert plain.std() > 1.1
    assert scores(audit, "known-round").unobserved.std() == pytest.approx(1, abs=0.03)


def test_one_run_gives_a_row_for_each_number_of_presentations():
    audit = train(presentations=(1, 2, 4, 8), rounds=16, noise_multiplier=2.0, canaries=2_000, seed=5)
    rows = audit.result().adversaries["known-others"].rows
    assert sorted(row.presentations for row in rows) == [1, 2, 4, 8]
    for row in rows:
        truth = mechanism_epsilon(2.0, delta=1e-6, participations=row.presentations)
        assert row.canaries == 500
        assert row.estimate.interval.low <= truth <= row.estimate.interval.high


def test_momentum_is_undone():
    """Momentum mixes a canary into later deltas; once it is inverted, known-others recovers the analytical epsilon."""
    audit = train(momentum=0.9, noise_multiplier=0.5, seed=2)
    raw = train(
        momentum=0.9, noise_multiplier=0.5, seed=2, audit=Audit(10_000, canaries=1_000, seed=1, delta=1e-6, rounds=20)
    )
    truth = mechanism_epsilon(0.5, delta=1e-6)
    row = audit.result().adversaries["known-others"].headline
    assert row.estimate.interval.low <= truth <= row.estimate.interval.high
    assert raw.result().adversaries["known-round"].headline.estimate.epsilon < row.estimate.epsilon


@pytest.mark.full
def test_sphere_canaries_recover_the_analytical_epsilon():
    audit = train(kind="sphere", dim=4_000, canaries=200, unobserved=200, noise_multiplier=0.5, seed=4)
    row = audit.result().adversaries["known-others"].headline
    truth = mechanism_epsilon(0.5, delta=1e-6)
    assert row.estimate.interval.low <= truth <= row.estimate.interval.high


def test_a_rung_is_present_only_if_its_inputs_were_given():
    audit = train(give_others=False, give_noise=False, rounds=2, dim=500, canaries=50)
    result = audit.result()
    assert set(result.adversaries) == {"final", "final-update", "all-iterates", "known-round"}
    assert result.gauges == ()
    empty = Audit(100, **SETTINGS)
    empty.observe_final(np.ones(100))
    assert set(empty.result().adversaries) == {"final"}
    assert Audit(100, **SETTINGS).result().adversaries == {}


def test_a_custom_attack_adds_a_sixth_row():
    """The attack accumulates cosines from round to round, and its state survives a reload."""

    def running_sum(round_number, model_delta, canaries, previous):
        cosines = canaries.cosines(model_delta)
        return cosines if previous is None else previous + cosines

    audit = Audit(500, canaries=50, seed=1, delta=1e-6, rounds=3, scores={"sum": running_sum})
    audit = train(audit=audit, dim=500, rounds=3, noise_multiplier=0.3, signal=0.0)
    expected = sum(item.cosines.astype(np.float64) for item in audit.log.rounds())
    np.testing.assert_allclose(scores(audit, "sum").observed, expected[:50], atol=1e-6)
    assert audit.result().adversaries["sum"].headline.estimate.epsilon > 1


def test_constant_custom_scores_give_a_note_instead_of_an_error():
    audit = Audit(500, canaries=50, seed=1, delta=1e-6, rounds=3, scores={"flat": lambda *_: np.ones(500)})
    found = train(audit=audit, dim=500, rounds=3).result()
    assert "flat" not in found.adversaries
    assert "known-others" in found.adversaries
    assert any("flat: all" in note for note in found.notes)


def test_rewinding_also_rewinds_custom_scores():
    def running_sum(round_number, model_delta, canaries, previous):
        cosines = canaries.cosines(model_delta)
        return cosines if previous is None else previous + cosines

    rows = np.random.default_rng(0).normal(size=(3, 200))
    audits = [Audit(200, canaries=20, seed=1, delta=1e-6, scores={"sum": running_sum}) for _ in range(2)]
    audits[0].observe_round(1, rows[0], present=[])
    audits[0].observe_round(2, rows[1], present=[])
    audits[0].rewind_to(1)
    audits[1].observe_round(1, rows[0], present=[])
    for audit in audits:
        audit.observe_round(2, rows[2], present=[])
    first, second = (scores(audit, "sum").observed for audit in audits)
    np.testing.assert_array_equal(first, second)


def test_canaries_presented_unequally_are_not_pooled_into_one_interval():
    """Some canaries take part once, some three times: final has a row for each group and a pooled one without interval."""
    audit = train(presentations=(1, 3), dim=1_000, canaries=200, rounds=6)
    rows = audit.result().adversaries["final"].rows
    assert [(row.presentations, row.canaries) for row in rows] == [(None, 200), (3, 100), (1, 100)]
    assert rows[0].estimate.interval is None
    assert "different numbers of times" in rows[0].warnings[0]


def test_momentum_requires_enough_unobserved_canaries():
    with pytest.raises(ValueError, match="unobserved must be at least 200 if momentum is undone"):
        Audit(2_000, canaries=20, unobserved=100, seed=1, delta=1e-5, momentum=0.9)


def test_updates_have_the_requested_norm():
    audit = Audit(300, **SETTINGS)
    assert np.linalg.norm(audit.update(3, 0.5)) == pytest.approx(0.5)
    assert np.linalg.norm(audit.update(3, 0.5, scale=10)) == pytest.approx(5)
    np.testing.assert_allclose(audit.updates([1, 2], 2.0), audit.update(1, 2.0) + audit.update(2, 2.0), atol=1e-12)
    assert not audit.updates([], 1.0).any()


def test_torch_and_numpy_give_the_same_result():
    torch = pytest.importorskip("torch")
    first, second = (Audit(1_000, canaries=100, seed=9, delta=1e-5, layers=[("a", 400), ("b", 600)]) for _ in range(2))
    rng = np.random.default_rng(0)
    for t in (1, 2, 3):
        present = np.arange(30) + 30 * (t - 1)
        noise, others = rng.normal(size=(2, 1_000)).astype(np.float32)
        delta = first.updates(present, 1.0, like=noise) + noise + others
        first.observe_round(t, delta, present=present, others=others, noise_std=1.0)
        as_tensors = (torch.from_numpy(delta), torch.from_numpy(others))
        second.observe_round(t, as_tensors[0], present=present, others=as_tensors[1], noise_std=1.0)
    for ours, theirs in zip(first.log.rounds(), second.log.rounds(), strict=True):
        np.testing.assert_allclose(ours.cosines, theirs.cosines, atol=1e-6)
        np.testing.assert_allclose(ours.layer_rests, theirs.layer_rests, rtol=1e-5)


def test_schedules_are_balanced_and_depend_on_the_seed():
    audit = Audit(1_000, canaries=100, seed=1, delta=1e-5, rounds=20, presentations=4)
    rows = [audit.canaries_in_round(t) for t in range(1, 21)]
    assert [len(row) for row in rows] == [20] * 20
    for period in range(4):
        assert sorted(np.concatenate(rows[5 * period : 5 * period + 5])) == list(range(100))
    other = Audit(1_000, canaries=100, seed=2, delta=1e-5, rounds=20, presentations=4)
    assert any((other.canaries_in_round(t) != audit.canaries_in_round(t)).any() for t in range(1, 21))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("layers", [None, [("a", 60), ("b", 40)]])
def test_a_learning_rate_of_zero_is_a_skipped_round(deferred, layers):
    """Everything that is in the units of the model delta is 0 then. A release without a clip norm is refused."""
    own, rng = (
        Audit(100, canaries=20, unobserved=20, seed=1, delta=1e-5, deferred=deferred, layers=layers),
        np.random.default_rng(0),
    )
    for number, rate in enumerate((1.0, 0.0, 0.5), start=1):
        total = own.updates([1, 2], 1.0) + rng.normal(size=100)
        facts = {"others": np.zeros(100), "noise_std": rate * 1.0, "clip_norm": rate * 1.0}
        own.observe_round(number, rate * total, present=[1, 2], **facts)
    own.flush()
    assert [item.number for item in own.log.rounds() if not item.skipped] == [1, 3]
    assert own.result().skipped == 1

    def release_without_clip_norm():
        own.observe_round(4, np.ones(100), present=[1], clip_norm=0.0)
        own.flush()

    with pytest.raises(ValueError, match="clip_norm must be above 0, got 0"):
        release_without_clip_norm()
    assert own.last_round == 3


def test_a_zero_delta_counts_as_a_skipped_round_and_gaps_are_allowed():
    audit = Audit(100, **SETTINGS)
    audit.observe_round(2, np.ones(100), present=[0])
    audit.observe_round(3, np.zeros(100), present=[1])
    audit.observe_round(7, np.ones(100), present=[])
    result = audit.result()
    assert (result.rounds, result.skipped, audit.last_round) == (2, 1, 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"round_number": 1}, "rounds must come in order, got round 1 after round 1"),
        ({"round_number": 0}, "round_number must be at least 1"),
        ({"model_delta": np.ones(99)}, r"model_delta must be one row of dim = 100 numbers, got shape \(99,\)"),
        ({"model_delta": np.ones((100, 1))}, "model_delta must be one row"),
        ({"model_delta": [1.0] * 100}, "must be a numpy array, a torch tensor or a jax array"),
        ({"model_delta": np.full(100, np.nan)}, "model_delta must be finite"),
        ({"model_delta": np.full(100, 1j)}, "must be real numbers, got complex128"),
        ({"others": np.full(100, np.inf)}, "must be finite"),
        ({"others": np.ones(5)}, "others must be one row"),
        ({"others": np.arange(1.0, 101.0)}, "no noise and no canary is left"),
        ({"present": [20]}, r"present canaries must lie in 0\.\.19, got 20"),
        ({"present": [-1]}, "index must be at least 0, got -1"),
        ({"present": [1, 1]}, "must differ, got one twice"),
        ({"present": [0.5]}, "whole number"),
        ({"noise_std": -1.0}, "noise_std must be at least 0"),
        ({"clip_norm": 0.0}, "clip_norm must be above 0"),
    ],
)
def test_invalid_rounds_are_rejected_and_not_recorded(arguments, message):
    audit = Audit(100, **SETTINGS)
    audit.observe_round(1, np.arange(1.0, 101.0), present=[0])
    before = str(list(audit.log.records()))
    call = {"round_number": 2, "model_delta": np.arange(1.0, 101.0), "present": [1]} | arguments
    with pytest.raises(ValueError, match=message):
        audit.observe_round(**call)
    assert str(list(audit.log.records())) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"canaries": 9}, "canaries must be at least 10, got 9"),
        ({"canaries": 95}, "must leave 10 directions for unobserved ones, got 95 canaries in dimension 100"),
        ({"unobserved": 90}, "unobserved must be at most dim - canaries = 80, got 90"),
        ({"delta": 0}, r"delta must lie in \(0, 1\)"),
        ({"kind": "cube"}, "kind must be"),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1"),
        ({"layers": [("a", 99)]}, "layers must add up to dim = 100, got 99"),
        ({"presentations": 0}, "presentations must be at least 1, got 0"),
        ({"seed": -1}, "seed must"),
    ],
)
def test_invalid_settings_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        Audit(100, **(SETTINGS | arguments))


def test_sampled_canaries_join_rounds_independently_and_reproducibly():
    """Counts are binomial, per canary and per round; two rounds or two seeds overlap only by chance."""
    audit = Audit(1000, canaries=500, seed=5, delta=1e-6)
    present = np.zeros((200, 500), dtype=bool)
    for number in range(200):
        present[number, audit.sampled_canaries(number + 1, 0.1)] = True
    for counts, trials in ((present.sum(axis=0), 200), (present.sum(axis=1), 500)):
        spread = ((counts - 0.1 * trials) ** 2).sum() / (0.09 * trials)
        assert 1e-3 < stats.chi2.cdf(spread, len(counts)) < 1 - 1e-3
    other = Audit(1000, canaries=500, seed=6, delta=1e-6)
    again = Audit(1000, canaries=500, seed=5, delta=1e-6)
    np.testing.assert_array_equal(again.sampled_canaries(7, 0.1), audit.sampled_canaries(7, 0.1))
    assert not np.array_equal(other.sampled_canaries(7, 0.1), audit.sampled_canaries(7, 0.1))
    assert len(audit.sampled_canaries(1, 0.0)) == 0
    assert len(audit.sampled_canaries(2**70, 1.0)) == 500
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="sampling_probability must"):
            audit.sampled_canaries(1, wrong)


def test_canaries_in_round_rejects_a_bad_round_or_schedule():
    with pytest.raises(ValueError, match="pass rounds= or sampling= to Audit"):
        Audit(100, **SETTINGS).canaries_in_round(1)
    with pytest.raises(ValueError, match="at most rounds = 3, got 4"):
        Audit(100, **SETTINGS, rounds=3).canaries_in_round(4)
    with pytest.raises(ValueError, match="presentations must be at most rounds = 3, got 4"):
        Audit(100, **SETTINGS, rounds=3, presentations=4).canaries_in_round(1)


anything = st.one_of(
    st.none(), st.integers(-3, 30), st.floats(allow_nan=True), st.text(max_size=3), st.binary(max_size=3), st.booleans(),
    st.lists(st.one_of(st.integers(-3, 30), st.floats(), st.text(max_size=2)), max_size=4),
)  # fmt: skip
arrays = st.builds(
    lambda length, dtype, value: np.full(length, value).astype(dtype),
    st.sampled_from([0, 1, 50, 60, 61]),
    st.sampled_from(["f4", "f8", "f2", "i4", "u1", "U3", "O", "?", "c8"]),
    st.sampled_from([0, 1, 2]),
)


@given(anything, st.one_of(arrays, anything), anything, st.one_of(arrays, anything), anything, anything)
def test_random_input_raises_only_documented_errors(number, model_delta, present, others, noise_std, clip_norm):
    audit = Audit(60, canaries=20, seed=1, delta=1e-5)
    audit.observe_round(1, np.arange(1.0, 61.0), present=[0])
    before = str(list(audit.log.records()))
    call = {"present": present, "others": others, "noise_std": noise_std, "clip_norm": clip_norm}
    with contextlib.suppress(ValueError):
        audit.observe_round(number, model_delta, **call)
        return
    assert str(list(audit.log.records())) == before


@pytest.mark.parametrize("precision", [None, np.float64, np.float32, np.float16])
def test_a_call_of_updates_does_not_change_what_a_round_records(precision):
    """The sum of the canaries is kept for the round, but not in a precision that its gauges would see."""

    def log_digest(asks):
        audit = Audit(2_000, canaries=40, seed=1, delta=1e-6, rounds=2, layers=[("a", 1_500), ("b", 500)])
        for number in (1, 2):
            rng, present = np.random.default_rng(number), audit.canaries_in_round(number)
            total = sum(audit.measurer.rotated_canaries.canary(index) for index in present)
            others = rng.normal(size=2_000)
            if asks:
                audit.updates(present, 1.0, like=np.zeros(1, precision))
            release = total + others + 0.02 * rng.normal(size=2_000)
            audit.observe_round(number, release, present=present, others=others, noise_std=0.02, clip_norm=1.0)
        return audit.log_digest

    assert log_digest(True) == log_digest(False)
