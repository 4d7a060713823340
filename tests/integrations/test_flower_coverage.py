"""Coverage of a Flower audit: a gauge per array, the configured noise, frozen arrays, and the list of checked items."""

import json
import logging

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
    client_side,
    config,
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
from flwr.app import Array, ArrayRecord  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402
from flwr.clientapp.mod import fixedclipping_mod  # noqa: E402
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAdam, FedMedian  # noqa: E402

from coalmine import Claim, mechanism_epsilon  # noqa: E402
from coalmine.integrations.flower import Observer, audited, canary_mod  # noqa: E402

CLAIM = Claim(epsilon=float(mechanism_epsilon(1.0, delta=1e-5, participations=5)), participations=5)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, logger="flwr")
    caplog.set_level(logging.INFO, logger="flwr.coalmine")


def item(source, name):
    return next(found for found in source.audit.items() if found.name == name)


class WithoutNoiseIn(DifferentialPrivacyServerSideFixedClipping):
    """Flower's wrapper with a fault: one array is released without noise."""

    spared = "last"

    def _add_noise_to_aggregated_arrays(self, aggregated_arrays):
        noised = super()._add_noise_to_aggregated_arrays(aggregated_arrays)
        noised[self.spared] = aggregated_arrays[self.spared]
        return noised


# One gauge for each array


@pytest.mark.parametrize(
    ("wrapper", "outcome"), [(DifferentialPrivacyServerSideFixedClipping, "PASS"), (WithoutNoiseIn, "VIOLATION")]
)
def test_bias_without_noise_is_a_violation(wrapper, outcome):
    """Ten of 10,000 numbers lack noise: only the gauge of their own array can detect it."""
    arrays = initial_arrays()
    strategy = audited(wrapper(fedavg(), 1.0, 1.0, 20), arrays, mode="extra", canaries=100, seed=SEED, delta=1e-5)
    run(strategy, LoopGrid(client_app(), nodes(20, 0)), arrays=arrays)
    result = strategy.audit.finish(claim=CLAIM)
    assert gauge(result, "layer last").status == ("ok" if outcome == "PASS" else "low")
    assert gauge(result, "layer first").status == gauge(result, "residual").status == "ok"
    assert result.verdict.outcome == outcome


def test_audited_makes_a_layer_of_every_floating_point_array():
    arrays = initial_arrays(SMALL)
    arrays["steps"] = Array(np.array(7, dtype=np.int64))
    arrays["empty"] = Array(np.zeros((0, 3), np.float32))
    strategy = audited(server_side(REAL), arrays, mode="extra", canaries=CANARIES, seed=SEED, delta=1e-5)
    assert strategy.audit.settings.layers == (("first", 1_990), ("last", 10))
    assert not [found for found in strategy.audit.items() if found.name == "tensors"]


def test_an_audit_without_layers_does_not_check_tensors():
    strategy = audited(server_side(REAL), audit=small_audit(), mode="extra")
    assert item(strategy, "tensors").status == "not checked"
    assert "without layers" in item(strategy, "tensors").detail


# Noise in mode "extra"


@pytest.mark.parametrize(("factor", "outcome"), [(1, "PASS"), (10, "VIOLATION")])
@pytest.mark.parametrize("wrapper", [server_side, pytest.param(client_side, marks=pytest.mark.full)])
def test_extra_canaries_do_not_repair_a_wrong_num_sampled_clients(wrapper, factor, outcome):
    """If it is ten times too large, a tenth of the noise is left: extra replies must not hide that."""
    strategy = audited(wrapper(20 * factor), audit=new_audit(canaries=100), mode="extra")
    run(strategy, LoopGrid(client_app([fixedclipping_mod] if wrapper is client_side else []), nodes(20, 0)))
    result = strategy.audit.finish(claim=CLAIM)
    assert gauge(result, "residual").largest == pytest.approx(1 / factor, rel=0.05)
    assert result.verdict.outcome == outcome


