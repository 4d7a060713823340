"""Checks of clients' replies, expected the strategy or the audit reads them: a client may send anything.

A bad reply is dropped. The log, the metrics of its round and the result's warnings name its node and the reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coalmine.argument_checks import short_repr
from coalmine.integrations.flower.arrays import array_values
from coalmine.integrations.flower.canary_clients import BYPASSED, FAILED, REPLY, Designation, mod_order
from coalmine.integrations.flower.weights import reply_weights
from coalmine.integrations.flower.wrapped import Wrapped

UNEQUAL = 1000.0  # a weight this many times above or below the round's median is implausible
LARGEST_SQUARE = 1e30  # squared length of an array: longer ones could overflow in single precision
LONGEST_FLOAT = 8  # bytes
LARGEST_WHOLE = 2**63  # a larger metric cannot be sent, and beyond 1e308 it does not fit a float
NAMED_NODES, NAMED_ROUNDS = 20, 5  # most that the result's warnings list
LONGEST = 300  # characters of a reason
NUMBER = 8  # bytes
MOST_BESIDE = 2**20  # bytes of a reply beside its arrays: metrics and settings


class BadReplyError(ValueError):
    """A reply that cannot be used, with the reason."""


@dataclass(frozen=True)
class DroppedReply:
    """A dropped reply: its node, the round of the audit, and why it was dropped."""

    node: int
    round_number: int
    why: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", printable(self.why, LONGEST))


def printable(text: str, longest: int) -> str:
    """A client's text on one line, with control characters escaped, cut to `longest` characters."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in " ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 3] + "..."


@dataclass
class RoundReplies:
    """A round's replies: the good ones, those that report a failure, and the bad ones, which are dropped."""

    round_number: int
    sampled: frozenset[int]  # nodes that the server sent a message to
    good: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    dropped: list[DroppedReply] = field(default_factory=list)
    silent: frozenset[int] = frozenset()  # nodes that sent nothing
    contested: set[int] = field(default_factory=set)  # nodes that were dropped because another sent the same canary

    def drop(self, reply: Message, why: str) -> None:
        """Drop a reply, whether or not it was counted as good."""
        self.good = [each for each in self.good if each is not reply]
        self.dropped.append(DroppedReply(reply.metadata.src_node_id, self.round_number, why))

    @property
    def heard(self) -> set[int]:
        """The nodes whose reply counts, good or failed."""
        return {reply.metadata.src_node_id for reply in (*self.good, *self.failed)}

    @property
    def lost(self) -> int:
        """Number of sampled nodes whose only replies were dropped: the average lacks them."""
        return len({each.node for each in self.dropped} & self.sampled - self.heard)


def sort_replies(
    received: Iterable[Message],
    messages: Sequence[Message],
    round_number: int,
    wrapped: Wrapped,
    *,
    model: Mapping[str, Array] | None = None,
    buffers: Collection[str] = (),
) -> RoundReplies:
    """The replies to a round's messages, sorted into good, failed and bad ones.

    `model` is the model in the messages, None if replies have no arrays. Its `buffers` held whole numbers at first. All
    replies must have the same records and metrics if the wrapped strategy demands it, and the same weight if Flower's
    accountant does. The majority decides.
    """
    weight_key = wrapped.weight_key
    sampled = frozenset(message.metadata.dst_node_id for message in messages)
    ids = {message.metadata.message_id for message in messages}
    round_replies = RoundReplies(round_number, sampled)
    replied: set[int] = set()
    for reply in received:
        node = reply.metadata.src_node_id
        try:
            if reply.metadata.reply_to_message_id not in ids and not reply.has_error():
                raise BadReplyError("it answers a message of another round")
            if node not in sampled and not reply.has_error():
                raise BadReplyError("its node was not sampled in this round")
            if node in replied:
                raise BadReplyError("its node has replied already in this round")
            replied.add(node)
            if reply.has_error():
                round_replies.failed.append(reply)
                continue
            if not reply.has_content():
                raise BadReplyError("it holds neither content nor an error")
            if model is not None:
                check_arrays(reply.content, model, buffers)
            check_size(reply.content)
            check_metrics(reply.content, weight_key)
        except BadReplyError as error:
            round_replies.drop(reply, str(error))
        else:
            round_replies.good.append(reply)
    round_replies.silent = sampled - round_replies.heard - {each.node for each in round_replies.dropped}
    if wrapped.demands_equal_records:
        _drop_unlike_majority(round_replies, weight_key)
    _drop_implausible_weights(round_replies, weight_key, equal_weights=model is not None and wrapped.has_accountant)
    return round_replies


