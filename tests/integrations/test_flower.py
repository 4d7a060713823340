"""Flower's strategies and mods in a loop; test_flower_processes.py tests real processes."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
from requires import require

require("flwr")
from click.testing import CliRunner  # noqa: E402
from flower_training import (  # noqa: E402
    CANARIES,
    DIM,
    REAL,
    SEED,
    SMALL,
    LoopGrid,
    client_app,
    client_side,
    config,
    cosines,
    fedavg,
    finish_as_stated,
    gauge,
    initial_arrays,
    new_audit,
    nodes,
    run,
    server_side,
    small_audit,
    small_run,
)
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import (  # noqa: E402
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdam,
    FedYogi,
    Krum,
)

from coalmine import Claim, mechanism_epsilon  # noqa: E402
from coalmine.canaries.rotation_rows import RowRotation  # noqa: E402
from coalmine.cli.compare import compare  # noqa: E402
from coalmine.estimators.correlated import BandedNoise  # noqa: E402
from coalmine.integrations.flower import Announcement, Observer, audited, canary_mod  # noqa: E402
from coalmine.integrations.flower.arrays import RecordLayout  # noqa: E402
from coalmine.integrations.flower.canary_clients import ASSIGNED  # noqa: E402
from coalmine.integrations.flower.modes import NO_CANARY  # noqa: E402
from coalmine.verification import verify_run  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_flower")


def by_replacing(wrapper=server_side):
    audit = small_audit()
    named = {REAL + 1 + i: i for i in range(CANARIES)}
    strategy = audited(wrapper(REAL + CANARIES, noise=0.0), audit=audit, mode="replace", canary_nodes=named)
    small_run(strategy, LoopGrid(client_app(), nodes()))
    return audit


def by_extra():
    audit = small_audit()
    strategy = audited(server_side(REAL, noise=0.0), audit=audit, mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
    return audit


def by_clients(wrapper=server_side, mods=(canary_mod,), configs=None, **settings):
    audit = small_audit()
    strategy = audited(wrapper(REAL + CANARIES, noise=0.0), audit=audit, mode="client", seed=SEED, **settings)
    small_run(strategy, LoopGrid(client_app(mods), configs or nodes()))
    return audit


def by_observer():
    audit = small_audit()
    watch = Observer(audit, clip_norm=1.0, participants=REAL + CANARIES)
    announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
    grid = LoopGrid(client_app([canary_mod]), nodes())
    small_run(server_side(REAL + CANARIES, noise=0.0), grid, train_config=announced, evaluate_fn=watch)
    return audit


PARTITIONS = [{"partition-id": i} for i in range(REAL + CANARIES)]
WAYS = {
    "extra": by_extra,
    "replace, clipped on clients": lambda: by_replacing(client_side),
    "canary-id": by_clients,
    "partition id": lambda: by_clients(configs=PARTITIONS, canary_partitions=range(REAL, REAL + CANARIES)),
    "named by the server": lambda: by_clients(
        configs=PARTITIONS, canary_nodes={REAL + 1 + i: i for i in range(CANARIES)}
    ),
    "clipped on clients": lambda: by_clients(client_side, [fixedclipping_mod, canary_mod]),
    "observer": by_observer,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_mode_gives_the_same_cosines(way):
    """Without noise and with the same nodes as canaries, the modes must not differ."""
    scores = cosines(WAYS[way]())
    assert scores.shape == (3, CANARIES + 10 * CANARIES)
    assert scores == pytest.approx(cosines(by_replacing()), abs=1e-5)
    assert scores[:, :CANARIES] == pytest.approx(1 / np.sqrt(CANARIES), abs=0.01)  # real updates are short


def test_canaries_ten_times_too_long_do_not_change_a_working_clip():
    plain = by_clients(client_side, [fixedclipping_mod, canary_mod], scale=1.0)
    assert cosines(by_clients(client_side, [fixedclipping_mod, canary_mod])) == pytest.approx(cosines(plain), abs=1e-5)


def test_clients_without_a_clip_are_a_violation():
    """The strategy relies on clients to clip; they do not, and canaries ten times too long reveal it."""
    audit = small_audit()
    strategy = audited(client_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()))
    assert finish_as_stated(strategy).verdict.outcome == "VIOLATION"


@pytest.mark.parametrize("side", ["server", pytest.param("client", marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_known_round_covers_the_truth(side, seed):
    """z = 1, five rounds, 400 canaries; studies/flower_coverage.py runs 20 seeds of each side.

    A seed gives the same canaries and noise on both sides. One of the three runs would miss by chance with probability 1/7.
    """
    audit, strategy = covered(side, seed)
    result = finish_as_stated(strategy)
    truth = mechanism_epsilon(1.0, delta=1e-5, participations=5)
    assert truth == pytest.approx(11.48, abs=0.01)
    assert gauge(result, "dilution").largest < 1.1
    for rung in ("known-round", "known-others"):
        interval = result.adversaries[rung].headline.estimate.interval
        assert interval.low <= truth <= interval.high
    assert result.verdict.outcome == "PASS"
    assert audit.last_round == 5


def covered(side, seed):
    """FedAvg with fixed clipping on one side, with extra canaries or canary clients that clip themselves."""
    audit = new_audit(seed=SEED + bytes([seed]))
    if side == "server":
        strategy = audited(server_side(20), audit=audit, mode="extra")
        run(strategy, LoopGrid(client_app(), nodes(20, 0)), seed=seed)
    else:
        app = client_app([fixedclipping_mod, canary_mod])
        strategy = audited(client_side(410), audit=audit, mode="client", seed=SEED + bytes([seed]))
        run(strategy, LoopGrid(app, nodes(10, 400)), seed=seed)
    return audit, strategy


@pytest.mark.full
@pytest.mark.parametrize("adaptive", [FedAdam, FedYogi])
def test_noise_after_an_adaptive_optimiser_is_a_violation(adaptive):
    """The wrapper adds its noise to the model after FedAdam or FedYogi, whose steps are longer than the updates."""
    audit = new_audit()
    strategy = audited(server_side(20, inner=adaptive(fraction_evaluate=0.0)), audit=audit, mode="extra")
    run(strategy, LoopGrid(client_app(), nodes(20, 0)))
    result = finish_as_stated(strategy)
    assert result.verdict.outcome == "VIOLATION"
    assert result.adversaries["known-round"].headline.estimate.epsilon > 2 * 11.48
    assert "known-others" not in result.adversaries  # Adam is not linear, so updates cannot be subtracted


def adaptive(side, dim, **settings):
    """Three rounds of adaptive clipping on one side with noise multiplier 1: the audit, its strategy, Flower's wrapper."""
    audit = new_audit(canaries=CANARIES, dim=dim)
    settings = {"clipped_count_stddev": 2.0} | settings
    if side == "server":
        wrapper = DifferentialPrivacyServerSideAdaptiveClipping(fedavg(), 1.0, REAL + CANARIES, **settings)
        named = {REAL + 1 + i: i for i in range(CANARIES)}
        strategy, mods = audited(wrapper, audit=audit, mode="replace", canary_nodes=named), []
    else:
        wrapper = DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 1.0, REAL + CANARIES, **settings)
        strategy, mods = audited(wrapper, audit=audit, mode="client", seed=SEED), [adaptiveclipping_mod, canary_mod]
    run(strategy, LoopGrid(client_app(mods), nodes()), rounds=3, arrays=initial_arrays(dim))
    return audit, strategy, wrapper


