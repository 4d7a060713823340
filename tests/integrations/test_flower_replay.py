"""Rounds of Flower aggregated again with one reply replaced by a zero update: honest strategies, and faults."""

import numpy as np
import pytest
from requires import require

require("flwr")
from flower_training import (  # noqa: E402
    CANARIES,
    REAL,
    SEED,
    LoopGrid,
    client_app,
    client_side,
    fedavg,
    nodes,
    server_side,
    small_audit,
    small_run,
)
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import (  # noqa: E402
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
)

from coalmine.integrations.flower import AuditedStrategy, canary_mod  # noqa: E402
from coalmine.integrations.flower.replayed import ReplayedAggregates  # noqa: E402

COUNT = REAL + CANARIES
full = pytest.mark.full


def trained(strategy, *mods, audit=None, rounds=3, mode="client", norm=3.0, examples=lambda node: 10, **settings):
    more = {"seed": SEED} if mode == "client" else {}
    audited = AuditedStrategy(strategy, audit or small_audit(), mode, **more | settings)
    grid = LoopGrid(client_app([*mods, canary_mod], update_norm=norm, examples=examples), nodes())
    audited.trained = small_run(audited, grid, rounds=rounds)  # type: ignore[attr-defined]
    return audited


def rows_item(audited, claim=50.0):
    result = audited.audit.finish(claim=claim)
    return result, next(item for item in result.audited if item.name == "rows")


def adaptive(kind):
    return lambda: kind(fedavg(), 1.0, COUNT, initial_clipping_norm=1.0)


HONEST = {
    "server": (lambda: server_side(COUNT), (), {}),
    "client": (lambda: client_side(COUNT), (fixedclipping_mod,), {}),
    "server, adaptive": (adaptive(DifferentialPrivacyServerSideAdaptiveClipping), (), {}),
    "client, adaptive": (adaptive(DifferentialPrivacyClientSideAdaptiveClipping), (adaptiveclipping_mod,), {}),
    "momentum": (lambda: server_side(COUNT, inner=FedAvgM(fraction_evaluate=0.0, server_momentum=0.5)), (), {}),
    "weights": (lambda: server_side(COUNT), (), {"examples": lambda node: 10 * node}),
    "extra canaries": (lambda: server_side(COUNT), (), {"mode": "extra"}),
    "replaced replies": (lambda: server_side(COUNT), (), {"mode": "replace", "canary_nodes": {9: 0, 10: 1, 11: 2}}),
    "short updates": (lambda: server_side(COUNT), (), {"norm": 0.01}),
    "no noise": (lambda: server_side(COUNT, noise=0.0), (), {}),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("server", "client") else full) for name in HONEST]
)
def test_honest_strategies_have_no_alarm(name):
    make, mods, settings = HONEST[name]
    _, item = rows_item(trained(make(), *mods, **settings))
    assert item.status == "checked"
    assert item.replayed.worst.factor <= 1 + item.replayed.worst.tolerance
    assert item.detail.endswith("clip norms")


def test_clients_that_do_not_clip_are_refuted_by_their_own_length():
    result, item = rows_item(trained(client_side(COUNT)))
    assert (result.verdict.outcome, item.status) == ("VIOLATION", "failed")
    assert item.replayed.worst.factor == pytest.approx(10.0, rel=1e-3)  # a canary's length before the clip


class Lopsided(FedAvg):
    """Adds one reply of a round once more."""

    def aggregate_train(self, server_round, replies):
        listed = list(replies)
        return super().aggregate_train(server_round, [*listed, listed[5]])


@full
@pytest.mark.parametrize("inner", [FedMedian, FedAdam, Lopsided])
def test_what_stands_inside_of_the_noise_is_measured(inner):
    """The noise is sized for a mean of clipped updates: a median, a server's Adam and a double reply move further."""
    _, item = rows_item(trained(server_side(COUNT, inner=inner(fraction_evaluate=0.0)), replay=True))
    assert item.status == "failed"
    assert item.replayed.worst.factor > 1.05


def test_training_is_bit_for_bit_the_one_without_replays(monkeypatch):
    with_replays = trained(server_side(COUNT))
    assert with_replays.audit.replays.steps
    monkeypatch.setattr(ReplayedAggregates, "take", lambda *_: {})
    without = trained(server_side(COUNT))
    assert without.audit.replays.steps == []
    for name, array in without.trained.arrays.items():
        assert np.array_equal(array.numpy(), with_replays.trained.arrays[name].numpy())


def test_noise_that_does_not_come_last_cannot_be_replayed():
    _, item = rows_item(trained(fedavg(), clip_norm=1.0, norm=0.5))
    assert item.status == "not checked"
    assert item.detail.startswith("no DifferentialPrivacy… wrapper is outermost")


@pytest.mark.parametrize(("replay", "reason"), [(None, "a strategy of your own"), (False, "replay=False")])
def test_a_strategy_of_one_s_own_is_not_repeated_unasked(replay, reason):
    """Its aggregation may save files or call others."""

    class Saving(FedAvg):
        saved = 0

        def aggregate_train(self, server_round, replies):
            Saving.saved += 1
            return super().aggregate_train(server_round, replies)

    audited = trained(server_side(COUNT, inner=Saving(fraction_evaluate=0.0)), replay=replay)
    assert Saving.saved == 3
    _, item = rows_item(audited)
    assert item.status == "not checked"
    assert item.detail.startswith(reason)


@full
def test_rounds_that_were_replayed_before_a_restart_stay(tmp_path):
    first = trained(server_side(COUNT), audit=small_audit(directory=tmp_path), rounds=2)
    before = list(first.audit.replays.steps)
    first.audit.close()
    second = trained(server_side(COUNT), audit=small_audit(directory=tmp_path), rounds=3)
    assert second.audit.replays.steps[: len(before)] == before
    _, item = rows_item(second)
    assert item.status == "checked"
