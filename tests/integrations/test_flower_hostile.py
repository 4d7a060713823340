"""Hostile clients: no reply crashes the server, incriminates an honest pipeline or hides a broken one; each is named."""

import json
import logging

import numpy as np
import pytest
from requires import require

require("flwr")
from flower_training import (  # noqa: E402
    REAL,
    SEED,
    SMALL,
    LoopGrid,
    client_app,
    client_side,
    config,
    fedavg,
    finish_as_stated,
    initial_arrays,
    new_audit,
    nodes,
    server_side,
    small_audit,
    small_run,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping  # noqa: E402
from hostile_clients import (  # noqa: E402
    ARRAYS,
    CANARY,
    CLAIMS,
    CLIENT,
    MANY,
    OWN,
    RECORDS,
    WEIGHTS,
    HostileGrid,
    as_another_node,
    canary_update,
    changed,
    claiming,
    failing,
    hostile_grid,
    in_turn,
    late,
    late_and_fresh,
    sending,
    twice,
    with_weight,
)

from coalmine.integrations.flower import audited, canary_mod  # noqa: E402
from coalmine.log.seed_file import write_seed  # noqa: E402

COUNT = REAL + MANY


pytestmark = pytest.mark.usefixtures("quiet_flower")


def attacked(
    attack, directory=None, *, node=CLIENT, side="server", wrapper=None, rounds=2, noise_for=COUNT, **settings
):
    """A run with one hostile node: the strategy, and its metrics by round."""
    audit = new_audit(canaries=MANY, dim=SMALL, directory=directory)
    mods = [canary_mod] if side == "server" else [fixedclipping_mod, canary_mod]
    inner = wrapper or (server_side if side == "server" else client_side)(noise_for)
    strategy = audited(inner, audit=audit, mode="client", seed=SEED, **settings)
    small_run(strategy, hostile_grid(attack, node=node, mods=mods), rounds=rounds)
    return strategy


def dropped(strategy):
    """Round, node and reason of each dropped reply."""
    return [(each.round_number, each.node, each.why) for each in strategy.dropped]


def assert_named(result, node):
    """The result names the node, and the verdict is not VIOLATION."""
    assert result.verdict.outcome in ("PASS", "UNDERPOWERED"), result.verdict.reason
    assert any(f"node {node}" in note for note in result.notes), result.notes


@pytest.mark.parametrize("side", ["server", pytest.param("client", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "group", [WEIGHTS, RECORDS, pytest.param(ARRAYS, marks=pytest.mark.full)], ids=["weights", "records", "arrays"]
)
def test_bad_replies_are_dropped_and_named(group, side, caplog, tmp_path):
    """One kind per round. The other replies are aggregated as usual, so the verdict is that of an honest run."""
    strategy = attacked(in_turn(group.values()), tmp_path, side=side, rounds=len(group))
    kinds = dict(zip(range(1, len(group) + 1), group, strict=True))
    by_round = {number: (node, why) for number, node, why in dropped(strategy)}
    assert {kinds[number] for number in by_round} == set(group)
    assert {node for node, _ in by_round.values()} == {CLIENT}
    lines = [line for line in strategy.audit.directory.read_metrics() if "canaries" in line]
    assert [line["dropped"] for line in lines] == [1] * len(group)
    assert [line["canaries"] for line in lines] == [MANY] * len(group)
    for number, (node, why) in by_round.items():
        assert f"reply of node {node} in round {number} was dropped: {why}" in caplog.text
        assert why.isprintable()
        assert len(why) < 200
    result = finish_as_stated(strategy)
    assert_named(result, CLIENT)
    assert result.verdict.outcome == "PASS", result.verdict.reason
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["missed"]["dropped"] == len(group)
    assert any(f"node {CLIENT}" in text for text in stored["warnings"])


@pytest.mark.parametrize("node", [CLIENT, pytest.param(CANARY, marks=pytest.mark.full)])
def test_invalid_claims_to_be_a_canary_are_dropped(node):
    """Records that are not one integer in range, or that name another node's canary."""
    strategy = attacked(in_turn(CLAIMS.values()), node=node, rounds=len(CLAIMS))
    present = [item.present.size for item in strategy.audit.log.rounds()]
    assert len(strategy.dropped) >= len(CLAIMS)
    assert min(present) >= MANY - 2
    assert max(present) <= MANY
    assert_named(finish_as_stated(strategy), node)


def canary(index, length=1.0):
    return canary_update(index, SEED) * length


def noise(length):
    """A fresh random update in each round."""
    return lambda number: np.random.default_rng([5, number]).normal(size=SMALL) * length / np.sqrt(SMALL)


def all_canaries(length):
    return sum(canary(index) for index in range(MANY)) * length / np.sqrt(MANY)


WRONG_CANARIES = {
    "a normal update": sending(noise(0.01), OWN),
    "a long update": sending(noise(10.0), OWN),
    "zero": sending(np.zeros(SMALL), OWN),
    "another canary": sending(canary(OWN + 2, 10.0), OWN),
    "its negative": sending(canary(OWN, -10.0), OWN),
    "1000 times too long": sending(canary(OWN, 10_000.0), OWN),
    "a tenth of the clip norm": sending(canary(OWN, 0.1), OWN),
    "something else beside it": sending(lambda number: canary(OWN, 10.0) + noise(30.0)(number), OWN),
    "all canaries": sending(all_canaries(10.0), OWN),
}


@pytest.mark.parametrize("side", ["server", pytest.param("client", marks=pytest.mark.full)])
def test_a_canary_that_sends_something_else_is_dropped(side):
    """The server knows every canary, so it detects any other update. The remaining canaries give the honest verdict."""
    strategy = attacked(in_turn(WRONG_CANARIES.values()), node=CANARY, side=side, rounds=len(WRONG_CANARIES))
    kinds = dict(zip(range(1, len(WRONG_CANARIES) + 1), WRONG_CANARIES, strict=True))
    assert {kinds[number] for number, node, _ in dropped(strategy) if node == CANARY} == set(WRONG_CANARIES)
    others = [index for index in range(MANY) if index != OWN]
    assert [item.present.tolist() for item in strategy.audit.log.rounds()] == [others] * len(WRONG_CANARIES)
    result = finish_as_stated(strategy)
    assert_named(result, CANARY)
    assert result.verdict.outcome == "PASS"


@pytest.mark.parametrize("length", [10.0, 3.0, 1.5])
def test_one_unclipped_canary_cannot_incriminate_clients_that_clip(length):
    """A missing clip would show in most canaries; in one of 24 it is the node's fault."""
    strategy = attacked(sending(canary(OWN, length), OWN), node=CANARY, side="client")
    assert [(node, why) for _, node, why in dropped(strategy)] == [
        (CANARY, f"it sends canary {OWN} {length:g} clip norms long, where most canaries are 1 long")
    ] * 2
    assert_named(finish_as_stated(strategy), CANARY)


@pytest.mark.parametrize("noise_for", [COUNT, 3 * COUNT], ids=["honest", "broken"])
@pytest.mark.parametrize(
    ("node", "attack"),
    [
        (CANARY, sending(noise(0.01), OWN)),
        (CLIENT, sending(noise(0.01), OWN)),
        (CLIENT, sending(canary(OWN, 10.0), OWN)),
        (CLIENT, sending(canary(OWN, -10.0), OWN)),
    ],
    ids=["a canary sends an update", "a client claims a canary", "with its canary", "with its negative"],
)
def test_a_canary_in_every_round_neither_incriminates_nor_hides_a_pipeline(node, attack, noise_for):
    """The honest pipeline gets no VIOLATION; one with a third of the noise does."""
    strategy = attacked(attack, node=node, rounds=3, noise_for=noise_for)
    result = finish_as_stated(strategy)
    assert any(f"node {node}" in note for note in result.notes)
    assert result.verdict.outcome == ("PASS" if noise_for == COUNT else "VIOLATION"), result.verdict.reason


@pytest.mark.full
@pytest.mark.parametrize("length", [1.0, -1.0, 0.3])
def test_a_real_client_that_knows_the_seed_cannot_cause_a_violation(length):
    """It sends the sum of all canaries as its own update, which raises every score. 30 rounds would be enough."""
    strategy = attacked(sending(all_canaries(length)), rounds=30)
    assert {node for _, node, _ in dropped(strategy)} == ({CLIENT} if length > 0 else set())
    result = finish_as_stated(strategy)
    assert result.verdict.outcome in ("PASS", "UNDERPOWERED"), result.verdict.reason


@pytest.mark.parametrize("length", [np.sqrt(SMALL), 100.0, 1e6], ids=["as the noise", "long", "very long"])
def test_an_unclipped_client_cannot_replace_missing_noise(length):
    """A Gaussian update as long as the missing noise would look like that noise."""
    wrapper = client_side(1000 * COUNT)  # a thousandth of the noise
    strategy = attacked(sending(noise(length)), side="client", wrapper=wrapper)
    assert {node for _, node, _ in dropped(strategy)} == {CLIENT}
    assert finish_as_stated(strategy).verdict.outcome == "VIOLATION"


def test_rounds_in_which_most_clients_do_not_clip_never_pass(caplog):
    """Then the pipeline is at fault and nothing is dropped. Canaries do clip, but replay sees what one reply moves."""
    audit = new_audit(canaries=MANY, dim=SMALL)
    strategy = audited(client_side(COUNT), audit=audit, mode="client", seed=SEED)
    app = client_app([fixedclipping_mod, canary_mod], update_norm=0.01)
    loud = client_app([], update_norm=30.0)

    def client(message, context):
        return (app if "canary-id" in context.node_config else loud)(message, context)

    small_run(strategy, LoopGrid(client, nodes(REAL, MANY)), rounds=2)
    result = finish_as_stated(strategy)
    assert strategy.dropped == []
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "row")
    assert caplog.text.count("most real clients sent updates longer than the clip norm") == 1


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (twice, "its node has replied already in this round"),
        (late_and_fresh(), "it answers a message of another round"),
        (as_another_node, "its node was not sampled in this round"),
    ],
    ids=["twice", "late", "from a node that was not sampled"],
)
def test_unrequested_replies_are_dropped(attack, why):
    strategy = attacked(attack, rounds=3)
    assert {reason for _, _, reason in dropped(strategy)} == {why}
    assert len(strategy.dropped) >= 2
    result = finish_as_stated(strategy)
    assert result.verdict.outcome == "PASS"
    assert strategy.audit._tally["missing"] == 0
    assert any(why in note for note in result.notes)


