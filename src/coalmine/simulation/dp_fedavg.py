"""DP-FedAvg with canaries (Algorithms 2 and 3), and DP-SGD, which treats each example as a client."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coalmine.audit import Audit
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.simulation.client_sums import ClientSums, equal_weights
from coalmine.simulation.clipping import Clipping, clip_factors
from coalmine.simulation.cohorts import Cohort
from coalmine.simulation.config import RunConfig
from coalmine.simulation.engines import Engine
from coalmine.simulation.models import accuracy
from coalmine.simulation.noise_addition import Noise, gaussian_noise, noise_of, noise_spread, noised_average
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.population import Indices, Population, single_examples
from coalmine.simulation.randomness import torch_stream
from coalmine.simulation.server_optimizer import ServerSettings, State, server_step
from coalmine.simulation.tasks import Task

# From model, clients, round number and clip norm to the sum of the clipped updates and their norms before clipping.
SumOfClients = Callable[[Tensor, Indices, int, float], tuple[Tensor, Tensor]]


def population_of(config: RunConfig, task: Task) -> Population:
    """The clients of a run: the task's clients, or its examples at level example."""
    return task.population if config.task.level == "client" else single_examples(len(task.train))


def clients_part(clients: Tensor, count: float) -> Tensor:
    """The real clients' part of ρ̄, which an attacker who knows all other updates subtracts."""
    return clients / count


@dataclass(frozen=True)
class Steps:
    """The steps of a round that privacy depends on. A self-test replaces one of them with a faulty one."""

    weigh: Callable[[Tensor], Tensor] = equal_weights
    clip: Callable[[Tensor, float], Tensor] = clip_factors
    noise: Callable[[float, Tensor, torch.Generator], Tensor] = gaussian_noise
    aggregate: Callable[[Tensor, Tensor, Tensor, float, float], Tensor] = noised_average
    others: Callable[[Tensor, float], Tensor] = clients_part
    server_step: Callable[[Tensor, State, int, ServerSettings], Tensor] = server_step
    note: str = ""  # for the reader of the result


@dataclass
class TrainingState:
    """Everything that the next round needs; a checkpoint stores it."""

    round_number: int  # of the last finished round
    model_vector: Tensor
    server: State
    clip_norm: float


@dataclass(frozen=True)
class RoundReport:
    """Statistics of one round."""

    round_number: int
    clients: int
    canaries: int
    clip_norm: float
    clipped_share: float  # of the real clients
    accuracy: float | None