def check_arrays(content: RecordDict, model: Mapping[str, Array], buffers: Collection[str] = ()) -> None:
    """Reject a reply whose arrays differ from the model's in name or shape, or hold unusable numbers.

    Any precision up to double will do: FedAdam turns the model into double precision, and clients keep their own. `buffers`
    may hold whole numbers, although averaging has turned the server's into fractions. Arrays in another order are sorted
    into the model's order, by which Flower clips them.
    """
    records = content.array_records
    if len(records) != 1:
        raise BadReplyError(f"it must hold one ArrayRecord, got {len(records)}")
    ((key, record),) = records.items()
    if record.keys() != model.keys():
        missing, more = list(model.keys() - record.keys()), list(record.keys() - model.keys())
        difference = f"lacks {short_repr(missing[0])}" if missing else f"holds {short_repr(more[0])}"
        raise BadReplyError(f"it must hold the model's arrays, but it {difference}")
    for name, array in record.items():
        _check_array(name, array, model[name], whole=name in buffers)
    if list(record) != list(model):
        content[key] = ArrayRecord({name: record[name] for name in model})


def _check_array(name: str, array: Array, sent: Array, *, whole: bool) -> None:
    expected = array_values(sent)
    try:
        if array.stype != sent.stype:
            raise BadReplyError(f"array {name!r} must be serialised as {sent.stype}, got {short_repr(array.stype)}")
        values = array_values(array)
    except BadReplyError:
        raise
    except Exception as error:  # damaged bytes make numpy raise many kinds
        raise BadReplyError(f"array {name!r} cannot be read ({type(error).__name__})") from None
    if not isinstance(values, np.ndarray):
        raise BadReplyError(f"array {name!r} cannot be read (it is an archive)")
    whole = whole or expected.dtype.kind not in "fV"
    right = values.dtype.kind in ("biuf" if whole else expected.dtype.kind)
    if not right or (values.dtype.kind == "f" and values.dtype.itemsize > LONGEST_FLOAT):
        wanted = "numbers" if whole else "floating-point numbers" if expected.dtype.kind == "f" else str(expected.dtype)
        raise BadReplyError(
            f"array {name!r} must hold {wanted} of at most 64 bits, got {short_repr(str(values.dtype))}"
        )
    if values.shape != expected.shape:
        raise BadReplyError(f"array {name!r} must have shape {expected.shape}, got {values.shape}")
    if values.dtype.kind == "V":
        return
    if values.dtype.kind != "f" or values.dtype.itemsize < 4:
        values = values.astype(np.float64)
    flat = values.ravel(order="K")
    with np.errstate(all="ignore"):
        square = float(np.vdot(flat, flat))
    if not square < LARGEST_SQUARE:
        problem = "numbers above 1e15" if np.isfinite(values).all() else "NaN or infinity"
        raise BadReplyError(f"array {name!r} must hold finite numbers of a usable size, got {problem}")


def check_size(content: RecordDict) -> None:
    """Reject a reply that holds much more beside its arrays than metrics and settings, which fill memory and logs."""
    records: list[Mapping[str, Any]] = [*content.config_records.values(), *content.metric_records.values()]
    entries = [entry for record in records for entry in record.items()]
    texts = [each for name, value in entries for each in (name, *(value if isinstance(value, list) else [value]))]
    size = sum(len(each) if isinstance(each, str | bytes) else NUMBER for each in texts)
    if size > MOST_BESIDE:
        raise BadReplyError(f"it must hold at most {MOST_BESIDE:,} bytes beside its arrays, got {size:,}")


