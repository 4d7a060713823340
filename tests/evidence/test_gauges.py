import numpy as np
import pytest
from scipy import stats
from training import train

from coalmine import Audit, Claim
from coalmine.evidence.gauges.gauge import LEVEL, ratio_quantile

SMALL = {"dim": 4_000, "canaries": 200, "rounds": 12}


def gauges(audit):
    return {gauge.name: gauge for gauge in audit.result().gauges}


def test_quantiles_match_the_length_of_a_noise_vector():
    for dof in (10, 9_000, 4_000_000):
        for p in (1e-9, 1e-3, 0.999):
            assert ratio_quantile(p, dof) == pytest.approx(np.sqrt(stats.chi2.ppf(p, dof) / dof), rel=1e-9)


def test_an_honest_run_raises_no_gauge():
    """Ten honest runs, 24 gauges at 1e-4 each and the rank gauge at 2e-3: a false alarm has probability below 5 %."""
    for seed in range(10):
        found = gauges(train(seed=seed, layers=[("a", 1_000), ("b", 3_000)], presentations=2, **SMALL))
        assert {name for name, gauge in found.items() if gauge.status != "ok"} == set()
        assert set(found) == {
            *("noise", "dilution", "difference", "residual", "pooled residual", "layer a", "layer b"),
            *("repeat", "rank", "repeat of any", "others"),
            *("shape", "distribution", "tails", "bare coordinates", "grid", "spectrum", "neighbours", "shared draws"),
            *(
                "noise follows others",
                "noise follows canaries",
                "shifted repeat",
                "coordinates",
                "weak coordinates",
                "canaries in the release",
                "carry-over",
            ),
            *("layers moved", "layers with a gradient", "signal by layer"),
        }


@pytest.mark.full
def test_an_honest_run_with_sphere_canaries_raises_no_gauge():
    """Sphere canaries overlap: m of them carry md/(m + d) degrees of freedom."""
    for seed in range(5):
        found = gauges(
            train(seed=seed, kind="sphere", dim=400, canaries=40, unobserved=360, rounds=4, noise_multiplier=0.2)
        )
        assert {name for name, gauge in found.items() if gauge.status != "ok"} == set()


def test_the_noise_gauge_detects_less_noise_under_a_small_signal():
    found = gauges(train(signal=0.3, noise=lambda t, rng, dim: rng.normal(size=dim) / 2, **SMALL))
    assert found["noise"].status == "low"
    assert found["noise"].smallest == pytest.approx(np.sqrt(0.25 + 0.09), abs=0.05)
    assert found["residual"].status == "low"


def test_only_the_residual_gauge_detects_less_noise_under_a_large_signal():
    """For noise/√2 the noise gauge is blind where ‖X‖²/(z²C²d) is above ½; the residual gauge is not."""
    found = gauges(train(signal=1.0, noise=lambda t, rng, dim: rng.normal(size=dim) / np.sqrt(2), **SMALL))
    assert found["noise"].status == "ok"
    assert found["residual"].status == "low"


def test_the_residual_gauge_warns_of_too_much_noise():
    found = gauges(train(noise=lambda t, rng, dim: 3 * rng.normal(size=dim), **SMALL))
    assert found["residual"].status == "warning"
    assert found["noise"].status == "ok"


def test_reused_noise_is_detected_with_and_without_others():
    def again(t, rng, dim):
        return np.random.default_rng(5).normal(size=dim)

    found = gauges(train(noise=again, signal=0.3, **SMALL))
    assert found["repeat"].status == "low"
    assert found["repeat"].smallest > 0.9
    assert found["difference"].status == "low"
    assert gauges(train(noise=again, signal=0.3, give_others=False, **SMALL))["difference"].status == "low"


def test_noise_reused_two_rounds_later_is_detected():
    found = gauges(train(noise=lambda t, rng, dim: np.random.default_rng(t % 2).normal(size=dim), signal=0.3, **SMALL))
    assert found["repeat"].status == "low"  # every pair of rounds is compared
    assert found["repeat"].flagged[:2] == (3, 4)
    assert found["repeat of any"].status == "low"


def test_a_layer_without_noise_is_detected_by_its_own_gauge():
    def on_part(t, rng, dim):
        noise = rng.normal(size=dim)
        noise[:40] = 0
        return noise

    found = gauges(train(noise=on_part, layers=[("bias", 40), ("rest", 3_960)], **SMALL))
    assert found["layer bias"].status == "low"
    assert found["layer bias"].smallest < 0.3
    assert found["layer rest"].status == "ok"


def test_dilution_measures_the_signal():
    found = gauges(train(signal=0.0, **SMALL))
    assert found["dilution"].largest == pytest.approx(1, abs=0.06)
    assert gauges(train(signal=1.0, **SMALL))["dilution"].largest > 2


def test_the_level_is_divided_among_rounds():
    found = gauges(train(**SMALL))["noise"]
    assert found.limits[0] == pytest.approx(ratio_quantile(LEVEL / 12, 3_800))


@pytest.mark.parametrize("strength", [3.0, 10.0])
def test_a_block_missing_from_others_is_not_a_violation(strength):
    """One client moves 256 neighbouring coordinates in every round and is missing from `others`."""
    dim, rounds, rng = 4_096, 20, np.random.default_rng(3)
    audit = Audit(dim, canaries=400, seed=3, delta=1e-6, rounds=rounds)
    missing = np.zeros(dim)
    missing[1_000:1_256] = strength
    for number in range(1, rounds + 1):
        present, others = audit.canaries_in_round(number), rng.normal(size=dim)
        delta = others + missing + audit.updates(present, 1.0) + rng.normal(size=dim)
        audit.observe_round(number, delta, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    result = audit.result(claim=Claim(epsilon=4.89, participations=1))
    assert "shifted repeat" in {gauge.name for gauge in result.gauges if gauge.status == "warning"}
    assert result.verdict.outcome == "UNDERPOWERED"
