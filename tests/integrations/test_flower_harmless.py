"""An audit never harms the training: real clients count as without it, or it stops at once and says why."""

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
    initial_arrays,
    new_audit,
    nodes,
    server_side,
    small_audit,
    small_run,
)
from flwr.app import Array, ArrayRecord  # noqa: E402
from flwr.clientapp.mod import (  # noqa: E402
    LocalDpMod,
    adaptiveclipping_mod,
    arrays_size_mod,
    fixedclipping_mod,
    message_size_mod,
)
from flwr.serverapp.strategy import (  # noqa: E402
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
)
from hostile_clients import CLIENT, HostileGrid, each  # noqa: E402

from coalmine.integrations.flower import Announcement, Observer, audited, canary_mod  # noqa: E402
from coalmine.integrations.flower.arrays import RecordLayout  # noqa: E402
from coalmine.integrations.flower.replies import LONGEST  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("quiet_flower")]

COUNT = REAL + CANARIES
STRATEGIES = {
    "FedAvg": fedavg,
    "FedAvgM": lambda: FedAvgM(fraction_evaluate=0.0, server_learning_rate=0.5, server_momentum=0.9),
    "FedAdam": lambda: FedAdam(fraction_evaluate=0.0),
    "FedYogi": lambda: FedYogi(fraction_evaluate=0.0),
    "FedAdagrad": lambda: FedAdagrad(fraction_evaluate=0.0),
}
WRAPPERS = {
    "no wrapper": lambda inner, count: inner,
    "server": lambda inner, count: server_side(count, inner=inner),
    "client": lambda inner, count: client_side(count, inner=inner),
    "server, adaptive": lambda inner, count: DifferentialPrivacyServerSideAdaptiveClipping(
        inner, 1.0, count, clipped_count_stddev=2.0
    ),
    "client, adaptive": lambda inner, count: DifferentialPrivacyClientSideAdaptiveClipping(
        inner, 1.0, count, clipped_count_stddev=2.0
    ),
}
MODS = {"client": [fixedclipping_mod], "client, adaptive": [adaptiveclipping_mod]}


def in_precision(app, precision):
    """Clients that keep the model in their own precision, whatever the server sends, as torch's load_state_dict does.

    `precision` maps a node and a round to a dtype, None for the dtype that was sent. Integer buffers stay integers.
    """

    def client(message, context):
        reply = app(message, context)
        (settings,) = message.content.config_records.values()
        dtype = precision(context.node_id, settings["server-round"])
        if dtype is None:
            return reply
        for key, record in list(reply.content.array_records.items()):
            cast = {name: Array(array.numpy().astype(BUFFERS.get(name, dtype))) for name, array in record.items()}
            reply.content[key] = ArrayRecord(cast)
        return reply

    return client


BUFFERS = {"steps": np.int64}
PRECISIONS = {
    "as sent": lambda node, number: None,
    "single": lambda node, number: np.float32,
    "half": lambda node, number: np.float16,
    "changing": lambda node, number: (np.float16, np.float32, np.float64)[(node + number) % 3],
}


def values(record):
    return np.concatenate([array.numpy().reshape(-1) for array in record.values()])


def announced_by(audit, strategy, scale):
    """Let a strategy announce the canaries itself, so that the same clients are canaries without an AuditedStrategy."""
    layout, configure = RecordLayout.of(initial_arrays(SMALL)), strategy.configure_train

    def configure_train(number, arrays, settings, grid):
        announcement = Announcement.of(
            audit,
            clip_norm=getattr(strategy, "clipping_norm", 1.0),
            scale=scale,
            left_out=layout.left_out,
            seed=SEED,
            partitions=None,
            round_number=number,
        )
        return configure(number, arrays, config(**{**settings, **announcement.to_config()}), grid)

    strategy.configure_train = configure_train
    return strategy


def model_after(strategy, wrapper, *, precision="single", canaries=CANARIES, rounds=4, seed=0):
    """The model after a run with clients of this precision."""
    app = in_precision(client_app([*MODS.get(wrapper, []), canary_mod]), PRECISIONS[precision])
    return values(small_run(strategy, LoopGrid(app, nodes(REAL, canaries)), rounds=rounds, seed=seed).arrays)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("canaries", [0, CANARIES])
