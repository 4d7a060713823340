"""The training loop against a plain version of Algorithms 2 and 3, and its audit."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from coalmine import mechanism_epsilon
from coalmine.simulation import RunConfig, Steps, simulate
from coalmine.simulation.batches import draw_batches
from coalmine.simulation.clipping import clip_factors
from coalmine.simulation.config import CanarySettings
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import client_engine
from coalmine.simulation.noise_addition import gaussian_noise
from coalmine.simulation.participation import write_rounds
from coalmine.simulation.randomness import numpy_stream, torch_stream
from coalmine.simulation.training_run import prepared

SHORT = {"rounds": 12, "canaries": {"count": 300}}


def config(level: str = "client", **changes: Any) -> RunConfig:
    made = RunConfig.from_dict(merged(merged(task_defaults("digits", level), SHORT), changes))
    return dataclasses.replace(made, engine=made.engine.resolved())


def clipped(vector: np.ndarray, norm: float) -> np.ndarray:
    return vector * min(1.0, norm / np.linalg.norm(vector))


def trained(settings: RunConfig, steps: Steps | None = None) -> tuple[Training, torch.Tensor]:
    with prepared(settings, None, steps) as training:
        state = training.initial_state()
        list(training.rounds(state))
        return training, state.model_vector


@pytest.mark.parametrize("divide_by", ["actual", "expected"])
def test_rounds_follow_algorithm_2(divide_by):
    """θ ← θ + η(Σ Clip(τ_j(θ)) + Σ Proj(c_i) + Z)/n, one client and canary at a time, in float64."""
    settings = config(rounds=3, privacy={"divide_by": divide_by}, server={"learning_rate": 0.8}, canaries={"count": 40})
    training, found = trained(settings)
    audit, task, clip_norm = training.audit, training.task, settings.privacy.clip_norm
    engine = client_engine("one-by-one", task.model, task.train, settings.client)
    theta = training.initial_vector().double().numpy()
    for number in (1, 2, 3):
        cohort = training.cohorts.of_round(number)
        owned = [task.population.examples(client) for client in cohort.clients]
        batches = draw_batches(owned, epochs=2, batch_size=16, rng=numpy_stream(1, "batches", number))
        total = np.zeros_like(theta)
        for update in engine.updates(torch.from_numpy(theta).float(), batches):
            total += clipped(update[0].double().numpy(), clip_norm)
        for canary in cohort.canaries:
            sent = audit.update(canary, clip_norm, scale=10.0, like=np.zeros(1))
            assert np.linalg.norm(sent) == pytest.approx(10 * clip_norm)
            total += clipped(sent, clip_norm)
        noise = torch.randn(len(theta), generator=torch_stream(1, "noise", number))
        total += noise.double().numpy() * settings.privacy.noise_multiplier * clip_norm
        n = len(cohort) if divide_by == "actual" else 50 + 40 / 3
        theta += 0.8 * total / n
    np.testing.assert_allclose(found.numpy(), theta, rtol=1e-3, atol=1e-5)


def test_examples_train_by_the_mean_of_their_clipped_gradients():
    """DP-SGD: θ ← θ − η(Σ Clip(∇ℓ_j) − Σ canaries)/n, one gradient at a time by autograd; n is the expected number."""
    settings = config("example", rounds=2, privacy={"noise_multiplier": 0.0}, canaries={"count": 20})
    training, found = trained(settings)
    model, data, clip_norm = training.task.model, training.task.train, settings.privacy.clip_norm
    theta = training.initial_vector()
    for number in (1, 2):
        cohort = training.cohorts.of_round(number)
        total = np.zeros(model.dim)
        for example in cohort.clients:
            leaf = theta.clone().requires_grad_()
            logits = model.logits(model.split(leaf), data.inputs[example : example + 1], ())
            torch.nn.functional.cross_entropy(logits, data.labels[example : example + 1]).backward()
            assert leaf.grad is not None
            total -= clipped(leaf.grad.double().numpy(), clip_norm)
        for canary in cohort.canaries:
            total += training.audit.update(canary, clip_norm, like=np.zeros(1))
        theta = theta + torch.from_numpy(settings.server.learning_rate * total / (250 + 20 / 2)).float()
    np.testing.assert_allclose(found.numpy(), theta.numpy(), rtol=1e-3, atol=1e-5)


def test_noise_has_its_std_and_is_independent_in_every_round():
    like = torch.zeros(100_000)
    first, second = (gaussian_noise(0.3, like, torch_stream(1, "noise", number)) for number in (1, 2))
    assert first.std().item() == pytest.approx(0.3, rel=4 / np.sqrt(2 * 100_000))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / np.sqrt(100_000)
    torch.testing.assert_close(first, gaussian_noise(0.3, like, torch_stream(1, "noise", 1)))


def test_runs_are_determined_by_config_and_seed():
    first, second, other = (trained(config(rounds=3, seed=seed))[1] for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("changes", "presentations"),
    [
        ({"rounds": 40}, 1),
        ({"canaries": {"presentations": [4]}}, 4),
        ({"privacy": {"clipping": "adaptive", "clip_norm": 0.1}}, 1),
        ({"server": {"optimizer": "adam", "learning_rate": 0.02}}, 1),
        ({"server": {"momentum": 0.9, "learning_rate": 0.3}}, 1),
        ({"participation": {"kind": "limited", "clients_per_round": 20, "separation": 4}}, 1),
        ({"canaries": {"pattern": "clients"}}, 3),
        pytest.param({"canaries": {"kind": "sphere", "count": 100, "unobserved": 100}}, 1, marks=pytest.mark.full),
    ],
    ids=["spread", "four times", "adaptive", "adam", "momentum", "limited", "as clients", "sphere"],
)
def test_known_others_recovers_the_analytical_epsilon(changes, presentations):
    """The mean score is √R/z_Δ within its standard error, which includes that of the null's scale."""
    outcome = simulate(config(**changes))
    row = outcome.adversaries["known-others"].headline
    assert row.presentations == presentations == outcome.trainer.presentations
    mean = np.sqrt(presentations) / outcome.trainer.update_noise_multiplier
    dof = 9610 - row.canaries
    error = np.sqrt(1 / row.canaries + mean**2 / (2 * dof))
    assert row.estimate.mean == pytest.approx(mean, abs=4 * error)
    assert outcome.trainer.update_epsilon == pytest.approx(
        mechanism_epsilon(outcome.trainer.update_noise_multiplier, delta=1e-6, participations=presentations)
    )
    assert not [gauge for gauge in outcome.gauges if gauge.status == "low"]


