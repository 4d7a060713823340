import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.gaussians import Gaussian
from coalmine.estimators.literature.canife import round_epsilons
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.simulation.clipping import clip_factors
from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import cnn_dropout, mlp
from coalmine.simulation.tasks.image_tasks import digits
from reproduction.canife import (
    CanifeSettings,
    craft_canaries,
    interference,
    mock_scores,
    sample_batch,
    sample_gradients,
    softened,
)
from reproduction.canife.comparison import Comparison, train
from reproduction.canife.gradients import Factors

CLASSES = 10


@pytest.fixture(scope="module")
def task():
    return digits()


@pytest.fixture(scope="module")
def trained(task):
    """Three partly trained models, after 30 steps of SGD."""
    gradients, examples = sample_gradients(task.model), softened(task.train, CLASSES)
    vectors = torch.stack([task.model.initial(torch.Generator().manual_seed(seed)) for seed in range(3)])
    stream = torch.Generator().manual_seed(1)
    for _ in range(30):
        batch = gradients(vectors, *sample_batch(examples, (3, 64), stream))
        vectors = vectors - 0.5 / 64 * batch.weighted_sum(clip_factors(batch.norms(), 1.0))
    return vectors


@pytest.fixture(scope="module")
def crafted(task, trained):
    """A canary for each model, with the pool it was crafted against and its initial sample."""
    settings = CanifeSettings(noise_multiplier=0.2, pool_size=200, design_steps=300)
    gradients, held_out = sample_gradients(task.model), softened(task.test, CLASSES)
    index = torch.arange(200).expand(3, 200)
    pool = gradients(trained, held_out.inputs[index], held_out.labels[index])
    start = held_out.inputs[200:203], held_out.labels[200:203]
    canaries = craft_canaries(gradients, trained, pool, sample=start[0], label=start[1], settings=settings)
    return canaries, pool, start


def one_by_one(model, vectors, inputs, labels):
    """Gradients of every sample by plain autograd, as models × samples × dim."""
    rows = []
    for vector, some, truth in zip(vectors, inputs, labels, strict=True):
        leaf = vector.clone().requires_grad_()
        losses = [
            functional.cross_entropy(model.logits(model.split(leaf), sample[None], ()), label[None])
            for sample, label in zip(some, truth, strict=True)
        ]
        rows.append(torch.stack([torch.autograd.grad(loss, leaf)[0] for loss in losses]))
    return torch.stack(rows)


@pytest.mark.parametrize("dense", [True, False])
def test_gradients_agree_with_autograd(dense):
    """Norms, products and weighted sums, from outer products and dense, against one sample at a time."""
    model = mlp(6, 5, 4, 3)
    if not dense:
        model = replace(model, layers=())
    stream = torch.Generator().manual_seed(0)
    vectors = torch.randn(2, model.dim, generator=stream, dtype=torch.float64)
    inputs = torch.randn(2, 7, 6, generator=stream, dtype=torch.float64)
    labels = torch.rand(2, 7, 3, generator=stream, dtype=torch.float64).softmax(dim=2)
    weights = torch.rand(2, 7, generator=stream, dtype=torch.float64)
    found = sample_gradients(model)(vectors, inputs, labels)
    alone = sample_gradients(model)(vectors, inputs[:, :1], labels[:, :1])
    rows = one_by_one(model, vectors, inputs, labels)
    torch.testing.assert_close(found.norms(), rows.norm(dim=2))
    torch.testing.assert_close(found.products(alone), (rows * rows[:, :1]).sum(dim=2))
    torch.testing.assert_close(found.weighted_sum(weights), (rows * weights.unsqueeze(2)).sum(dim=1))


def test_both_methods_craft_the_same_canary(task, trained):
    settings = CanifeSettings(noise_multiplier=0.2, pool_size=20, design_steps=20)
    held_out, index = softened(task.test, CLASSES), torch.arange(20).expand(3, 20)
    losses = []
    for model in (task.model, replace(task.model, layers=())):
        gradients = sample_gradients(model)
        pool = gradients(trained, held_out.inputs[index], held_out.labels[index])
        start = held_out.inputs[20:23], held_out.labels[20:23]
        canaries = craft_canaries(gradients, trained, pool, sample=start[0], label=start[1], settings=settings)
        losses.append(canaries.losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-5)