@pytest.mark.parametrize(
    ("dim", "settings", "most"), [(SMALL, {"clip_norm_lr": 2.0}, 0.1), (DIM, {}, 0.05)], ids=["fast", "Flower's own"]
)
@pytest.mark.parametrize("side", ["server", "client"])
def test_adaptive_clipping_scales_its_noise_by_the_wrong_norm(side, dim, settings, most):
    """The audit uses the norm that clipped the updates; Flower scales its noise by the norm after the update.

    The norm falls in the first round, so the noise is too small: gauges detect it, and the verdict is VIOLATION.
    Twelve canaries alone would not detect it.
    """
    audit, strategy, wrapper = adaptive(side, dim, **settings)
    norms = np.array([item.clip_norm * (REAL + CANARIES) for item in audit.log.rounds()] + [wrapper.clipping_norm])
    assert norms[0] == pytest.approx(0.1)
    assert strategy.noise_multiplier == pytest.approx((1 - 1 / 16) ** -0.5)  # multiplier of the updates alone
    changes = norms[1:] / norms[:-1]
    assert np.abs(changes - 1).max() > most
    assert changes[0] < 1
    result = finish_as_stated(strategy)
    for name in ("residual", "noise"):
        assert gauge(result, name).values == pytest.approx(changes, rel=4 / np.sqrt(2 * dim))
        assert gauge(result, name).status == "low"
        assert 1 in gauge(result, name).flagged
    assert result.verdict.outcome == "VIOLATION"
    assert result.verdict.reason.startswith("the noise gauge")
    assert {rung.verdict.outcome for rung in result.adversaries.values()} == {"PASS", "UNDERPOWERED"}


def test_canaries_follow_an_adaptive_clip_on_clients():
    audit = small_audit()
    wrapper = DifferentialPrivacyClientSideAdaptiveClipping(fedavg(), 0.0, REAL + CANARIES)
    strategy = audited(wrapper, audit=audit, mode="client", seed=SEED)
    small_run(strategy, LoopGrid(client_app([adaptiveclipping_mod, canary_mod]), nodes()))
    scores = cosines(audit)[:, :CANARIES]
    assert scores == pytest.approx(1 / np.sqrt(CANARIES), abs=0.03)
    assert len({item.clip_norm for item in audit.log.rounds()}) == 3


def test_local_noise_on_clients_is_audited():
    """LocalDpMod's noise of std 0.5 on each of 25 clients gives their sum a noise multiplier of 2.5."""
    audit = new_audit(canaries=20)
    local = LocalDpMod(1.0, 1.0, np.sqrt(2 * np.log(1.25 / 1e-5)) / 0.5, 1e-5)
    strategy = audited(fedavg(), audit=audit, mode="client", seed=SEED, clip_norm=1.0, noise_multiplier=2.5, scale=10.0)
    run(strategy, LoopGrid(client_app([local, canary_mod]), nodes(5, 20)))
    result = finish_as_stated(strategy)
    assert gauge(result, "noise").smallest == pytest.approx(1.0, abs=0.05)
    assert gauge(result, "noise").status == "ok"
    scores = result.adversaries["known-round"].headline.estimate
    assert scores.mean == pytest.approx(np.sqrt(5) / 2.5, abs=4 / np.sqrt(20))