@pytest.mark.parametrize("mode", ["client", "replace"])
def test_other_modes_detect_a_wrong_num_sampled_clients(mode):
    named, seed = {REAL + 1 + i: i for i in range(CANARIES)}, {"seed": SEED} if mode == "client" else {}
    strategy = audited(server_side(10 * (REAL + CANARIES)), audit=small_audit(), mode=mode, canary_nodes=named, **seed)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()))
    result = finish_as_stated(strategy)
    assert gauge(result, "residual").largest == pytest.approx(0.1, rel=0.1)
    assert result.verdict.outcome == "VIOLATION"


class Recorded(DifferentialPrivacyServerSideFixedClipping):
    """Flower's wrapper; `used` lists the values of num_sampled_clients behind its noise."""

    def _add_noise_to_aggregated_arrays(self, aggregated_arrays):
        self.__dict__.setdefault("used", []).append(self.num_sampled_clients)
        return super()._add_noise_to_aggregated_arrays(aggregated_arrays)


@pytest.mark.parametrize(
    ("configured", "examples", "silent", "expected"),
    [
        (8, lambda node: 10, (), 20),
        (80, lambda node: 10, (), 200),
        (8, lambda node: 10, (1, 2), 8 * 18 / 6),
        (8, lambda node: 30 if node == 1 else 10, (), 8 * (100 + 12 * 30) / 100),
    ],
    ids=["as it should be", "ten times too large", "two replies missing", "one client weighs three times as much"],
)
def test_noise_stays_proportional_to_one_clients_share(configured, examples, silent, expected):
    """Twelve extra replies reduce a client's share of the average; the noise shrinks by the same factor."""
    wrapper = Recorded(fedavg(), 1.0, 1.0, configured)
    strategy = audited(wrapper, audit=small_audit(), mode="extra")
    grid = LoopGrid(client_app(examples=examples), nodes(canaries=0), silent=[(1, node) for node in silent])
    small_run(strategy, grid, rounds=1)
    assert wrapper.used == pytest.approx([expected])  # type: ignore[attr-defined]
    assert wrapper.num_sampled_clients == configured


def test_a_median_ignores_weights():
    wrapper = Recorded(FedMedian(fraction_evaluate=0.0), 1.0, 1.0, REAL)
    strategy = audited(wrapper, audit=small_audit(), mode="extra")
    grid = LoopGrid(client_app(examples=lambda node: 30 if node == 1 else 10), nodes(canaries=0))
    small_run(strategy, grid, rounds=1)
    assert wrapper.used == [REAL + CANARIES]  # type: ignore[attr-defined]


# Frozen arrays


def frozen_app(mods=()):
    """Clients that change every array except "last"."""
    app, inner = ClientApp(mods=list(mods)), client_app()

    @app.train()
    def train(message, context):
        (before,) = message.content.array_records.values()
        reply = inner(message, context)
        (name,) = reply.content.array_records
        changed = dict(reply.content[name].items())
        changed["last"] = Array(before["last"].numpy().astype(np.float64))  # same numbers, other bytes
        reply.content[name] = ArrayRecord(changed)
        return reply

    return app


@pytest.mark.parametrize("known_others", [True, False])
@pytest.mark.parametrize("mode", ["client", "extra"])
def test_frozen_arrays_with_noise_are_named(mode, known_others, tmp_path):
    arrays = initial_arrays(SMALL)
    client = mode == "client"
    count = REAL + CANARIES if client else REAL
    strategy = audited(
        server_side(count), arrays, mode=mode, canaries=CANARIES, seed=SEED, delta=1e-5, directory=tmp_path,
        known_others=known_others,
    )  # fmt: skip
    grid = LoopGrid(frozen_app([canary_mod]), nodes() if client else nodes(canaries=0))
    small_run(strategy, grid, arrays=arrays)
    strategy.audit.finish()
    named = [
        text for text in json.loads((tmp_path / "result.json").read_text())["warnings"] if "no real client" in text
    ]
    assert [text.split(",")[0] for text in named] == ["no real client changed last"]


@pytest.mark.parametrize("noise", [1.0, 0.0])
def test_trained_arrays_are_not_called_frozen(noise):
    strategy = audited(server_side(REAL, noise=noise), audit=small_audit(), mode="extra")
    small_run(strategy, LoopGrid(client_app() if noise else frozen_app(), nodes(canaries=0)))
    strategy.audit.finish()
    assert not [text for text in strategy._warnings.texts if "no real client" in text]