def check_metrics(content: RecordDict, weight_key: str) -> None:
    """Reject a reply without one MetricRecord of numbers, or with a weight that is not finite and above 0."""
    records = content.metric_records
    if len(records) != 1:
        raise BadReplyError(f"it must hold one MetricRecord, got {len(records)}")
    (metrics,) = records.values()
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > LARGEST_WHOLE:
                raise BadReplyError(f"metric {short_repr(name)} must be a number, got a whole number beyond 2^63")
    weight = metrics.get(weight_key, 1.0)
    if isinstance(weight, list):
        raise BadReplyError(f"{weight_key!r} must be one number, got {short_repr(weight)}")
    if not math.isfinite(weight) or weight <= 0:
        raise BadReplyError(f"{weight_key!r} must be finite and above 0, got {weight:g}")


def _drop_unlike_majority(round_replies: RoundReplies, weight_key: str) -> None:
    """Drop the replies whose records or metrics differ from the majority's; in a tie, those without weights."""
    kinds = [_record_shape(reply) for reply in round_replies.good]
    if len(set(kinds)) < 2:
        return
    counts = Counter(kinds)
    usual = max(counts, key=lambda kind: (counts[kind], any(name == weight_key for name, _ in kind[1])))
    for reply, kind in zip(list(round_replies.good), kinds, strict=True):
        if kind != usual:
            odd = sorted({name for name, _ in set(kind[1]) ^ set(usual[1])}) or sorted(set(kind[0]) - set(usual[0]))
            round_replies.drop(
                reply, f"its records or metrics are not those of most replies: {', '.join(map(repr, odd))}"
            )


def _record_shape(reply: Message) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """The record names that Flower compares, and each metric's name and length, -1 for a single number."""
    ((key, metrics),) = reply.content.metric_records.items()
    names = (*reply.content.array_records, key)
    listed = ((name, len(value) if isinstance(value, list) else -1) for name, value in metrics.items())
    return names, tuple(sorted(listed))


def _drop_implausible_weights(round_replies: RoundReplies, weight_key: str, *, equal_weights: bool) -> None:
    """Drop the replies with a weight far from the median or, if weights must be equal, unlike the majority's."""
    weights = reply_weights(round_replies.good, weight_key)
    if len(set(weights)) < 2:
        return
    median, (usual, count) = float(np.median(weights)), Counter(weights).most_common(1)[0]
    for reply, weight in zip(list(round_replies.good), weights, strict=True):
        if not median / UNEQUAL <= weight <= UNEQUAL * median:
            round_replies.drop(
                reply, f"{weight_key!r} is {weight:g}, but the median of the round's replies is {median:g}"
            )
        elif equal_weights and weight != usual and 2 * count > len(weights):
            round_replies.drop(reply, f"{weight_key!r} must be the same for all, {usual:g}, got {weight:g}")