def test_the_model_is_that_of_the_same_clients_without_the_audit(name, wrapper, canaries):
    """Bit for bit, noise included: the audit only reads. Without canaries it is the model of the users' own run."""
    count = REAL + canaries
    scale = 1.0 if wrapper == "no wrapper" else 10.0
    plain = announced_by(small_audit(), WRAPPERS[wrapper](STRATEGIES[name](), count), scale)
    clip = {"clip_norm": 1.0} if wrapper == "no wrapper" else {}
    strategy = audited(WRAPPERS[wrapper](STRATEGIES[name](), count), audit=small_audit(), seed=SEED, **clip)
    expected = model_after(plain, wrapper, canaries=canaries)
    assert np.array_equal(model_after(strategy, wrapper, canaries=canaries), expected)
    assert strategy.dropped == []
    assert {len(item.present) for item in strategy.audit.log.rounds()} == {canaries}
    assert {item.participants for item in strategy.audit.log.rounds()} == {count}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wrapper", ["server", "client"])
@pytest.mark.parametrize("name", ["FedAvg", "FedAdam"])
def test_replies_of_any_precision_are_taken(name, wrapper, precision):
    """FedAdam turns the server's model into double precision after round 1; clients keep their own."""
    plain = announced_by(small_audit(), WRAPPERS[wrapper](STRATEGIES[name](), COUNT), 10.0)
    strategy = audited(WRAPPERS[wrapper](STRATEGIES[name](), COUNT), audit=small_audit(), seed=SEED)
    assert np.array_equal(
        model_after(strategy, wrapper, precision=precision), model_after(plain, wrapper, precision=precision)
    )
    assert strategy.dropped == []


@pytest.mark.parametrize("seed", range(3))
def test_single_precision_clients_of_fedadam_take_part_in_every_round(seed, tmp_path):
    """Behind a clip on the server: no reply is dropped, and nothing blames the canaries."""
    strategy = audited(
        server_side(COUNT, inner=FedAdam(fraction_evaluate=0.0)), audit=small_audit(directory=tmp_path), seed=SEED
    )
    model_after(strategy, "server", rounds=5, seed=seed)
    lines = [line for line in strategy.audit.directory.read_metrics() if "clients" in line]
    assert [(line["clients"], line["canaries"], line["dropped"]) for line in lines] == [(REAL, CANARIES, 0)] * 5
    assert strategy.audit.finish().adversaries["known-round"].headline.presentations == 5


def test_integer_buffers_stay_integers_on_clients():
    """Averaging turns the server's buffer into fractions; clients still send whole numbers."""
    arrays = initial_arrays(SMALL)
    arrays["steps"] = Array(np.array(7, dtype=np.int64))
    strategy = audited(server_side(COUNT), audit=small_audit(), seed=SEED)
    app = in_precision(client_app([canary_mod]), PRECISIONS["single"])
    result = small_run(strategy, LoopGrid(app, nodes()), arrays=arrays)
    assert result.arrays["steps"].dtype == "float64"
    assert strategy.dropped == []


def reaching(strategy):
    """What reaches the innermost strategy: by round and node, the update and the weight."""
    seen, inner, current = {}, strategy, {}
    while getattr(inner, "strategy", None) is not None:
        inner = inner.strategy
    configure, aggregate = inner.configure_train, inner.aggregate_train

    def configure_train(number, arrays, *rest):
        current["model"] = values(arrays).astype(np.float64)
        return configure(number, arrays, *rest)

    def aggregate_train(number, replies):
        replies = list(replies)
        for reply in replies:
            (record,), (metrics,) = reply.content.array_records.values(), reply.content.metric_records.values()
            update = values(record).astype(np.float64) - current["model"]
            seen.setdefault((number, reply.metadata.src_node_id), (update, metrics["num-examples"]))  # not extra ones
        return aggregate(number, replies)

    inner.configure_train, inner.aggregate_train = configure_train, aggregate_train
    return seen