def test_an_error_reply_skips_the_private_round_and_is_counted(caplog):
    """Flower's wrapper skips the whole round; the audit reports the missed round and continues."""
    audit = small_audit()
    strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes(), failing=[(2, 1)]))
    result = strategy.audit.finish()
    assert (result.rounds, result.skipped) == (2, 1)
    assert audit.last_round == 3
    assert f"skipped 1, failed 1, missing 0, dropped 0, lost canaries {CANARIES}" in caplog.text


def test_a_failed_canary_is_not_counted_as_present():
    """Without a wrapper, FedAvg averages the remaining replies: the failed canary is not present."""
    audit = small_audit()
    strategy = audited(fedavg(), audit=audit, mode="client", seed=SEED, clip_norm=1.0)
    failed = REAL + 1 + 5
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes(), failing=[(2, failed)], silent=[(3, failed)]))
    present = [item.present.tolist() for item in audit.log.rounds()]
    everybody = list(range(CANARIES))
    assert present == [everybody, [i for i in everybody if i != 5], [i for i in everybody if i != 5]]
    assert abs(cosines(audit)[1:, 5]).max() < 0.15
    assert strategy.audit._tally["failed"] == strategy.audit._tally["missing"] == 1


def test_missing_replies_leave_too_little_noise():
    """The wrapper scales its noise for the sampled clients; if a third do not reply, each of the others counts for more."""
    audit = small_audit()
    strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED)
    silent = [(t, node) for t in (1, 2, 3) for node in range(1, 7)]
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes(), silent=silent))
    result = finish_as_stated(strategy)
    assert gauge(result, "residual").largest == pytest.approx(14 / 20, abs=0.04)
    assert result.verdict.outcome == "VIOLATION"


def test_noise_sized_for_equal_weights_is_a_violation_where_weights_differ(caplog):
    """One client in ten has twenty times the weight, the noise assumes equal weights, and canaries use the largest."""
    audit = new_audit(canaries=50)
    strategy = audited(server_side(20), audit=audit, mode="extra")
    app = client_app(examples=lambda node: 200 if node <= 2 else 10)
    run(strategy, LoopGrid(app, nodes(20, 0)), rounds=2)
    assert finish_as_stated(strategy).verdict.outcome == "VIOLATION"
    assert "clients have different weights" in caplog.text
    assert "heaviest canary" not in caplog.text


def heavy(node):
    """Weights with which two real clients count twenty times as much as the others."""
    return 200 if node <= 2 else 10


@pytest.mark.parametrize("canaries", [12, 50])
def test_canary_clients_keep_their_own_weight(canaries, caplog):
    """In mode "client" canaries weigh less than the heaviest client, and the verdict accounts for it, without chance."""
    arrays, count = initial_arrays(), 20 + canaries
    strategy = audited(server_side(count), arrays, canaries=range(20, count), seed=SEED, delta=1e-5)
    assert strategy.mode == "client"
    configs = [{"partition-id": i} for i in range(count)]
    run(strategy, LoopGrid(client_app([canary_mod], examples=heavy), configs), rounds=2, arrays=arrays)
    result = finish_as_stated(strategy)
    assert (result.verdict.outcome, result.verdict.code) == ("VIOLATION", "stated")
    assert result.claim.sensitivity == pytest.approx(20 * math.sqrt(2))
    assert strategy.audit.finish(claim=1000.0).verdict.outcome != "VIOLATION"
    mean = (2 * 200 + (count - 2) * 10) / count
    assert f"clients have different weights (by 'num-examples'), up to {200 / mean:.3g} times the mean" in caplog.text
    assert "the heaviest canary weighs 0.05 of the heaviest client" in caplog.text


@pytest.mark.parametrize("mode", ["client", "extra"])
def test_unequal_weights_give_one_warning_without_a_wrapper(mode, caplog):
    """Only one, although the largest weight changes in each round; LocalDpMod's noise ignores weights, too."""
    weights = iter(range(11, 1_000))
    local = LocalDpMod(1.0, 1.0, 10.0, 1e-5)
    seed = {"seed": SEED} if mode == "client" else {}
    strategy = audited(fedavg(), audit=small_audit(), mode=mode, clip_norm=1.0, noise_multiplier=1.0, **seed)
    mods = [local, canary_mod] if mode == "client" else [local]
    app = client_app(mods, examples=lambda node: next(weights) if node == 1 else 10)
    small_run(strategy, LoopGrid(app, nodes(canaries=CANARIES if mode == "client" else 0)))
    (warning,) = strategy._warnings.texts
    assert warning.startswith("clients have different weights (by 'num-examples'), up to 1.0")
    assert "an epsilon of one clip norm per client is for equal weights" in warning
    assert caplog.text.count("have different weights") == 1


@pytest.mark.parametrize("wrapper", [server_side, lambda count: fedavg()])
def test_equal_weights_give_no_warning(wrapper):
    strategy = audited(wrapper(REAL + CANARIES), audit=small_audit(), mode="client", seed=SEED, clip_norm=1.0)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()), rounds=1)
    assert strategy._warnings.texts == []


