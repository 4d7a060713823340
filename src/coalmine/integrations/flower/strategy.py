"""The server's side: a strategy around the user's own that puts canaries in, or reads them from replies, and observes."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    Krum,
    MultiKrum,
    QFedAvg,
    Result,
    Strategy,
)

from coalmine.audit.audit import Audit
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.integrations.checks import nonnegative, positive
from coalmine.integrations.flower.announcement import PREFIX, REPLY, Announcement, checked_partitions, checked_seed
from coalmine.integrations.flower.checkpoint import load_checkpoint, save_checkpoint
from coalmine.integrations.flower.designation import Designation
from coalmine.integrations.flower.layout import Row
from coalmine.integrations.flower.recorder import Recorder

logger = logging.getLogger("flwr.coalmine")  # shown where Flower shows its own
Mode = Literal["client", "replace", "extra"]
SERVER_CLIP = (DifferentialPrivacyServerSideFixedClipping, DifferentialPrivacyServerSideAdaptiveClipping)
CLIENT_CLIP = (DifferentialPrivacyClientSideFixedClipping, DifferentialPrivacyClientSideAdaptiveClipping)
DROPPING = (Krum, MultiKrum, Bulyan, FedTrimmedAvg, FedMedian, QFedAvg)
BEFORE_CLIP = 10.0
NO_CANARY = (
    "no reply says that it is a canary, so none takes part: clients need canary_mod, last in their mods, and canary-id, "
    "canary_partitions or canary_nodes must name some of them"
)


@dataclass(frozen=True)
class _Sent:
    """What a round's training was configured with."""

    clip_norm: float
    messages: tuple[Message, ...]
    available: int  # nodes there were to sample from


