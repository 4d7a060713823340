"""A claim is for the client that the noise protects least: by the rounds and the weights that Flower's server saw."""

import json
import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
from requires import require

require("flwr")
from flower_training import (  # noqa: E402
    CANARIES,
    REAL,
    SEED,
    SMALL,
    LoopGrid,
    client_app,
    fedavg,
    finish_as_stated,
    initial_arrays,
    new_audit,
    nodes,
    run,
    server_side,
    small_audit,
    small_run,
)
from flwr.clientapp.mod import LocalDpMod  # noqa: E402
from flwr.serverapp.strategy import FedMedian  # noqa: E402

from coalmine import Claim, FixedSize, mechanism_epsilon  # noqa: E402
from coalmine.integrations.flower import audited, canary_mod  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

DELTA = 1e-5
SEEDS = range(3)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="flwr")


def epsilon_of(*contributions):
    """The composed epsilon of a client with these contributions, in units of each round's noise."""
    return float(mechanism_epsilon(1 / math.sqrt(sum(each**2 for each in contributions)), delta=DELTA))


def trained(strategy, configs, *, examples=lambda node: 10, rounds=3, seed=0, mods=(canary_mod,), **grid):
    app = client_app(list(mods), examples=examples)
    run(strategy, LoopGrid(app, configs, **grid), rounds=rounds, seed=seed, arrays=initial_arrays(SMALL))
    return strategy


def by_clients(configs, *, canaries=CANARIES, wrapper=None, seed=0, **settings):
    audit = new_audit(canaries=canaries, dim=SMALL, seed=SEED + bytes([seed]))
    return audited(wrapper or server_side(len(configs)), audit=audit, seed=SEED + bytes([seed]), **settings)


class Examples:
    """Weights by node and round: clients do not know the round, so their calls are counted."""

    def __init__(self, weights):
        self.weights, self.calls = weights, {}

    def __call__(self, node):
        number = self.calls[node] = self.calls.get(node, 0) + 1
        return self.weights(node, number)


# The rounds in which a node took part


def in_turn(count=4, each=10):
    """Nodes with ten canaries each: a canary takes part once in ten rounds, a node in all of them."""
    return nodes(REAL, 0) + [{"canary-id": f"{each * node}-{each * node + each - 1}"} for node in range(count)]


@pytest.fixture(scope="module", params=SEEDS)
def ten_rounds(request, tmp_path_factory):
    configs = in_turn()
    home = tmp_path_factory.mktemp("run")
    seed = SEED + bytes([request.param])
    audit = new_audit(canaries=40, dim=SMALL, seed=seed, directory=home)
    strategy = audited(server_side(len(configs)), audit=audit, seed=seed)
    return trained(strategy, configs, rounds=10, seed=request.param), home, seed


def test_a_bare_number_is_for_all_rounds_of_a_node(ten_rounds):
    """4.38 is the epsilon of one round. Each node took part in ten, although each canary did only once."""
    strategy, _, _ = ten_rounds
    whole = epsilon_of(*[1] * 10)
    assert whole == pytest.approx(17.9, abs=0.05)
    result = strategy.audit.finish(claim=epsilon_of(1))
    assert result.verdict.outcome == "VIOLATION"
    assert result.claim.participations == 10
    assert strategy.audit.finish(claim=1.01 * whole).verdict.outcome == "PASS"
    slightly = strategy.audit.finish(claim=0.99 * whole).verdict
    assert (slightly.outcome, slightly.code) == ("VIOLATION", "stated"), slightly.reason
    assert slightly.finding.epsilon == pytest.approx(whole)


def test_participations_and_their_epsilon_are_in_the_result(ten_rounds):
    strategy, home, seed = ten_rounds
    result = finish_as_stated(strategy)
    assert result.claim.participations == 10
    assert result.claim.epsilon == pytest.approx(epsilon_of(*[1] * 10))
    assert result.verdict.outcome == "PASS"
    text = "a node took part in up to 10 of 10 rounds: epsilon 17.9 for the client that contributed most"
    assert any(text in note for note in result.notes)
    stored = json.loads((home / "result.json").read_text())
    assert stored["client_participations"] == 10
    assert stored["client_epsilon"] == pytest.approx(17.9, abs=0.05)
    checks = {check.name: check.held for check in verify_run(home, seed, model=home / "model.npy")}
    assert False not in checks.values(), checks