def test_replies_of_two_nodes_with_the_same_canary_are_dropped(caplog):
    """The server cannot know whose canary it is. Round 1 names both nodes, and the other canaries are audited."""
    audit = small_audit()
    doubled = [*nodes(), {"canary-id": 3}]
    strategy = audited(server_side(len(doubled)), audit=audit, mode="client", seed=SEED)
    small_run(strategy, LoopGrid(client_app([canary_mod]), doubled))
    assert [item.present.tolist() for item in audit.log.rounds()] == [[i for i in range(CANARIES) if i != 3]] * 3
    first, second = REAL + 4, len(doubled)
    reason = "was dropped: node {} also sent canary 3 in this round: each node needs its own canary-id"
    assert f"the reply of node {first} in round 1 {reason.format(second)}" in caplog.text
    assert f"the reply of node {second} in round 1 {reason.format(first)}" in caplog.text
    assert gauge(strategy.audit.finish(), "residual").status == "ok"  # noise matches the number of averaged replies


def test_a_fraction_of_the_nodes_become_canaries():
    """A hash of the ids chooses them: about the requested number, the same in every round, each with its own canary."""
    audit = new_audit(canaries=40, dim=SMALL)
    strategy = audited(server_side(100), audit=audit, mode="replace", canary_nodes=0.2)
    small_run(strategy, LoopGrid(client_app(), nodes(100, 0)))
    present = [sorted(item.present.tolist()) for item in audit.log.rounds()]
    assert present[0] == present[1] == present[2] == list(range(len(present[0])))
    assert 8 <= len(present[0]) <= 35  # 20 ± 3 standard deviations


def test_sampled_clients_give_canaries_different_presentations():
    audit = new_audit(canaries=20, dim=SMALL)
    strategy = audited(server_side(10, inner=fedavg(fraction_train=0.5)), audit=audit, mode="client", seed=SEED)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes(0, 20)), rounds=4)
    sizes = [item.present.size for item in audit.log.rounds()]
    assert sizes == [10, 10, 10, 10]
    times = np.bincount(np.concatenate([item.present for item in audit.log.rounds()]), minlength=20)
    assert len(set(times)) > 1
    counts = np.bincount(times)
    usual = max(range(1, counts.size), key=lambda often: (counts[often], often))
    assert usual < times.max()
    result = finish_as_stated(strategy)
    assert result.claim.participations == times.max()
    assert result.analytical_epsilon == mechanism_epsilon(1.0, delta=1e-5, participations=usual)


def test_extra_canaries_follow_the_schedule_of_the_audit():
    audit = small_audit(rounds=3, presentations=1)
    strategy = audited(server_side(REAL), audit=audit, mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
    for number, item in enumerate(audit.log.rounds(), start=1):
        assert sorted(item.present) == sorted(audit.canaries_in_round(number))
    assert strategy.wrapped.private.num_sampled_clients == REAL  # unchanged


def trained_or_observed(way, factor):
    """Three rounds with noise multiplier 1, and a `factor` too small a noise, in a strategy or beside an observer."""
    count = REAL + CANARIES
    strategy, app = server_side(factor * count), client_app([canary_mod])
    if way == "strategy":
        strategy = audited(strategy, audit=small_audit(), mode="client", seed=SEED)
        small_run(strategy, LoopGrid(app, nodes()))
        return strategy.audit
    watch = Observer(small_audit(), clip_norm=1.0, participants=count, noise_multiplier=1.0)
    announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
    small_run(strategy, LoopGrid(app, nodes()), train_config=announced, evaluate_fn=watch)
    return watch.audit


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1, ("UNDERPOWERED", "no claim")), (10, ("VIOLATION", "less noise"))],
    ids=["right", "tenth"],
)
@pytest.mark.parametrize("way", ["strategy", "observer"])
def test_without_a_claim_nothing_passes(way, factor, verdict):
    """The noise multiplier is no claim, but less noise than it states is a VIOLATION."""
    result = trained_or_observed(way, factor).finish()
    assert result.claim is None
    assert (result.verdict.outcome, result.verdict.code) == verdict
    noted = [note for note in result.notes if "a node took part in up to 3 of 3 rounds: epsilon 8.39" in note]
    assert len(noted) == (way == "strategy")


@pytest.mark.parametrize("way", ["strategy", "observer"])
def test_a_bare_claim_is_for_a_client(way):
    claim = trained_or_observed(way, 1).finish(claim=30.0).claim
    assert (claim.epsilon, claim.unit, claim.participations) == (30.0, "client", 3 if way == "strategy" else None)


@pytest.mark.parametrize(
    "schedule", [{}, {"rounds": 3}, {"rounds": 3, "presentations": 3}], ids=["none", "once", "all"]
)
@pytest.mark.parametrize("heaviest", [1, 3])
@pytest.mark.parametrize("claim", [30.0, Claim.mechanism(30.0), Claim(30.0, participations=1)])
def test_a_claim_made_before_training_is_judged_and_verifies(claim, heaviest, schedule, tmp_path):
    """The server completes it with the rounds and the weights that it saw; it remains the claim of the commitment."""
    audit = small_audit(directory=tmp_path, claim=claim, **schedule)
    strategy = audited(server_side(REAL), audit=audit, mode="extra")
    app = client_app(examples=lambda node: 10 * heaviest if node == 1 else 10)
    small_run(strategy, LoopGrid(app, nodes(canaries=0)))
    result = strategy.audit.finish(claim=claim)  # repeated, which is allowed
    assert result.claim.epsilon == 30.0
    assert not any("made after training" in note for note in result.notes)
    checks = {check.name: check for check in verify_run(tmp_path, SEED, model=tmp_path / "model.npy")}
    assert checks["claim"].held, checks["claim"]
    assert checks["result"].held


