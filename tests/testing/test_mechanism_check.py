"""The privacy unit test: the arguments of the function, its valid return values, and the result."""

import json
import warnings
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from aggregators import DELTA, clip, multiplier, noised_mean, noised_sum, not_repeatable, with_noise
from scipy.stats import nct

from coalmine import AuditResult, BandedNoise, TreeNoise
from coalmine.log.files import json_ready
from coalmine.testing import PrivacyNote, assert_private, check_private
from coalmine.testing.call_plan import ScoreTest, plan_calls

SEEDS_OF_NARROW_FAILURES = (2, 8)
CLAIM = {"epsilon": 3.0, "delta": DELTA, "dim": 2_000}


def outcome(release, **changes):
    return str(check_private(release, **{**CLAIM, **changes}).verdict.outcome)


@pytest.mark.parametrize("epsilon", [1.0, 3.0, 10.0])
def test_a_correct_sum_passes_and_its_epsilon_is_measured(epsilon):
    result = assert_private(noised_sum(1, epsilon=epsilon), epsilon=epsilon, delta=DELTA, dim=5_000)
    assert result.verdict.outcome == "PASS"
    assert result.interval[0] < epsilon < result.interval[1]
    assert result.trainer.check.calls >= 3
    assert not result.notes


def test_noise_for_replace_one_passes_and_half_of_it_fails():
    assert outcome(noised_mean(1, factor=2.0), adjacency="replace-one") == "PASS"
    result = check_private(noised_mean(1), adjacency="replace-one", **CLAIM)
    assert result.verdict.outcome == "VIOLATION"
    assert "zero-out adjacency" in result.trainer.check.likely_fault


def test_the_number_of_clients_is_not_checked_under_add_remove():
    result = check_private(noised_sum(1), adjacency="add-remove", **CLAIM)
    assert "number itself stays private is not checked" in result.notes[-1]


def test_noise_in_half_precision_is_a_warning():
    release = with_noise(1, lambda rng, size: rng.standard_normal(size).astype(np.float16))
    with pytest.warns(PrivacyNote, match="half precision"):
        assert_private(release, **CLAIM)


@pytest.mark.parametrize(
    "rounded",
    [
        lambda values: values.astype(np.float16),
        lambda values: values.astype(np.float32),
        lambda values: np.rint(values * 256).astype(np.int64),
        list,
    ],
)
def test_a_release_of_another_type_passes(rounded):
    release = noised_sum(1)
    with warnings.catch_warnings(category=PrivacyNote):
        assert outcome(lambda updates: rounded(release(updates))) == "PASS"


def test_every_call_has_the_same_clients_and_all_lengths_occur():
    seen = []

    def release(updates):
        seen.append(np.linalg.norm(updates, axis=1))
        gram = updates @ updates.T
        assert np.abs(gram - np.diag(np.diag(gram))).max() < 1e-6 * gram.max()
        return noised(updates)

    noised = noised_sum(3, norm=0.5)
    assert outcome(release, clients=30, clip_norm=0.5) == "PASS"
    assert {len(norms) for norms in seen} == {30}
    alike = [round(float(norms[0] / 0.5), 6) for norms in seen if np.ptp(norms) < 1e-6 * norms[0]]
    assert {length: alike.count(length) >= 3 for length in set(alike)} == dict.fromkeys((0.1, 1.0, 10.0, 1_000.0), True)
    mixed = [np.round(norms / 0.5, 6) for norms in seen if np.ptp(norms) > 1e-6 * norms[0]]
    assert {tuple(np.unique(norms)) for norms in mixed if len(np.unique(norms)) == 2} == {(0.1, 10.0), (1.0, 1_000.0)}
    assert min((norms > 5).sum() for norms in mixed if norms.min() == 0.1) == 1  # a single long update
    assorted = [norms for norms in mixed if len(np.unique(norms)) > 2]
    assert len(assorted) >= 3
    assert all(norms.min() == 1.8 and norms.max() < 30 for norms in assorted)


def test_a_function_may_change_its_input():
    release = noised_sum(1)

    def destructive(updates):
        result = release(updates)
        updates[:] = np.nan
        return result

    assert outcome(destructive) == "PASS"
    assert outcome(lambda updates: destructive(np.stack(updates)), updates="list") == "PASS"


def test_the_same_arguments_give_the_same_result():
    one, two = (check_private(noised_sum(3), **CLAIM) for _ in range(2))
    assert one.epsilon == two.epsilon
    assert check_private(noised_sum(3), **CLAIM, seed=1).epsilon != one.epsilon


