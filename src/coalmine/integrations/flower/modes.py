"""How canaries get into a round's replies: clients send them, or the server replaces replies or adds some."""

from fractions import Fraction
from typing import Any, Literal

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from coalmine.audit import Audit
from coalmine.integrations.flower.canary_clients import PREFIX, REPLY, Announcement, Designation
from coalmine.integrations.flower.replies import CanaryClaims, RoundReplies
from coalmine.integrations.flower.sent_canaries import CanaryCheck
from coalmine.integrations.flower.sent_round import SentRound, only_record
from coalmine.integrations.flower.weights import largest_unequal, reply_weights
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.measure.schedule import Indices

Mode = Literal["client", "replace", "extra"]
NO_CANARY = (
    "no reply reports a canary, so none takes part: clients need canary_mod, last in their mods, and canary-id, "
    "canary_partitions or canary_nodes must name some of them"
)


class CanarySource:
    """Where a round's canaries come from."""

    def __init__(self, audit: Audit, wrapped: Wrapped, designation: Designation, scale: float) -> None:
        self._audit, self._wrapped, self._designation, self._scale = audit, wrapped, designation, scale

    @property
    def one_each(self) -> bool:
        """Whether each canary takes part exactly when Flower samples its node."""
        return False

    @property
    def owners(self) -> dict[int, int]:
        """The node that last sent a canary, by canary, where clients say which one they send."""
        return {}

    def begin(self, sent: SentRound, replies: RoundReplies, check: CanaryCheck) -> None:
        """Read or choose the canaries of a round."""

    def canaries(self, sent: SentRound, good: list[Message]) -> dict[int, Message]:
        """The replies of the round's canaries, by canary, given the good replies."""
        raise NotImplementedError

    def extra(self, canaries: dict[int, Message]) -> list[Message]:
        """The canaries that are not among the clients' replies."""
        return []

    def _insert(self, sent: SentRound, content: RecordDict, index: int, weight: float | None) -> None:
        """Turn a reply into a canary. It gets the largest weight, because a weighted mean exposes that client most."""
        (name,) = content.array_records
        update = self._audit.update(index, sent.clip_norm, scale=self._scale, like=sent.current)
        content[name] = sent.layout.add_update(only_record(sent.messages[0]), update)
        if weight is not None:
            (metrics,) = content.metric_records.values()
            whole = isinstance(metrics[self._wrapped.weight_key], int)
            metrics[self._wrapped.weight_key] = int(weight) if whole else weight


class CanaryClients(CanarySource):
    """Mode "client": clients send canaries, and their replies report them."""

    def __init__(
        self,
        audit: Audit,
        wrapped: Wrapped,
        designation: Designation,
        scale: float,
        *,
        seed: int | bytes | None,
        partitions: range | None,
    ) -> None:
        super().__init__(audit, wrapped, designation, scale)
        self._seed, self._partitions = seed, partitions
        self._claims = CanaryClaims(audit.settings.canaries, designation)
        self._found: dict[int, Message] = {}
        self.reported = False  # whether any reply has reported a canary
        self.missing = False  # whether the round must have held canaries, and no reply reported one

    @property
    def one_each(self) -> bool:
        return (self._designation if self._designation.names_nodes else self._claims).one_each

    @property
    def owners(self) -> dict[int, int]:
        return self._claims.owners

    def announce(self, config: ConfigRecord, *, clip_norm: float, left_out: tuple[str, ...], round_number: int) -> None:
        """Add the instructions for canary clients to a round's config."""
        announcement = Announcement.of(
            self._audit,
            clip_norm=clip_norm,
            scale=self._scale,
            left_out=left_out,
            seed=self._seed,
            partitions=self._partitions,
            round_number=round_number,
        )
        config.update(announcement.to_config())

    def address(self, message: Message, round_number: int) -> Message:
        """The message unchanged, or a new one for a node that the server names, because messages share their content."""
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

    def begin(self, sent: SentRound, replies: RoundReplies, check: CanaryCheck) -> None:
        """Find the replies that report a canary and hold it. Those that do not hold it are dropped."""
        self.reported |= any(REPLY in reply.content for reply in replies.good)
        noisy = self._wrapped.private is None
        found = self._claims.read(replies, lambda index, among: check.holding(index, among, scale=self._scale))
        wrong = check.wrong_canaries(found, scale=self._scale, noisy=noisy)
        for index, why in wrong.items():
            replies.drop(found.pop(index), why)
        self._claims.remember_owners(found)
        self._found = found
        self.missing = not found and not replies.dropped and self._expected(sent, replies.good)

    def canaries(self, sent: SentRound, good: list[Message]) -> dict[int, Message]:
        kept = {id(reply) for reply in good}
        return {index: reply for index, reply in self._found.items() if id(reply) in kept}

    def _expected(self, sent: SentRound, good: list[Message]) -> bool:
        """Whether the replies must contain canaries: the server named some of the nodes, or all nodes replied."""
        nodes = [reply.metadata.src_node_id for reply in good]
        some_are_named = any(self._designation.index_of(node, sent.number) is not None for node in nodes)
        return some_are_named or 0 < sent.available <= len(good)