def test_flowers_accountant_does_not_change_the_claim():
    accounting = require("flwr.serverapp")
    settings = accounting.PrivacyConfig(
        target_delta=1e-5,
        population_size=REAL,
        sampling_method=accounting.SamplingMethod.NO_AMPLIFICATION,
        neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    accountant = accounting.RdpAccountant(settings)
    wrapper = DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, REAL, accountant=accountant)
    audit = small_audit()
    strategy = audited(wrapper, audit=audit, mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), rounds=5)
    assert wrapper.privacy_spent().epsilon == pytest.approx(12.30, abs=0.02)
    claim = strategy.audit.finish(claim=11.5).claim
    assert (claim.epsilon, claim.participations, claim.unit) == (11.5, 5, "client")


def test_a_restarted_server_resumes_after_its_last_round(tmp_path):
    def start(rounds, failing=()):
        audit = small_audit(directory=tmp_path)
        strategy = audited(server_side(50), audit=audit, mode="replace", canary_nodes=0.5)
        small_run(strategy, LoopGrid(client_app(), nodes(50, 0), failing=failing), rounds=rounds)
        return audit, strategy

    audit, _ = start(2, failing=[(1, 3)])
    first = [item.present.tolist() for item in audit.log.rounds()]
    audit.directory.close()
    audit, strategy = start(4)
    assert audit.last_round == 4
    assert [item.number for item in audit.log.rounds()] == [2, 3, 4]
    assert [sorted(item.present.tolist()) for item in audit.log.rounds()] == [sorted(first[0])] * 3
    result = finish_as_stated(strategy)
    final = next(result.adversaries[name] for name in ["final-update"])
    assert final.headline.estimate.mean > 1  # √3 if the initial model is still known, otherwise about 0
    stored = json.loads((tmp_path / "result.json").read_text())
    replied = len(first[0]) - (
        "3" in json.loads((tmp_path / ASSIGNED).read_text())
    )  # a hash decides whether node 3 is a canary
    assert stored["missed"] == {"skipped": 1, "failed": 1, "missing": 0, "dropped": 0, "lost_canaries": replied}
    assert finish_as_stated(strategy).to_dict() == result.to_dict()  # and again, in the same process


class Sent(LoopGrid):
    """Nodes that send these updates, longer or shorter than the clip norm; `laid` is the memory layout."""

    def __init__(self, updates, laid):
        super().__init__(None, [{} for _ in updates])
        self.updates, self.laid = updates, laid

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            update = self.updates[message.metadata.dst_node_id - 1]
            arrays, place = {}, 0
            for name, array in message.content["arrays"].items():
                values = array.numpy()
                step = update[place : place + values.size].reshape(values.shape)
                arrays[name] = Array(self.laid(values + step))
                place += values.size
            metrics = MetricRecord({"num-examples": message.metadata.dst_node_id})
            replies.append(Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message))
        return replies


@pytest.mark.parametrize(
    "laid",
    [
        lambda values: values.astype(np.float32),
        lambda values: np.asfortranarray(values.astype(np.float32)),
        lambda values: values.astype(np.float64),
        lambda values: values.astype(">f4"),
    ],
    ids=["as the model", "columns first", "double", "the other byte order"],
)
@pytest.mark.parametrize("wrapper", [server_side, client_side])
def test_others_are_the_clipped_average_of_the_real_clients(laid, wrapper, monkeypatch):
    """For every memory layout, and although a strategy that clips replaces the arrays in the replies.

    If clients must clip, a longer update is dropped.
    """
    rng = np.random.default_rng(4)
    lengths = np.array([0.1, 0.5, 1, 3, 10, 100]) if wrapper is server_side else np.full(6, 0.9)
    updates = rng.normal(size=(6, SMALL)) * lengths[:, None] / np.sqrt(SMALL)
    audit, observed = small_audit(), []
    observe = audit.observe_round
    monkeypatch.setattr(
        audit, "observe_round", lambda *a, **options: (observed.append(options["others"]), observe(*a, **options))
    )
    strategy = audited(wrapper(6), audit=audit, mode="replace", canary_nodes={6: 0})
    small_run(strategy, Sent(updates, laid), rounds=1)
    weights = np.arange(1, 7) / 21  # node 6 is a canary
    norms = np.linalg.norm(updates, axis=1)
    assert (norms[:5] > 1).any() == (wrapper is server_side)
    truth = sum(w * u * min(1, 1 / norm) for w, u, norm in zip(weights[:5], updates[:5], norms[:5], strict=True))
    (others,) = observed
    assert others.dtype == np.float32
    rounding = 2.0**-23 * np.abs(initial_arrays(SMALL)["first"].numpy()).max()  # of the model plus an update
    assert np.abs(others - truth).max() < rounding
    assert np.abs(truth).max() > 1000 * rounding