@pytest.mark.parametrize("like", ["torch", "jax"])
def test_updates_can_be_arrays_of_other_libraries(like):
    pytest.importorskip(like)
    release = noised_sum(1)
    kinds = set()

    def of_library(updates):
        kinds.add(type(updates).__module__.split(".")[0])
        return type(updates)(release(np.asarray(updates))) if like == "torch" else release(np.asarray(updates))

    assert outcome(of_library, like=like) == "PASS"
    assert len(kinds) == 1
    assert kinds.pop().startswith(like)


def test_updates_have_the_type_of_a_given_array():
    torch = pytest.importorskip("torch")
    release, kinds = noised_sum(1), set()

    def remembering(updates):
        kinds.add(updates.dtype)
        return release(np.asarray(updates, dtype=np.float64))

    assert outcome(remembering, like=np.zeros(1, dtype=np.float16)) == "PASS"
    assert outcome(remembering, like=torch.zeros(1, dtype=torch.float64)) == "PASS"
    assert kinds == {np.dtype(np.float16), torch.float64}


def in_layers(seed, bare):
    rng = np.random.default_rng(seed)

    def release(updates):
        rows = np.stack([np.concatenate([part.ravel() for part in update]) for update in updates])
        noise = multiplier() * rng.standard_normal(rows.shape[1])
        noise[1_200:] *= not bare
        total = clip(rows).sum(axis=0) + noise
        return {"weight": total[:1_200].reshape(30, 40), "bias": total[1_200:]}

    return release


def test_a_layer_without_noise_is_detected_in_lists_of_layers():
    shapes = [(30, 40), (300,)]
    claim = {"epsilon": 3.0, "delta": DELTA, "shapes": shapes}
    assert check_private(in_layers(1, False), **claim).verdict.outcome == "PASS"
    with pytest.raises(AssertionError, match="some coordinates have no noise"):
        assert_private(in_layers(1, True), **claim)


def weighted(seed, *, largest):
    rng = np.random.default_rng(seed)

    def release(updates, weights):
        noise = multiplier() * largest * rng.standard_normal(updates.shape[1])
        return ((clip(updates) * weights[:, None]).sum(axis=0) + noise) / weights.sum()

    return release


def noise_of_a_plain_mean(seed):
    rng = np.random.default_rng(seed)

    def release(updates, weights):
        noise = multiplier() / len(updates) * rng.standard_normal(updates.shape[1])
        return (clip(updates) * weights[:, None]).sum(axis=0) / weights.sum() + noise

    return release


@pytest.mark.full
def test_the_client_with_the_largest_weight_is_tested():
    weights = [4.0] * 5 + [1.0] * 45
    settings = {"weights": weights, "clients": 50}
    assert outcome(weighted(1, largest=4.0), **settings) == "PASS"
    with pytest.raises(AssertionError, match="largest weight counts for more"):
        assert_private(noise_of_a_plain_mean(1), **CLAIM, **settings)


def test_a_declared_aggregate_reveals_a_tenth_of_the_noise():
    assert outcome(noised_sum(1), aggregate="sum", dim=5_000) == "PASS"
    assert outcome(noised_mean(1), aggregate="mean", dim=5_000) == "PASS"
    assert outcome(noised_sum(1, factor=0.9), aggregate="sum", dim=5_000) == "VIOLATION"


def test_a_mean_over_another_number_of_clients_passes():
    """Its scale resembles that of the mean: a guessed aggregate must not refute the claim."""
    release = noised_sum(1)
    assert outcome(lambda updates: release(updates) / 128, dim=5_000) == "PASS"


def test_more_noise_than_claimed_passes_and_far_too_much_hides_the_canaries():
    assert outcome(noised_sum(1, factor=3.0)) == "PASS"
    with pytest.raises(AssertionError, match="far more noise than claimed"):
        assert_private(noised_sum(1, factor=200.0), **CLAIM)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        {"clients": 1},
        {"clients": 3},
        {"dim": 50, "clients": 20},
        {"dim": 50},
        {"clip_norm": 1e-3},
        {"clip_norm": 1e3},
        {"epsilon": 50.0},
        {"epsilon": 0.8, "clients": 400},
        {"scale": 1.0},
    ],
)
def test_unusual_settings_pass_and_half_the_noise_fails(settings):
    made = {"epsilon": settings.get("epsilon", 3.0), "norm": settings.get("clip_norm", 1.0)}
    assert outcome(noised_sum(2, **made), **settings) == "PASS"
    assert outcome(noised_sum(2, factor=0.5, **made), **settings) == "VIOLATION"


