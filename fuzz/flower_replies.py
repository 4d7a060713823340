"""Replies of hostile Flower clients: the server drops bad replies, finishes the run, and never raises an error."""

import contextlib
import copy
import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fuzz.cases import Case

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integrations"))
NUMBERS = (float("nan"), float("inf"), -1, 0, 1e7, 1e308, -1e308, 2**62, 0.5, 10)


def make_case(rng: random.Random, folder: Path) -> Case:
    """A run of two rounds in which one node, real or canary, answers badly."""
    import flower_training as flower

    node = rng.choice((1, 3, flower.REAL + 1, flower.REAL + 3))
    attack = rng.choice((_examples, _metric, _arrays, _records, _metric_names))
    seed = rng.randrange(1 << 30)
    server = rng.random() < 0.5
    given = f"node {node}, {attack.__name__.lstrip('_')}, {'server' if server else 'client'} side, seed {seed}"
    return Case(given, lambda: _run(flower, node, attack, seed, server))


def _run(flower: Any, node: int, attack: Any, seed: int, server: bool) -> None:
    from flwr.clientapp.mod import fixedclipping_mod

    from coalmine.integrations.flower import audited, canary_mod

    mods = [canary_mod] if server else [fixedclipping_mod, canary_mod]
    honest = flower.client_app(mods)

    def answer(message: Any, context: Any) -> Any:
        reply = honest(message, context)
        if context.node_id == node and reply.has_content():
            with contextlib.suppress(TypeError, ValueError, KeyError, StopIteration):  # errors of Flower itself
                spoiled = copy.deepcopy(reply)
                attack(spoiled, random.Random(seed))
                return spoiled
        return reply

    before = logging.getLogger("coalmine").level
    logging.getLogger("coalmine").setLevel(logging.CRITICAL)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    count = flower.REAL + flower.CANARIES
    strategy = flower.server_side(count) if server else flower.client_side(count)
    try:
        inner = audited(strategy, audit=flower.small_audit(), mode="client", seed=flower.SEED)
        grid = flower.LoopGrid(answer, flower.nodes())
        flower.small_run(inner, grid, rounds=2)
    finally:
        logging.getLogger("coalmine").setLevel(before)


def _first(records: Any) -> Any:
    return next(iter(records.values()))


def _examples(reply: Any, rng: random.Random) -> None:
    record = _first(reply.content.metric_records)
    if rng.random() < 0.2:
        del record["num-examples"]
    else:
        record["num-examples"] = rng.choice(NUMBERS)


def _metric(reply: Any, rng: random.Random) -> None:
    record = _first(reply.content.metric_records)
    record[rng.choice(list(record))] = rng.choice((*NUMBERS, [1, 2, 3], [float("nan")]))


def _metric_names(reply: Any, rng: random.Random) -> None:
    record = _first(reply.content.metric_records)
    for name in ("coalmine-canary", "canary", "canary-id", "coalmine"):
        record[name] = rng.choice(NUMBERS)
    for other in list(reply.content.metric_records.values())[1:]:
        for name in list(other):
            other[name] = rng.choice((*NUMBERS, [1, 2]))


def _arrays(reply: Any, rng: random.Random) -> None:
    from flwr.app import Array

    record = _first(reply.content.array_records)
    name = rng.choice(list(record))
    values = record[name].numpy()
    kind = rng.randrange(7)
    if kind == 0:
        del record[name]
    elif kind == 1:
        record[name] = Array(np.full_like(values, rng.choice((np.nan, np.inf, 3e38))))
    elif kind == 2:
        record[name] = Array(values.ravel()[: rng.randrange(5)])
    elif kind == 3:
        record[name] = Array(values.astype(rng.choice((np.int64, np.float16, np.complex64, np.bool_))))
    elif kind == 4:
        record["extra"] = Array(np.zeros(3))
    elif kind == 5:
        record[name] = Array("float32", (2, 2), "numpy.ndarray", rng.randbytes(30))
    else:
        record[name] = Array(values * 1e20)


def _records(reply: Any, rng: random.Random) -> None:
    content = reply.content
    name = rng.choice(list(content))
    if rng.random() < 0.5:
        del content[name]
    else:
        content["extra"] = content[name]
