"""Flower in one process: real strategies, a real ClientApp with mods, and a grid that calls it in a loop."""

import random

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from coalmine import Audit, mechanism_epsilon

SEED = b"tests only"
DIM, SMALL = 10_000, 2_000
REAL, CANARIES = 8, 12


class LoopGrid(Grid):
    """Nodes 1, 2, … with their configs. `failing` and `silent` are pairs of round and node.

    With `catching`, an exception in a client becomes an error reply like a SuperNode's.
    """

    def __init__(self, app, node_configs, *, failing=(), silent=(), catching=False):
        self.catching = catching
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
        self.app = app
        self.failing, self.silent = set(failing), set(silent)
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=config, state=RecordDict(), run_config={})
            for node, config in enumerate(node_configs, start=1)
        }

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            (config,) = message.content.config_records.values()
            key = (config["server-round"], node)
            if key in self.failing:
                replies.append(Message(Error(code=0, reason="killed"), reply_to=message))
            elif key not in self.silent:
                replies.append(self.reply(message, node))
        return replies

    def reply(self, message, node):
        try:
            return self.app(message, self.contexts[node])
        except ValueError as error:
            if not self.catching:
                raise
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)

    def set_run(self, run):
        raise NotImplementedError

    run = property(set_run)

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError


def initial_arrays(dim=DIM):
    """Two arrays of a model of `dim` numbers, far from 0 so that rounding is realistic."""
    values = np.random.default_rng(99).normal(size=dim).astype(np.float32)
    return ArrayRecord({"first": Array(values[:-10].reshape(10, -1)), "last": Array(values[-10:])})


def client_app(mods=(), *, update_norm=0.01, examples=lambda node: 10):
    """A client that sends its own random update in each round."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message, context):
        (record,) = message.content.array_records.values()
        (config,) = message.content.config_records.values()
        rng = np.random.default_rng([context.node_id, config["server-round"]])
        moved = {}
        for name, array in record.items():
            values = array.numpy()
            moved[name] = Array(values)
            if array.dtype.startswith("float"):
                step = rng.normal(size=values.shape) * update_norm / np.sqrt(DIM)
                moved[name] = Array(np.asarray(values + step, dtype=values.dtype))
        metrics = MetricRecord({"num-examples": examples(context.node_id), "loss": 1.0})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    return app


def new_audit(*, canaries=400, dim=DIM, seed=SEED, delta=1e-5, **settings):
    return Audit(dim, canaries=canaries, seed=seed, delta=delta, **settings)


def run(strategy, grid, *, rounds=5, seed=0, arrays=None, **more):
    """Train. Flower samples nodes and noise from global generators, which are seeded here."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    return strategy.start(grid, arrays or initial_arrays(), num_rounds=rounds, **more)


def cosines(audit):
    return np.array([item.cosines for item in audit.log.rounds()])


def config(**entries):
    return ConfigRecord(entries)


def fedavg(**settings):
    return FedAvg(fraction_evaluate=0.0, **settings)


def server_side(count, *, noise=1.0, clip=1.0, inner=None):
    return DifferentialPrivacyServerSideFixedClipping(inner or fedavg(), noise, clip, count)


def client_side(count, *, noise=1.0, clip=1.0, inner=None):
    return DifferentialPrivacyClientSideFixedClipping(inner or fedavg(), noise, clip, count)


def small_audit(**settings):
    return new_audit(canaries=CANARIES, dim=SMALL, **settings)


def small_run(strategy, grid, **settings):
    return run(strategy, grid, **({"rounds": 3, "arrays": initial_arrays(SMALL)} | settings))


def nodes(real=REAL, canaries=CANARIES):
    """Node configs: real clients first, then canaries, designated in every possible way."""
    return [{"partition-id": i} for i in range(real)] + [{"canary-id": i} for i in range(canaries)]


def gauge(result, name):
    return next(found for found in result.gauges if found.name == name)


def finish_as_stated(strategy, **more):
    """The result for the epsilon that the stated noise gives the node, or canary, that took part most often."""
    times = strategy.ledger.exposures.participations(strategy.audit)
    delta = strategy.audit.settings.delta
    claim = float(mechanism_epsilon(strategy.noise_multiplier, delta=delta, participations=times))
    return strategy.audit.finish(claim=claim, **more)