def test_a_crafted_canary_is_orthogonal_to_its_pool_and_has_the_clip_norm(task, trained, crafted):
    canaries, pool, (sample, label) = crafted
    gradients = sample_gradients(task.model)
    plain = interference(pool, gradients(trained, sample.unsqueeze(1), label.unsqueeze(1)))
    assert (interference(pool, canaries.gradient) < plain / 10).all()
    assert (canaries.losses[-1] < canaries.losses[0] / 100).all()
    assert (canaries.norm > 1 - 1e-6).all()
    torch.testing.assert_close(canaries.update.norm(dim=1), torch.ones(3))
    torch.testing.assert_close(canaries.label.sum(dim=1), torch.ones(3))
    rows = one_by_one(task.model, trained, canaries.sample.unsqueeze(1), canaries.label.unsqueeze(1))[:, 0]
    torch.testing.assert_close(canaries.update, rows / rows.norm(dim=1, keepdim=True), rtol=1e-3, atol=1e-5)


def test_a_short_canary_grows_to_the_clip_norm(task, trained):
    """Starts from a sample whose gradient has a tenth of the clip norm."""
    gradients, held_out = sample_gradients(task.model), softened(task.test, CLASSES)
    index = torch.arange(100).expand(3, 100)
    pool = gradients(trained, held_out.inputs[index], held_out.labels[index])
    sample, label = held_out.inputs[100:103], held_out.labels[100:103]
    clip = 10 * float(gradients(trained, sample.unsqueeze(1), label.unsqueeze(1)).norms().min())
    settings = CanifeSettings(noise_multiplier=0.2, clip_norm=clip, design_steps=400)
    canaries = craft_canaries(gradients, trained, pool, sample=sample, label=label, settings=settings)
    assert (canaries.norm > 0.95 * clip).all()
    assert (interference(pool, canaries.gradient) < 0.05).all()


def test_zero_gradients_are_handled():
    """The slope of a norm at 0 is infinite, and infinity times 0 is NaN."""
    slope = torch.zeros(1, 1, 3, requires_grad=True)
    norms = Factors((torch.ones(1, 1, 2),), (slope,)).norms()
    (found,) = torch.autograd.grad(norms.sum(), slope)
    assert float(norms.detach()) < 1e-18
    assert torch.isfinite(found).all()


def test_crafted_canary_interferes_little_with_unseen_samples(task, trained, crafted):
    canaries, _, (sample, label) = crafted
    gradients = sample_gradients(task.model)
    others = gradients(
        trained, *sample_batch(softened(task.train, CLASSES), (3, 500), torch.Generator().manual_seed(5))
    )
    plain = interference(others, gradients(trained, sample.unsqueeze(1), label.unsqueeze(1)))
    assert (interference(others, canaries.gradient) < plain / 5).all()


@pytest.fixture(scope="module")
def silent(task, trained):
    """Examples whose labels the first model predicts with certainty, so that their gradients vanish."""
    with torch.no_grad():
        logits = task.model.logits(task.model.split(trained[0]), task.train.inputs, ())
    return Examples(task.train.inputs, logits.softmax(dim=1))


@pytest.fixture(scope="module")
def silent_scores(task, trained, crafted, silent):
    """20,000 scores of each kind for a canary without interference, noise multiplier 0.5, clip norm 3."""
    copies = 100
    settings = CanifeSettings(noise_multiplier=0.5, clip_norm=3.0, scores=200, batch_size=4)
    canaries = replace(crafted[0], update=3 * crafted[0].update[:1].expand(copies, -1))
    return [
        table.double().flatten().numpy()
        for table in mock_scores(
            sample_gradients(task.model),
            trained[:1].expand(copies, -1),
            canaries,
            silent,
            settings,
            torch.Generator().manual_seed(3),
        )
    ]