def test_correlated_noise_passes_and_too_little_of_it_fails():
    tree, banded = TreeNoise(rounds=8), BandedNoise.for_prefix_sums(8, bands=3)
    strongest = max(tree.strength([number]) for number in range(1, 9)) ** 0.5

    def noised(noise, std, seed=1):
        rng, rows, fresh = np.random.default_rng(seed), np.linalg.inv(noise.matrix()), []

        def release(updates):
            fresh.append(std * rng.standard_normal(updates.shape[1]))
            return clip(updates).sum(axis=0) + rows[len(fresh) - 1, : len(fresh)] @ np.stack(fresh)

        return release

    for noise, factor in ((tree, strongest), (banded, 1.0)):
        settings = {"noise": noise, "clients": 50}
        assert outcome(noised(noise, factor * multiplier()), **settings) == "PASS"
        assert outcome(noised(noise, factor * multiplier() / 2), **settings) == "VIOLATION"
        assert outcome(noised(noise, 2 * factor * multiplier()), adjacency="replace-one", **settings) == "PASS"
        assert outcome(noised(noise, factor * multiplier()), adjacency="replace-one", **settings) == "VIOLATION"


def test_underpowered_raises_with_a_remedy():
    with pytest.raises(AssertionError, match="raise clients or most_calls") as failed:
        assert_private(noised_sum(1, epsilon=0.01), epsilon=0.01, delta=DELTA, dim=200, most_calls=50)
    assert "UNDERPOWERED" in str(failed.value)


def test_a_narrow_failure_is_repeated_with_other_canaries():
    """With 8 % less noise many checks fail narrowly, and a repetition decides."""
    ends = {}
    for seed in SEEDS_OF_NARROW_FAILURES:
        result = check_private(not_repeatable(seed, factor=0.92), **CLAIM, seed=seed)
        ends[str(result.verdict.outcome)] = result.notes[-1]
    assert "a first check was VIOLATION" in ends["PASS"]
    assert ends["PASS"].endswith("a second one with other canaries passed")
    assert ends["VIOLATION"].endswith("a second one did not pass either")


@pytest.mark.parametrize(("epsilon", "clients"), [(3.0, 100), (2.0, 100), (10.0, 100), (3.0, 20), (2.0, 3)])
def test_the_default_calls_detect_a_fifth_more_than_the_claim(epsilon, clients):
    plan = plan_calls(ScoreTest(epsilon=epsilon, delta=DELTA), clients, 5_000)
    dof = (5_000 - clients * plan.groups) * plan.calls
    assert ScoreTest(epsilon=epsilon, delta=DELTA).detectable(clients * plan.calls, dof) <= 1.2001 * epsilon or (
        plan.calls > 1_000 - plan.groups
    )
    assert plan.calls % plan.groups == 0


def test_a_given_number_of_calls_limits_the_check():
    test = ScoreTest(epsilon=3.0, delta=DELTA)
    assert plan_calls(test, 100, 5_000).calls == 17
    assert plan_calls(test, 100, 5_000, most_calls=5).calls == 5
    assert plan_calls(ScoreTest(epsilon=1.0, delta=DELTA), 50, 5_000).calls == 200
    assert plan_calls(ScoreTest(epsilon=1.0, delta=DELTA), 50, 5_000, most_calls=400).calls > 200
    five, usual = (check_private(noised_sum(1), **CLAIM, **most).verdict.finding for most in ({"most_calls": 5}, {}))
    assert five.detectable_epsilon > usual.detectable_epsilon > 3.5


@pytest.mark.parametrize(("epsilon", "moves", "dof"), [(3.0, 1, 1e5), (1.0, 1, 1e6), (10.0, 2, 2_000), (50.0, 1, 500)])
def test_the_detectable_epsilon_is_detected_with_98_percent(epsilon, moves, dof):
    """Oracle: scores N(1/z', 1) over an estimated scale, tested with the noncentral t, and again if p is above 1e-6."""
    rng, runs, scores = np.random.default_rng(1), 40_000, 700
    found = ScoreTest(epsilon=epsilon, delta=DELTA, moves=moves).detectable(scores, dof)
    claimed, faulty = 1 / (moves * multiplier(epsilon)), 1 / (moves * multiplier(found))

    def p_values():
        means = rng.normal(faulty, 1 / np.sqrt(scores), runs) / np.sqrt(rng.chisquare(dof, runs) / dof)
        return nct.sf(means * np.sqrt(scores), dof, claimed * np.sqrt(scores))

    first, second = p_values(), p_values()
    detected = np.mean((first < 1e-6) | ((first < 0.002) & (second < 0.002)))
    assert detected == pytest.approx(0.98, abs=0.004)