@pytest.mark.parametrize("way", [lambda epsilon: Claim(epsilon, participations=1)])
def test_an_explicit_number_of_participations_is_kept_and_contrasted(ten_rounds, way):
    strategy, _, _ = ten_rounds
    result = strategy.audit.finish(claim=way(epsilon_of(1)))
    assert result.verdict.outcome == "PASS"
    assert result.claim.participations == 1
    assert any("up to 10 of 10 rounds: epsilon 17.9" in note for note in result.notes)
    (item,) = [each for each in result.audited if each.name == "participations"]
    assert item.status == "not checked"
    assert item.detail.startswith("the claim is for 1, but by node id, a real node took part in up to 10 of 10")


def test_sampled_nodes_are_counted_one_by_one():
    """Nodes are sampled at one half; the claim is for the node that was sampled most often."""
    count = REAL + CANARIES
    strategy = by_clients(nodes(), wrapper=server_side(count // 2, inner=fedavg(fraction_train=0.5)))
    counted, configure = dict.fromkeys(range(1, count + 1), 0), strategy.strategy.configure_train

    def configure_train(*arguments):
        messages = list(configure(*arguments))
        for message in messages:
            counted[message.metadata.dst_node_id] += 1
        return messages

    strategy.strategy.configure_train = configure_train
    trained(strategy, nodes(), rounds=7)
    most = max(counted.values())
    assert 3 < most < 7
    assert strategy.ledger.exposures.nodes.times == {
        node: times for node, times in counted.items() if node <= REAL and times
    }
    assert strategy.audit.finish(claim=3.0).claim.participations == most


def test_rounds_that_released_nothing_and_lost_replies_do_not_count():
    """Node 1 fails in round 2, which the wrapper then skips. Node 2 says nothing in round 3."""
    strategy = trained(by_clients(nodes()), nodes(), rounds=4, failing=[(2, 1)], silent=[(3, 2)])
    times = strategy.ledger.exposures.nodes.times
    assert (times[1], times[2], times[3]) == (3, 2, 3)
    assert strategy.ledger.exposures.rounds == 3


@pytest.mark.parametrize("mode", ["extra", "replace"])
def test_real_nodes_are_counted_in_every_mode(mode):
    """Extra canaries follow a schedule of one round each; the real nodes are in all three."""
    named = {"canary_nodes": {REAL + 1 + i: i for i in range(CANARIES)}} if mode == "replace" else {}
    audit = small_audit(rounds=3, presentations=1) if mode == "extra" else small_audit()
    count = REAL if mode == "extra" else REAL + CANARIES
    strategy = audited(server_side(count), audit=audit, mode=mode, **named)
    trained(strategy, nodes(count, 0), mods=[])
    assert sorted(strategy.ledger.exposures.nodes.times.items()) == [(node, 3) for node in range(1, REAL + 1)]
    result = strategy.audit.finish(claim=0.99 * epsilon_of(1, 1, 1))
    assert (result.claim.participations, result.verdict.outcome, result.verdict.code) == (3, "VIOLATION", "stated")


def test_a_restarted_server_remembers_who_took_part(tmp_path):
    """With the weights of each round: the heavy node was heavy before the restart only."""

    def start(rounds, examples):
        audit = small_audit(directory=tmp_path)
        strategy = audited(server_side(REAL + CANARIES), audit=audit, seed=SEED)
        small_run(strategy, LoopGrid(client_app([canary_mod], examples=examples), nodes()), rounds=rounds)
        return strategy

    start(2, lambda node: 30 if node == 1 else 10).audit.directory.close()
    strategy = start(5, lambda node: 10)
    assert strategy.ledger.exposures.nodes.times == dict.fromkeys(range(1, REAL + 1), 5)
    result = finish_as_stated(strategy)
    assert result.claim.participations == 5
    heavy = 30 / 220 * 20
    assert result.verdict.code == "stated"
    assert result.verdict.finding.epsilon == pytest.approx(epsilon_of(heavy, heavy, 1, 1, 1))
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["client_epsilon"] == pytest.approx(result.verdict.finding.epsilon)


# Weights


@pytest.mark.parametrize("seed", SEEDS)
def test_the_largest_weight_decides_not_the_canaries_mean(seed):
    """Five of twelve canaries weigh half, so the others have epsilon 13.6 where the noise is sized for 11.5."""
    light = range(REAL + 1, REAL + 6)
    strategy = trained(
        by_clients(nodes(), seed=seed), nodes(), examples=lambda n: 5 if n in light else 10, rounds=5, seed=seed
    )
    result = strategy.audit.finish(claim=11.5)
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "stated"), result.verdict.reason
    truth = epsilon_of(*[20 / 17.5] * 5)
    assert truth == pytest.approx(13.6, abs=0.05)
    assert result.verdict.finding.epsilon == pytest.approx(truth)
    assert strategy.audit.finish(claim=1.01 * truth).verdict.outcome != "VIOLATION"
    assert any(f"epsilon {truth:.3g} for the client that contributed most" in note for note in result.notes)


@pytest.mark.parametrize("weight", [20, 100])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_heavy_client_is_refuted_without_chance(weight, seed):
    strategy = trained(
        by_clients(nodes(), seed=seed), nodes(), examples=lambda n: weight * 10 if n == 1 else 10, seed=seed
    )
    result = finish_as_stated(strategy)
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "stated"), result.verdict.reason
    truth = epsilon_of(*[weight / (weight + 19) * 20] * 3)
    assert result.verdict.finding.epsilon == pytest.approx(truth)
    assert strategy.audit.finish(claim=1.01 * truth).verdict.outcome != "VIOLATION"