# The list of what was checked


@pytest.mark.parametrize(
    ("strategy", "settings", "reason"),
    [
        (server_side(REAL), {"known_others": False}, "known_others=False was given"),
        (fedavg(), {"clip_norm": 1.0}, "without a DifferentialPrivacy… wrapper"),
        (server_side(REAL, inner=FedAdam(fraction_evaluate=0.0)), {}, "FedAdam does not average linearly"),
    ],
)
def test_the_reason_for_omitting_known_others_is_given(strategy, settings, reason, tmp_path, caplog):
    wrapped = audited(strategy, audit=small_audit(directory=tmp_path), mode="extra", **settings)
    small_run(wrapped, LoopGrid(client_app(), nodes(canaries=0)))
    result = wrapped.audit.finish()
    assert "known-others" not in result.adversaries
    assert item(wrapped, "others").status == "not checked"
    assert item(wrapped, "others").detail.startswith(reason)
    (text,) = [
        text for text in json.loads((tmp_path / "result.json").read_text())["warnings"] if "known-others" in text
    ]
    assert text.startswith(f"known-others was left out: {reason}")
    assert text in caplog.text


@pytest.mark.parametrize(
    ("wrapper", "mode", "settings", "status", "detail"),
    [
        (server_side, "extra", {}, "checked", "10 times the clip norm went through the server's clip in Diff"),
        (server_side, "client", {}, "checked", "the server's clip in DifferentialPrivacyServerSideFixedClipping"),
        (client_side, "client", {}, "checked", "10 times the clip norm went through the clients' clip"),
        (client_side, "extra", {}, "cannot be checked", "mode 'extra' makes canaries on the server"),
        (server_side, "extra", {"scale": 1.0}, "not checked", "no longer than the clip norm"),
        (lambda count: fedavg(), "client", {"clip_norm": 1.0}, "not checked", "no longer than the clip norm"),
        (lambda count: fedavg(), "client", {"clip_norm": 1.0, "scale": 10.0}, "checked", "the clients' clip"),
    ],
)
def test_clipping_is_checked_if_long_canaries_are_clipped(wrapper, mode, settings, status, detail):
    strategy = audited(wrapper(REAL), audit=small_audit(), mode=mode, **settings)
    clipping = item(strategy, "clipping")
    assert clipping.status == status
    assert detail in clipping.detail


def test_every_round_records_the_scale_of_its_canaries():
    for scale in (1.0, 10.0):
        audit = small_audit()
        strategy = audited(server_side(REAL), audit=audit, mode="extra", scale=scale)
        small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
        assert [found.scale for found in audit.log.rounds()] == [scale] * 3


def heavy(node):
    return 200 if node <= 2 else 10


@pytest.mark.parametrize(
    ("mode", "examples", "status", "detail"),
    [
        ("client", lambda node: 10, "checked", "as much as the heaviest"),
        ("client", heavy, "not checked", "up to 20 times as much as a canary"),
        ("extra", heavy, "checked", "as much as the heaviest"),
    ],
)
def test_weights_are_checked_if_canaries_weigh_as_much_as_any_client(mode, examples, status, detail):
    seed, count = ({"seed": SEED}, CANARIES) if mode == "client" else ({}, 0)
    strategy = audited(server_side(REAL + count), audit=small_audit(), mode=mode, **seed)
    assert item(strategy, "weights").detail == "no canary took part in any round"
    small_run(strategy, LoopGrid(client_app([canary_mod], examples=examples), nodes(canaries=count)))
    assert item(strategy, "weights").status == status
    assert detail in item(strategy, "weights").detail


