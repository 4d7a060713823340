"""The server's side: a strategy that wraps the user's own, adds canaries or reads them from replies, and observes.

`audited` returns one.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Bulyan, FedAvg, FedMedian, FedTrimmedAvg, Krum, MultiKrum, QFedAvg, Result, Strategy

from coalmine.argument_checks import short_repr
from coalmine.audit import Audit, OnViolation
from coalmine.integrations.flower.arrays import FrozenArrays, Layout, Row, as_record
from coalmine.integrations.flower.canary_clients import (
    PREFIX,
    REPLY,
    STRONG,
    Announcement,
    Designation,
    Nodes,
    checked_partitions,
    checked_seed,
    mod_order,
    refuse_guessable,
)
from coalmine.integrations.flower.claims import read_claim
from coalmine.integrations.flower.exposures import Exposures, participations_item, watch_one_round, whole_run_claim
from coalmine.integrations.flower.observer import Recorder, logger
from coalmine.integrations.flower.replies import (
    CanaryClaims,
    DroppedReply,
    RoundReplies,
    copy_config,
    describe_dropped,
    printable,
    refuse_most_dropped,
    reply_weight,
    sort_replies,
)
from coalmine.integrations.flower.scope import (
    CLIENT_CLIP,
    SAMPLER,
    SERVER_CLIP,
    WeightRatio,
    adaptive_clip_warning,
    clipping_item,
    others_item,
    tensors_item,
    weights_item,
)
from coalmine.integrations.flower.sent_canaries import CanaryCheck, rounding_error
from coalmine.integrations.flower.server_checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from coalmine.integrations.setup import (
    CLIP_SCALE,
    AuditSettings,
    nonnegative,
    positive,
    refuse_finished,
    set_up_audit,
    watch_noise,
)
from coalmine.log.seed_file import read_seed
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

Mode = Literal["client", "replace", "extra"]
DEPLOYED = ("HttpGrid", "GrpcGrid")  # by name: simulations have an InMemoryGrid, and flwr.superlink is not public
DROPPING = (Krum, MultiKrum, Bulyan, FedTrimmedAvg, FedMedian, QFedAvg)
LONGEST_REASON = 400  # characters kept of a failed reply's reason
NO_CANARY = (
    "no reply reports a canary, so none takes part: clients need canary_mod, last in their mods, and canary-id, "
    "canary_partitions or canary_nodes must name some of them"
)

HOLDING = "it holds canaries but does not report one, so its node knows the seed"
UNCLIPPED = (
    "most real clients sent updates longer than the clip norm, although clients must clip, so such rounds cannot confirm a "
    "claim"
)


def audited(
    strategy: Strategy,
    model: Any = None,
    *,
    mode: Mode = "client",
    canaries: int | range | None = None,
    unobserved: int | None = None,
    seed: int | bytes | None = None,
    seed_file: Path | str | None = None,
    delta: float | None = None,
    directory: Path | str | None = None,
    claim: Any = None,
    on_violation: OnViolation | None = None,
    audit: Audit | None = None,
    scale: float | None = None,
    **settings: Any,
) -> "AuditedStrategy":
    """The strategy wrapped in an `AuditedStrategy`, with an `audit` for the model that training starts from.

    `model` is that model: an ArrayRecord, a torch Module or a state_dict. Each of its floating-point arrays gets its own
    noise gauge. `canaries` is their number or, in mode "client", the partition ids that are canaries in a simulation.

    Give either `seed` or `seed_file`. In mode "client" a `seed` is announced to all clients. The seed in a `seed_file` is
    never announced: each canary node reads its own copy, `coalmine-seed-file` in its node config. In a deployment or in a
    seed file, a seed that can be guessed is rejected: a number below 2^64, or fewer than 8 bytes.

    `unobserved`, `delta`, `directory`, `claim` and `on_violation` are those of `Audit`. Without a claim, `on_violation`
    watches the noise multiplier. An `audit` of your own replaces all of these settings and the model. You may give its
    `seed` too, to announce it. `mode`, `scale` and `settings` are those of AuditedStrategy.

    A bare number as `claim` is the epsilon of one client over the whole run: of the node that took part most often, and
    with the largest weight, as the server saw it. A PrivacyConfig of Flower, or an accountant with one, claims its
    `max_epsilon`.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a strategy of flwr.serverapp, got {short_repr(strategy)}")
    if isinstance(canaries, range):
        settings["canary_partitions"] = canaries
        canaries = len(canaries)
    layers = None if model is None else Layout.of(as_record(model)).layers
    audit_settings: AuditSettings = {
        "canaries": canaries,
        "unobserved": unobserved,
        "delta": delta,
        "directory": directory,
    }
    audit_settings |= {"seed": seed if audit is None else None, "seed_file": seed_file, "audit": audit}
    audit_settings |= {"claim": read_claim(claim, delta), "on_violation": on_violation}
    announced = seed if mode == "client" or audit is not None else None
    if seed_file is not None and seed is None and audit is None:
        refuse_guessable(read_seed(seed_file), f"seed file {seed_file}", f"make one with: coalmine seed {seed_file}")
    made = AuditedStrategy(
        strategy, set_up_audit(layers, **audit_settings), mode, seed=announced, scale=scale, **settings
    )
    watch_noise(made.audit, on_violation, made.noise_multiplier)
    return made