def test_a_weight_that_is_heavy_once_counts_once():
    """Twenty times in one of five rounds: five such rounds would have three times the epsilon."""
    examples = Examples(lambda node, number: 200 if (node, number) == (1, 3) else 10)
    strategy = trained(by_clients(nodes()), nodes(), examples=examples, rounds=5)
    truth = epsilon_of(200 / 390 * 20, 1, 1, 1, 1)
    result = strategy.audit.finish(claim=0.99 * truth)
    assert result.verdict.code == "stated"
    assert result.verdict.finding.epsilon == pytest.approx(truth)
    assert truth < epsilon_of(*[200 / 390 * 20] * 5) / 3
    assert strategy.audit.finish(claim=1.01 * truth).verdict.outcome != "VIOLATION"


@pytest.mark.parametrize("seed", range(6))
def test_an_exact_claim_holds_under_random_weights(seed):
    """Weights vary by node and round, nodes are sampled, canaries are in few rounds: the exact epsilon is no VIOLATION."""
    rng = np.random.default_rng(seed)
    table = rng.integers(5, 40, size=(100, 20))
    examples = Examples(lambda node, number: int(table[node, number]))
    wrapper = server_side((REAL + 6) // 2, inner=fedavg(fraction_train=0.5))
    strategy = by_clients(in_turn(6, 5), canaries=30, wrapper=wrapper, seed=seed)
    trained(strategy, in_turn(6, 5), examples=examples, rounds=8, seed=seed)
    truth = strategy.ledger.exposures.epsilon(strategy.audit, 1.0, equal_weights=False)
    for factor, refuted in [(0.98, True), (1.0, False)]:
        result = strategy.audit.finish(claim=factor * truth)
        assert (result.verdict.outcome == "VIOLATION") is refuted, result.verdict.reason
    assert result.verdict.outcome in ("PASS", "UNDERPOWERED")


def test_exposures_are_those_of_the_weighted_average():
    """Against the definition: weight over the round's total, over the noise's share, summed in squares by node."""
    table = np.random.default_rng(5).integers(5, 40, size=(REAL + CANARIES + 1, 5))
    strategy = trained(by_clients(nodes()), nodes(), examples=Examples(lambda n, t: int(table[n, t])), rounds=4)
    weights = table[1:, 1:5].astype(float)
    shares = weights / weights.sum(axis=0) * (REAL + CANARIES)
    squares = (shares**2).sum(axis=1)
    found = strategy.ledger.exposures
    assert [found.nodes.squares[node] for node in range(1, REAL + 1)] == pytest.approx(squares[:REAL])
    assert [found.canaries.squares[index] for index in range(CANARIES)] == pytest.approx(squares[REAL:])


def test_light_clients_beside_heavy_canaries_are_not_refuted():
    """Canaries weigh three times as much as any client, one round each: a client's own epsilon is what counts."""
    configs = in_turn(4, 5)
    strategy = by_clients(configs, canaries=20)
    trained(strategy, configs, examples=lambda n: 30 if n > REAL else 10, rounds=5)
    mine, canary = epsilon_of(*[10 / 200 * 12] * 5), epsilon_of(30 / 200 * 12)
    result = strategy.audit.finish(claim=1.01 * max(mine, canary))
    assert result.verdict.outcome != "VIOLATION", result.verdict.reason
    assert result.claim.participations == 5
    assert strategy.audit.finish(claim=0.98 * max(mine, canary)).verdict.code == "stated"


def test_a_round_without_noise_has_an_infinite_epsilon(tmp_path):
    """The wrapper's noise is switched off before the last round."""
    strategy = audited(server_side(REAL), audit=small_audit(directory=tmp_path), mode="extra")

    def evaluate(server_round, arrays):
        strategy.strategy.noise_multiplier = 0.0 if server_round == 2 else 1.0  # type: ignore[attr-defined]

    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), evaluate_fn=evaluate)
    result = strategy.audit.finish(claim=100.0)
    assert result.verdict.outcome == "VIOLATION", result.verdict.reason
    assert json.loads((tmp_path / "result.json").read_text())["client_epsilon"] == "inf"