def test_weights_before_a_restart_are_remembered(tmp_path):
    def start(rounds, examples):
        audit = small_audit(directory=tmp_path)
        strategy = audited(server_side(REAL + CANARIES), audit=audit, mode="client", seed=SEED)
        small_run(strategy, LoopGrid(client_app([canary_mod], examples=examples), nodes()), rounds=rounds)
        return audit, strategy

    audit, _ = start(1, heavy)
    audit.directory.close()
    _, strategy = start(2, lambda node: 10)
    assert item(strategy, "weights").status == "not checked"
    heavy_round = 200 / (2 * 200 + 18 * 10) * 20  # a heavy client's part of round 1, over that of equal weights
    truth = mechanism_epsilon(1 / np.hypot(heavy_round, 1), delta=1e-5)
    assert finish_as_stated(strategy).verdict.finding.epsilon == pytest.approx(truth)


def test_the_sampler_is_never_checked():
    assert item(audited(server_side(REAL), audit=small_audit(), mode="extra"), "sampler").status == "not checked"


def test_the_result_lists_every_item(monkeypatch):
    audit, items = small_audit(), []
    result = audit.result
    monkeypatch.setattr(audit, "result", lambda **options: (items.extend(options["audited"]), result(**options))[1])
    strategy = audited(server_side(REAL), audit=audit, mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)))
    claim = finish_as_stated(strategy).claim
    assert [found for found in items if found.name != "rows"] == strategy.audit.items(claim)
    names = {"clipping", "weights", "others", "tensors", "participations", "sampler", "rows"}
    assert {found.name for found in items} == names


def test_an_observer_lists_what_it_cannot_check(monkeypatch):
    audit, items = small_audit(), []
    result = audit.result
    monkeypatch.setattr(audit, "result", lambda **options: (items.extend(options["audited"]), result(**options))[1])
    watch = Observer(audit, clip_norm=1.0, participants=REAL + CANARIES, noise_multiplier=1.0)
    announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
    grid = LoopGrid(client_app([canary_mod]), nodes())
    small_run(server_side(REAL + CANARIES), grid, train_config=announced, evaluate_fn=watch)
    watch.audit.finish()
    assert {found.name: found.status for found in items} == {
        "clipping": "checked",
        "weights": "cannot be checked",
        "others": "not checked",
        "tensors": "not checked",
        "sampler": "not checked",
    }
    assert [found.scale for found in audit.log.rounds()] == [10.0] * 3


def test_an_observer_declares_a_clip_norm_only_in_the_units_of_the_average():
    for participants in (None, REAL + CANARIES):
        audit = small_audit()
        watch = Observer(audit, clip_norm=1.0, participants=participants)
        announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
        grid = LoopGrid(client_app([canary_mod]), nodes())
        small_run(server_side(REAL + CANARIES), grid, train_config=announced, evaluate_fn=watch, rounds=1)
        (found,) = audit.log.rounds()
        assert found.clip_declared == (participants is not None)
        assert found.clip_norm == (1.0 if participants is None else 1 / participants)


# Flower's accountant


def with_accountant(count, **settings):
    accounting = require("flwr.serverapp")
    privacy = accounting.PrivacyConfig(
        target_delta=1e-5,
        population_size=count,
        sampling_method=accounting.SamplingMethod.NO_AMPLIFICATION,
        neighboring_relation=accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    accountant = accounting.RdpAccountant(privacy)
    return DifferentialPrivacyServerSideFixedClipping(fedavg(), 1.0, 1.0, count, accountant=accountant)


def test_the_accountants_epsilon_is_logged_and_stored(tmp_path, caplog):
    strategy = audited(with_accountant(REAL), audit=small_audit(directory=tmp_path), mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), rounds=5)
    strategy.audit.finish()
    stored = json.loads((tmp_path / "result.json").read_text())
    assert stored["accounted_epsilon"] == pytest.approx(12.30, abs=0.02)
    assert "Flower's accountant: epsilon 12.3 at delta 1e-05" in caplog.text


def test_a_restarted_accountant_gives_a_warning(tmp_path):
    for rounds in (1, 2):
        audit = small_audit(directory=tmp_path)
        strategy = audited(with_accountant(REAL), audit=audit, mode="extra")
        small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), rounds=rounds)
        warned = [text for text in strategy._warnings.texts if "accountant" in text]
        audit.directory.close()
    assert warned == ["Flower's accountant starts again after round 1: its epsilon is for later rounds only"]
