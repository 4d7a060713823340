"""Hostile clients: no reply raises on the server, frames an honest pipeline or hides a broken one; each is named."""

import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
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
    initial_arrays,
    new_audit,
    nodes,
    server_side,
    small_audit,
    small_run,
)
from flwr.app import ConfigRecord, MetricRecord  # noqa: E402
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
    as_another_node,
    canary_update,
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

COUNT = REAL + MANY


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="flwr")
    caplog.set_level(logging.WARNING, logger="flwr.coalmine")


def attacked(
    attack, directory=None, *, node=CLIENT, side="server", wrapper=None, rounds=2, noise_for=COUNT, **settings
):
    """A run with one hostile node: the strategy, and its lines of metrics by round."""
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


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("group", [WEIGHTS, RECORDS, ARRAYS], ids=["weights", "records", "arrays"])
def test_bad_replies_are_dropped_and_named(group, side, caplog, tmp_path):
    """One kind in each round. The others' replies are aggregated as usual, so the verdict is the honest one."""
    strategy = attacked(in_turn(group.values()), tmp_path, side=side, rounds=len(group))
    kinds = dict(zip(range(1, len(group) + 1), group, strict=True))
    found = {number: (node, why) for number, node, why in dropped(strategy)}
    assert {kinds[number] for number in found} == set(group)
    assert {node for node, _ in found.values()} == {CLIENT}
    lines = [line for line in strategy.audit.directory.read_metrics() if "canaries" in line]
    assert [line["dropped"] for line in lines] == [1] * len(group)
    assert [line["canaries"] for line in lines] == [MANY] * len(group)
    for number, (node, why) in found.items():
        assert f"reply of node {node} in round {number} was dropped: {why}" in caplog.text
        assert why.isprintable()
        assert len(why) < 200
    result = strategy.audit.finish()
    assert_named(result, CLIENT)
    assert result.verdict.outcome == "PASS", result.verdict.reason
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["missed"]["dropped"] == len(group)
    assert any(f"node {CLIENT}" in text for text in stored["warnings"])


@pytest.mark.parametrize("node", [CLIENT, CANARY])
def test_invalid_claims_to_be_a_canary_are_dropped(node):
    """A record that is not one whole number in range, or that names another node's canary."""
    strategy = attacked(in_turn(CLAIMS.values()), node=node, rounds=len(CLAIMS))
    present = [item.present.size for item in strategy.audit.log.rounds()]
    assert len(strategy.dropped) >= len(CLAIMS)
    assert min(present) >= MANY - 2
    assert max(present) <= MANY
    assert_named(strategy.audit.finish(), node)
