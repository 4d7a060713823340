"""Faults of public packages, each written again in a few lines: none of them passes. A first trial had passed them."""

from typing import Any

import numpy as np
import pytest
import torch

from coalmine import mechanism_epsilon
from coalmine.testing import check_private
from coalmine.testing.torch import state_dicts, step_release

EPSILON = float(mechanism_epsilon(1.0, delta=1e-5))
RNG = np.random.default_rng


def clipped(rows, norm=1.0):
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True) / norm, 1.0)


def gradients_never_cleared(rng):
    """deepee 0.1.9, its standard loop: each replica's gradient is added to that of the steps before, then clipped."""
    kept: list[Any] = [0.0]

    def release(rows):
        kept[0] = clipped(kept[0] + rows)  # the clip changes the gradients in place
        return (kept[0].sum(axis=0) + rng.normal(size=rows.shape[1])) / len(rows)

    return release


def one_microbatch(rng):
    """tensorflow-privacy 0.9 with num_microbatches=1: the mean of the batch is clipped, so one record turns it around."""
    return lambda rows: clipped(rows.mean(axis=0)) + rng.normal(size=rows.shape[1])


def batch_clip(rng):
    """pyvacy 0.0.32: the sum of the batch is clipped, and its noise is divided by the root of the batch."""
    return lambda rows: clipped(rows.sum(axis=0)) / len(rows) + rng.normal(size=rows.shape[1]) / len(rows) ** 0.5


@pytest.mark.parametrize("fault", [gradients_never_cleared, one_microbatch, batch_clip])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fault_of_a_public_package_never_passes(fault, seed):
    result = check_private(fault(RNG(seed)), epsilon=EPSILON, delta=1e-5, dim=1_000, seed=seed)
    assert result.verdict.outcome != "PASS"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_batch_clip_whose_generator_cannot_be_replayed_never_passes(seed):
    """TensorFlow draws its noise where no replay reaches, and a batch of many hides what one client can do."""

    def noises():  # a generator of Python cannot be copied
        rng = RNG(seed)
        while True:
            yield rng.normal(size=1_000)

    noise = noises()

    def release(rows):
        return clipped(rows.mean(axis=0)) + next(noise)

    result = check_private(release, epsilon=EPSILON, delta=1e-5, dim=1_000, clients=40, seed=seed)
    assert result.verdict.outcome != "PASS"


@pytest.mark.parametrize(("clients", "scale"), [(100, 10.0), (20, 1.0), (3, 10.0)])
def test_what_is_left_of_an_earlier_call_never_passes(clients, scale):
    """The clip of the last update hides what is left of long ones behind it: short updates bring it out."""
    release = gradients_never_cleared(RNG(5))
    found = check_private(release, epsilon=EPSILON, delta=1e-5, dim=1_000, clients=clients, scale=scale)
    assert found.verdict.outcome != "PASS"


def test_a_correct_function_carries_nothing_over():
    for seed in range(3):
        rng = RNG(seed)
        found = check_private(
            lambda rows, rng=rng: clipped(rows).sum(axis=0) + rng.normal(size=rows.shape[1]),
            epsilon=EPSILON, delta=1e-5, dim=1_000, seed=seed,
        )  # fmt: skip
        assert found.verdict.outcome == "PASS"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_contribution_that_is_19_percent_too_long_in_two_layers_never_passes(seed):
    """Each layer is clipped by itself, to a norm with which both together are 1.19 clip norms long."""
    rng = RNG(seed)

    def release(clients):
        sums = [sum(clipped(client[layer].ravel(), 1.19 / 2**0.5) for client in clients) for layer in (0, 1)]
        return [total + rng.normal(size=total.shape) for total in sums]

    result = check_private(release, epsilon=EPSILON, delta=1e-5, shapes=[(500,), (500,)], seed=seed)
    assert result.verdict.outcome == "VIOLATION"


