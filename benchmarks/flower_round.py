"""The time that the audit adds to a Flower round at d = 1,000,000 with 1,000 canaries, on the server and on a canary client.

Rounds are real: Flower's simulation engine runs 50 nodes that train on as many examples as the clients of
benchmarks/audit_share.py and clip, and FedAvg in Flower's wrapper adds the noise. Five of the nodes are canaries.
Strategies with and without an audit alternate on the same replies. The overhead is the additional time of the audited one in
`configure_train` and `aggregate_train`, divided by the whole plain round. In every second round clients send the model back
without training: no round can be shorter.

The floor, for n real clients: every number of their replies is read once, 4·n·d bytes, 180 MB here. The audit itself needs
three transforms of d numbers: one of the round's model delta, one of that delta without the real clients, and one for the
sum of the canaries, which the gauges of single arrays subtract. About ten passes over single vectors of d, 4 MB each, come
on top. With a directory, 4 MB of model are written and synced.

    python -m benchmarks.flower_round
"""

import copy
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

BAR = 0.02
DIM, CANARIES, NODES, CANARY_NODES = 1_000_000, 1_000, 50, 5
INPUTS, HIDDEN, CLASSES = 799, 1111, 100  # a network of exactly DIM weights
STEPS = 7  # of 16 examples
TURNS, WARM_UP, SEED = 22, 2, 7


def main() -> int:
    if not all(find_spec(name) for name in ("flwr", "ray")):
        print("skipped: it needs pip install 'coalmine[flower]'")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FLWR_HOME": folder, "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        share = server(Path(folder))
    client()
    print(f"share of the server in a round of clients that train: at most {share:.1%} (bar {BAR:.0%})")
    return 0 if share <= BAR else 1


def server(folder: Path) -> float:
    """Print every figure and return the share that the bar limits."""
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from coalmine.integrations.flower import canary_mod

    logging.getLogger("flwr").setLevel(logging.ERROR)
    app, turns = ServerApp(), list[dict[str, float]]()

    @app.main()
    def take_turns(grid: Any, context: Any) -> None:
        strategies, model = made(folder), initial_model()
        for number in range(1, TURNS + 1):
            turns.append(timed_turn(strategies, number, model, grid, steps=STEPS * (number % 2)))

    client_app = training_client([fixedclipping_mod, canary_mod])
    backend: Any = {"client_resources": {"num_cpus": 1}, "init_args": {"log_to_driver": False}}
    run_simulation(app, client_app, num_supernodes=NODES, backend_config=backend)
    trained, untrained = turns[WARM_UP::2], turns[WARM_UP + 1 :: 2]
    share = told(trained, f"{NODES} nodes, {STEPS} steps each")
    told(untrained, f"{NODES} nodes that do not train")
    return share


def timed_turn(strategies: dict[str, Any], number: int, model: Any, grid: Any, *, steps: int) -> dict[str, float]:
    """Seconds of each strategy in one round of `Strategy.start`, and of everything in between, as "exchange"."""
    from flwr.app import ConfigRecord, RecordDict

    seconds, messages, start = {}, {}, time.perf_counter()
    for name, strategy in strategies.items():
        messages[name] = list(strategy.configure_train(number, model, ConfigRecord({"steps": steps}), grid))
        start, seconds[name] = time.perf_counter(), time.perf_counter() - start
    replies = list(grid.send_and_receive(messages["audited"], timeout=600))
    seconds["exchange"] = time.perf_counter() - start
    assert len(replies) == NODES
    names = list(strategies)
    first = number // 2 % len(names)
    for turn, name in enumerate(
        ["plain", *names[first:], *names[:first]]
    ):  # the first is not counted: fresh memory is slow
        own = [copy.copy(reply) for reply in replies]
        for reply in own:
            reply.content = RecordDict(dict(reply.content))  # strategies change it
        start = time.perf_counter()
        arrays, _ = strategies[name].aggregate_train(number, own)
        seconds[name] += time.perf_counter() - start if turn else 0.0
        assert arrays is not None
    return seconds


def told(turns: list[dict[str, float]], what: str) -> float:
    """Print medians and quartiles; return the largest share of an audit."""
    rounds = [turn["exchange"] + turn["plain"] for turn in turns]
    usual = statistics.median(rounds)
    plain = spread([turn["plain"] for turn in turns])
    print(f"a plain round, d = {DIM:,}, {what}: {spread(rounds)}, of it on the server {plain}")
    shares = {}
    for name in [name for name in turns[0] if name not in ("exchange", "plain")]:
        more = [turn[name] - turn["plain"] for turn in turns]
        shares[name] = statistics.median(more) / usual
        print(f"  {name}: the server takes {spread(more)} longer, {shares[name]:.1%} of the round")
    return max(shares.values())