def test_a_strategy_that_ignores_weights_is_not_refuted_by_them():
    wrapper = server_side(REAL, inner=FedMedian(fraction_evaluate=0.0))
    strategy = audited(wrapper, audit=small_audit(), mode="extra")
    trained(strategy, nodes(canaries=0), examples=lambda node: 200 if node == 1 else 10, mods=[])
    result = finish_as_stated(strategy)
    assert result.claim.sensitivity is None
    assert result.verdict.code != "stated"


def test_noise_on_clients_is_not_composed_by_weights():
    """Each client's own noise has its weight too, so the server's figure would be too large: only scores decide."""
    local = LocalDpMod(1.0, 1.0, math.sqrt(2 * math.log(1.25 / DELTA)) / 0.5, DELTA)
    strategy = audited(fedavg(), audit=small_audit(), seed=SEED, clip_norm=1.0, noise_multiplier=2.2, scale=10.0)
    trained(strategy, nodes(), examples=lambda node: 40 if node == 1 else 10, mods=[local, canary_mod])
    result = finish_as_stated(strategy)
    assert result.verdict.code != "stated"
    assert result.claim.sensitivity == pytest.approx(4 * math.sqrt(3))
    assert any("up to 3 of 3 rounds" in note and "epsilon" not in note for note in result.notes)


@pytest.mark.full
def test_an_amplified_claim_is_accounted_for_the_heaviest_client():
    scheme = FixedSize(REAL + CANARIES, population=100, rounds=3)
    strategy = trained(by_clients(nodes()), nodes(), examples=lambda node: 200 if node == 1 else 10)
    result = strategy.audit.finish(claim=Claim(5.0, sampling=scheme))
    assert result.claim.noise_multiplier == pytest.approx(390 / 200 / 20)


# Flower's own settings as a claim


def privacy(**changes):
    accounting = require("flwr.supercore.privacy_accounting")
    settings = {
        "target_delta": DELTA,
        "population_size": 100,
        "neighboring_relation": accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        "sampling_method": accounting.SamplingMethod.NO_AMPLIFICATION,
        "max_epsilon": 9.0,
    }
    return accounting.PrivacyConfig(**settings | changes)


@pytest.mark.parametrize("way", [lambda config: config, lambda config: SimpleNamespace(config=config)])
@pytest.mark.parametrize("at_finish", [False, True])
def test_a_privacy_config_claims_its_largest_epsilon(way, at_finish):
    arrays, given = initial_arrays(SMALL), way(privacy())
    strategy = audited(
        server_side(REAL),
        arrays,
        mode="extra",
        canaries=CANARIES,
        seed=SEED,
        delta=DELTA,
        claim=None if at_finish else given,
    )
    trained(strategy, nodes(canaries=0), mods=[])
    result = strategy.audit.finish(claim=given if at_finish else None)
    assert (result.claim.epsilon, result.claim.participations) == (9.0, 3)


def test_a_config_that_claims_something_else_is_refused():
    accounting = require("flwr.supercore.privacy_accounting")
    poisson = privacy(sampling_method=accounting.SamplingMethod.POISSON)
    for config, says in [
        (privacy(max_epsilon=None), "PrivacyConfig without max_epsilon claims no epsilon"),
        (privacy(target_delta=1e-6), "target_delta of the PrivacyConfig must be the audit's delta, 1e-05, got 1e-06"),
        (poisson, "must be for no-amplification and add-or-remove-one, got poisson and add-or-remove-one"),
    ]:
        with pytest.raises(ValueError, match=says):
            audited(server_side(5), initial_arrays(SMALL), canaries=3, seed=SEED, delta=DELTA, claim=config)