class CanaryClaims:
    """The canaries that clients report in their replies, checked against the server's own designation.

    Without a designation, two nodes may report the same canary in one round. Then it belongs to the node that sent its
    vector, which takes the seed. If several did, it belongs to the one among them that last sent it alone; without any, all
    these replies are bad.
    """

    def __init__(self, canaries: int, designation: Designation) -> None:
        self._canaries, self._designation = canaries, designation
        self.owners: dict[int, int] = {}  # the node that last sent a canary alone

    def read(
        self, round_replies: RoundReplies, holding: Callable[[int, list[Message]], list[Message]]
    ) -> dict[int, Message]:
        """The canaries' replies, by canary. Bad ones are dropped from the round's replies.

        `holding` returns those of some replies that hold a canary.
        """
        claims: dict[int, list[Message]] = {}
        for reply in list(round_replies.good):
            if REPLY not in reply.content:
                continue
            try:
                index = self._reported_index(reply, round_replies.round_number)
            except BadReplyError as error:
                round_replies.drop(reply, str(error))
                continue
            del reply.content[REPLY]  # the strategy does not know this record
            claims.setdefault(index, []).append(reply)
        for index, replies in list(claims.items()):
            if len(replies) > 1:
                claims[index] = self._keep_owner(index, replies, holding(index, replies), round_replies)
        return {index: replies[0] for index, replies in claims.items() if replies}

    def remember_owners(self, canaries: Mapping[int, Message]) -> None:
        """Remember which node sent which canary."""
        self.owners |= {index: reply.metadata.src_node_id for index, reply in canaries.items()}

    @property
    def one_each(self) -> bool:
        """Whether no node has sent two canaries."""
        return len(set(self.owners.values())) == len(self.owners)

    def _reported_index(self, reply: Message, round_number: int) -> int:
        record = reply.content[REPLY]
        entries = dict(record) if isinstance(record, ConfigRecord) else {}
        failed, bypassed = entries.pop(FAILED, None), entries.pop(BYPASSED, None)
        if isinstance(failed, str):
            raise BadReplyError(f"its node cannot send its canary: {failed}")
        if isinstance(bypassed, str):
            raise BadReplyError(mod_order(printable(bypassed, LONGEST // 4)))
        index = entries.get("canary") if len(entries) == 1 else None
        if type(index) is not int or not 0 <= index < self._canaries:
            got = short_repr(dict(record)) if isinstance(record, ConfigRecord) else type(record).__name__
            raise BadReplyError(f"it must name one canary in 0..{self._canaries - 1}, got {got}")
        if self._designation.names_nodes:
            assigned = self._designation.index_of(reply.metadata.src_node_id, round_number)
            if assigned != index:
                role = "no canary" if assigned is None else f"canary {assigned}"
                raise BadReplyError(f"it claims to be canary {index}, but the server assigned {role} to its node")
        return index

    def _keep_owner(
        self, index: int, replies: list[Message], holding: list[Message], round_replies: RoundReplies
    ) -> list[Message]:
        """The reply that holds the canary; of several, that of its known node, if there is one. The others are dropped."""
        owner = self.owners.get(index)
        kept = holding if len(holding) == 1 else [each for each in holding if each.metadata.src_node_id == owner]
        nodes = [reply.metadata.src_node_id for reply in replies]
        for reply, node in zip(replies, nodes, strict=True):
            if any(reply is each for each in kept):
                continue
            round_replies.contested.add(node)
            if kept:
                why = f"it reports canary {index}, which node {kept[0].metadata.src_node_id} sent in this round"
            else:
                others = ", ".join(str(each) for each in nodes if each != node)
                why = f"node {others} also sent canary {index} in this round: each node needs its own canary-id"
            round_replies.drop(reply, why)
        return kept


def refuse_most_dropped(round_replies: RoundReplies) -> None:
    """Stop if most replies of a round would be dropped: the rest would train another model than without the audit.

    Contested canaries do not count: each hostile client could have an honest one dropped, and so end the training of all.
    """
    bad = [each for each in round_replies.dropped if each.node not in round_replies.contested]
    if round_replies.lost - len(round_replies.contested) <= len(round_replies.good):
        return
    why, count = Counter(each.why for each in bad).most_common(1)[0]
    node = min(each.node for each in bad if each.why == why)
    raise ValueError(
        f"the audit would drop {round_replies.lost} of {round_replies.lost + len(round_replies.good)} replies in round "
        f"{round_replies.round_number}, which would change the training, so it stops: {count} of them, such as that of "
        f"node {node}, because {why}. Mend this, or train without the audit"
    )


def describe_dropped(dropped: Sequence[DroppedReply]) -> list[str]:
    """One sentence per node and reason, for the result's warnings."""
    rounds: dict[tuple[int, str], list[int]] = {}
    for each in dropped:
        rounds.setdefault((each.node, each.why), []).append(each.round_number)
    lines = []
    for (node, why), numbers in list(rounds.items())[:NAMED_NODES]:
        listed = ", ".join(map(str, numbers[:NAMED_ROUNDS])) + (", ..." if len(numbers) > NAMED_ROUNDS else "")
        where = f"round {listed}" if len(numbers) == 1 else f"{len(numbers)} rounds ({listed})"
        lines.append(f"the reply of node {node} was dropped in {where}: {why}")
    if len(rounds) > NAMED_NODES:
        lines.append(f"{len(dropped)} replies were dropped in total: the log names the rest")
    return lines


def copy_config(config: Mapping[str, Any]) -> ConfigRecord:
    """A deep copy of a config."""
    return ConfigRecord({name: list(value) if isinstance(value, list) else value for name, value in config.items()})