def noise_for(epsilon: float, delta: float) -> float:
    """The noise multiplier of the Gaussian mechanism with this epsilon: its two tails, solved for z."""

    def excess(z: float) -> float:
        return float(norm.cdf(0.5 / z - epsilon * z) - np.exp(epsilon + norm.logcdf(-0.5 / z - epsilon * z)) - delta)

    return float(brentq(excess, 0.05, 50, xtol=1e-12))


@pytest.mark.parametrize("presentations", [1, 4])
def test_updates_and_count_of_an_adaptive_clip_compose_to_the_total_epsilon(presentations):
    """The reported epsilons of updates and count, converted back to noise: their 1/z² add up to R/z² of the run."""
    privacy = {"clipping": "adaptive", "noise_multiplier": 1.5, "count_noise": 2.0}
    outcome = simulate(config(privacy=privacy, canaries={"presentations": [presentations]}))
    written = outcome.trainer
    shares = [noise_for(epsilon, 1e-6) ** -2 for epsilon in (written.update_epsilon, written.count_epsilon)]
    assert shares[1] == pytest.approx(presentations / (2 * 2.0) ** 2, rel=1e-6)  # a client changes the count by ½
    assert sum(shares) == pytest.approx(presentations / 1.5**2, rel=1e-6)
    assert sum(shares) ** -0.5 == pytest.approx(noise_for(outcome.analytical_epsilon, 1e-6), rel=1e-6)