def test_a_reply_of_another_size_is_rejected():
    layout = RecordLayout.of(initial_arrays(SMALL))
    wrong = ArrayRecord({"first": Array(np.zeros((10, 5), np.float32)), "last": Array(np.zeros(10, np.float32))})
    with pytest.raises(ValueError, match=r"'first' must hold 1990 numbers like the model's, got 50"):
        layout.update_into(np.empty(SMALL, np.float32), wrong, np.zeros(SMALL, np.float32))


@pytest.mark.parametrize("known_others", [True, False])
def test_clients_and_server_need_few_transforms(known_others, monkeypatch):
    """A canary client needs one; the server one per round, one to check canaries' replies, and one for known-others.

    One transform takes the cosines of the release and of its residual.
    """
    counts = {"sums": 0, "products": 0}

    def counted(name):
        real = getattr(RowRotation, name)

        def call(*arguments):
            counts[name] += 1
            return real(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(RowRotation, name, counted(name))
    audit = small_audit()
    strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED, known_others=known_others)
    each, app = [], client_app([canary_mod])

    def client(message, context):
        before = dict(counts)
        reply = app(message, context)
        each.append((context.node_config, {name: counts[name] - before[name] for name in counts}))
        return reply

    small_run(strategy, LoopGrid(client, nodes()), rounds=1)
    assert len(each) == REAL + CANARIES
    for node, taken in each:
        assert taken == {"sums": int("canary-id" in node), "products": 0}
    assert counts == {"sums": CANARIES + 1 + known_others, "products": 1}


@pytest.mark.parametrize(("mode", "canaries"), [("client", range(REAL, REAL + CANARIES)), ("extra", CANARIES)])
def test_audited_with_a_model_gives_the_same_cosines(mode, canaries, tmp_path):
    """`audited` makes the audit itself from the model, and `coalmine compare` shows the given task."""
    arrays = initial_arrays(SMALL)
    count = REAL if mode == "extra" else REAL + CANARIES
    strategy = audited(
        server_side(count, noise=0.0), arrays, mode=mode, canaries=canaries, seed=SEED, delta=1e-5, directory=tmp_path
    )
    grid = LoopGrid(client_app([canary_mod]), PARTITIONS[:count])
    small_run(strategy, grid, arrays=arrays)
    assert cosines(strategy.audit) == pytest.approx(cosines(by_extra()), abs=1e-5)
    strategy.audit.finish(task="a task")  # type: ignore[call-arg]
    shown = CliRunner().invoke(compare, ["--json", str(tmp_path)])
    assert json.loads(shown.stdout)[0]["task"] == "a task"
    strategy.audit.finish()
    stored = json.loads((tmp_path / "result.json").read_text())
    assert (stored["trainer"], stored["task"]) == ("flower", "flower")


def test_the_run_directory_is_valid_and_verifies(tmp_path):
    schema = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "result.schema.json").read_text())
    audit = small_audit(directory=tmp_path)
    strategy = audited(server_side(REAL), audit=audit, mode="extra")

    def evaluate(server_round, arrays):
        return MetricRecord({"accuracy": 0.25 * server_round})

    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), evaluate_fn=evaluate)
    strategy.audit.finish()
    stored = json.loads((tmp_path / "result.json").read_text())
    require("jsonschema").validate(stored, schema)
    assert stored["accuracy"] == 0.75
    assert stored["noise_multiplier"] == 1.0
    assert stored["presentations"] == 3
    lines = audit.directory.read_metrics()
    assert [line["accuracy"] for line in lines if "accuracy" in line] == [0.25, 0.5, 0.75]
    checks = {check.name: check.held for check in verify_run(tmp_path, SEED, model=tmp_path / "model.npy")}
    assert False not in checks.values(), checks
    assert {checks[name] for name in ("commitment", "cosines", "result")} == {True}, checks


def test_a_seed_in_a_node_file_is_never_sent(tmp_path):
    secret = tmp_path / "seed"
    secret.write_bytes(SEED)
    configs = [{**node, "coalmine-seed-file": str(secret)} if "canary-id" in node else node for node in nodes()]
    audit = small_audit()
    strategy = audited(server_side(REAL + CANARIES, noise=0.0), audit=audit, mode="client")
    small_run(strategy, LoopGrid(client_app([canary_mod]), configs))
    assert cosines(audit) == pytest.approx(cosines(by_clients()), abs=1e-5)
    assert "coalmine-seed" not in strategy._sent.messages[0].content["config"]


def test_a_canary_without_a_seed_is_an_error():
    audit = small_audit()
    strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client")
    with pytest.raises(ValueError, match="a canary needs the seed"):
        small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()))


def test_a_seed_other_than_the_audits_is_rejected(tmp_path):
    """Otherwise clients would send unknown canaries, and the audit would detect nothing and give PASS."""
    audit = small_audit()
    with pytest.raises(ValueError, match="seed must be the one that the audit was made with"):
        audited(server_side(5), audit=audit, mode="client", seed=b"another")
    with pytest.raises(ValueError, match="seed must be the one that the audit was made with"):
        Observer(audit, clip_norm=1.0).announce(initial_arrays(SMALL), seed=b"another")
    secret = tmp_path / "seed"
    secret.write_bytes(b"another")
    configs = [{**node, "coalmine-seed-file": str(secret)} if "canary-id" in node else node for node in nodes()]
    strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client")
    with pytest.raises(ValueError, match=r"seed must hold the seed of the server's audit, got another"):
        small_run(strategy, LoopGrid(client_app([canary_mod]), configs))