def made(folder: Path) -> dict[str, Any]:
    """The strategies that take turns."""
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

    from coalmine import Audit
    from coalmine.integrations.flower import audited
    from coalmine.integrations.flower.arrays import RecordLayout

    arrays = RecordLayout.of(initial_model()).layers  # a gauge for each, like audited()

    def plain() -> Any:
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
        return DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 1.0, NODES)

    def with_audit(directory: Path | None = None, layers: Any = arrays, **settings: Any) -> Any:
        audit = Audit(DIM, canaries=CANARIES, seed=SEED, delta=1e-5, layers=layers, directory=directory)
        nodes = range(NODES - CANARY_NODES, NODES)
        return audited(plain(), audit=audit, seed=SEED, canary_partitions=nodes, **settings)

    return {
        "plain": plain(),
        "without known others": with_audit(known_others=False, layers=None),
        "without a gauge for each array": with_audit(layers=None),
        "audited": with_audit(),
        "audited, in a directory": with_audit(folder / "run"),
    }


def client() -> None:
    """The time that a canary adds to its client, next to that of the one necessary transform."""
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    from coalmine.canaries import RotatedCanaries
    from coalmine.integrations.flower import Announcement, canary_mod

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    announced = Announcement(canaries=CANARIES, dim=DIM, kind="rotated", clip_norm=1.0, scale=10.0, seed=SEED)
    content = {
        "arrays": initial_model(),
        "config": ConfigRecord(announced.to_config() | {"server-round": 1, "steps": 1}),
    }
    message = Message(RecordDict(content), dst_node_id=1, message_type="train")
    context = Context(run_id=1, node_id=1, node_config={"canary-id": 3}, state=RecordDict(), run_config={})
    reply = training_client([])(message, context)
    like = np.empty(0, np.float32)
    drawn = RotatedCanaries(CANARIES, DIM, seed=SEED)
    calls: dict[str, Callable[[], object]] = {
        "a canary's mod": lambda: canary_mod(message, context, lambda *_: reply),
        "of it one transform": lambda: drawn.canary(3, like=like),
        "of it the rotation, drawn from the seed": lambda: RotatedCanaries(CANARIES, DIM, seed=SEED),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    print(f"a canary client, d = {DIM:,}:")
    for name, found in seconds.items():
        print(f"  {name}: {spread(found)}")


def initial_model() -> Any:
    from flwr.app import Array, ArrayRecord

    rng = np.random.default_rng(0)
    shapes = {"hidden": (INPUTS + 1, HIDDEN), "out": (HIDDEN, CLASSES), "bias": (CLASSES,)}
    return ArrayRecord({n: Array((0.03 * rng.normal(size=shape)).astype(np.float32)) for n, shape in shapes.items()})


def training_client(mods: list[Any]) -> Any:
    """A client that takes the requested number of steps in batches of 16 examples."""
    from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Any, context: Any) -> Any:
        rng = np.random.default_rng(context.node_id % 2**32)
        (record,) = message.content.array_records.values()
        hidden, out, bias = (array.numpy() for array in record.values())
        (config,) = message.content.config_records.values()
        bias += 0.01  # Flower's clip divides by the update's length
        for _ in range(config["steps"]):
            inputs = rng.random((16, INPUTS + 1), dtype=np.float32)
            reached = np.maximum(inputs @ hidden, 0)
            odds = np.exp(reached @ out + bias)
            error = odds / odds.sum(axis=1, keepdims=True)
            error[np.arange(16), rng.integers(0, CLASSES, 16)] -= 1
            back = (error @ out.T) * (reached > 0)
            for values, gradient in ((hidden, inputs.T @ back), (out, reached.T @ error), (bias, error.sum(axis=0))):
                values -= 0.01 * gradient
        arrays = ArrayRecord({name: Array(a) for name, a in zip(record, (hidden, out, bias), strict=True)})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def spread(seconds: list[float]) -> str:
    """Median, and quartiles."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(seconds, n=4, method="inclusive"))
    return f"{middle:.0f} ms ({low:.0f} … {high:.0f})"


if __name__ == "__main__":
    raise SystemExit(main())
