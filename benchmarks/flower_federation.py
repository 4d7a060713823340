"""What the audit adds to Flower's server in a federation of 1,000 nodes, 20 of which are canaries in every round.

Strategy, wrapper, messages, mods and ClientApp are Flower's own. The grid calls the clients one after another in this
process: Ray would not change what the server does. Every node takes part in every round and replies with a model of
d = 100,000 numbers, 400 MB a round. The same replies go to a strategy without an audit and to two with one, in turn. Time is
this process's processor time, which other programs on the machine hardly change.

    python -m benchmarks.flower_federation
"""

import copy
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

DIM, CANARIES, NODES, CANARY_NODES = 100_000, 1_000, 1_000, 20
ROUNDS, WARM_UP, SEED = 6, 1, 7
RESULTS = Path(__file__).parent / "results" / "flower_federation.json"


def main() -> int:
    if find_spec("flwr") is None:
        print("skipped: it needs pip install 'coalmine[flower]'")
        return 0
    found = measure()
    if "--write" in sys.argv[1:]:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return 0


def measure() -> dict[str, Any]:
    """Medians over the rounds, in seconds of processor time."""
    strategies, grid, model = made(), in_process_grid(), initial_model()
    logging.getLogger("flwr").setLevel(logging.ERROR)  # flwr sets it when it is imported
    taken: dict[str, list[float]] = {name: [] for name in (*strategies, "clients")}
    present = []
    for number in range(1, ROUNDS + WARM_UP + 1):
        seconds, canaries = one_round(strategies, number, model, grid)
        if number > WARM_UP:
            present.append(canaries)
            for name, value in seconds.items():
                taken[name].append(value)
    middle = {name: statistics.median(values) for name, values in taken.items()}
    more = {
        name: statistics.median(one - plain for one, plain in zip(taken[name], taken["plain"], strict=True))
        for name in strategies
        if name != "plain"
    }
    return {
        "nodes": NODES,
        "canary_nodes": sorted(set(present)),
        "parameters": DIM,
        "canaries": CANARIES,
        "rounds": ROUNDS,
        "seconds": {name: round(value, 4) for name, value in middle.items()},
        "audit_seconds": {name: round(value, 4) for name, value in more.items()},
        "audit_share_of_server": {name: round(value / middle["plain"], 4) for name, value in more.items()},
    }


def one_round(strategies: dict[str, Any], number: int, model: Any, grid: Any) -> tuple[dict[str, float], int]:
    """Seconds of each strategy on the same replies, and of the clients; and how many nodes were canaries."""
    from flwr.app import ConfigRecord, RecordDict

    seconds, messages = {}, {}
    for name, strategy in strategies.items():
        start = time.process_time()
        messages[name] = list(strategy.configure_train(number, model, ConfigRecord(), grid))
        seconds[name] = time.process_time() - start
    start = time.process_time()
    replies = list(grid.send_and_receive(messages["audited"]))
    seconds["clients"] = time.process_time() - start
    assert len(replies) == NODES
    names = list(strategies)
    for turn, name in enumerate(["plain", *names[number % len(names) :], *names[: number % len(names)]]):
        own = [copy.copy(reply) for reply in replies]
        for reply in own:
            reply.content = RecordDict(dict(reply.content))  # strategies change it
        start = time.process_time()
        arrays, _ = strategies[name].aggregate_train(number, own)
        seconds[name] += (
            time.process_time() - start if turn else 0.0
        )  # the first time for nothing: fresh memory is slow
        assert arrays is not None
    return seconds, len(strategies["audited"].audit.log.observed[-1].present)


def made() -> dict[str, Any]:
    """The strategies that take turns."""
    from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg

    from coalmine import Audit
    from coalmine.integrations.flower import audited
    from coalmine.integrations.flower.arrays import RecordLayout

    def plain() -> Any:
        inner = FedAvg(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
        return DifferentialPrivacyClientSideFixedClipping(inner, 1.0, 1.0, NODES)

    def with_audit(**settings: Any) -> Any:
        layers = RecordLayout.of(initial_model()).layers
        audit = Audit(DIM, canaries=CANARIES, seed=SEED, delta=1e-5, layers=layers)
        nodes = range(NODES - CANARY_NODES, NODES)
        return audited(plain(), audit=audit, seed=SEED, canary_partitions=nodes, **settings)

    return {"plain": plain(), "audited": with_audit(), "without known others": with_audit(known_others=False)}


def initial_model() -> Any:
    from flwr.app import Array, ArrayRecord

    rng = np.random.default_rng(0)
    shapes = {"hidden": (DIM // 100 - 10, 100), "out": (9, 100), "bias": (100,)}
    return ArrayRecord({name: Array(rng.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()})


def in_process_grid() -> Any:
    """A grid whose nodes are called one after another; each adds a short update of its own."""
    from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp import Grid
    from flwr.supercore.task_identity import TaskIdentity

    from coalmine.integrations.flower import canary_mod

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    app = ClientApp(mods=[fixedclipping_mod, canary_mod])

    @app.train()
    def train(message: Any, context: Any) -> Any:
        (record,) = message.content.array_records.values()
        moved = {name: array.numpy() for name, array in record.items()}
        moved["bias"] = moved["bias"] + np.float32(1e-3 * (context.node_id % 7 + 1))
        content: Any = {
            "arrays": ArrayRecord({name: Array(np.asarray(values, np.float32)) for name, values in moved.items()}),
            "metrics": MetricRecord({"num-examples": 1}),
        }
        return Message(RecordDict(content), reply_to=message)

    class InProcessGrid(Grid):
        contexts = {  # noqa: RUF012
            node: Context(
                run_id=1, node_id=node, node_config={"partition-id": node - 1}, state=RecordDict(), run_config={}
            )
            for node in range(1, NODES + 1)
        }

        def get_node_ids(self) -> Iterable[int]:
            return list(self.contexts)

        def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Iterable[Any]:
            return [app(message, self.contexts[message.metadata.dst_node_id]) for message in messages]

        def set_run(self, run: Any) -> None:
            raise NotImplementedError

        @property
        def run(self) -> Any:
            raise NotImplementedError

        def create_message(self, *arguments: Any, **settings: Any) -> Any:
            raise NotImplementedError

        def push_messages(self, messages: Any) -> Any:
            raise NotImplementedError

        def pull_messages(self, message_ids: Any) -> Any:
            raise NotImplementedError

    return InProcessGrid()


if __name__ == "__main__":
    raise SystemExit(main())
