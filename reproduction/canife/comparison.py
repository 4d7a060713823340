"""DP-SGD runs in parallel, audited with crafted canaries and, as in the paper, with random ones.

All runs form one batch of models, so that 50 runs take about a minute on a GPU.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coalmine.argument_checks import Floats, one_number, whole_number
from coalmine.simulation.clipping import clip_factors
from coalmine.simulation.models.model import accuracy
from coalmine.simulation.randomness import numpy_stream, torch_stream
from coalmine.simulation.tasks.task import Task
from reproduction.canife.crafting import CanifeSettings, craft_canaries, interference
from reproduction.canife.gradients import sample_gradients
from reproduction.canife.mock_rounds import mock_scores, sample_batch, softened


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings of a comparison: `runs` models, with as many unobserved canaries as observed ones.

    Every example is used once, in shuffled order. Every observed canary is added to one random round. We chose the learning
    rate and the momentum, since the paper states neither. With momentum, cosines are with the step of the model, as in
    Section 5.3. `crafted` False leaves CANIFE out.
    """

    runs: int = 50
    rounds: int | None = None  # default: one epoch
    canaries: int = 1000
    learning_rate: float = 0.5
    momentum: float = 0.0
    crafted: bool = True
    seed: int = 1
    crafting: CanifeSettings = field(default_factory=lambda: CanifeSettings(noise_multiplier=0.2))

    def __post_init__(self) -> None:
        whole_number("runs", self.runs, minimum=1)
        whole_number("canaries", self.canaries, minimum=10)
        if self.rounds is not None:
            whole_number("rounds", self.rounds, minimum=1)
        if not one_number("learning_rate", self.learning_rate) > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if not 0 <= one_number("momentum", self.momentum) < 1:
            raise ValueError(f"momentum must lie in [0, 1), got {self.momentum}")

    def epoch(self, examples: int) -> int:
        """The number of rounds for this many examples."""
        epoch = -(-examples // self.crafting.batch_size)
        if self.rounds is not None and self.rounds > epoch:
            raise ValueError(f"rounds must be at most {epoch}, one epoch, got {self.rounds}")
        return self.rounds or epoch


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The results of the runs: arrays whose first axis is the run."""

    crafted_observed: Floats  # runs × audited rounds × scores
    crafted_unobserved: Floats
    observed: Floats  # largest cosine over rounds, runs × canaries
    unobserved: Floats
    known_others: Floats  # cosine with the round's delta minus all other updates, runs × canaries
    norms: Floats  # of the crafted canary's gradient before the clip, runs × audited rounds
    interference: Floats  # mean |cosine|: initial and crafted canary with the pool, crafted canary with training data
    data_norms: Floats  # of the sum of the real clipped gradients, runs × rounds
    accuracy: Floats
    canary: Floats  # the first run's first crafted sample
    seconds: float
    dim: int
    examples: int
    device: str


def train(
    task: Task, plan: Comparison, *, device: str = "cpu", progress: Callable[[int, int], None] | None = None
) -> Trained:
    """Train every run of the comparison and audit it with both kinds of canary.

    On a CPU this uses one thread, since its matrix products are too small for two.
    """
    start, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        study = _Study(task, plan, torch.device(device))
        for round_number in range(1, study.rounds + 1):
            if plan.crafted and round_number in plan.crafting.audited(study.rounds):
                study.audit(round_number)
            study.train_round(round_number)
            if progress:
                progress(round_number, study.rounds)
        return study.results(start)
    finally:
        torch.set_num_threads(threads)


class _Study:
    """The models of all runs and their audits during one epoch."""

    def __init__(self, task: Task, plan: Comparison, device: torch.device) -> None:
        self.plan, self.settings, self.task = plan, plan.crafting, task.to(str(device))
        self.rounds, runs, count = plan.epoch(len(task.train)), plan.runs, plan.canaries
        if self.settings.pool_size >= len(task.test):
            raise ValueError(
                f"pool_size must be below the number of held-out examples, {len(task.test)}, got {self.settings.pool_size}"
            )
        classes = task.model.layers[-1] if task.model.layers else int(task.train.labels.max()) + 1
        self.examples = softened(self.task.train, classes)
        self.held_out = softened(self.task.test, classes)
        self.gradients = sample_gradients(task.model)
        self.vectors = torch.stack([task.model.initial(self._stream("model", run)) for run in range(runs)]).to(device)
        streams = [numpy_stream(plan.seed, "canife order", run) for run in range(runs)]
        orders = np.stack([stream.permutation(len(task.train)) for stream in streams])
        self.orders = torch.from_numpy(orders).to(device)
        self.when = np.stack([stream.integers(1, self.rounds + 1, size=count) for stream in streams])
        self.canaries = torch.empty(runs, 2 * count, task.model.dim, device=device)
        for run in range(runs):
            self.canaries[run].normal_(generator=self._stream("canaries", run, device=device))
        self.canaries /= torch.linalg.vector_norm(self.canaries, dim=2, keepdim=True)
        self.largest = torch.full((runs, 2 * count), -math.inf, device=device)
        self.known_others = torch.full((runs, count), math.nan, device=device)
        self.velocity = torch.zeros_like(self.vectors)
        self.data_norms: list[Tensor] = []
        self.audits: list[dict[str, Tensor]] = []

    def train_round(self, round_number: int) -> None:
        """One step of DP-SGD in every run, and the cosine of its delta with each canary."""
        plan, settings = self.plan, self.settings
        start = (round_number - 1) * settings.batch_size
        index = self.orders[:, start : start + settings.batch_size]
        batch = self.gradients(self.vectors, self.examples.inputs[index], self.examples.labels[index])
        real = -batch.weighted_sum(clip_factors(batch.norms(), settings.clip_norm))
        runs, present = np.nonzero(self.when == round_number)
        of_run = torch.from_numpy(runs).to(real.device)
        sent = settings.clip_norm * self.canaries[of_run, torch.from_numpy(present).to(real.device)]
        stream = self._stream("noise", round_number, device=real.device)
        noise = settings.noise_std * torch.randn(real.shape, generator=stream, device=real.device)
        total = (real + noise).index_add_(0, of_run, sent)
        self.velocity.mul_(plan.momentum).add_(total)
        cosines = torch.bmm(self.canaries, self.velocity.unsqueeze(2)).squeeze(2)
        cosines /= torch.linalg.vector_norm(self.velocity, dim=1, keepdim=True)
        self.largest = torch.maximum(self.largest, cosines)
        self._score_known(real, total, of_run, present, sent)
        self.data_norms.append(torch.linalg.vector_norm(real, dim=1))
        self.vectors += plan.learning_rate / settings.batch_size * self.velocity

    def _score_known(self, real: Tensor, total: Tensor, of_run: Tensor, present: Any, sent: Tensor) -> None:
        """The cosines for an attacker who knows the round and all other updates."""
        canaries_sum = torch.zeros_like(total).index_add_(0, of_run, sent)
        alone = (total - real - canaries_sum)[of_run] + sent  # without all other updates, including other canaries
        own = (alone * sent).sum(dim=1) / (alone.norm(dim=1) * sent.norm(dim=1))
        self.known_others[of_run, torch.from_numpy(present).to(of_run.device)] = own

    def audit(self, round_number: int) -> None:
        """CANIFE's audit of a round: craft a canary for each current model and score it."""
        settings, device = self.settings, self.vectors.device
        stream = self._stream("audit", round_number, device=device)
        indices = torch.stack(
            [
                torch.randperm(len(self.held_out), generator=stream, device=device)[: settings.pool_size + 1]
                for _ in range(self.plan.runs)
            ]
        )
        index, first = indices[:, 1:], indices[:, 0]
        pool = self.gradients(self.vectors, self.held_out.inputs[index], self.held_out.labels[index])
        sample, label = self.held_out.inputs[first], self.held_out.labels[first]
        canaries = craft_canaries(self.gradients, self.vectors, pool, sample=sample, label=label, settings=settings)
        initial = self.gradients(self.vectors, sample.unsqueeze(1), label.unsqueeze(1))
        batch = sample_batch(self.examples, (self.plan.runs, settings.pool_size), stream)
        training_gradients = self.gradients(self.vectors, *batch)
        observed, unobserved = mock_scores(self.gradients, self.vectors, canaries, self.examples, settings, stream)
        self.audits.append(
            {
                "observed": observed,
                "unobserved": unobserved,
                "norm": canaries.norm,
                "interference": torch.stack(
                    [
                        interference(pool, initial),
                        interference(pool, canaries.gradient),
                        interference(training_gradients, canaries.gradient),
                    ],
                    dim=1,
                ),
                "sample": canaries.sample[0],
            }
        )

    def results(self, start: float) -> Trained:
        def audits(name: str) -> Floats:
            empty = np.zeros((self.plan.runs, 0, 0))
            return np.stack([_to_array(audit[name]) for audit in self.audits], axis=1) if self.audits else empty

        model, test, count = self.task.model, self.task.test, self.plan.canaries
        return Trained(
            crafted_observed=audits("observed"),
            crafted_unobserved=audits("unobserved"),
            observed=_to_array(self.largest[:, :count]),
            unobserved=_to_array(self.largest[:, count:]),
            known_others=_to_array(self.known_others),
            norms=audits("norm"),
            interference=audits("interference"),
            data_norms=_to_array(torch.stack(self.data_norms, dim=1)),
            accuracy=np.array([accuracy(model, vector, test.inputs, test.labels) for vector in self.vectors]),
            canary=_to_array(self.audits[0]["sample"]) if self.audits else np.zeros(0),
            seconds=time.monotonic() - start,
            dim=model.dim,
            examples=len(self.examples),
            device=_device_name(self.vectors.device),
        )

    def _stream(self, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
        return torch_stream(self.plan.seed, f"canife {purpose}", *numbers, device=device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _to_array(tensor: Tensor) -> Floats:
    return np.asarray(tensor.detach().cpu().double())