def test_a_late_reply_is_missing_in_its_own_round():
    """Flower divides by fewer replies and keeps the noise: the gauge detects it, as for any silent node."""
    strategy = attacked(late(), rounds=3)
    assert dropped(strategy) == [(number, CLIENT, "it answers a message of another round") for number in (2, 3)]
    assert strategy.audit._tally["missing"] == 1


def test_error_replies_name_the_node_on_one_line(caplog):
    """Flower's wrapper skips such rounds. The reason is truncated and its control characters are escaped."""
    strategy = attacked(in_turn([failing, lambda reply, message: [reply]]), rounds=2)
    (warning,) = strategy._warnings.texts
    assert warning.startswith(f"node {CLIENT} failed in round 1: \\x1b[31mno \\x1b[31mno")
    assert warning.isprintable()
    assert len(warning) < 500
    result = finish_as_stated(strategy)
    assert (result.rounds, result.skipped) == (1, 1)
    assert result.verdict.outcome != "VIOLATION"


def test_a_round_without_a_good_reply_stops_the_run():
    """Adaptive clipping would divide by the number of replies, 0. Without the audit, Flower would use the reply."""
    wrapper = DifferentialPrivacyServerSideAdaptiveClipping(fedavg(), 1.0, 1, clipped_count_stddev=1.0)
    strategy = audited(wrapper, audit=small_audit(), mode="extra")
    grid = hostile_grid(with_weight(-1), node=1, canaries=0)
    grid.contexts = {1: grid.contexts[1]}
    wrapper.strategy.min_train_nodes = wrapper.strategy.min_available_nodes = 1  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"would drop 1 of 1 replies in round 1, .*'num-examples' must be finite and above 0"
    ):
        small_run(strategy, grid)
    assert [each.node for each in strategy.dropped] == [1]