class ReplacedReplies(CanarySource):
    """Mode "replace": the replies of canary nodes become canaries on the server."""

    @property
    def one_each(self) -> bool:
        return self._designation.one_each

    def canaries(self, sent: SentRound, good: list[Message]) -> dict[int, Message]:
        canaries = {}
        weight = largest_unequal(reply_weights(good, self._wrapped.weight_key))
        for reply in good:
            index = self._designation.index_of(reply.metadata.src_node_id, sent.number)
            if index is not None:
                self._insert(sent, reply.content, index, weight)
                canaries[index] = reply
        return canaries


class ExtraReplies(CanarySource):
    """Mode "extra": canaries are additional replies.

    They join by the audit's schedule, or with the probability that a node is sampled.
    """

    def __init__(
        self,
        audit: Audit,
        wrapped: Wrapped,
        designation: Designation,
        scale: float,
        *,
        rng: np.random.Generator | None,
    ) -> None:
        super().__init__(audit, wrapped, designation, scale)
        self._rng = rng
        self._chosen: Indices = np.zeros(0, np.int32)

    def begin(self, sent: SentRound, replies: RoundReplies, check: CanaryCheck) -> None:
        """Choose the canaries that join this round."""
        settings, number = self._audit.settings, self._audit.last_round + 1
        if settings.rounds is not None:
            self._chosen = self._audit.canaries_in_round(number)
            return
        rate = min(1.0, len(sent.messages) / max(sent.available, 1))
        if self._rng is None:
            self._chosen = self._audit.sampled_canaries(number, rate)
        else:
            self._chosen = np.flatnonzero(self._rng.random(settings.canaries) < rate).astype(np.int32)

    def canaries(self, sent: SentRound, good: list[Message]) -> dict[int, Message]:
        if not good:
            return {}
        weight = largest_unequal(reply_weights(good, self._wrapped.weight_key))
        instructions = {message.metadata.dst_node_id: message for message in sent.messages}
        extra = {}
        for position, index in enumerate(self._chosen.tolist()):
            template = good[position % len(good)]  # in turn, so that the averages of metrics stay the same
            records: dict[str, Any] = {
                name: MetricRecord(dict(record)) if isinstance(record, MetricRecord) else record
                for name, record in template.content.items()
            }
            content = RecordDict(records)
            self._insert(sent, content, index, weight)
            extra[index] = Message(content, reply_to=instructions[template.metadata.src_node_id])
        return extra

    def extra(self, canaries: dict[int, Message]) -> list[Message]:
        return list(canaries.values())


def growth(wrapped: Wrapped, good: list[Message], extra: list[Message]) -> Fraction | float:
    """The factor by which extra replies shrink one client's share of the average; 1 without any.

    Unequal weights count if the strategy averages by weight.
    """
    if not extra:
        return Fraction(1)
    weights = reply_weights(good, wrapped.weight_key)
    if largest_unequal(weights) is None or wrapped.ignores_weights:
        return Fraction(len(good) + len(extra), len(good))
    return (sum(weights) + sum(reply_weights(extra, wrapped.weight_key))) / sum(weights)