def test_the_result_survives_json():
    result = check_private(noised_sum(1), **CLAIM)
    again = AuditResult.from_dict(json.loads(json.dumps(json_ready(result.to_dict()))))
    assert again.epsilon == result.epsilon
    assert again.trainer == result.trainer
    assert "checked      noise, clipping" in str(result)
    schema = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "result.schema.json").read_text())
    jsonschema.validate(json_ready(result.to_dict()), schema)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"release": 3}, "release must be a function"),
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"delta": 2.0}, "delta must lie in"),
        ({"dim": None}, "dim must be given"),
        ({"dim": 5}, "dim must be at least 20"),
        ({"dim": "many"}, "dim must be a whole number"),
        ({"clients": 0}, "clients must be at least 1"),
        ({"clients": 1_500}, "clients must be at most dim / 2"),
        ({"clip_norm": -1.0}, "clip_norm must be above 0"),
        ({"adjacency": "swap"}, "adjacency must be"),
        ({"aggregate": "median"}, "aggregate must be"),
        ({"updates": "tree"}, "updates must be"),
        ({"like": "tensorflow"}, "like must be"),
        ({"like": 3}, "like must be"),
        ({"shapes": [(3, "a")]}, "shapes must list"),
        ({"shapes": [(3, 4)]}, "dim must be the total size of shapes"),
        ({"weights": [1.0]}, "weights must be one for each"),
        ({"weights": [-1.0] * 100}, "weights must be above 0"),
        ({"noise": "tree"}, "noise must be a TreeNoise"),
        ({"noise": TreeNoise(rounds=50)}, "must be at most dim / 2 under correlated noise"),
        ({"scale": 0.5}, "scale must lie between 1 and 1e"),
        ({"scale": 1e200}, "scale must lie between 1 and 1e"),
        ({"clip_norm": 1e200}, "clip_norm must lie between"),
        ({"epsilon": 1e90}, "epsilon must be at most"),
        ({"most_calls": 2}, "most_calls must be at least 3"),
    ],
)
def test_bad_arguments_are_one_line(changes, message):
    settings = {"release": noised_sum(1), **CLAIM, **changes}
    with pytest.raises(ValueError, match=message) as error:
        check_private(settings.pop("release"), **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("released", "message"),
    [
        (None, "got None"),
        (np.zeros(7), "must return dim = 2,000 numbers"),
        (np.zeros((2, 2_000)), "must return dim = 2,000 numbers"),
        (np.full(2_000, np.nan), "must return finite numbers"),
        (np.zeros(2_000), "got zeros in every call"),
        ("text", "must return an array of real numbers"),
        (np.zeros(2_000, dtype=complex), "must return an array of real numbers"),
        (np.ma.zeros(2_000), "must return an array of real numbers"),
        ([[1.0], [2.0, 3.0]], "must return dim"),
    ],
)
def test_a_wrong_release_is_one_line(released, message):
    with pytest.raises(ValueError, match=message) as error:
        check_private(lambda updates: released, **CLAIM)
    assert "\n" not in str(error.value)


def test_half_precision_of_torch_and_jax_is_accepted():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    release = noised_sum(1)
    assert outcome(lambda updates: torch.from_numpy(release(updates)).bfloat16().requires_grad_()) == "PASS"
    assert outcome(lambda updates: jax.asarray(release(updates), dtype=jax.bfloat16)) == "PASS"
    with pytest.raises(TypeError, match="must return an array of real numbers"):
        check_private(lambda updates: torch.zeros(2_000).to_sparse(), **CLAIM)


def test_progress_counts_the_calls():
    seen = []
    result = check_private(noised_sum(1), **CLAIM, progress=lambda done, total: seen.append((done, total)))
    calls = result.trainer.check.calls
    assert seen == [(done, calls) for done in range(1, calls + 1)]


def test_errors_of_the_function_are_raised():
    def broken(updates):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        assert_private(broken, **CLAIM)