def test_with_an_accountant_replies_of_a_different_weight_are_dropped():
    """Flower's accountant raises an error for unequal weights and skips rounds with another number of replies."""
    accounting = require("flwr.serverapp")
    settings = accounting.PrivacyConfig(
        target_delta=1e-5,
        population_size=COUNT,
        sampling_method=accounting.SamplingMethod.NO_AMPLIFICATION,
        neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    wrapper = server_side(COUNT)
    wrapper.accountant = accounting.RdpAccountant(settings)
    strategy = attacked(with_weight(11), wrapper=wrapper)
    assert [why for _, _, why in dropped(strategy)] == ["'num-examples' must be the same for all, 10, got 11"] * 2
    result = finish_as_stated(strategy)
    assert result.skipped == 0
    assert_named(result, CLIENT)


def test_a_claim_to_be_a_canary_is_checked_against_the_servers_choice():
    """canary_nodes assigns canaries 0..23. A node that claims another canary, or is not a canary, is dropped."""
    named = {REAL + 1 + index: index for index in range(MANY)}
    for node, claim, truth in [(CANARY, OWN + 1, f"canary {OWN}"), (CLIENT, OWN, "no canary")]:
        strategy = attacked(claiming(ConfigRecord({"canary": claim})), node=node, rounds=1, canary_nodes=named)
        why = f"it claims to be canary {claim}, but the server assigned {truth} to its node"
        assert dropped(strategy) == [(1, node, why)]


def test_the_first_node_with_a_canary_keeps_it():
    """Only the client that claims it later is dropped."""
    honest = lambda reply, message: [reply]  # noqa: E731
    strategy = attacked(in_turn([honest, sending(canary(OWN, 10.0), OWN)]), rounds=2)
    assert [(number, node) for number, node, _ in dropped(strategy)] == [(2, CLIENT)]
    assert [item.present.size for item in strategy.audit.log.rounds()] == [MANY, MANY]


@pytest.mark.parametrize("update", [0.001, 10.0])
def test_a_liar_who_reports_an_honest_canary_is_named_and_the_canary_stays(update):
    """Only the owner of a canary can send its vector, so the contents decide, from round 1 on."""
    strategy = attacked(sending(noise(update), OWN), rounds=2)
    why = f"it reports canary {OWN}, which node {CANARY} sent in this round"
    assert dropped(strategy) == [(number, CLIENT, why) for number in (1, 2)]
    assert [item.present.size for item in strategy.audit.log.rounds()] == [MANY, MANY]
    result = finish_as_stated(strategy)
    assert result.verdict.outcome == "PASS", result.verdict.reason
    assert_named(result, CLIENT)


def test_many_liars_do_not_hide_a_violation():
    """Four real clients of ten report honest canaries, and the noise is for too few clients."""

    class Liars(HostileGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = []
            for reply in super().send_and_receive(messages, timeout=timeout):
                node = reply.metadata.src_node_id
                message = next(each for each in messages if each.metadata.dst_node_id == node)
                replies += sending(noise(0.01), node)(reply, message) if 1 <= node <= 4 else [reply]
            return replies

    audit = new_audit(canaries=MANY, dim=SMALL)
    strategy = audited(server_side(3 * COUNT), audit=audit, mode="client", seed=SEED)
    honest = lambda reply, message: [reply]  # noqa: E731
    small_run(strategy, Liars(client_app([canary_mod]), nodes(REAL, MANY), CLIENT, honest), rounds=2)
    assert [item.present.size for item in strategy.audit.log.rounds()] == [MANY, MANY]
    assert finish_as_stated(strategy).verdict.outcome == "VIOLATION"


def test_the_owner_of_a_canary_is_remembered_after_a_restart(tmp_path):
    """Two nodes that know the seed send the same canary: the one that had it alone before the restart keeps it."""
    honest = lambda reply, message: [reply]  # noqa: E731
    attacked(honest, tmp_path, rounds=1).audit.close()
    strategy = attacked(sending(canary(OWN, 10.0), OWN), tmp_path, rounds=2)
    assert [(number, node) for number, node, _ in dropped(strategy)] == [(2, CLIENT)]
    assert [item.present.size for item in strategy.audit.log.rounds()] == [MANY, MANY]


def test_nodes_that_fail_or_do_not_answer_are_named_with_the_number_of_rounds(tmp_path):
    honest = lambda reply, message: [reply]  # noqa: E731
    nothing = lambda reply, message: []  # noqa: E731
    attacked(in_turn([nothing, failing]), tmp_path, rounds=2).audit.close()
    strategy = attacked(in_turn([nothing, honest]), tmp_path, rounds=4)
    notes = " ".join(finish_as_stated(strategy).notes)
    assert f"did not answer: node {CLIENT} in 2 rounds" in notes
    assert f"replied with an error: node {CLIENT} in 1 round" in notes


def test_a_canary_node_that_cannot_make_its_canary_is_dropped_alone(tmp_path):
    """An error reply would make Flower's wrapper skip the round of all."""
    write_seed(tmp_path / "right")
    write_seed(tmp_path / "wrong")
    configs = nodes(REAL, MANY)
    for settings in configs[REAL:]:
        name = "wrong" if settings["canary-id"] == OWN else "right"
        settings["coalmine-seed-file"] = str(tmp_path / name)
    strategy = audited(
        server_side(COUNT),
        initial_arrays(SMALL),
        canaries=MANY,
        seed_file=tmp_path / "right",
        delta=1e-5,
        mode="client",
    )
    small_run(strategy, LoopGrid(client_app([canary_mod]), configs), rounds=2)
    assert [(number, node) for number, node, _ in dropped(strategy)] == [(1, CANARY), (2, CANARY)]
    assert all("its node cannot send its canary: seed file" in why for *_, why in dropped(strategy))
    assert [item.present.size for item in strategy.audit.log.rounds()] == [MANY - 1, MANY - 1]


def test_a_reply_that_fills_memory_is_dropped():
    text = ConfigRecord({"notes": "x" * 2**21})
    strategy = attacked(changed(lambda content: content.update({"more": text})), rounds=1)
    ((_, node, why),) = dropped(strategy)
    assert (node, why[:44]) == (CLIENT, "it must hold at most 1,048,576 bytes beside ")


def test_rounds_that_are_trained_again_after_a_restart_are_counted(tmp_path):
    honest = lambda reply, message: [reply]  # noqa: E731
    attacked(honest, tmp_path, rounds=3).audit.close()
    (tmp_path / "checkpoint.npz").unlink()  # a power cut damaged it, and the one before it is used
    strategy = attacked(honest, tmp_path, rounds=3)
    times = next(item for item in strategy.audit.items() if item.name == "participations")
    assert times.status == "not checked"
    assert times.detail == "1 round was released before a restart and trained again: it is not counted"


def test_a_restarted_server_still_names_the_nodes(tmp_path):
    attacked(with_weight(-1), tmp_path, rounds=1).audit.directory.close()
    strategy = attacked(lambda reply, message: [reply], tmp_path, rounds=2)
    assert dropped(strategy) == [(1, CLIENT, "'num-examples' must be finite and above 0, got -1")]
    assert any(f"node {CLIENT}" in note for note in finish_as_stated(strategy).notes)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_canaries_of_models_in_another_precision_are_accepted(dtype):
    """Half precision rounds a canary by far more than single precision does."""
    arrays = ArrayRecord(
        {name: Array(array.numpy().astype(dtype) * dtype(3)) for name, array in initial_arrays(SMALL).items()}
    )
    for canaries in (2, MANY):
        strategy = audited(
            server_side(REAL + canaries), audit=new_audit(canaries=MANY, dim=SMALL), seed=SEED, scale=1.0
        )
        small_run(strategy, LoopGrid(client_app([canary_mod]), nodes(REAL, canaries)), rounds=2, arrays=arrays)
        assert strategy.dropped == []


@pytest.mark.parametrize("group", [WEIGHTS, RECORDS], ids=["weights", "records"])
def test_bad_evaluation_replies_are_dropped(group):
    app = client_app([canary_mod])

    @app.evaluate()
    def evaluate(message, context):
        metrics = MetricRecord({"num-examples": 10, "loss": 1.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    kinds = {name: attack for name, attack in group.items() if not name.startswith("arrays")}
    inner = fedavg()
    inner.fraction_evaluate, inner.min_evaluate_nodes = 1.0, 2
    strategy = audited(server_side(COUNT, inner=inner), audit=new_audit(canaries=MANY, dim=SMALL), seed=SEED)
    grid = hostile_grid(in_turn(kinds.values()), mods=[canary_mod])
    grid.app = app
    result = small_run(strategy, grid, rounds=len(kinds))
    assert len(result.evaluate_metrics_clientapp) == len(kinds)
    assert all(metrics["loss"] == pytest.approx(1.0) for metrics in result.evaluate_metrics_clientapp.values())
    assert {each.node for each in strategy.dropped} == {CLIENT}


def test_the_callers_config_is_never_changed_and_the_seed_never_logged(caplog):
    """Flower logs the train config at every start, so it must not contain an announced seed."""
    secret = 987_654_321_987_654_321_987
    caplog.set_level(logging.INFO, logger="flwr")
    train_config, listed = config(rate=0.1, steps=[1, 2]), [1, 2]
    for _ in range(2):
        strategy = audited(server_side(COUNT), audit=small_audit(seed=secret), seed=secret)
        small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()), rounds=1, train_config=train_config)
        assert dict(train_config) == {"rate": 0.1, "steps": listed}
    assert "ConfigRecord (train)" in caplog.text
    assert str(secret) not in caplog.text
    sent = strategy._sent.messages[0].content["config"]
    assert sent["coalmine-seed"] == str(secret)
    sent["steps"].append(3)
    assert train_config["steps"] == listed
