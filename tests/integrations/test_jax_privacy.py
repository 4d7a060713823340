"""jax_privacy's DP-SGD with canaries: verdicts on the accountant's epsilon, honest and broken."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from requires import require

require("jax_privacy")
from jax_privacy import batch_selection  # noqa: E402
from jax_training import DELTA, POISSON, STEPS, gaussian, legs, train  # noqa: E402

from coalmine import mechanism_epsilon  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")


def test_honest_training_passes_on_the_accountants_epsilon():
    privatizer = gaussian()
    result = privatizer.audit.finish(**train(privatizer, POISSON))
    assert result.verdict.outcome == "PASS"
    assert result.claim.amplified
    assert set(legs(result).values()) == {"PASS"}
    rung = result["known-others"]
    exact = mechanism_epsilon(1.0, delta=DELTA, participations=rung.headline.presentations)
    assert rung.interval[0] <= exact <= rung.interval[1]
    assert next(item for item in result.audited if item.name == "clipping").status == "not checked"


def test_half_the_noise_is_a_violation_of_the_noise_leg():
    privatizer = gaussian(stddev=0.5)
    result = privatizer.audit.finish(**train(privatizer, POISSON))
    assert result.verdict.outcome == "VIOLATION"
    assert legs(result)["noise"] == "VIOLATION"


@pytest.mark.parametrize(
    "strategy",
    [
        batch_selection.BallsInBinsSampling(iterations=STEPS, cycle_length=10),
        batch_selection.FixedBatchSampling(batch_size=60, iterations=STEPS),
        pytest.param(
            batch_selection.CyclicPoissonSampling(sampling_prob=0.13, iterations=STEPS), marks=pytest.mark.slow
        ),
    ],
    ids=["balls in bins", "fixed size", "higher rate"],
)
def test_another_batch_selection_than_accounted_is_a_violation_of_the_sampling_leg(strategy):
    privatizer = gaussian()
    result = privatizer.audit.finish(**train(privatizer, strategy))
    assert result.verdict.outcome == "VIOLATION"
    assert legs(result)["sampling"] == "VIOLATION"