def test_fixed_clip_has_no_count_and_a_noiseless_count_has_multiplier_zero():
    fixed = simulate(config(rounds=1)).trainer
    assert (fixed.count_epsilon, fixed.count_noise_multiplier) == (None, None)
    bare = simulate(config(rounds=1, privacy={"clipping": "adaptive", "noise_multiplier": 0.0})).trainer
    assert (bare.count_epsilon, bare.count_noise_multiplier) == (np.inf, 0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"clients_per_round": 50}, 3),
        ({"clients_per_round": 150}, 6),  # two rounds per epoch: 150 clients, then the remaining 50
        ({"clients_per_round": 150, "kind": "fixed"}, 9),
        ({"clients_per_round": 150, "kind": "poisson"}, 9),
        ({"clients_per_round": 60, "kind": "limited", "separation": 3}, 4),
    ],
    ids=["shuffled", "shuffled with a rest", "fixed", "poisson", "limited"],
)
@pytest.mark.parametrize("pattern", ["spread", "clients", "replace"])
def test_client_rounds_match_the_sampled_rounds(changes, times, pattern):
    """Average over the clients, counted in the sampled rounds."""
    cheap = {"max_examples_per_client": 1}
    settings = config(task=cheap, participation=changes, canaries={"pattern": pattern, "count": 40})
    outcome = simulate(settings)
    with prepared(settings, None, None) as training:
        rounds = [training.cohorts.of_round(number).clients for number in range(1, settings.rounds + 1)]
    clients = 160 if pattern == "replace" else 200
    assert outcome.trainer.client_rounds == times == pytest.approx(sum(map(len, rounds)) / clients, abs=0.5)
    assert outcome.trainer.client_exposure == "average"
    assert outcome.trainer.client_epsilon == mechanism_epsilon(0.5, delta=1e-6, participations=times)


@pytest.mark.parametrize("pattern", ["spread", "clients"])
def test_client_rounds_are_counted_from_a_rounds_file(tmp_path, pattern):
    """Client 7 is in 9 of 12 rounds of ten clients, the others in far fewer; clients_per_round, 50, is ignored."""
    drawn = [np.random.default_rng(number).choice(np.arange(10, 200), 9, replace=False) for number in range(20)]
    rounds = [np.append(present, 7) if number < 9 else present for number, present in enumerate(drawn)]
    rounds[12:] = [np.array([3]) for _ in rounds[12:]]  # after the last round of the run
    if pattern == "clients":
        rounds = [np.append(present, 200 + np.arange(100)) for present in rounds]  # every canary in every round
    write_rounds(tmp_path / "rounds.txt", rounds, clients=200)
    named = {"kind": "file", "rounds_file": str(tmp_path / "rounds.txt")}
    outcome = simulate(config(participation=named, canaries={"pattern": pattern, "count": 100}))
    assert outcome.trainer.client_rounds == 9
    assert outcome.trainer.client_epsilon == mechanism_epsilon(0.5, delta=1e-6, participations=9)
    assert outcome.trainer.client_exposure == "most exposed"


def test_fraction_and_equal_count_give_the_same_run():
    canaries = {"pattern": "replace"}
    made = config()
    share, number = (
        simulate(dataclasses.replace(made, canaries=CanarySettings(**canaries, **given)))
        for given in ({"replace_fraction": 0.25}, {"count": 50})
    )
    assert share.trainer == number.trainer
    assert share.to_dict() == number.to_dict()
    assert (share.settings.canaries, share.trainer.population) == (50, 200)


def test_example_level_recovers_the_analytical_epsilon():
    outcome = simulate(config("example"))
    row = outcome.adversaries["known-others"].headline
    assert row.estimate.mean == pytest.approx(2.0, abs=4 * np.sqrt(1 / 300 + 4 / (2 * 9310)))


def test_one_run_has_a_row_for_each_group_of_presentations():
    rows = simulate(config(canaries={"presentations": [1, 4]})).adversaries["known-others"].rows
    assert {row.presentations: row.canaries for row in rows} == {1: 150, 4: 150}


def test_a_run_without_noise_has_no_analytical_epsilon():
    outcome = simulate(config(privacy={"noise_multiplier": 0.0}))
    assert outcome.analytical_epsilon == np.inf
    assert outcome.verdict.code == "no claim"
    assert outcome.adversaries["known-round"].headline.estimate.epsilon > 20
    judged = simulate(config(privacy={"noise_multiplier": 0.0}, claim={"epsilon": 5.0}))
    assert judged.verdict is not None
    assert judged.verdict.outcome == "VIOLATION"


