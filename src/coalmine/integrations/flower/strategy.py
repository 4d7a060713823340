"""The server's side: a strategy that wraps the user's own, adds canaries or reads them from replies, and observes."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from coalmine.argument_checks import positive
from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import as_record
from coalmine.integrations.flower.canary_clients import (
    STRONG,
    Designation,
    Nodes,
    checked_partitions,
    checked_seed,
)
from coalmine.integrations.flower.examination import Examiner
from coalmine.integrations.flower.exposures import watch_one_round
from coalmine.integrations.flower.modes import (
    CanaryClients,
    CanarySource,
    ExtraReplies,
    Mode,
    ReplacedReplies,
    growth,
)
from coalmine.integrations.flower.replies import (
    DroppedReply,
    RoundReplies,
    copy_config,
    refuse_most_dropped,
    sort_replies,
)
from coalmine.integrations.flower.sent_round import SentRound
from coalmine.integrations.flower.strategy_audit import StrategyAudit
from coalmine.integrations.flower.warning_log import logger
from coalmine.integrations.flower.weights import Averaged, reply_weights
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.integrations.setup import CLIP_SCALE, refuse_finished

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
    Some rounds are aggregated again with one reply replaced by a zero update, which measures what one client moves
    (docs/explanation/replay.md). `replay=False` replays nothing, and True repeats a strategy that is not Flower's own too.

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
        replay: bool | None = None,
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
        self.strategy, self.mode = strategy, mode
        self.wrapped = Wrapped(strategy, clip_norm=clip_norm, noise_multiplier=noise_multiplier)
        self._scale = _canary_scale(scale, mode, self.wrapped)
        self._designation, self._seed = Designation(audit, canary_nodes), checked_seed(audit, seed)
        self._source: CanarySource
        common = audit, self.wrapped, self._designation, self._scale
        if mode == "client":
            self._source = CanaryClients(*common, seed=self._seed, partitions=checked_partitions(canary_partitions))
        else:
            self._source = ReplacedReplies(*common) if mode == "replace" else ExtraReplies(*common, rng=rng)
        left_out = self.wrapped.why_no_others(known_others=known_others)
        self.audit = StrategyAudit(
            audit,
            self.wrapped,
            self._source,
            mode=mode,
            scale=self._scale,
            others_left_out=left_out,
            replay=replay,
        )
        self.ledger, self._warnings = self.audit.ledger, self.audit.warnings
        self._examiner = Examiner(self.audit, self._source)
        self._sent: SentRound | None = None
        self._evaluated: tuple[Message, ...] = ()  # the messages of this round's evaluation
        self._warn_of_strategy()
        watch_one_round(audit)

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
        refuse_finished(self.audit.core)
        self._check_secrecy(grid)
        done, arrays = self.audit.resume(as_record(initial_arrays))
        self.audit.begin(arrays, num_rounds)
        remaining = max(num_rounds - done, 0)
        evaluate = None if evaluate_fn is None else self.audit.with_accuracy(evaluate_fn)
        result = super().start(grid, arrays, remaining, timeout, train_config, evaluate_config, evaluate)
        if not remaining:
            result.arrays = arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages; in mode "client" they carry the announcement for canary clients."""
        if not self.audit.has_begun:
            self.audit.begin(arrays)
        clip_norm, number = self.wrapped.clip_norm, self.audit.number(server_round)
        layout, current = self.audit.layout, self.audit.current
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
        sent = self._sent
        if sent is None:
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
        replayed = self.audit.replays.take(server_round, sent, averaged.replies, averaged.largest_share)
        arrays, metrics = self.wrapped.aggregate(server_round, [*found.good, *found.failed, *extra], grown * kept)
        noise, divisor = self.wrapped.noise_multiplier, float(len(found.good) * grown)
        released = arrays is not None
        if released and self.audit.views.by_name:
            real = [reply for reply in found.good if id(reply) not in averaged.index_of]
            self.audit.views.observe(sent, real, canaries, self._scale)
        if released:
            self.ledger.add_release(averaged, (noise or 0.0) / divisor)
        self.audit.observe(
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
            **replayed,
            lost_canaries=0 if released else len(canaries),
            clip_norm=sent.clip_norm,
        )
        self.audit.save(server_round, sent.model if arrays is None else arrays)
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
        number = self.audit.number(server_round) if self.audit.has_begun else server_round
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
        buffers = self.audit.layout.left_out if self.audit.has_begun else ()
        return sort_replies(replies, messages, number, self.wrapped, model=model, buffers=buffers)

    def _averaged(self, replies: list[Message], canaries: dict[int, Message]) -> Averaged:
        """The replies with their weights in the average: all equal where the strategy ignores the clients' own."""
        equal = self.wrapped.ignores_weights
        weights = [1.0] * len(replies) if equal else reply_weights(replies, self.wrapped.weight_key)
        return Averaged(replies, weights, canaries)

    @property
    def noise_multiplier(self) -> float | None:
        """The stated noise in the sum of updates, over the clip norm; None if none is stated."""
        return self.wrapped.noise_multiplier

    @property
    def dropped(self) -> list[DroppedReply]:
        """The bad replies so far."""
        return self.ledger.dropped

    def _check_secrecy(self, grid: Grid) -> None:
        """In a deployment, reject a guessable seed, and warn if the seed is announced to every client."""
        if not any(kind.__name__ in DEPLOYED for kind in type(grid).__mro__):
            return
        if self.audit.core.seed_is_guessable:
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