@pytest.mark.full
def test_without_interference_scores_follow_the_gaussian_mechanism(silent_scores):
    for scores, mean in zip(silent_scores, (1.0, 0.0), strict=True):
        assert scores.mean() == pytest.approx(mean, abs=4 * 0.5 / math.sqrt(scores.size))
        assert scores.std() == pytest.approx(0.5, rel=4 / math.sqrt(2 * scores.size))


def test_epsilon_of_a_silent_round_is_the_analytical_epsilon(silent_scores):
    """Gaussians fitted to the scores give the mechanism's epsilon; its slope in the mean sets the tolerance."""
    present, _ = silent_scores
    truth = mechanism_epsilon(0.5, delta=1e-5)
    found = epsilon_estimate(present, null=Gaussian(0.0, 0.5), delta=1e-5, variance="null", confidence=None).epsilon
    error = 4 / math.sqrt(present.size)  # error of the shift 1/z, in units of the scores' std
    slope = (mechanism_epsilon(0.5 / 1.01, delta=1e-5) - truth) / 0.02  # the shift is 2; 1 % of it is 0.02
    assert found == pytest.approx(truth, abs=slope * error)


def test_the_published_epsilon_of_a_silent_round_follows_from_its_error_rates(silent_scores):
    """At the threshold with the fewest errors, ½, both rates are Φ(−1/2z): far below the analytical epsilon."""
    found = round_epsilons([scores[None] for scores in silent_scores], delta=1e-5)[0]
    rate = 0.5 * math.erfc(1.0 / math.sqrt(2))
    error = math.sqrt(rate * (1 - rate) / silent_scores[0].size)
    bounded = rate + 1.96 * error  # Clopper-Pearson's margin
    expected = math.log((1 - 1e-5 - bounded) / bounded)
    assert found == pytest.approx(expected, abs=4 * math.sqrt(2) * error / rate)
    assert found < mechanism_epsilon(0.5, delta=1e-5) / 3


def test_interference_adds_its_variance_to_the_scores(task, trained):
    """For a plain sample as canary, against the mean and variance of sums over a batch sampled with replacement."""
    gradients, examples = sample_gradients(task.model), softened(task.train, CLASSES)
    vectors = trained[:1].expand(50, -1)
    settings = CanifeSettings(noise_multiplier=0.2, scores=40, batch_size=16, design_steps=0)
    sample, label = examples.inputs[:1].expand(50, -1), examples.labels[:1].expand(50, -1)
    nobody = gradients(vectors, sample.unsqueeze(1), label.unsqueeze(1))
    canaries = craft_canaries(gradients, vectors, nobody, sample=sample, label=label, settings=settings)
    update = canaries.update[0]
    rows = one_by_one(task.model, trained[:1], examples.inputs[None], examples.labels[None])[0]
    products = (rows * clip_factors(rows.norm(dim=1), 1.0).unsqueeze(1)) @ update
    length = float(update.square().sum())
    tables = mock_scores(gradients, vectors, canaries, examples, settings, torch.Generator().manual_seed(4))
    for table, own in zip(tables, (length, 0.0), strict=True):
        scores = table.flatten()
        variance = 0.04 * length + 16 * float(products.var(correction=0))
        assert variance > 2 * 0.04 * length
        mean = own + 16 * float(products.mean())
        assert float(scores.mean()) == pytest.approx(mean, abs=4 * math.sqrt(variance / 2000))
        assert float(scores.var()) == pytest.approx(variance, rel=4 * math.sqrt(2 / 2000))


def test_audited_rounds_are_the_first_and_every_hundredth_after_it():
    settings = CanifeSettings(noise_multiplier=0.2)
    assert list(settings.audited(469)) == [1, 101, 201, 301, 401]
    assert list(settings.audited(1)) == [1]
    assert settings.noise_std == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise_multiplier": -1}, "noise_multiplier must be at least 0, got -1"),
        ({"clip_norm": 0}, "clip_norm must be above 0, got 0"),
        ({"pool_size": 0}, "pool_size must be at least 1, got 0"),
        ({"scores": 9}, "scores must be at least 10, got 9"),
        ({"design_rate": math.nan}, "design_rate must be finite"),
    ],
)
def test_invalid_settings_are_rejected_with_one_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        CanifeSettings(**{"noise_multiplier": 0.2} | wrong)