HALF_NOISE = Steps(noise=lambda std, like, generator: gaussian_noise(std / 2, like, generator))
NO_CLIP = Steps(clip=lambda norms, clip_norm: torch.ones_like(norms))
WEIGHTED = Steps(weigh=lambda examples: examples / 7.5)


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [(Steps(), "PASS"), (HALF_NOISE, "VIOLATION"), (NO_CLIP, "VIOLATION"), (WEIGHTED, "VIOLATION")],
    ids=["honest", "half the noise", "clip forgotten", "weighted by examples"],
)
def test_a_faulty_step_is_detected(steps, verdict):
    outcome = simulate(config(claim={"analytical": True}), steps=steps)
    assert outcome.verdict is not None
    assert outcome.verdict.outcome == verdict


def test_honest_clip_reduces_canaries_to_the_clip_norm():
    ten, one = (trained(config(rounds=2, canaries={"scale": scale}))[1] for scale in (10.0, 1.0))
    torch.testing.assert_close(ten, one, rtol=1e-5, atol=1e-7)
    assert clip_factors(torch.tensor([5.0]), 0.5).item() == pytest.approx(0.1)


def test_canaries_count_in_the_adaptive_quantile_like_clients():
    """All canaries exceed the clip norm, so without clients the norm grows by exp(rate · quantile) per round."""
    settings = config(
        rounds=2,
        privacy={"noise_multiplier": 0.0, "clipping": "adaptive", "clip_norm": 1e-4},
        canaries={"pattern": "clients"},
    )
    with prepared(settings, None, None) as training:
        reports = list(training.rounds(training.initial_state()))
    assert [report.clip_norm for report in reports] == pytest.approx([1e-4, 1e-4 * np.exp(0.2 * 0.5)])


@pytest.mark.parametrize(
    ("canaries", "says"),
    [
        ({"count": 500}, None),
        (
            {"count": 700},
            "58 % of the participants are canaries, too many for the adaptive clip's quantile: the clip norm will grow",
        ),
        ({"count": 700, "scale": 1.0}, "the clip norm will shrink"),
        ({"count": 300, "pattern": "clients"}, "60 % of the participants are canaries"),
        ({"count": 90, "pattern": "replace"}, None),
    ],
)
def test_too_many_canaries_for_an_adaptive_clip_give_a_warning(canaries, says, caplog):
    with prepared(config(rounds=10, privacy={"clipping": "adaptive"}, canaries=canaries), None, None):
        assert (says in caplog.text) if says else not caplog.text


@pytest.mark.full
def test_memory_does_not_grow_with_absent_clients():
    """Peak memory of whole runs with 1,000 and 100,000 virtual clients; the latter's examples alone would take 5.3 MiB."""
    small, large = (_peak_memory(clients) for clients in (1_000, 100_000))
    assert large - small < 4 * 2**20


def _peak_memory(clients: int) -> int:
    code = f"""
import resource
from coalmine.simulation import RunConfig, simulate
from coalmine.simulation.config import TaskSettings, CanarySettings
simulate(RunConfig(rounds=30, task=TaskSettings(clients={clients}), canaries=CanarySettings(count=300)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def test_the_baseline_is_plain_federated_averaging():
    """The same clients of the same rounds, averaged in float64, without clip, noise or canaries."""
    settings = config(rounds=3, baseline=True, server={"learning_rate": 0.8}, canaries={"count": 40})
    result = simulate(settings)
    training, _ = trained(settings)
    task, theta = training.task, training.initial_vector().double().numpy()
    engine = client_engine("one-by-one", task.model, task.train, settings.client)
    for number in (1, 2, 3):
        clients = training.cohorts.of_round(number).clients
        owned = [task.population.examples(client) for client in clients]
        batches = draw_batches(owned, epochs=2, batch_size=16, rng=numpy_stream(1, "batches", number))
        updates = list(engine.updates(torch.from_numpy(theta).float(), batches))
        theta += 0.8 * np.mean([update.reshape(-1).double().numpy() for update in updates], axis=0)
    state = training.initial_state()
    state.model_vector = torch.from_numpy(theta).float()
    assert result.trainer.accuracy_without_dp == pytest.approx(training.evaluate(state), abs=0.005)
    assert result.trainer.accuracy_without_dp > result.trainer.accuracy
    assert f"; {result.trainer.accuracy_without_dp:.1%} without DP and canaries" in str(result)
    assert simulate(config(rounds=1)).trainer.accuracy_without_dp is None