@pytest.mark.parametrize("noise", [None, BandedNoise(coefficients=(1.0, 0.5), rounds=3)])
def test_announcement_round_trips_through_its_config(noise):
    """With all committed settings: a node with other settings would reject the right seed."""
    audit = new_audit(canaries=CANARIES, dim=SMALL, unobserved=200, noise=noise, layers=[("a", 500), ("b", 1_500)])
    sent = Announcement.of(
        audit, clip_norm=1.0, scale=10.0, left_out=("c",), seed=5, partitions=range(3, 15), round_number=4
    )
    assert Announcement.from_config(sent.to_config()) == sent
    alone = Announcement(canaries=12, dim=SMALL, kind="rotated", clip_norm=1.0, scale=10.0)
    assert Announcement.from_config(alone.to_config()) == alone


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"canary_partitions": range(REAL, REAL + CANARIES)},
        {"canary_nodes": {REAL + 1 + i: i for i in range(CANARIES)}},
    ],
    ids=["canary-id", "partition id", "named by the server"],
)
@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_clients_without_canary_mod_give_one_warning(way, fraction, caplog):
    """In the first round that must contain canaries, or otherwise at the end."""
    inner = fedavg(fraction_train=fraction)
    count = int(fraction * (REAL + CANARIES))
    strategy = audited(server_side(count, inner=inner), audit=small_audit(), mode="client", seed=SEED, **way)
    small_run(strategy, LoopGrid(client_app(), PARTITIONS))
    at_once = fraction == 1 or "canary_nodes" in way
    assert caplog.text.count("clients need canary_mod") == int(at_once)
    strategy.audit.finish()
    assert caplog.text.count("clients need canary_mod") == 1
    assert strategy._warnings.texts == [NO_CANARY]


def test_a_round_without_canaries_gives_no_warning():
    """If canaries did not reply, or none was sampled while another round had one."""
    named = {REAL + 1 + i: i for i in range(CANARIES)}
    strategy = audited(server_side(REAL + CANARIES), audit=small_audit(), mode="client", seed=SEED, canary_nodes=named)
    silent = [(1, node) for node in named]
    small_run(strategy, LoopGrid(client_app([canary_mod]), PARTITIONS, silent=silent), rounds=2)
    strategy.audit.finish()
    assert strategy._warnings.texts == []


@pytest.mark.parametrize("way", ["strategy", "observer"])
def test_buffers_are_named_and_integer_buffers_excluded(way, caplog, tmp_path):
    """Buffers like those of batch normalisation are both named.

    An integer buffer is never audited, although Flower averages it to fractions; a floating-point buffer is audited.
    """
    arrays = initial_arrays(SMALL)
    arrays["norm.running_mean"] = Array(np.zeros(7, np.float32))
    arrays["norm.num_batches_tracked"] = Array(np.array(7, dtype=np.int64))
    audit = new_audit(canaries=CANARIES, dim=SMALL + 7, directory=tmp_path)
    grid = LoopGrid(client_app([canary_mod]), nodes())
    expected = {
        "integer arrays are left out of the audit, though Flower clips and noises them: norm.num_batches_tracked",
        "buffers are not parameters, but Flower clips and noises them, and the audit includes them: norm.running_mean",
    }
    if way == "observer":
        expected.add("known-others was left out: the observer sees models only, not the clients' updates")
        watch = Observer(audit, clip_norm=1.0, participants=REAL + CANARIES)
        announced = config(**watch.announce(arrays, seed=SEED))
        small_run(server_side(REAL + CANARIES), grid, arrays=arrays, train_config=announced, evaluate_fn=watch)
        watch.audit.finish()
    else:
        strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED)
        small_run(strategy, grid, arrays=arrays)
        strategy.audit.finish()
    assert {record.message for record in caplog.records if record.levelno == logging.WARNING} == expected
    assert set(json.loads((tmp_path / "result.json").read_text())["warnings"]) == expected
    assert audit.last_round == 3


def test_strategies_that_drop_outliers_are_named(caplog):
    audited(server_side(REAL, inner=Krum()), audit=small_audit(), mode="extra")
    assert "Krum may drop" in caplog.text