def test_models_with_dropout_are_rejected():
    with pytest.raises(ValueError, match="without dropout"):
        sample_gradients(cnn_dropout(10))


# DP-SGD of several runs, audited both ways


@pytest.fixture(scope="module")
def plan():
    crafting = CanifeSettings(
        noise_multiplier=0.2, batch_size=25, pool_size=64, design_steps=40, audit_every=30, scores=20
    )
    return Comparison(runs=2, canaries=100, learning_rate=0.2, crafting=crafting)


@pytest.fixture(scope="module")
def compared(task, plan):
    return train(task, plan)


def test_every_run_is_audited_both_ways(task, compared):
    assert compared.crafted_observed.shape == compared.crafted_unobserved.shape == (2, 2, 20)
    assert compared.observed.shape == compared.unobserved.shape == compared.known_others.shape == (2, 100)
    assert compared.data_norms.shape == (2, 60)
    assert (compared.data_norms <= 25).all()
    assert (compared.accuracy > 0.6).all()
    assert compared.interference.shape == (2, 2, 3)
    assert np.isfinite(compared.known_others).all()
    assert (compared.dim, compared.examples, compared.device) == (task.model.dim, 1500, "cpu")


def test_known_others_scores_follow_the_gaussian_mechanism(compared):
    """√d times the cosine of a canary with itself plus noise is N(1/z, 1), apart from the canary's own length."""
    scores = compared.known_others.flatten() * math.sqrt(compared.dim)
    length = math.sqrt(1 + 1 / (0.04 * compared.dim))
    assert scores.mean() == pytest.approx(5 / length, abs=4 / math.sqrt(scores.size))
    assert scores.std() == pytest.approx(1.0, rel=4 / math.sqrt(2 * scores.size))


def test_scores_of_unobserved_canaries_are_maxima_over_their_rounds(compared):
    """The median of the largest of 60 normals is 2.27; the direction that rounds share makes it smaller."""
    median = np.median(compared.unobserved) * math.sqrt(compared.dim)
    error = 1.25 * compared.unobserved.std() * math.sqrt(compared.dim / compared.unobserved.size)
    assert 1.9 < median < 2.27 + 4 * error
    assert np.median(compared.observed) > np.median(compared.unobserved) * 1.2


def test_the_same_seed_trains_the_same_runs(task, plan, compared):
    again = train(task, plan)
    np.testing.assert_array_equal(again.crafted_observed, compared.crafted_observed)
    np.testing.assert_array_equal(again.observed, compared.observed)
    other = train(task, replace(plan, seed=2, crafted=False))
    assert other.crafted_observed.shape == (2, 0, 0)
    assert not np.array_equal(other.observed, compared.observed)


def test_momentum_hides_canaries_from_single_steps(task, plan, compared):
    moved = train(task, replace(plan, momentum=0.9, learning_rate=0.02, crafted=False))
    apart = [np.median(found.observed) / np.median(found.unobserved) for found in (compared, moved)]
    assert apart[1] < apart[0]
    scores = moved.known_others.flatten() * math.sqrt(moved.dim)
    assert scores.mean() == pytest.approx(5, abs=4 / math.sqrt(scores.size) + 0.01)  # with momentum inverted


def test_impossible_comparisons_are_rejected(task, plan):
    with pytest.raises(ValueError, match="rounds must be at most 60, one epoch, got 61"):
        train(task, replace(plan, rounds=61))
    with pytest.raises(ValueError, match="pool_size must be below the number of held-out examples, 297, got 297"):
        train(task, replace(plan, crafting=replace(plan.crafting, pool_size=297)))
    with pytest.raises(ValueError, match="momentum must lie in"):
        replace(plan, momentum=1.0)
