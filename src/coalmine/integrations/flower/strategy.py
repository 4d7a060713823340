"""The server's side: a strategy that wraps the user's own, adds canaries or reads them from replies, and observes."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import as_record
from coalmine.integrations.flower.canary_clients import (
    STRONG,
    Designation,
    Nodes,
    checked_partitions,
    checked_seed,
)
from coalmine.integrations.flower.claims import read_claim
from coalmine.integrations.flower.examination import Examiner
from coalmine.integrations.flower.exposures import participations_item, watch_one_round, whole_run_claim
from coalmine.integrations.flower.ledger import NodeLedger
from coalmine.integrations.flower.modes import (
    NO_CANARY,
    CanaryClients,
    CanarySource,
    ExtraReplies,
    Mode,
    ReplacedReplies,
    growth,
)
from coalmine.integrations.flower.recorder import Recorder
from coalmine.integrations.flower.replies import (
    DroppedReply,
    RoundReplies,
    copy_config,
    describe_dropped,
    refuse_most_dropped,
    sort_replies,
)
from coalmine.integrations.flower.scope import (
    SAMPLER,
    adaptive_clip_warning,
    clipping_item,
    others_item,
    tensors_item,
)
from coalmine.integrations.flower.sent_round import SentRound
from coalmine.integrations.flower.server_checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from coalmine.integrations.flower.warning_log import WarningLog, logger
from coalmine.integrations.flower.weights import Averaged, reply_weights
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.integrations.setup import CLIP_SCALE, positive, refuse_finished
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

DEPLOYED = ("HttpGrid", "GrpcGrid")  # by name: simulations have an InMemoryGrid, and flwr.superlink is not public


class AuditedStrategy(Strategy):
    """A strategy with canaries in it. Wrap it around the outermost strategy, differential privacy included.

    - Mode "client": clients run `canary_mod`. A canary is a node with `canary-id` in its node config, a partition id in
      `canary_partitions`, or a node that the server names by `canary_nodes`. `seed`, the audit's own, is announced to
      clients unless canary nodes read it from a file.
    - Mode "replace": the replies of `canary_nodes` become canaries on the server.
    - Mode "extra": canaries are additional replies. They join in the rounds of the audit's schedule if it has `rounds`.
      Otherwise they join with the probability that a node is sampled, drawn from the audit's seed or from `rng`. The ratio
      of the noise to one client's contribution stays the same: during aggregation, the wrapper's `num_sampled_clients` grows
      by the same factor as the replies.

    `canary_nodes` is a fraction of the nodes, or {node id: canary}. A node may have several canaries, as in {node id: [0, 1,
    2]}: it sends them in turn, one in each round.

    Clip norm and noise are read from Flower's own wrappers. Without one, give `clip_norm` and, relative to the sum of
    updates, `noise_multiplier`. `scale` is the length of a canary in clip norms before a clip: 10, or 1 if there is no clip.
    With `known_others` the server sums the real updates for the rung of that name, which reads every reply once more. If the
    audit has a directory, a restarted ServerApp resumes after the last complete round. A directory that holds a finished run
    is rejected.

    `strategy.audit.finish` observes the final model. It takes `claim` and `task`, the name of the training task. Without a
    claim, also before training, the verdict is never PASS. A claim that does not state participations is for the largest
    number of rounds in which one node took part, or one canary if that is more. If clients have different weights, it is for
    the client that contributed most. A claim with `sampling` is judged with Flower's own sampling, unless canaries are extra
    replies or share a node. If a check would drop most replies of a round, the strategy raises a ValueError before it
    aggregates them.
    """

    def __init__(
        self,
        strategy: Strategy,
        audit: Audit,
        mode: Mode = "client",
        *,
        canary_nodes: Nodes | None = None,
        canary_partitions: Iterable[int] | None = None,
        seed: int | bytes | None = None,
        clip_norm: float | None = None,
        noise_multiplier: float | None = None,
        scale: float | None = None,
        known_others: bool = True,
        rng: np.random.Generator | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("client", "replace", "extra"):
            raise ValueError(f"mode must be 'client', 'replace' or 'extra', got {mode!r}")
        if mode == "replace" and canary_nodes is None:
            raise ValueError("mode 'replace' needs canary_nodes: a fraction of the nodes, or {node id: canary}")
        if mode == "extra" and canary_nodes is not None:
            raise ValueError("mode 'extra' has no canary nodes: omit canary_nodes")
        if mode != "client" and (canary_partitions is not None or seed is not None):
            raise ValueError(
                f"canary_partitions and seed are for mode 'client', where clients are canaries, not {mode!r}"
            )
        self.strategy, self.audit, self.mode = strategy, audit, mode
        self.wrapped = Wrapped(strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
        self._scale = _canary_scale(scale, mode, self.wrapped)
        self._warnings = WarningLog()
        self.ledger = NodeLedger(audit, self.wrapped, self._warnings)
        self._others_left_out = self.wrapped.why_no_others(known_others=known_others)
        self._designation = Designation(audit, canary_nodes)
        self._seed = checked_seed(audit, seed)
        self._source = self._new_source(checked_partitions(canary_partitions), rng)
        self._examiner = Examiner(
            audit,
            self.wrapped,
            self._source,
            scale=self._scale,
            others=self._others_left_out is None,
            warnings=self._warnings,
        )
        self._recorder: Recorder | None = None
        self._sent: SentRound | None = None
        self._evaluated: tuple[Message, ...] = ()  # the messages of this round's evaluation
        self._warn_of_strategy()
        watch_one_round(audit)
        audit.finish_with(self.finish)

    def _new_source(self, partitions: range | None, rng: np.random.Generator | None) -> CanarySource:
        common = self.audit, self.wrapped, self._designation, self._scale
        if self.mode == "client":
            return CanaryClients(*common, seed=self._seed, partitions=partitions, warnings=self._warnings)
        return ReplacedReplies(*common) if self.mode == "replace" else ExtraReplies(*common, rng=rng)

    # Flower's interface

    def start(
        self,
        grid: Grid,
        initial_arrays: Any,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train like the wrapped strategy. In the directory of an interrupted run, train only the missing rounds.

        `initial_arrays` may also be a torch Module or a state_dict.
        """
        refuse_finished(self.audit)
        self._check_secrecy(grid)
        done, arrays = self._resume(as_record(initial_arrays))
        self._recorder = self._new_recorder(arrays)
        remaining = max(num_rounds - done, 0)
        evaluate = None if evaluate_fn is None else self._with_accuracy(evaluate_fn)
        result = super().start(grid, arrays, remaining, timeout, train_config, evaluate_config, evaluate)
        if not remaining:
            result.arrays = arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages; in mode "client" they carry the announcement for canary clients."""
        if self._recorder is None:
            self._recorder = self._new_recorder(arrays)
        clip_norm, number = self.wrapped.clip_norm, self._recorder.number(server_round)
        layout, current = self._recorder.layout, self._recorder.current
        extended = copy_config(config)  # Flower logs the caller's config, and the announcement may hold the seed
        if isinstance(self._source, CanaryClients):
            self._source.announce(extended, clip_norm=clip_norm, left_out=layout.left_out, round_number=number)
        self._designation.assign(grid.get_node_ids())
        messages = list(self.strategy.configure_train(server_round, arrays, extended, grid))
        if isinstance(self._source, CanaryClients):
            messages = [self._source.address(message, number) for message in messages]
        available = len(list(grid.get_node_ids()))
        self._sent = SentRound(number, clip_norm, tuple(messages), available, layout, current)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's aggregation, with canaries in the replies. The audit observes the new model."""
        recorder, sent = self._recorder, self._sent
        if recorder is None or sent is None:
            raise ValueError("aggregate_train was called before configure_train")
        found = self._sort(replies, sent.messages, sent.number, sent.model)
        self.ledger.add_failures(sent.number, found.failed)
        canaries, others = self._examiner.examine(sent, found)
        self.ledger.add_dropped(found.dropped)
        refuse_most_dropped(found)
        extra = self._source.extra(canaries)
        averaged = self._averaged([*found.good, *extra], canaries)
        self.ledger.add_round(sent, averaged, found.good)
        grown = growth(self.wrapped, found.good, extra)
        kept = Fraction(len(found.good), len(found.good) + found.lost) if found.good else Fraction(1)
        arrays, metrics = self.wrapped.aggregate(server_round, [*found.good, *found.failed, *extra], grown * kept)
        noise, divisor = self.noise_multiplier, float(len(found.good) * grown)
        released = arrays is not None
        if released:
            self.ledger.add_release(averaged, (noise or 0.0) / divisor)
        recorder.observe(
            server_round,
            arrays,
            np.array(sorted(canaries) if released else [], dtype=np.int32),
            others=others if released else None,
            noise_std=noise * sent.clip_norm / divisor if noise and averaged.replies else None,
            canary_norm=sent.clip_norm * averaged.canary_share,
            scale=self._scale,
            participants=len(averaged.replies) if released else None,
            clients=len(averaged.replies) - len(canaries),
            **self.ledger.metrics(averaged, found),
            lost_canaries=0 if released else len(canaries),
            clip_norm=sent.clip_norm,
        )
        self._save(server_round, arrays)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages."""
        configured = self.strategy.configure_evaluate(server_round, arrays, copy_config(config), grid)
        self._evaluated = tuple(configured)
        return list(self._evaluated)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The wrapped strategy's aggregation, without bad replies."""
        number = server_round if self._recorder is None else self._recorder.number(server_round)
        found = self._sort(replies, self._evaluated, number, None)
        self.ledger.add_dropped(found.dropped)
        refuse_most_dropped(found)
        return self.strategy.aggregate_evaluate(server_round, [*found.good, *found.failed])

    def summary(self) -> None:
        """The wrapped strategy's summary, and a line about the audit."""
        logger.info("audited: %d canaries, mode %s", self.audit.settings.canaries, self.mode)
        self.strategy.summary()

    def _sort(
        self, replies: Iterable[Message], messages: tuple[Message, ...], number: int, model: ArrayRecord | None
    ) -> RoundReplies:
        """A round's replies, sorted into good, failed and bad ones by their form."""
        buffers = () if self._recorder is None else self._recorder.layout.left_out
        return sort_replies(replies, messages, number, self.wrapped, model=model, buffers=buffers)

    def _averaged(self, replies: list[Message], canaries: dict[int, Message]) -> Averaged:
        """The replies with their weights in the average: all equal where the strategy ignores the clients' own."""
        equal = self.wrapped.ignores_weights
        weights = [1.0] * len(replies) if equal else reply_weights(replies, self.wrapped.weight_key)
        return Averaged(replies, weights, canaries)

    # The result

    @property
    def noise_multiplier(self) -> float | None:
        """The stated noise in the sum of updates, over the clip norm; None if none is stated."""
        return self.wrapped.noise_multiplier

    @property
    def dropped(self) -> list[DroppedReply]:
        """The bad replies so far."""
        return self.ledger.dropped

    def finish(self, *, claim: Any = None, task: str | None = None) -> AuditResult:
        """Observe the final model, and return the result. If the audit has a directory, it is also written there.

        `task` is the name of the training task. Give a `claim` only if the audit was made without one.
        """
        if self._recorder is None:
            raise ValueError("there is nothing to finish: call start() first")
        self._warn_of_rounds()
        noise, seen = self.noise_multiplier, self.ledger.exposures
        more: dict[str, Any] = seen.entries(self.audit, noise, equal_weights=not self.ledger.weights_differ)
        late = read_claim(claim, self.audit.settings.delta)
        completed = whole_run_claim(self.audit.claim or late, self.audit, seen)
        spent = self.wrapped.spent
        if spent is not None:
            more["accounted_epsilon"] = float(spent.epsilon)
            logger.info("Flower's accountant: epsilon %.4g at delta %g", spent.epsilon, spent.delta)
        self._recorder.first_failure = next(iter(self.ledger.failures), None)
        return self._recorder.finish(
            late,
            completed=completed,
            noise_multiplier=noise,
            task=task,
            weight=seen.heaviest_weight(noise) if completed is not None and completed.amplified else 1.0,
            sampler_observed=self._source.one_each,
            audited=self.audited_items(completed),
            pipeline=self.wrapped.facts,
            warnings=[*self._warnings.texts, *describe_dropped(self.dropped)],
            **more,
        )

    def audited_items(self, claim: Claim | None = None) -> list[AuditedItem]:
        """The parts of the pipeline that this audit has checked so far or not, each with its reason."""
        tensors = tensors_item(len(self.audit.settings.layers), self._others_left_out)
        amplified = claim is not None and claim.amplified
        times = None if amplified else participations_item(claim, self.ledger.exposures)
        items = (
            clipping_item(self.mode, self.wrapped, self._scale),
            self.ledger.ratio.item,
            others_item(self._others_left_out),
            tensors,
            times,
            SAMPLER,
        )
        return [item for item in items if item is not None]

    def _warn_of_rounds(self) -> None:
        """Warn of what the rounds showed about the whole run."""
        unreported = isinstance(self._source, CanaryClients) and not self._source.reported and not self.ledger.failures
        if unreported and not any(entry.present.size for entry in self.audit.log.observed):
            self._warnings.add(NO_CANARY)
        if self.ledger.frozen and self.wrapped.adds_noise:
            self._warnings.add(
                f"no real client changed {', '.join(self.ledger.frozen)}, but Flower adds noise to every array: if they are "
                "frozen parameters or buffers, do not send them with the model"
            )
        if self._others_left_out is not None:
            self._warnings.add(f"known-others was left out: {self._others_left_out}")
        adaptive = adaptive_clip_warning(self.audit, self.wrapped)
        if adaptive is not None:
            self._warnings.add(adaptive)

    # Setup and restarts

    def _new_recorder(self, arrays: ArrayRecord) -> Recorder:
        privacy: dict[str, Any] = {"clip_norm": self.wrapped.clip_norm, "delta": self.audit.settings.delta}
        if self.noise_multiplier is not None:
            privacy["noise_multiplier"] = self.noise_multiplier
        config = {
            "trainer": "flower",
            "strategy": self.wrapped.names,
            "privacy": privacy,
            "canaries": {"count": self.audit.settings.canaries, "mode": self.mode, "scale": self._scale},
        }
        recorder = Recorder(self.audit, arrays, config)
        for text in recorder.layout.warnings:
            self._warnings.add(text)
        if self.audit.directory is not None and self.audit.last_round:
            self.ledger.restore_rounds(self.audit.directory.read_metrics())
        return recorder

    def _resume(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """The number of finished rounds and the model after them. The audit rewinds to that round."""
        saved = None
        if self.audit.directory is not None:
            saved = load_checkpoint(self.audit.directory.path, recorded_rounds=self.audit.last_round)
        done, arrays, state, seen = saved or Checkpoint(0, initial, {}, {})
        self.ledger.restore_exposures(seen)
        self.audit.rewind_to(done)
        if done:
            logger.info("resuming after round %d", done)
            for text in self.wrapped.resume(state, done):
                self._warnings.add(text)
        return done, arrays

    def _save(self, server_round: int, arrays: ArrayRecord | None) -> None:
        model = arrays if arrays is not None or self._sent is None else self._sent.model
        if self.audit.directory is None or self._recorder is None or model is None:
            return
        self.audit.flush(sync=True)  # a checkpoint must never be ahead of the audit, even after a power cut
        number, seen = self._recorder.number(server_round), self.ledger.exposures.to_arrays()
        save_checkpoint(self.audit.directory.path, number, model, self.wrapped.state, seen)

    def _with_accuracy(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """The user's function, which also records the accuracy that it returns."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            accuracy = None if metrics is None else metrics.get("accuracy")
            if self._recorder is not None and server_round and isinstance(accuracy, int | float):
                self._recorder.add_accuracy(server_round, float(accuracy))
            return metrics

        return evaluate

    def _check_secrecy(self, grid: Grid) -> None:
        """In a deployment, reject a guessable seed, and warn if the seed is announced to every client."""
        if not any(kind.__name__ in DEPLOYED for kind in type(grid).__mro__):
            return
        if self.audit.seed_is_guessable:
            raise ValueError(f"the seed of a deployment {STRONG}: give seed_file=, made with: coalmine seed FILE")
        if self._seed is not None:
            self._warnings.add(
                "every client receives the seed, so a hostile one can imitate canaries: give seed_file= instead"
            )

    def _warn_of_strategy(self) -> None:
        if self.wrapped.ignores_weights:
            self._warnings.add(
                f"{self.wrapped.names[-1]} may drop or reweight canaries as outliers: the audit measures less than leaks"
            )
        if self.mode != "client" and self.wrapped.clips_on_clients:
            self._warnings.add(
                f"mode {self.mode!r} bypasses the clients' clip, so the clip is not audited: use canary_mod on clients"
            )


def _canary_scale(scale: float | None, mode: Mode, wrapped: Wrapped) -> float:
    """Length of a canary in clip norms: by default 10 if it goes through a clip, otherwise 1."""
    if scale is not None:
        return positive("scale", scale)
    clipped = wrapped.clips_on_server or (mode == "client" and wrapped.clips_on_clients)
    return CLIP_SCALE if clipped else 1.0