def test_invalid_settings_are_rejected():
    audit = small_audit()
    with pytest.raises(TypeError, match=r"strategy must be a strategy of flwr\.serverapp, got 3"):
        audited(3, audit=audit)
    with pytest.raises(TypeError, match="needs the model that is trained"):
        audited(server_side(5), canaries=12, seed=SEED, delta=1e-5)
    with pytest.raises(ValueError, match="so omit canaries, delta"):
        audited(server_side(5), audit=audit, canaries=12, delta=1e-5)
    with pytest.raises(ValueError, match="mode must be"):
        audited(server_side(5), audit=audit, mode="ghost")
    with pytest.raises(ValueError, match="mode 'replace' needs canary_nodes"):
        audited(server_side(5), audit=audit, mode="replace")
    with pytest.raises(ValueError, match="clip_norm"):
        audited(fedavg(), audit=audit, mode="extra")
    with pytest.raises(ValueError, match="are for mode 'client'"):
        audited(server_side(5), audit=audit, mode="extra", seed=SEED)
    with pytest.raises(ValueError, match=r"fraction in \(0, 1\]"):
        audited(server_side(5), audit=audit, mode="replace", canary_nodes=1.5)
    with pytest.raises(ValueError, match=r"a different canary for each node, got canary 0 for nodes 1 and 22$"):
        audited(server_side(5), audit=audit, mode="replace", canary_nodes={1: 0, 3: 1, 22: [2, 0]})
    with pytest.raises(ValueError, match=r"a different canary for each node, got canary 4 for node 1 twice$"):
        audited(server_side(5), audit=audit, mode="client", canary_nodes={1: [4, 4]})
    with pytest.raises(ValueError, match=r"canaries in 0..11, at least one for each node, got {1: 12}"):
        audited(server_side(5), audit=audit, mode="replace", canary_nodes={1: 12})
    with pytest.raises(ValueError, match="start"):
        audited(server_side(5), audit=audit, mode="extra").audit.finish()
    with pytest.raises(ValueError, match="clip_norm and participants"):
        Observer(audit, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="participants must be at least 1"):
        Observer(audit, clip_norm=1.0, participants=0)
    wrong = audited(server_side(5), audit=new_audit(dim=DIM), mode="extra")
    with pytest.raises(ValueError, match=f"dim = {SMALL}"):
        small_run(wrong, LoopGrid(client_app(), nodes(canaries=0)))


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["scale", "clip_norm", "noise_multiplier"])
def test_invalid_numbers_are_rejected_before_training(name, value):
    audit = small_audit()
    watched = {"clip_norm": 1.0, "participants": 5}
    if (name, value) == ("noise_multiplier", 0.0):
        audited(server_side(5), audit=audit, mode="extra", noise_multiplier=0.0)  # zero noise can be audited
        Observer(audit, **watched, noise_multiplier=0.0)
        return
    with pytest.raises(ValueError, match=f"{name} must be "):
        audited(server_side(5), audit=audit, mode="client", seed=SEED, **{name: value})
    scale = {"scale": value} if name == "scale" else {}
    with pytest.raises(ValueError, match=f"{name} must be "):
        Observer(audit, **watched | ({} if scale else {name: value})).announce(initial_arrays(SMALL), **scale)


def test_partitions_may_be_a_list():
    listed = list(range(REAL, REAL + CANARIES))
    scores = cosines(by_clients(configs=PARTITIONS, canary_partitions=listed))
    assert scores == pytest.approx(cosines(by_clients()), abs=1e-5)


@pytest.mark.parametrize("partitions", [[1, 3], [2, 1], [1, 1], [], range(1, 9, 2), 5, "12", [-1, 0], [1.5]])
def test_partitions_must_be_consecutive(partitions):
    with pytest.raises(ValueError, match="canary_partitions must be "):
        audited(server_side(5), audit=small_audit(), mode="client", seed=SEED, canary_partitions=partitions)


def restarted(directory):
    """Start a server in a directory and train one round more than before."""
    audit = small_audit(directory=directory)
    try:
        strategy = audited(server_side(50), audit=audit, mode="replace", canary_nodes=0.5)
        small_run(strategy, LoopGrid(client_app(), nodes(50, 0)), rounds=audit.last_round + 1)
    finally:
        audit.directory.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"}", b" "),
    ],
    ids=["of its last byte", "in half", "to nothing", "inside"],
)
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint.npz", r"checkpoint.npz is not a checkpoint \(.*\); remove it to train from round 1"),
        ("audit/nodes.json", r"nodes.json must name different canaries in 0..11 by node, got .*; remove it"),
        ("initial.npy", r"initial.npy is not a model \(.*\); restore it from a copy"),
    ],
)
def test_a_damaged_file_is_named(name, says, damage, tmp_path):
    restarted(tmp_path)
    path = tmp_path / name
    path.write_bytes(damage(path.read_bytes().rstrip(b"\n")))
    with pytest.raises(ValueError, match=says):
        restarted(tmp_path)


@pytest.mark.parametrize("text", ["[]", "7", "null", '{"1": 12}', '{"1": 0, "2": 0}', '{"1": null}', "\xff"])
def test_invalid_node_assignments_are_rejected(text, tmp_path):
    restarted(tmp_path)
    (tmp_path / "audit" / "nodes.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"nodes.json must name different canaries"):
        restarted(tmp_path)


def test_an_initial_model_of_another_size_is_rejected_before_training(tmp_path):
    restarted(tmp_path)
    np.save(tmp_path / "initial.npy", np.zeros(SMALL - 1, np.float32))
    with pytest.raises(ValueError, match=r"initial.npy must be a model of 2000 numbers, got shape \(1999,\)"):
        restarted(tmp_path)


def test_canary_mod_leaves_other_clients_unchanged():
    """Without an announcement, or in an evaluation, the mod changes nothing."""
    app = client_app([canary_mod])
    with_mod = small_run(server_side(REAL, noise=0.0), LoopGrid(app, nodes(REAL, 0)))
    plain = small_run(server_side(REAL, noise=0.0), LoopGrid(client_app(), nodes(REAL, 0)))
    assert isinstance(with_mod.arrays, ArrayRecord)
    for name in plain.arrays:
        assert np.array_equal(with_mod.arrays[name].numpy(), plain.arrays[name].numpy())