class AuditedStrategy(Strategy):
    """A strategy with canaries in it. Wrap it around the outermost one, differential privacy included.

    mode "client": clients run `canary_mod`; a canary is a node with `canary-id` in its node config, a partition id in
    `canary_partitions`, or one that the server names by `canary_nodes`. `seed`, the audit's own, is announced to clients
    unless canary nodes have it in a file. "replace": the replies of `canary_nodes`, a fraction or {node id: canary}, become
    canaries on the server. "extra": canaries are further replies, in the rounds of the audit's schedule if it has `rounds`,
    else with the probability that a node is sampled, drawn from the audit's seed or from `rng`.

    Clip norm and noise are read from Flower's own wrappers; elsewhere give `clip_norm` and, relative to the sum of updates,
    `noise_multiplier`. `scale` is how many times too long canaries are before a clip that they pass: 10, or 1 where there is
    none. `known_others` has the server add up the real updates for the rung of that name, which reads every reply once more.
    With a directory the audit's, a restarted ServerApp goes on after the last finished round.
    """

    def __init__(
        self,
        strategy: Strategy,
        audit: Audit,
        mode: Mode = "replace",
        *,
        canary_nodes: float | Mapping[int, int] | None = None,
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
            raise ValueError("replace needs canary_nodes: a fraction of the nodes, or {node id: canary}")
        if mode == "extra" and canary_nodes is not None:
            raise ValueError("extra canaries are no nodes: leave canary_nodes out")
        if mode != "client" and (canary_partitions is not None or seed is not None):
            raise ValueError(
                f"canary_partitions and seed are for mode 'client', where clients are canaries, not {mode!r}"
            )
        self.strategy, self.audit, self.mode = strategy, audit, mode
        self._private = _private_wrapper(strategy)
        self._innermost = _innermost(strategy)
        if self._private is None and clip_norm is None:
            raise ValueError(
                "no DifferentialPrivacy… wrapper was found: say how long a canary's update is by clip_norm"
            )
        self._given_clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._given_noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._scale = _scale(scale, mode, self._private)
        self._designation = Designation(audit, canary_nodes)
        self._partitions, self._seed = checked_partitions(canary_partitions), checked_seed(audit, seed)
        linear = getattr(type(self._innermost), "aggregate_train", None) is FedAvg.aggregate_train
        self._known_others = known_others and linear and self._private is not None
        self._rng = rng
        self._recorder: Recorder | None = None
        self._sent: _Sent | None = None
        self._unclear = False  # whether this round's canaries cannot be told apart
        self._told_of_any = False  # whether a reply ever said that it is a canary
        self._warned: list[str] = []
        self._weights_differ = False  # whether that was warned of
        self._heaviest = 1.0  # client, against the heaviest canary of its round
        self._check_strategy()

    # What the server is asked

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As ever; in a directory that holds rounds already, only those that are missing, from the model saved there."""
        done, arrays = self._resumed(initial_arrays)
        self._recorder = self._new_recorder(arrays)
        left = max(num_rounds - done, 0)
        evaluate = None if evaluate_fn is None else self._evaluating(evaluate_fn)
        result = super().start(grid, arrays, left, timeout, train_config, evaluate_config, evaluate)
        if not left:
            result.arrays = arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's own messages; canary clients get a word of their own."""
        if self._recorder is None:
            self._recorder = self._new_recorder(arrays)
        clip_norm = self._clip_norm()
        if self.mode == "client":
            for name, value in self._announcement(clip_norm).to_config().items():
                config[name] = value
        messages = [self._designated(m) for m in self.strategy.configure_train(server_round, arrays, config, grid)]
        self._sent = _Sent(clip_norm, tuple(messages), len(list(grid.get_node_ids())))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's own aggregation, canaries among the replies, and a look at what came of it."""
        recorder, sent = self._recorder, self._sent
        if recorder is None or sent is None:
            raise ValueError("aggregate_train came before configure_train")
        received = list(replies)
        valid = [reply for reply in received if not reply.has_error()]
        self._unclear = False
        canaries = self._canary_replies(recorder, sent, valid)
        ghosts = list(canaries.values()) if self.mode == "extra" else []
        counted = [*valid, *ghosts]
        mine = {id(reply) for reply in canaries.values()}
        weights = self._weights(counted)
        own = [weight for reply, weight in zip(counted, weights, strict=True) if id(reply) in mine]
        self._warn_of_weights(weights, own)
        if own and max(own) > 0:
            self._heaviest = max(self._heaviest, max(weights) / max(own))
        real = [reply for reply in valid if id(reply) not in mine]
        others = self._others(recorder, sent, real, sum(weights))
        arrays, metrics = self._aggregated(server_round, [*received, *ghosts], len(counted))
        released = arrays is not None
        noise = self.noise_multiplier
        recorder.observe(
            server_round,
            arrays,
            np.array(sorted(canaries) if released else [], dtype=np.int32),
            clear=not self._unclear,
            others=others if released else None,
            noise_std=noise * sent.clip_norm / len(counted) if noise and counted else None,
            canary_norm=sent.clip_norm * (float(np.mean(own)) / sum(weights) if own else 1 / max(len(counted), 1)),
            clients=len(real),
            failed=len(received) - len(valid),
            missing=len(sent.messages) - len(received),
            lost_canaries=0 if released else len(canaries),
            clip_norm=sent.clip_norm,
        )
        self._save(server_round, arrays)
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The strategy's own."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The strategy's own."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """The strategy's own, and a line on the audit."""
        logger.info("audited: %d canaries, mode %s", self.audit.settings.canaries, self.mode)
        self.strategy.summary()

    # What the user asks

    @property
    def noise_multiplier(self) -> float | None:
        """The noise that the strategy claims to add to the updates, over the clip norm; None if it says nothing of it."""
        if self._given_noise is not None or self._private is None:
            return self._given_noise
        return float(self._private.noise_multiplier)

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """Observe the final model and return what was found; in a run directory, write it too, under the task's name.

        The claim is by default that of the noise multiplier, for a client that takes part as often as canaries did. Where
        clients weigh differently it is one for the heaviest.
        """
        if self._recorder is None:
            raise ValueError("there is nothing to finish: start() comes first")
        if self.mode == "client" and not self._told_of_any and not any(r.present.size for r in self.audit.log.rounds()):
            self._warn(NO_CANARY)
        more: dict[str, Any] = {"warnings": list(self._warned)}
        spent = self._private.privacy_spent() if hasattr(self._private, "privacy_spent") else None
        if spent is not None:
            more["accounted_epsilon"] = float(spent.epsilon)
        noise = self.noise_multiplier
        return self._recorder.finish(claim, noise_multiplier=noise, task=task, heaviest=self._heaviest, **more)

    # Rounds

    def _canary_replies(self, recorder: Recorder, sent: _Sent, valid: list[Message]) -> dict[int, Message]:
        """The replies that are canaries, by canary: told by clients, put in the place of theirs, or made."""
        if self.mode == "client":
            return self._told(sent, valid)
        if self.mode == "extra":
            return self._ghosts(recorder, sent, valid)
        found = {}
        for reply in valid:
            index = self._designation.index_of(reply.metadata.src_node_id)
            if index is not None:
                self._fill(recorder, sent, reply.content, index, self._largest_weight(valid))
                found[index] = reply
        return found

    def _told(self, sent: _Sent, valid: list[Message]) -> dict[int, Message]:
        found: dict[int, Message] = {}
        for reply in valid:
            if REPLY not in reply.content:
                continue
            index = int(reply.content.config_records[REPLY]["canary"])  # type: ignore[arg-type]
            del reply.content[REPLY]  # the strategy has no use for it
            if index in found:
                self._unclear = True
                self._warn(
                    f"canary {index} came from two nodes, so no such round is audited: each needs its own canary-id"
                )
            found[index] = reply
        self._told_of_any |= bool(found)
        if not found and self._has_canaries(sent, valid):
            self._warn(NO_CANARY)
        return found

    def _has_canaries(self, sent: _Sent, valid: list[Message]) -> bool:
        """Whether there must be canaries among the replies: nodes that the server named, or simply every node."""
        named = any(self._designation.index_of(reply.metadata.src_node_id) is not None for reply in valid)
        return named or 0 < sent.available <= len(valid)

    def _ghosts(self, recorder: Recorder, sent: _Sent, valid: list[Message]) -> dict[int, Message]:
        if not valid:
            return {}
        settings = self.audit.settings
        if settings.rounds is not None:
            chosen = self.audit.canaries_in_round(self.audit.last_round + 1)
        else:
            rate = min(1.0, len(sent.messages) / max(sent.available, 1))
            if self._rng is None:
                chosen = self.audit.sampled_canaries(self.audit.last_round + 1, rate)
            else:
                chosen = np.flatnonzero(self._rng.random(settings.canaries) < rate).astype(np.int32)
        weight = self._largest_weight(valid)
        instructions = {message.metadata.dst_node_id: message for message in sent.messages}
        ghosts = {}
        for place, index in enumerate(chosen):
            template = valid[place % len(valid)]  # in turn, so that metrics keep their averages
            content = RecordDict(
                {
                    name: MetricRecord(dict(record)) if isinstance(record, MetricRecord) else record
                    for name, record in template.content.items()
                }
            )
            self._fill(recorder, sent, content, int(index), weight)
            ghosts[int(index)] = Message(content, reply_to=instructions[template.metadata.src_node_id])
        return ghosts

    def _fill(self, recorder: Recorder, sent: _Sent, content: RecordDict, index: int, weight: float | None) -> None:
        """Make a canary of a reply. It counts as much as any client may: that is whom a weighted mean gives away most."""
        (name,) = content.array_records
        update = self.audit.update(index, sent.clip_norm, scale=self._scale, like=recorder.current)
        content[name] = recorder.layout.moved(next(iter(sent.messages[0].content.array_records.values())), update)
        if weight is not None:
            (metrics,) = content.metric_records.values()
            whole = isinstance(metrics[self._weight_key], int)
            metrics[self._weight_key] = int(weight) if whole else weight

    def _aggregated(
        self, server_round: int, replies: list[Message], valid: int
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's aggregation; with extra replies, of noise that is sized for as many as there are."""
        if self.mode != "extra" or self._private is None:
            return self.strategy.aggregate_train(server_round, replies)
        expected = self._private.num_sampled_clients
        self._private.num_sampled_clients = valid
        try:
            return self.strategy.aggregate_train(server_round, replies)
        finally:
            self._private.num_sampled_clients = expected

    def _others(self, recorder: Recorder, sent: _Sent, real: list[Message], total: float) -> Row | None:
        """The real clients' part of the average, clipped by us: what they sent is on trial, and so is the clip.

        Each reply is read once, where it lies: update, length and share of the sum take no copy of it.
        """
        if not self._known_others:
            return None
        layout, current = recorder.layout, recorder.current
        summed, update = np.zeros_like(current), np.empty_like(current)
        for reply, weight in zip(real, self._weights(real), strict=True):
            (record,) = reply.content.array_records.values()
            layout.update_into(update, record, current)
            square = float(np.vdot(update, update)) + self._left_out_square(sent, record, layout.left_out)
            update *= weight / total * min(1.0, sent.clip_norm / max(square**0.5, 1e-300))
            summed += update
        return summed

    def _left_out_square(self, sent: _Sent, record: ArrayRecord, names: tuple[str, ...]) -> float:
        """Flower's clip norm counts buffers too."""
        (before,) = sent.messages[0].content.array_records.values()
        gaps = [np.asarray(record[name].numpy() - before[name].numpy(), dtype=np.float64) for name in names]
        return sum(float(np.vdot(gap, gap)) for gap in gaps)

    # Weights

    @property
    def _weight_key(self) -> str:
        return str(getattr(self._innermost, "weighted_by_key", "num-examples"))

    def _weights(self, replies: list[Message]) -> list[float]:
        found = []
        for reply in replies:
            (metrics,) = reply.content.metric_records.values()
            found.append(float(metrics.get(self._weight_key, 1.0)))  # type: ignore[arg-type]
        return found

    def _largest_weight(self, valid: list[Message]) -> float | None:
        weights = self._weights(valid)
        return max(weights) if len(set(weights)) > 1 else None

    def _warn_of_weights(self, weights: list[float], own: list[float]) -> None:
        """Once, in the first round in which weights differ; `own` are those of the canaries."""
        if self._weights_differ or not weights or max(weights) == min(weights):
            return
        self._weights_differ = True
        sized = "the noise is sized" if self._private is not None else "an epsilon of one clip norm a client is"
        text = (
            f"clients weigh differently (by {self._weight_key!r}), up to {max(weights) / np.mean(weights):.3g} times "
            f"the mean, but {sized} for equal weights: send the same number from all"
        )
        if own and max(own) < max(weights):
            text += (
                f"; the heaviest canary weighs {max(own) / max(weights):.3g} of the heaviest client, so the audit reads "
                "less than that client gives away, and judges a claim by as much"
            )
        self._warn(text)

    # Setting up

    def _clip_norm(self) -> float:
        if self._given_clip_norm is not None:
            return self._given_clip_norm
        assert self._private is not None
        return float(self._private.clipping_norm)  # read before aggregation, which changes an adaptive one

    def _designated(self, message: Message) -> Message:
        """The message as it is, or a new one for a canary that the server names: all messages share one content."""
        index = self._designation.index_of(message.metadata.dst_node_id) if self.mode == "client" else None
        if index is None:
            return message
        content = RecordDict(dict(message.content))
        name = next(name for name, record in content.config_records.items() if PREFIX + "dim" in record)
        content[name] = ConfigRecord({**content.config_records[name], PREFIX + "canary": index})
        return Message(
            content,
            dst_node_id=message.metadata.dst_node_id,
            message_type=message.metadata.message_type,
            ttl=message.metadata.ttl,
            group_id=message.metadata.group_id,
        )

    def _announcement(self, clip_norm: float) -> Announcement:
        assert self._recorder is not None
        return Announcement.of(
            self.audit,
            clip_norm=clip_norm,
            scale=self._scale,
            left_out=self._recorder.layout.left_out,
            seed=self._seed,
            partitions=self._partitions,
        )

    def _new_recorder(self, arrays: ArrayRecord) -> Recorder:
        privacy: dict[str, Any] = {"clip_norm": self._clip_norm(), "delta": self.audit.settings.delta}
        if self.noise_multiplier is not None:
            privacy["noise_multiplier"] = self.noise_multiplier
        config = {
            "trainer": "flower",
            "strategy": [type(self.strategy).__name__, type(self._innermost).__name__],
            "privacy": privacy,
            "canaries": {"count": self.audit.settings.canaries, "mode": self.mode, "scale": self._scale},
        }
        recorder = Recorder(self.audit, arrays, config)
        for text in recorder.layout.warnings:
            self._warn(text)
        return recorder

    def _resumed(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """How many rounds are done, and the model after them; the audit goes back to there."""
        saved = None if self.audit.directory is None else load_checkpoint(self.audit.directory.path)
        if saved is not None and self.audit.last_round < saved[0]:
            logger.warning("the audit's rounds end before the checkpoint, so training starts again from round 1")
            saved = None
        done, arrays, state = saved or (0, initial, {})
        self.audit.rewind_to(done)
        if done:
            logger.info("going on after round %d", done)
            if self._private is not None and "clipping_norm" in state:
                self._private.clipping_norm = state["clipping_norm"]
            if type(self._innermost).aggregate_train is not FedAvg.aggregate_train:
                self._warn(
                    f"the state of {type(self._innermost).__name__} is not saved: it starts afresh after round {done}"
                )
        return done, arrays

    def _save(self, server_round: int, arrays: ArrayRecord | None) -> None:
        if self.audit.directory is None or self._recorder is None:
            return
        model = arrays
        if model is None:
            assert self._sent is not None
            if not self._sent.messages:
                return
            (model,) = self._sent.messages[0].content.array_records.values()
        state = {} if self._private is None else {"clipping_norm": float(self._private.clipping_norm)}
        save_checkpoint(self.audit.directory.path, self._recorder.number(server_round), model, state)

    def _evaluating(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            accuracy = None if metrics is None else metrics.get("accuracy")
            if self._recorder is not None and server_round and isinstance(accuracy, int | float):
                self._recorder.add_accuracy(server_round, float(accuracy))
            return metrics

        return evaluate

    def _check_strategy(self) -> None:
        if isinstance(self._innermost, DROPPING):
            self._warn(
                f"{type(self._innermost).__name__} may drop or reweigh canaries as outliers: the audit reads less than leaks"
            )
        if self.mode != "client" and isinstance(self._private, CLIENT_CLIP):
            self._warn(
                f"mode {self.mode!r} bypasses the clients' clip, so it is not audited: canary_mod on clients would"
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.append(text)
            logger.warning("%s", text)


def _scale(given: float | None, mode: Mode, private: Any) -> float:
    """How many times too long canaries are: 10 where a clip awaits them, else 1."""
    if given is not None:
        return positive("scale", given)
    clipped = isinstance(private, SERVER_CLIP) or (mode == "client" and isinstance(private, CLIENT_CLIP))
    return BEFORE_CLIP if clipped else 1.0


def _private_wrapper(strategy: Any) -> Any:
    """Flower's own wrapper for differential privacy, wherever it is in the chain; None if there is none."""
    while strategy is not None and not isinstance(strategy, (*SERVER_CLIP, *CLIENT_CLIP)):
        strategy = getattr(strategy, "strategy", None)
    return strategy


def _innermost(strategy: Any) -> Any:
    while getattr(strategy, "strategy", None) is not None:
        strategy = strategy.strategy
    return strategy
