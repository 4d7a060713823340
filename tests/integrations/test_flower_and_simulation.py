"""Flower and coalmine.simulation on the same task, seed and schedule."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from requires import require

torch = require("torch")
require("flwr")
require("sklearn")
from flower_training import LoopGrid, cosines, run  # noqa: E402
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg  # noqa: E402

from coalmine import Audit  # noqa: E402
from coalmine.integrations.flower import audited  # noqa: E402
from coalmine.simulation.batches import draw_batches  # noqa: E402
from coalmine.simulation.config import RunConfig  # noqa: E402
from coalmine.simulation.config_sources import merged, task_defaults  # noqa: E402
from coalmine.simulation.randomness import numpy_stream  # noqa: E402
from coalmine.simulation.training_run import prepared  # noqa: E402

CLIENTS, ROUNDS = 20, 3


class SimulatedClients(LoopGrid):
    """Nodes that train like the simulation's clients; clipping, averaging and canaries are Flower's and ours."""

    def __init__(self, training):
        super().__init__(None, [{} for _ in range(CLIENTS)])
        self.training = training

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        content = messages[0].content if messages else None
        if content is None:
            return []
        number = content["config"]["server-round"]
        model = torch.from_numpy(content["arrays"]["model"].numpy())
        client = self.training.config.client
        cohort = self.training.cohorts.of_round(number).clients.tolist()
        owned = [self.training.population.examples(index) for index in cohort]
        rng = numpy_stream(self.training.config.seed, "batches", number)
        batches = draw_batches(owned, epochs=client.epochs, batch_size=client.batch_size, rng=rng)
        updates = torch.cat([chunk.clone() for chunk in self.training.engine.updates(model, batches)])
        replies = []
        for message, update in zip(sorted(messages, key=lambda m: m.metadata.dst_node_id), updates, strict=True):
            arrays = ArrayRecord({"model": Array((model + update).numpy())})
            metrics = MetricRecord({"num-examples": 1})
            replies.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
        return replies


def test_cosines_agree_with_the_simulation(caplog):
    """Without noise, both programs compute the same mathematics."""
    caplog.set_level(logging.ERROR, logger="flwr")
    changes = {
        "rounds": ROUNDS,
        "participation": {"clients_per_round": CLIENTS},
        "privacy": {"noise_multiplier": 0.0},
        "server": {"learning_rate": 1.0, "momentum": 0.0},
        "canaries": {"count": 30},
        "engine": {"device": "cpu", "jobs": 1},
    }
    made = RunConfig.from_dict(merged(task_defaults("digits"), changes))
    settings = replace(made, engine=made.engine.resolved())
    with prepared(settings, None, None) as training:
        state = training.initial_state()
        for _ in training.rounds(state):
            pass
        ours = cosines(training.audit)
        initial = training.initial_vector().numpy()
        audit = Audit(
            len(initial), canaries=30, seed=settings.canary_seed(), delta=settings.privacy.delta, rounds=ROUNDS
        )
        wrapper = DifferentialPrivacyServerSideFixedClipping(
            FedAvg(fraction_evaluate=0.0), 0.0, settings.privacy.clip_norm, CLIENTS
        )
        strategy = audited(wrapper, audit=audit, mode="extra")
        arrays = ArrayRecord({"model": Array(initial)})
        result = run(strategy, SimulatedClients(training), rounds=ROUNDS, arrays=arrays)
    assert ours.shape == (ROUNDS, audit.settings.total)
    assert np.abs(ours).max() > 0.1
    assert cosines(audit) == pytest.approx(ours, abs=1e-4)
    assert result.arrays["model"].numpy() == pytest.approx(state.model_vector.numpy(), abs=1e-4)