@pytest.mark.parametrize("mode", ["client", "replace", "extra"])
@pytest.mark.parametrize("wrapper", ["no wrapper", "server", "client"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_real_clients_count_as_without_canaries(name, wrapper, mode):
    """Each real client's clipped update and weight are those of a run without canaries, in each round, up to rounding."""

    def run_of(count, audit):
        strategy = WRAPPERS[wrapper](STRATEGIES[name](), REAL if mode == "extra" else count)
        seen = reaching(strategy)
        if audit:
            settings = {"clip_norm": 1.0} if wrapper == "no wrapper" else {}
            settings |= {"seed": SEED} if mode == "client" else {}
            settings |= {"canary_nodes": {REAL + 1 + i: i for i in range(CANARIES)}} if mode == "replace" else {}
            strategy = audited(strategy, audit=small_audit(), mode=mode, **settings)
        mods = [*MODS.get(wrapper, []), *([canary_mod] if mode == "client" else [])]
        app = in_precision(client_app(mods, update_norm=3.0, examples=lambda node: 5 + node), PRECISIONS["single"])
        extra = CANARIES if audit and mode != "extra" else 0
        small_run(strategy, LoopGrid(app, nodes(REAL, extra)))
        return seen

    expected, found = run_of(REAL, audit=False), run_of(COUNT, audit=True)
    assert len(expected) == 3 * REAL
    for key, (update, weight) in expected.items():
        assert found[key][1] == weight
        assert np.abs(found[key][0] - update).max() < 1e-5  # single precision of numbers up to about 10
        assert np.linalg.norm(update) > 0.5


# What would change the training stops it


def spoiled(count):
    """A grid in which `count` real nodes send NaN."""
    app, broken = client_app([canary_mod]), each(lambda array: array * np.nan)

    def client(message, context):
        reply = app(message, context)
        return broken(reply, message)[0] if context.node_id <= count else reply

    return LoopGrid(client, nodes(REAL, 4))


def test_a_check_that_drops_most_replies_stops_before_the_round_is_aggregated(tmp_path):
    strategy = audited(server_side(REAL + 4), audit=small_audit(directory=tmp_path), seed=SEED)
    says = (
        r"^the audit would drop 7 of 12 replies in round 1, which would change the training, so it stops: 7 of them, such "
        r"as that of node 1, because array 'first' must hold finite numbers of a usable size, got NaN or infinity\. Mend "
        r"this, or train without the audit$"
    )
    with pytest.raises(ValueError, match=says):
        small_run(strategy, spoiled(7))
    assert strategy.audit.last_round == 0


def test_a_few_bad_replies_do_not_stop_the_training():
    strategy = audited(server_side(REAL + 4), audit=small_audit(), seed=SEED)
    small_run(strategy, spoiled(5))
    assert len(strategy.dropped) == 15
    result = finish_as_stated(strategy)
    assert result.rounds == 3
    assert sum("was dropped in 3 rounds" in note for note in result.notes) == 5


def test_contested_canaries_do_not_stop_the_training():
    """Almost half of the clients report honest canaries. They are dropped, and the canaries are not."""

    def client(message, context):
        reply = app(message, context)
        if context.node_id <= 6:
            reply.content["coalmine"] = config(canary=context.node_id - 1)
        return reply

    app = client_app([canary_mod])
    strategy = audited(server_side(14), audit=small_audit(), seed=SEED)
    small_run(strategy, LoopGrid(client, nodes(REAL, 6)))
    assert [line.round_number for line in strategy.dropped] == [1] * 6 + [2] * 6 + [3] * 6
    assert [item.present.size for item in strategy.audit.log.rounds()] == [6] * 3
    assert strategy.ledger.exposures.nodes.times == {7: 3, 8: 3}


def test_canaries_in_an_adaptive_clip_norm_are_counted_and_bounded():
    wrapper = WRAPPERS["server, adaptive"](fedavg(), COUNT)
    strategy = audited(wrapper, audit=small_audit(), seed=SEED)
    model_after(strategy, "server, adaptive")
    warned = [note for note in strategy.audit.finish().notes if "adaptive clip norm" in note]
    most = 1 - np.exp(-0.2 * CANARIES / COUNT)
    assert len(warned) == 1
    assert f"up to {CANARIES / COUNT:.0%} of a round's replies" in warned[0]
    assert f"by at most {most:.0%} more in each round" in warned[0]


# The order of mods


def clipping(message, context, call_next):
    """A user's own mod that clips: nothing shows what it does."""
    return fixedclipping_mod(message, context, call_next)


ORDER = "canary_mod must be last in mods, or canaries bypass {0}: mods=[{1}, canary_mod]"
WRONG = {
    "fixedclipping_mod": ("client", fixedclipping_mod, 0.01),
    "adaptiveclipping_mod": ("client, adaptive", adaptiveclipping_mod, 0.01),
    "LocalDpMod": ("no wrapper", LocalDpMod(1.0, 1.0, 10.0, 1e-5), 0.01),
    "own": ("client", clipping, 3.0),
}


@pytest.mark.parametrize("later", [[], [arrays_size_mod]])
@pytest.mark.parametrize("name", WRONG)
def test_canaries_that_bypass_a_mod_are_no_violation(name, later, caplog):
    """Four such canaries are dropped, and the others train as without them. The result names the right order."""
    wrapper, mod, norm = WRONG[name]
    says = ORDER.format(name, name) if name != "own" else ORDER.format("the clients' clip", "...")
    clip = {"clip_norm": 1.0, "noise_multiplier": 1.0, "scale": 10.0} if wrapper == "no wrapper" else {}
    strategy = audited(WRAPPERS[wrapper](fedavg(), REAL + 4), audit=small_audit(), seed=SEED, **clip)
    app = client_app([canary_mod, *later, mod], update_norm=norm)
    small_run(strategy, LoopGrid(app, nodes(REAL, 4)))
    assert {each.why for each in strategy.dropped} == {says}
    assert {each.node for each in strategy.dropped} == set(range(REAL + 1, REAL + 5))
    result = finish_as_stated(strategy)
    assert (result.verdict.outcome, result.verdict.code) == ("UNDERPOWERED", "no canaries")
    assert any(says in note for note in result.notes)


@pytest.mark.parametrize("name", WRONG)
def test_most_clients_with_the_wrong_order_stop_with_the_right_one(name):
    wrapper, mod, norm = WRONG[name]
    clip = {"clip_norm": 1.0, "noise_multiplier": 1.0, "scale": 10.0} if wrapper == "no wrapper" else {}
    strategy = audited(WRAPPERS[wrapper](fedavg(), COUNT), audit=small_audit(), seed=SEED, **clip)
    with pytest.raises(ValueError, match=r"would drop 12 of 20 replies in round 1, .*canary_mod must be last in mods"):
        small_run(strategy, LoopGrid(client_app([canary_mod, mod], update_norm=norm), nodes()))


@pytest.mark.parametrize(
    "mods", [[canary_mod], [canary_mod, message_size_mod], [fixedclipping_mod, canary_mod, arrays_size_mod]]
)
def test_other_mods_may_come_later(mods):
    wrapper = client_side if fixedclipping_mod in mods else server_side
    strategy = audited(wrapper(COUNT), audit=small_audit(), seed=SEED)
    small_run(strategy, LoopGrid(client_app(mods), nodes()))
    assert strategy.dropped == []


@pytest.mark.parametrize("norm", [3.0, 0.999, 0.5])
def test_the_right_order_passes_whatever_the_length_of_updates(norm):
    strategy = audited(client_side(REAL + 24), audit=new_audit(canaries=24, dim=SMALL), seed=SEED)
    app = client_app([fixedclipping_mod, canary_mod], update_norm=norm * np.sqrt(10_000 / SMALL))
    small_run(strategy, LoopGrid(app, nodes(REAL, 24)))
    assert strategy.dropped == []
    assert finish_as_stated(strategy).verdict.outcome == "PASS"


def test_a_missing_clip_is_still_a_violation():
    """Real updates as long as the clip norm, plus and minus a fifth, show that nobody clips."""
    app = client_app([canary_mod], update_norm=np.sqrt(10_000 / SMALL))
    strategy = audited(client_side(REAL + 4), audit=small_audit(), seed=SEED)
    small_run(strategy, LoopGrid(app, nodes(REAL, 4)))
    assert not any("last in mods" in each.why for each in strategy.dropped)
    assert finish_as_stated(strategy).verdict.outcome == "VIOLATION"


def test_one_client_cannot_pretend_that_the_order_is_wrong():
    """It reports a bypassed mod: only its own reply is dropped."""

    def attack(reply, message):
        reply.content["coalmine"] = config(canary=3, bypassed="fixedclipping_mod\n" * 100)
        return [reply]

    strategy = audited(server_side(COUNT), audit=small_audit(), seed=SEED)
    small_run(strategy, HostileGrid(client_app([canary_mod]), nodes(), CLIENT, attack))
    assert {each.node for each in strategy.dropped} == {CLIENT}
    assert all(each.why.isprintable() and len(each.why) <= LONGEST for each in strategy.dropped)
    assert {item.present.size for item in strategy.audit.log.rounds()} == {CANARIES}


def test_an_observers_canaries_refuse_the_wrong_order():
    watch = Observer(small_audit(), clip_norm=1.0, participants=COUNT, noise_multiplier=1.0)
    announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
    grid = LoopGrid(client_app([canary_mod, fixedclipping_mod]), nodes(), catching=True)
    small_run(client_side(COUNT), grid, train_config=announced, evaluate_fn=watch)
    with pytest.raises(ValueError, match="every round was skipped"):
        watch.audit.finish()
    with pytest.raises(ValueError, match="canary_mod must be last in mods"):
        small_run(client_side(COUNT), LoopGrid(grid.app, nodes()), train_config=announced)
