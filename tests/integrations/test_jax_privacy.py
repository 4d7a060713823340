"""jax_privacy's DP-SGD with canaries: verdicts on the accountant's epsilon, honest and broken."""

from types import SimpleNamespace

import numpy as np
import pytest
from requires import require

require("jax_privacy")
from jax_privacy import batch_selection  # noqa: E402
from jax_training import DELTA, EXAMPLES, POISSON, RATE, STEPS, data, gaussian, legs, train  # noqa: E402

from coalmine import Claim, Poisson, amplified_epsilon, data_canaries, mechanism_epsilon  # noqa: E402
from coalmine.verdict.amplified_claim import SampledClaim  # noqa: E402

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


@pytest.mark.full
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
def test_unaccounted_batch_selection_is_a_violation_of_the_sampling_leg(strategy):
    privatizer = gaussian()
    result = privatizer.audit.finish(**train(privatizer, strategy))
    assert result.verdict.outcome == "VIOLATION"
    assert legs(result)["sampling"] == "VIOLATION"


def shuffled_epochs():
    rng = np.random.default_rng(1)
    for _ in range(STEPS // 10):
        yield from rng.permutation(EXAMPLES).reshape(10, -1)


def poisson(**options):
    return batch_selection.CyclicPoissonSampling(iterations=STEPS, **options)


@pytest.mark.parametrize(
    ("strategy", "outcome"),
    [
        (POISSON, "PASS"),
        (poisson(sampling_prob=0.13), "VIOLATION"),
        (poisson(sampling_prob=RATE, truncated_batch_size=60), "VIOLATION"),
        (poisson(sampling_prob=1.0, cycle_length=10), "VIOLATION"),
        (poisson(sampling_prob=0.2, cycle_length=2), "VIOLATION"),
        (poisson(sampling_prob=0.5, cycle_length=5), "VIOLATION"),
        (batch_selection.FixedBatchSampling(batch_size=60, iterations=STEPS), "VIOLATION"),
        (batch_selection.BallsInBinsSampling(iterations=STEPS, cycle_length=10), "VIOLATION"),
        (None, "VIOLATION"),
        (batch_selection.BMinSepSampling(sampling_prob=RATE, iterations=STEPS, min_sep=4), "UNDERPOWERED"),
    ],
    ids=repr,
)
def test_batches_of_every_strategy_against_a_poisson_event(strategy, outcome):
    """The sampling leg alone. Examples that keep a distance are picked less often, and no attack on them is known."""
    batches = shuffled_epochs() if strategy is None else strategy.batch_iterator(EXAMPLES, rng=1)
    canary_of = np.full(EXAMPLES, -1)
    canary_of[np.random.default_rng(5).permutation(EXAMPLES)[:500]] = np.arange(500)
    entries = []
    for number, indices in enumerate(batches, start=1):
        present = canary_of[np.asarray(indices, np.int64)]
        present = np.sort(present[present >= 0]).astype(np.int32)
        entries.append(SimpleNamespace(number=number, present=present, participants=len(indices)))
    scheme = Poisson(RATE, STEPS)
    epsilon = float(amplified_epsilon(1.0, scheme, DELTA))
    claim = Claim(epsilon, sampling=scheme, noise_multiplier=1.0, sampler_observed=True)
    found = SampledClaim.of(claim, delta=DELTA, rounds=STEPS).sampler_finding(
        entries, SimpleNamespace(canaries=500), [1.0] * STEPS
    )
    assert found.outcome == outcome, found.sentence()


def test_groups_that_take_turns_have_the_epsilon_of_their_mixture():
    """Two groups with one turn each: the target is in a turn with probability 1/2, as under Poisson at half the rate."""
    delta, rng = 1e-3, np.random.default_rng(3)
    claim = Claim(0.1, sampling=Poisson(0.25, 3), noise_multiplier=1.0)
    sampled = SampledClaim.of(claim, delta=delta, rounds=3)
    groups = [np.arange(0, 200), np.arange(200, 400)] * 5
    picked = [group[rng.random(200) < 0.5] for group in groups]
    numbers = range(1, 11)
    found = sampled._cyclic(SimpleNamespace(rate=0.25, rate_interval=(0.25, 0.25)), picked, numbers, 400)
    x = np.linspace(-10, 12, 200_001)
    absent, present = (np.exp(-0.5 * (x - mean) ** 2) / np.sqrt(2 * np.pi) for mean in (0, 1))
    mixed = absent + 0.5 * 0.5 * (present - absent)
    beyond = np.trapezoid(np.maximum(mixed - np.exp(found) * absent, 0), x)
    assert beyond == pytest.approx(delta, rel=0.02)
    honest = [np.flatnonzero(rng.random(400) < 0.25) for _ in numbers]
    assert sampled._cyclic(SimpleNamespace(rate=0.25, rate_interval=(0.25, 0.25)), honest, numbers, 400) == 0.0


def test_data_canaries_are_scored_by_the_predictions_of_the_parameters():
    records = data_canaries.outliers([-1] * 30, [1] * 30, count=60, classes=100, seed=b"the seed of records")
    common = {"data_canaries": records, "predict": lambda params, inputs: inputs @ params["w"] + params["b"][0]}
    with pytest.raises(ValueError, match=r"train on canaries\.insert"):
        gaussian(**common)
    records.insert(data())
    with pytest.raises(TypeError, match="data_canaries need predict="):
        gaussian(data_canaries=records)
    privatizer = gaussian(**common)
    trained = train(privatizer, POISSON)
    with pytest.raises(TypeError, match="to score data_canaries"):
        privatizer.audit.finish(noise_state=trained["noise_state"])
    result = privatizer.audit.finish(**trained)
    scores = records.score(lambda inputs: inputs @ np.asarray(trained["params"]["w"]) + trained["params"]["b"][0])
    expected = records.scored(scores, delta=DELTA)["black-box"].area  # before training all logits are 0
    assert result.records["black-box"].area == pytest.approx(expected)