@pytest.mark.parametrize("norms", [(1.0, 1.0), (0.99, 0.66)])
def test_layers_clipped_as_if_each_were_the_model_never_pass(norms):
    """The most frequent fault: every tensor is clipped to the norm of the whole, √2 too long for two."""
    rng = RNG(0)

    def release(clients):
        sums = [sum(clipped(client[i].ravel(), norm) for client in clients) for i, norm in enumerate(norms)]
        return [total + rng.normal(size=total.shape) for total in sums]

    result = check_private(release, epsilon=EPSILON, delta=1e-5, shapes=[(960,), (40,)])
    assert result.verdict.outcome != "PASS"


def steps(model, clear=True, per_example=True, noise=1.0):
    """DP-SGD by microbatches of one, as several packages have it."""
    generator = torch.Generator().manual_seed(0)
    names = list(model.parameters())

    def step(batch):
        total = [torch.zeros_like(p) for p in names]
        for example in batch if per_example else [batch]:
            if clear:
                model.zero_grad()
            model(example).sum().backward()
            norm = torch.cat([p.grad.reshape(-1) for p in names]).norm()
            for summed, p in zip(total, names, strict=True):
                summed += p.grad / max(float(norm), 1.0)
        with torch.no_grad():
            for summed, p in zip(total, names, strict=True):
                p -= summed + noise * torch.randn(p.shape, generator=generator)

    return step


@pytest.mark.parametrize(
    ("faulty", "outcomes"),
    [
        ({}, {"PASS"}),
        ({"noise": 0.5}, {"VIOLATION"}),
        ({"per_example": False}, {"VIOLATION", "UNDERPOWERED"}),
        ({"clear": False}, {"VIOLATION", "UNDERPOWERED"}),
    ],
    ids=["honest", "half the noise", "batch clip", "never cleared"],
)
def test_a_step_in_torch_is_tested_by_a_linear_probe(faulty, outcomes):
    release = step_release(lambda model: steps(model, **faulty), [(300,), (200,)])
    result = check_private(release, epsilon=EPSILON, delta=1e-5, dim=500, clients=40)
    assert result.verdict.outcome in outcomes


@pytest.mark.parametrize("deltas", [False, True])
@pytest.mark.parametrize(("weighted", "outcomes"), [(False, {"PASS"}), (True, {"VIOLATION", "UNDERPOWERED"})])
def test_an_aggregation_of_state_dicts_is_tested_with_its_weights(deltas, weighted, outcomes):
    """Noise for a mean of equals; with weights by the number of examples the heaviest client counts for more."""
    model = {"w": torch.full((20, 20), 3.0), "seen": torch.tensor(7), "b": torch.zeros(100)}
    generator = torch.Generator().manual_seed(1)

    def aggregate(clients):
        assert all(int(state["seen"]) == 7 for _, state in clients)
        total = {name: torch.zeros_like(model[name]) for name in ("w", "b")}
        shares = [count if weighted else 1 for count, _ in clients]
        for share, (_, state) in zip(shares, clients, strict=True):
            update = {name: state[name] - (0 if deltas else model[name]) for name in total}
            norm = torch.cat([part.reshape(-1) for part in update.values()]).norm()
            for name, part in update.items():
                total[name] += share / sum(shares) * part / max(float(norm), 1.0)
        noisy = {
            name: value + torch.randn(value.shape, generator=generator) / len(clients) for name, value in total.items()
        }
        return {name: value + (0 if deltas else model[name]) for name, value in noisy.items()} | {"seen": model["seen"]}

    weights = [1.0] * 35 + [30.0] * 5
    release = state_dicts(aggregate, model, deltas=deltas)
    result = check_private(release, epsilon=EPSILON, delta=1e-5, dim=500, clients=40, weights=weights)
    assert result.verdict.outcome in outcomes


def test_what_cannot_be_probed_is_one_line():
    with pytest.raises(ValueError, match="floating-point tensors"):
        state_dicts(lambda clients: clients[0][1], {"seen": torch.tensor(1)})
    with pytest.raises(ValueError, match="without 'w'"):
        state_dicts(lambda clients: {}, {"w": torch.zeros(30)})(RNG(0).normal(size=(2, 30)))
    with pytest.raises(TypeError, match="make_step must return a function"):
        step_release(lambda model: None, [(30,)])  # type: ignore[return-value]