@dataclass(frozen=True)
class _RoundConfig:
    """The configuration of a round's training."""

    round_number: int  # the audit's number
    clip_norm: float
    messages: tuple[Message, ...]
    available: int  # number of nodes to sample from


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
        self._private = _private_wrapper(strategy)
        self._innermost = _innermost(strategy)
        if self._private is None and clip_norm is None:
            raise ValueError(
                "no DifferentialPrivacy… wrapper was found: give clip_norm, the length of a canary's update"
            )
        self._user_clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._user_noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._scale = _canary_scale(scale, mode, self._private)
        self._designation = Designation(audit, canary_nodes)
        self._partitions, self._seed = checked_partitions(canary_partitions), checked_seed(audit, seed)
        self._others_left_out = self._reason_without_others(known_others)
        self._rng = rng
        self._recorder: Recorder | None = None
        self._round_config: _RoundConfig | None = None
        self._evaluated: tuple[Message, ...] = ()  # the messages of this round's evaluation
        self._claims = CanaryClaims(audit.settings.canaries, self._designation)
        self.dropped: list[DroppedReply] = []  # bad replies so far
        self._canary_reported = False  # whether any reply has reported a canary
        self._warned: list[str] = []
        self._failures: set[str] = set()  # reasons of failed replies
        self._weights_differ = False  # whether a warning has said so
        self._ratio = WeightRatio()
        self._exposures = self._new_exposures()
        self._frozen: FrozenArrays | None = None
        self._check_strategy()
        watch_one_round(audit)
        audit.finish_with(self._finish)

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
        clip_norm, number = self._clip_norm(), self._recorder.number(server_round)
        extended = copy_config(config)  # Flower logs the caller's config, and the announcement may hold the seed
        if self.mode == "client":
            extended.update(self._announcement(clip_norm, number).to_config())
        self._designation.assign(grid.get_node_ids())
        configured = self.strategy.configure_train(server_round, arrays, extended, grid)
        messages = [self._address_canary(message, number) for message in configured]
        self._round_config = _RoundConfig(number, clip_norm, tuple(messages), len(list(grid.get_node_ids())))
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's aggregation, with canaries in the replies. The audit observes the new model."""
        recorder, config = self._recorder, self._round_config
        if recorder is None or config is None:
            raise ValueError("aggregate_train was called before configure_train")
        sorted_replies = self._sort_train_replies(replies, config)
        self._warn_of_failures(recorder, config, sorted_replies.failed)
        canaries, others = self._examine(recorder, config, sorted_replies)
        self._log_dropped(sorted_replies.dropped)
        refuse_most_dropped(sorted_replies)
        valid, failed, dropped = sorted_replies.good, sorted_replies.failed, sorted_replies.dropped
        extra = list(canaries.values()) if self.mode == "extra" else []
        averaged = [*valid, *extra]
        canary_ids = {id(reply) for reply in canaries.values()}
        weights = self._averaging_weights(averaged)
        canary_weights = [weight for reply, weight in zip(averaged, weights, strict=True) if id(reply) in canary_ids]
        self._warn_of_weights(weights, canary_weights)
        self._ratio.add(weights, canary_weights)
        real = [reply for reply in valid if id(reply) not in canary_ids]
        self._update_frozen(recorder, config, real)
        growth = self._growth(valid, extra)
        kept = Fraction(len(valid), len(valid) + sorted_replies.lost) if valid else Fraction(1)
        arrays, metrics = self._aggregate(server_round, [*valid, *failed, *extra], growth * kept)
        released = arrays is not None
        noise, divisor = self.noise_multiplier, float(len(valid) * growth)
        canary_share = float(np.mean(canary_weights)) / sum(weights) if canary_weights else 1 / max(len(averaged), 1)
        if released:
            unit = (noise or 0.0) / divisor if self._exposures.in_noise else canary_share
            self._exposures.add_replies(averaged, weights, canaries, unit)
        recorder.observe(
            server_round,
            arrays,
            np.array(sorted(canaries) if released else [], dtype=np.int32),
            others=others if released else None,
            noise_std=noise * config.clip_norm / divisor if noise and averaged else None,
            canary_norm=config.clip_norm * canary_share,
            scale=self._scale,
            participants=len(averaged) if released else None,
            clients=len(real),
            **_weight_metrics(weights, canary_weights),
            failed=len(failed),
            missing=sorted_replies.silent,
            dropped=len(dropped),
            dropped_replies=[[each.node, each.why] for each in dropped] or None,
            lost_canaries=0 if released else len(canaries),
            clip_norm=config.clip_norm,
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
        sorted_replies = self._sort(replies, self._evaluated, number, None)
        self._log_dropped(sorted_replies.dropped)
        refuse_most_dropped(sorted_replies)
        return self.strategy.aggregate_evaluate(server_round, [*sorted_replies.good, *sorted_replies.failed])

    def summary(self) -> None:
        """The wrapped strategy's summary, and a line about the audit."""
        logger.info("audited: %d canaries, mode %s", self.audit.settings.canaries, self.mode)
        self.strategy.summary()

    # The result

    @property
    def noise_multiplier(self) -> float | None:
        """The stated noise in the sum of updates, over the clip norm; None if none is stated."""
        if self._user_noise is not None or self._private is None:
            return self._user_noise
        return float(self._private.noise_multiplier)

    def _finish(self, *, claim: Any = None, task: str | None = None) -> AuditResult:
        if self._recorder is None:
            raise ValueError("there is nothing to finish: call start() first")
        explained = self._canary_reported or self._failures
        if self.mode == "client" and not explained and not any(entry.present.size for entry in self.audit.log.observed):
            self._warn(NO_CANARY)
        if self._frozen is not None and self._frozen.names and self._private is not None and self.noise_multiplier:
            self._warn(
                f"no real client changed {', '.join(self._frozen.names)}, but Flower adds noise to every array: if they are "
                "frozen parameters or buffers, do not send them with the model"
            )
        if self._others_left_out is not None:
            self._warn(f"known-others was left out: {self._others_left_out}")
        adaptive = adaptive_clip_warning(self.audit, self._private)
        if adaptive is not None:
            self._warn(adaptive)
        noise, seen = self.noise_multiplier, self._exposures
        more: dict[str, Any] = seen.entries(self.audit, noise, equal_weights=not self._weights_differ)
        late = read_claim(claim, self.audit.settings.delta)
        completed = whole_run_claim(self.audit.claim or late, self.audit, seen)
        spent = self._private.privacy_spent() if hasattr(self._private, "privacy_spent") else None
        if spent is not None:
            more["accounted_epsilon"] = float(spent.epsilon)
            logger.info("Flower's accountant: epsilon %.4g at delta %g", spent.epsilon, spent.delta)
        return self._recorder.finish(
            late,
            completed=completed,
            noise_multiplier=noise,
            task=task,
            weight=seen.heaviest_weight(noise) if completed is not None and completed.amplified else 1.0,
            sampler_observed=self._observes_sampler,
            audited=self.audited_items(completed),
            pipeline=self._pipeline(),
            warnings=[*self._warned, *describe_dropped(self.dropped)],
            **more,
        )

    def _pipeline(self) -> dict[str, Any]:
        """Facts about the pipeline, if Flower's own wrapper adds the noise."""
        if self._private is None:
            return {}
        adaptive = "Adaptive" in type(self._private).__name__
        return {"trust_model": "central", "clipping": "adaptive" if adaptive else "fixed"}  # the server adds the noise

    @property
    def _observes_sampler(self) -> bool:
        """Whether canaries take part exactly when Flower samples their nodes."""
        if self.mode == "extra":
            return False
        return (self._designation if self._designation.names_nodes else self._claims).one_each

    def audited_items(self, claim: Claim | None = None) -> list[AuditedItem]:
        """The parts of the pipeline that this audit has checked so far or not, each with its reason."""
        tensors = tensors_item(len(self.audit.settings.layers), self._others_left_out)
        amplified = claim is not None and claim.amplified
        times = None if amplified else participations_item(claim, self._exposures)
        return [
            clipping_item(self.mode, self._private, self._scale),
            weights_item(self._ratio),
            others_item(self._others_left_out),
            *([] if tensors is None else [tensors]),
            *([] if times is None else [times]),
            SAMPLER,
        ]

    # Rounds

    def _sort_train_replies(self, replies: Iterable[Message], config: _RoundConfig) -> RoundReplies:
        """The round's replies, sorted into good, failed and bad ones by their content."""
        (model,) = config.messages[0].content.array_records.values() if config.messages else (None,)
        return self._sort(replies, config.messages, config.round_number, model)

    def _sort(
        self, replies: Iterable[Message], messages: tuple[Message, ...], number: int, model: ArrayRecord | None
    ) -> RoundReplies:
        return sort_replies(
            replies,
            messages,
            number,
            model=model,
            weight_key=self._weight_key,
            uniform=hasattr(self._innermost, "weighted_by_key"),
            equal_weights=model is not None and getattr(self._private, "accountant", None) is not None,
            buffers=() if self._recorder is None else self._recorder.layout.left_out,
        )

    def _examine(
        self, recorder: Recorder, config: _RoundConfig, replies: RoundReplies
    ) -> tuple[dict[int, Message], Row | None]:
        """The canaries' replies, by canary, and the real clients' part of the average.

        Bad replies are dropped, and the rest is examined again.
        """
        check = CanaryCheck(self.audit, recorder.layout, recorder.current)
        canaries = self._reported_canaries(check, config, replies) if self.mode == "client" else {}
        chosen = self._choose_extra(config) if self.mode == "extra" else None
        while True:
            if self.mode == "replace":
                canaries = self._replace_replies(recorder, config, replies.good)
            elif chosen is not None:
                canaries = self._extra_replies(recorder, config, replies.good, chosen)
            canary_ids = {id(reply) for reply in canaries.values()}
            extra = list(canaries.values()) if self.mode == "extra" else []
            real = [reply for reply in replies.good if id(reply) not in canary_ids]
            others, lengths = self._others(recorder, config, real, sum(self._weights([*replies.good, *extra])))
            if others is None:
                return canaries, None
            bad = self._too_long(recorder, config, real, lengths)
            if 2 * len(bad) > len(real):  # not a single bad client: the canaries show whether clients clip
                self._warn(UNCLIPPED)
                return canaries, None
            if not bad and canaries and self._bypass_clip(check, config, real, lengths):
                bad, canaries = [(reply, mod_order()) for reply in canaries.values()], {}
            if not bad and self.mode == "client":
                bad = [(reply, HOLDING) for reply in check.replies_with_canaries(others, real, sorted(canaries))]
            if not bad:
                return canaries, others
            for reply, why in bad:
                replies.drop(reply, why)

    def _too_long(
        self, recorder: Recorder, config: _RoundConfig, real: list[Message], lengths: list[float]
    ) -> list[tuple[Message, str]]:
        """The real replies that are longer than the clip norm, if clients must clip."""
        if not isinstance(self._private, CLIENT_CLIP) or not real:
            return []
        return [
            (reply, f"its update is {length / config.clip_norm:.3g} clip norms long, but clients must clip")
            for reply, length in zip(real, lengths, strict=True)
            if length > 1.01 * config.clip_norm + rounding_error(reply, recorder.current)
        ]

    def _bypass_clip(self, check: CanaryCheck, config: _RoundConfig, real: list[Message], lengths: list[float]) -> bool:
        """Whether canaries did not go through the clip that real clients' updates go through."""
        clipped = isinstance(self._private, CLIENT_CLIP) and self.mode == "client" and self._scale > 1
        return clipped and check.bypass_clip(real, lengths, clip_norm=config.clip_norm)

    def _replace_replies(self, recorder: Recorder, config: _RoundConfig, valid: list[Message]) -> dict[int, Message]:
        """Turn the replies of canary nodes into canaries; return them by canary."""
        canaries = {}
        for reply in valid:
            index = self._designation.index_of(reply.metadata.src_node_id, config.round_number)
            if index is not None:
                self._insert_canary(recorder, config, reply.content, index, self._largest_weight(valid))
                canaries[index] = reply
        return canaries

    def _reported_canaries(self, check: CanaryCheck, config: _RoundConfig, replies: RoundReplies) -> dict[int, Message]:
        """The replies that report a canary and hold it, by canary."""
        self._canary_reported |= any(REPLY in reply.content for reply in replies.good)
        canaries = self._claims.read(replies)
        wrong = check.wrong_canaries(
            canaries, clip_norm=config.clip_norm, scale=self._scale, noisy=self._private is None
        )
        for index, why in wrong.items():
            replies.drop(canaries.pop(index), why)
        self._claims.remember_owners(canaries)
        if not canaries and not replies.dropped and self._expects_canaries(config, replies.good):
            self._warn(NO_CANARY)
        return canaries

    def _expects_canaries(self, config: _RoundConfig, valid: list[Message]) -> bool:
        """Whether the replies must contain canaries: the server named some of the nodes, or all nodes replied."""
        nodes, number = [reply.metadata.src_node_id for reply in valid], config.round_number
        some_are_named = any(self._designation.index_of(node, number) is not None for node in nodes)
        return some_are_named or 0 < config.available <= len(valid)

    def _choose_extra(self, config: _RoundConfig) -> Indices:
        """The canaries that join this round as extra replies."""
        settings = self.audit.settings
        if settings.rounds is not None:
            return self.audit.canaries_in_round(self.audit.last_round + 1)
        rate = min(1.0, len(config.messages) / max(config.available, 1))
        if self._rng is None:
            return self.audit.sampled_canaries(self.audit.last_round + 1, rate)
        return np.flatnonzero(self._rng.random(settings.canaries) < rate).astype(np.int32)

    def _extra_replies(
        self, recorder: Recorder, config: _RoundConfig, valid: list[Message], chosen: Indices
    ) -> dict[int, Message]:
        """Extra replies with the chosen canaries, by canary."""
        if not valid:
            return {}
        weight = self._largest_weight(valid)
        instructions = {message.metadata.dst_node_id: message for message in config.messages}
        extra = {}
        for position, index in enumerate(chosen):
            template = valid[position % len(valid)]  # in turn, so that the averages of metrics stay the same
            content = RecordDict(
                {
                    name: MetricRecord(dict(record)) if isinstance(record, MetricRecord) else record
                    for name, record in template.content.items()
                }
            )
            self._insert_canary(recorder, config, content, int(index), weight)
            extra[int(index)] = Message(content, reply_to=instructions[template.metadata.src_node_id])
        return extra

    def _insert_canary(
        self, recorder: Recorder, config: _RoundConfig, content: RecordDict, index: int, weight: float | None
    ) -> None:
        """Turn a reply into a canary. It gets the largest weight, because a weighted mean exposes that client most."""
        (name,) = content.array_records
        update = self.audit.update(index, config.clip_norm, scale=self._scale, like=recorder.current)
        content[name] = recorder.layout.add_update(
            next(iter(config.messages[0].content.array_records.values())), update
        )
        if weight is not None:
            (metrics,) = content.metric_records.values()
            whole = isinstance(metrics[self._weight_key], int)
            metrics[self._weight_key] = int(weight) if whole else weight

    def _growth(self, valid: list[Message], extra: list[Message]) -> Fraction | float:
        """The factor by which extra replies shrink one client's share of the average; 1 without any.

        Unequal weights count if the strategy averages by weight.
        """
        if not extra:
            return Fraction(1)
        if self._largest_weight(valid) is None or isinstance(self._innermost, DROPPING):
            return Fraction(len(valid) + len(extra), len(valid))
        total = sum(self._weights(valid))
        return (total + sum(self._weights(extra))) / total

    def _aggregate(
        self, server_round: int, replies: list[Message], growth: Fraction | float
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's aggregation. Extra and dropped replies change a client's share, and the noise with it.

        So their ratio is the same as without the audit, even if the user's `num_sampled_clients` is wrong.
        """
        if not replies:
            return None, None
        if growth == 1 or self._private is None:
            return self.strategy.aggregate_train(server_round, replies)
        configured = self._private.num_sampled_clients
        scaled = float(configured * growth)
        self._private.num_sampled_clients = int(scaled) if scaled.is_integer() else scaled
        try:
            return self.strategy.aggregate_train(server_round, replies)
        finally:
            self._private.num_sampled_clients = configured

    def _others(
        self, recorder: Recorder, config: _RoundConfig, real: list[Message], total: float
    ) -> tuple[Row | None, list[float]]:
        """The real clients' part of the average, clipped by the audit, and the length of each update before the clip.

        The pipeline's own clip is under test, so it cannot be used here. Each reply is read once and never copied.
        """
        if self._others_left_out is not None:
            return None, []
        layout, current = recorder.layout, recorder.current
        summed, update, lengths = np.zeros_like(current), np.empty_like(current), []
        for reply, weight in zip(real, self._weights(real), strict=True):
            (record,) = reply.content.array_records.values()
            layout.update_into(update, record, current)
            square = float(np.vdot(update, update)) + self._left_out_square(config, record, layout.left_out)
            update *= weight / total * min(1.0, config.clip_norm / max(square**0.5, 1e-300))
            summed += update
            lengths.append(square**0.5)
        return summed, lengths

    def _left_out_square(self, config: _RoundConfig, record: ArrayRecord, names: tuple[str, ...]) -> float:
        """Squared length of the arrays that are left out: Flower's clip counts them too."""
        (before,) = config.messages[0].content.array_records.values()
        gaps = [np.asarray(record[name].numpy() - before[name].numpy(), dtype=np.float64) for name in names]
        return sum(float(np.vdot(gap, gap)) for gap in gaps)

    def _update_frozen(self, recorder: Recorder, config: _RoundConfig, real: list[Message]) -> None:
        """Find the arrays that no real client changes."""
        if self._frozen is None:
            self._frozen = FrozenArrays(recorder.layout.names)
        for reply in real:
            (before,) = config.messages[0].content.array_records.values()
            (record,) = reply.content.array_records.values()
            self._frozen.compare(before, record)

    # Weights

    @property
    def _weight_key(self) -> str:
        return str(getattr(self._innermost, "weighted_by_key", "num-examples"))

    def _weights(self, replies: list[Message]) -> list[float]:
        return [reply_weight(reply, self._weight_key) for reply in replies]

    def _averaging_weights(self, replies: list[Message]) -> list[float]:
        """The weights of the average: all equal where the strategy ignores the clients' own."""
        return [1.0] * len(replies) if isinstance(self._innermost, DROPPING) else self._weights(replies)

    def _new_exposures(self) -> Exposures:
        """Where a wrapper adds noise, one client's noise does not depend on its weight. With noise on clients it does."""
        return Exposures(in_noise=self._private is not None and bool(self.noise_multiplier))

    def _largest_weight(self, valid: list[Message]) -> float | None:
        weights = self._weights(valid)
        return max(weights) if len(set(weights)) > 1 else None

    def _warn_of_weights(self, weights: list[float], canary_weights: list[float]) -> None:
        """Warn once, in the first round in which weights differ."""
        if self._weights_differ or not weights or max(weights) == min(weights):
            return
        self._weights_differ = True
        basis = "the noise is sized" if self._private is not None else "an epsilon of one clip norm per client is"
        text = (
            f"clients have different weights (by {self._weight_key!r}), up to {max(weights) / np.mean(weights):.3g} times "
            f"the mean, but {basis} for equal weights: send the same number from all"
        )
        if canary_weights and max(canary_weights) < max(weights):
            text += (
                f"; the heaviest canary weighs {max(canary_weights) / max(weights):.3g} of the heaviest client, so the "
                "audit measures less than that client leaks, and the verdict accounts for this factor"
            )
        self._warn(text)

    # Setup

    def _clip_norm(self) -> float:
        if self._user_clip_norm is not None:
            return self._user_clip_norm
        assert self._private is not None
        return float(self._private.clipping_norm)  # read before aggregation, which changes an adaptive clip norm

    def _address_canary(self, message: Message, round_number: int) -> Message:
        """The message unchanged, or a new one for a node that the server names, because messages share their content."""
        if self.mode != "client":
            return message
        index = self._designation.index_of(message.metadata.dst_node_id, round_number)
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

    def _announcement(self, clip_norm: float, round_number: int) -> Announcement:
        assert self._recorder is not None
        return Announcement.of(
            self.audit,
            clip_norm=clip_norm,
            scale=self._scale,
            left_out=self._recorder.layout.left_out,
            seed=self._seed,
            partitions=self._partitions,
            round_number=round_number,
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
        if self.audit.directory is not None and self.audit.last_round:
            for line in self.audit.directory.read_metrics():  # the rounds before a restart
                self.dropped += [
                    DroppedReply(node, line["round"], why) for node, why in line.get("dropped_replies", ())
                ]
                if line.get("canaries"):
                    lightest, heaviest = line.get("lightest_canary", 1.0), line.get("heaviest_canary", 1.0)
                    self._ratio.add([line.get("heaviest_client", 1.0)], [lightest, heaviest])
        return recorder

    def _resume(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """The number of finished rounds and the model after them. The audit rewinds to that round."""
        saved = None
        if self.audit.directory is not None:
            saved = load_checkpoint(self.audit.directory.path, recorded_rounds=self.audit.last_round)
        done, arrays, state, seen = saved or Checkpoint(0, initial, {}, {})
        self._exposures = Exposures.from_arrays(seen) if seen else self._new_exposures()
        self.audit.rewind_to(done)
        if done:
            logger.info("resuming after round %d", done)
            if self._private is not None and "clipping_norm" in state:
                self._private.clipping_norm = state["clipping_norm"]
            if type(self._innermost).aggregate_train is not FedAvg.aggregate_train:
                self._warn(
                    f"the state of {type(self._innermost).__name__} is not saved: it starts again after round {done}"
                )
            if getattr(self._private, "accountant", None) is not None:
                self._warn(f"Flower's accountant starts again after round {done}: its epsilon is for later rounds only")
        return done, arrays

    def _save(self, server_round: int, arrays: ArrayRecord | None) -> None:
        if self.audit.directory is None or self._recorder is None:
            return
        model = arrays
        if model is None:
            assert self._round_config is not None
            if not self._round_config.messages:
                return
            (model,) = self._round_config.messages[0].content.array_records.values()
        state = {} if self._private is None else {"clipping_norm": float(self._private.clipping_norm)}
        self.audit.flush(sync=True)  # a checkpoint must never be ahead of the audit, even after a power cut
        number, seen = self._recorder.number(server_round), self._exposures.to_arrays()
        save_checkpoint(self.audit.directory.path, number, model, state, seen)

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

    def _reason_without_others(self, known_others: bool) -> str | None:
        """Why the real clients' part of a round cannot be subtracted from it; None if it can."""
        if not known_others:
            return "known_others=False was given"
        if self._private is None:
            return "without a DifferentialPrivacy… wrapper the server cannot tell updates from noise added on clients"
        if getattr(type(self._innermost), "aggregate_train", None) is not FedAvg.aggregate_train:
            name = type(self._innermost).__name__
            return (
                f"{name} does not average linearly, so the real clients' part cannot be subtracted from the new model"
            )
        return None

    def _check_secrecy(self, grid: Grid) -> None:
        """In a deployment, reject a guessable seed, and warn if the seed is announced to every client."""
        if not any(kind.__name__ in DEPLOYED for kind in type(grid).__mro__):
            return
        if self.audit.seed_is_guessable:
            raise ValueError(f"the seed of a deployment {STRONG}: give seed_file=, made with: coalmine seed FILE")
        if self._seed is not None:
            self._warn("every client receives the seed, so a hostile one can imitate canaries: give seed_file= instead")

    def _check_strategy(self) -> None:
        if isinstance(self._innermost, DROPPING):
            self._warn(
                f"{type(self._innermost).__name__} may drop or reweight canaries as outliers: the audit measures less than "
                "leaks"
            )
        if self.mode != "client" and isinstance(self._private, CLIENT_CLIP):
            self._warn(
                f"mode {self.mode!r} bypasses the clients' clip, so the clip is not audited: use canary_mod on clients"
            )

    def _log_dropped(self, dropped: list[DroppedReply]) -> None:
        """Log each dropped reply, and keep it for the result."""
        for each in dropped:
            logger.warning("the reply of node %s in round %d was dropped: %s", each.node, each.round_number, each.why)
        self.dropped += dropped

    def _warn_of_failures(self, recorder: Recorder, config: _RoundConfig, failed: list[Message]) -> None:
        """Warn once for each reason."""
        for reply in failed:
            reason = _reason(str(reply.error.reason))
            recorder.first_failure = recorder.first_failure or reason
            if reason not in self._failures:
                self._failures.add(reason)
                self._warn(f"node {reply.metadata.src_node_id} failed in round {config.round_number}: {reason}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.append(text)
            logger.warning("%s", text)


def _canary_scale(scale: float | None, mode: Mode, private: Any) -> float:
    """Length of a canary in clip norms: by default 10 if it goes through a clip, otherwise 1."""
    if scale is not None:
        return positive("scale", scale)
    clipped = isinstance(private, SERVER_CLIP) or (mode == "client" and isinstance(private, CLIENT_CLIP))
    return CLIP_SCALE if clipped else 1.0


def _weight_metrics(weights: list[float], canary_weights: list[float]) -> dict[str, float]:
    """The weights of a round for its line of metrics, if they differ."""
    if not canary_weights or min(weights) == max(weights):
        return {}
    lightest, heaviest = min(canary_weights), max(canary_weights)
    return {"heaviest_client": max(weights), "lightest_canary": lightest, "heaviest_canary": heaviest}


def _reason(text: str) -> str:
    """A failed reply's reason on one line, without Flower's wrapping: <class 'ValueError'>:<'text'>."""
    line = " ".join(text.split())
    match = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", line)
    return printable(line if match is None else match[1].strip(), LONGEST_REASON)


def _private_wrapper(strategy: Any) -> Any:
    """Flower's own wrapper for differential privacy, wherever it is in the chain; None if there is none."""
    while strategy is not None and not isinstance(strategy, (*SERVER_CLIP, *CLIENT_CLIP)):
        strategy = getattr(strategy, "strategy", None)
    return strategy


def _innermost(strategy: Any) -> Any:
    while getattr(strategy, "strategy", None) is not None:
        strategy = strategy.strategy
    return strategy