class Training:
    """The training loop: one round at a time, each a function of the state before it and of the config."""

    def __init__(
        self,
        planned: PlannedPrivacy,
        *,
        task: Task,
        engine: Engine,
        audit: Audit,
        steps: Steps | None = None,
    ) -> None:
        self.planned, self.task, self.engine, self.audit = planned, task, engine, audit
        config, cohorts = self.config, self.cohorts = planned.config, planned.cohorts
        self.steps = steps or Steps()
        self.population = population_of(config, task)
        self.sums = ClientSums(config, self.population, engine, self.steps.weigh, self.steps.clip)
        self.clients_sum: SumOfClients = self.sums.compute  # in one process; several ranks replace it
        self.clipping: Clipping = config.privacy.clipping_of(cohorts.expected_size)
        self.noise: Noise = noise_of(config.noise_law())
        self._second_stream: Any = None
        self._thread: ThreadPoolExecutor | None = None

    @property
    def description(self) -> str:
        """How the clients are trained, in a few words."""
        ranks = self.config.engine.jobs
        return f"{self.engine.description}, in {ranks} ranks" if ranks > 1 else self.engine.description

    def initial_vector(self) -> Tensor:
        """θ₀."""
        vector = self.task.model.initial(torch_stream(self.config.seed, "initial model"))
        return vector.to(self.config.engine.device)

    def initial_state(self) -> TrainingState:
        vector = self.initial_vector()
        server = self.config.server.initial_state(len(vector), vector.device)
        return TrainingState(0, vector, server, self.config.privacy.clip_norm)

    def rounds(self, state: TrainingState) -> Iterator[RoundReport]:
        """Run the remaining rounds; `state` is up to date when a round's report is yielded."""
        while state.round_number < self.config.rounds:
            yield self.round(state)

    def round(self, state: TrainingState) -> RoundReport:
        """One round: train, clip, sum, add canaries and noise, divide, record for the audit, step (Algorithm 3)."""
        number, clip_norm = state.round_number + 1, state.clip_norm
        cohort = self.cohorts.of_round(number)
        count = float(len(cohort) or 1) if self.config.divisor == "actual" else self.cohorts.expected_size
        join = self._run_in_parallel(lambda: self._canaries_sum(state.model_vector, cohort, clip_norm))
        clients, norms = self.clients_sum(state.model_vector, cohort.clients, number, clip_norm)
        canaries, canary_norms = join()
        noise_std = self.clipping.update_noise_multiplier * clip_norm
        noise = self._noise(number, noise_std, state.model_vector)
        model_delta = self.steps.aggregate(clients, canaries, noise, count, clip_norm)
        # Without noise, an attacker who knows all other updates sees the canary exactly.
        others = self.steps.others(clients, count) if noise_std else None
        self.audit.observe_round(
            number,
            model_delta,
            present=cohort.canaries,
            others=others,
            noise_std=noise_std * noise_spread(self.noise.law, number) / count,
            clip_norm=clip_norm / count,
            scale=self.config.canaries.scale,
            participants=len(cohort),
        )
        state.model_vector += self.steps.server_step(model_delta, state.server, number, self.config.server)
        below = int((norms <= clip_norm).sum()) + int((canary_norms <= clip_norm).sum())
        # AdaptiveClipping counts −½ or ½ per participant; the divisor n may differ from their number.
        centred = below + (count - len(cohort)) / 2
        state.clip_norm = self.clipping.next_norm(
            clip_norm, centred, count, torch_stream(self.config.seed, "count", number)
        )
        state.round_number = number
        return RoundReport(
            round_number=number,
            clients=len(cohort.clients),
            canaries=len(cohort.canaries),
            clip_norm=clip_norm,
            clipped_share=float((norms > clip_norm).float().mean()) if len(norms) else 0.0,
            accuracy=self._accuracy(state),
        )

    def _run_in_parallel(self, work: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        """Run `work` in parallel with the training and return a function that waits for its result.

        On a GPU it runs on a second stream, after the training is queued, so that the GPU does not wait for the host to
        queue both. On a CPU it runs in a thread, except for dense models, which train too fast for a thread to pay off.
        """
        if torch.device(self.config.engine.device).type == "cuda":
            return self._on_second_stream(work)
        if self.task.model.layers:
            return work
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "coalmine-canaries", initializer=stay_in_one_thread)
        return self._thread.submit(work).result

    def _on_second_stream(self, work: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
        if self._second_stream is None:
            self._second_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream, start = self._second_stream, torch.cuda.current_stream().record_event()

        def join() -> tuple[Tensor, Tensor]:
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                results = work()
            torch.cuda.current_stream().wait_stream(stream)
            for tensor in results:
                tensor.record_stream(torch.cuda.current_stream())
            return results

        return join

    def _noise(self, round_number: int, std: float, like: Tensor) -> Tensor:
        """Z(t): the noise of this round, made from independent normal numbers."""
        return self.noise.of_round(
            round_number, std, lambda draw_std, index: self.steps.noise(draw_std, like, self._stream("noise", index))
        )

    def _canaries_sum(self, model_vector: Tensor, cohort: Cohort, clip_norm: float) -> tuple[Tensor, Tensor]:
        """The sum of the canaries' updates after the same weights and clip, and their norms before clipping.

        Each canary sends a vector of `scale` clip norms, so one factor clips their whole sum. Each declares as many
        examples as the largest client.
        """
        scale = self.config.canaries.scale
        norms = torch.full((len(cohort.canaries),), scale * clip_norm, device=model_vector.device)
        if not len(norms):
            return torch.zeros_like(model_vector), norms
        factors = self.steps.clip(norms, clip_norm) * self.steps.weigh(
            torch.full_like(norms, self.sums.declared_examples(self.population.most_examples))
        )
        total = self.audit.updates(cohort.canaries, clip_norm, scale=scale, like=model_vector)
        return total * factors[0], norms

    def _accuracy(self, state: TrainingState) -> float | None:
        if state.round_number % self.config.evaluate_every and state.round_number != self.config.rounds:
            return None
        return self.evaluate(state)

    def evaluate(self, state: TrainingState) -> float:
        """The accuracy of the model on the test set."""
        test = self.task.test
        unscored = self.task.unscored_labels
        return accuracy(self.task.model, state.model_vector, test.inputs, test.labels, unscored=unscored)

    def accuracy_without_dp(self) -> float:
        """The accuracy of the same model, trained on the same rounds' clients without clip, noise and canaries."""
        state = self.initial_state()
        for number in range(1, self.config.rounds + 1):
            clients = self.cohorts.of_round(number).clients
            total, _ = self.clients_sum(state.model_vector, clients, number, math.inf)
            state.model_vector += server_step(total / (len(clients) or 1), state.server, number, self.config.server)
        return self.evaluate(state)

    def _stream(self, purpose: str, number: int) -> torch.Generator:
        return torch_stream(self.config.seed, purpose, number, device=self.config.engine.device)
