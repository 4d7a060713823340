"""What clients send back, checked before the strategy or the audit reads it: a client may send anything.

A bad reply is dropped. The log, the metrics of its round and the result's warnings name its node and say why.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from coalmine.argument_checks import shown
from coalmine.integrations.flower.arrays import array_values
from coalmine.integrations.flower.canary_clients import REPLY, Designation

UNEQUAL = 1000.0  # times the median weight of a round, or as small a part of it: no plausible number of examples
LARGEST_SQUARE = 1e30  # of an array's length: in single precision, squares of longer ones overflow
LARGEST_WHOLE = 2**63  # a metric beyond it does not travel, and beyond 1e308 it is no float
NAMED_NODES, NAMED_ROUNDS = 20, 5  # in the result's warnings
LONGEST = 160  # characters of a reason


class BadReplyError(ValueError):
    """Why a reply cannot be used."""


@dataclass(frozen=True)
class DroppedReply:
    """A reply that was dropped: who sent it, in which round of the audit, and why it is bad."""

    node: int
    round_number: int
    why: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "why", printable(self.why, LONGEST))


def printable(text: str, longest: int) -> str:
    """A client's text on one line: control characters are escaped, and a long text is cut."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in " ".join(text.split()))
    return line if len(line) <= longest else line[: longest - 3] + "..."


@dataclass
class RoundReplies:
    """A round's replies: the good ones, those that report a failure, and the bad ones, which are dropped."""

    round_number: int
    asked: frozenset[int]
    good: list[Message] = field(default_factory=list)
    failed: list[Message] = field(default_factory=list)
    dropped: list[DroppedReply] = field(default_factory=list)
    silent: int = 0  # nodes that sent nothing

    def drop(self, reply: Message, why: str) -> None:
        """Drop a reply that looked good at first, or that comes now."""
        self.good = [each for each in self.good if each is not reply]
        self.dropped.append(DroppedReply(reply.metadata.src_node_id, self.round_number, why))

    @property
    def lost(self) -> int:
        """Nodes that were asked and whose only replies were dropped: the average lacks them."""
        counted = {reply.metadata.src_node_id for reply in (*self.good, *self.failed)}
        return len({each.node for each in self.dropped} & self.asked - counted)


def sort_replies(
    received: Iterable[Message],
    messages: Sequence[Message],
    round_number: int,
    *,
    model: Mapping[str, Array] | None,
    weight_key: str,
    uniform: bool,
    equal_weights: bool = False,
) -> RoundReplies:
    """The replies to a round's messages, sorted into good, failed and bad ones.

    `model` is what the messages sent, None where replies have no arrays. With `uniform` all replies must have the same
    records and metrics, as FedAvg demands; with `equal_weights` also the same weight. Then most replies decide.
    """
    asked = frozenset(message.metadata.dst_node_id for message in messages)
    ids = {message.metadata.message_id for message in messages}
    found = RoundReplies(round_number, asked)
    replied: set[int] = set()
    for reply in received:
        node = reply.metadata.src_node_id
        try:
            if reply.metadata.reply_to_message_id not in ids and not reply.has_error():
                raise BadReplyError("it answers a message of another round")
            if node not in asked and not reply.has_error():
                raise BadReplyError("its node was not asked in this round")
            if node in replied:
                raise BadReplyError("its node has replied already in this round")
            replied.add(node)
            if reply.has_error():
                found.failed.append(reply)
                continue
            if not reply.has_content():
                raise BadReplyError("it holds neither content nor an error")
            if model is not None:
                check_arrays(reply.content, model)
            check_metrics(reply.content, weight_key)
        except BadReplyError as error:
            found.drop(reply, str(error))
        else:
            found.good.append(reply)
    found.silent = len(asked - {reply.metadata.src_node_id for reply in (*found.good, *found.failed)})
    found.silent -= found.lost
    if uniform:
        _drop_unlike_most(found, weight_key)
    _drop_implausible_weights(found, weight_key, equal_weights)
    return found


def check_arrays(content: RecordDict, model: Mapping[str, Array]) -> None:
    """Reject a reply without the model's arrays: the same names and shapes, real numbers of a usable size.

    Arrays in another order are put into the model's, as Flower clips them by their order.
    """
    records = content.array_records
    if len(records) != 1:
        raise BadReplyError(f"it must hold one ArrayRecord, got {len(records)}")
    ((key, record),) = records.items()
    if record.keys() != model.keys():
        missing, more = list(model.keys() - record.keys()), list(record.keys() - model.keys())
        what = f"lacks {shown(missing[0])}" if missing else f"holds {shown(more[0])}"
        raise BadReplyError(f"it must hold the model's arrays, but it {what}")
    for name, array in record.items():
        _check_array(name, array, model[name])
    if list(record) != list(model):
        content[key] = ArrayRecord({name: record[name] for name in model})


def _check_array(name: str, array: Array, sent: Array) -> None:
    before = array_values(sent)
    try:
        if array.stype != sent.stype:
            raise BadReplyError(f"array {name!r} must be serialised as {sent.stype}, got {shown(array.stype)}")
        values = array_values(array)
    except BadReplyError:
        raise
    except Exception as error:  # numpy raises many kinds over damaged bytes
        raise BadReplyError(f"array {name!r} cannot be read ({type(error).__name__})") from None
    if not isinstance(values, np.ndarray):
        raise BadReplyError(f"array {name!r} cannot be read (it is an archive)")
    kinds = before.dtype.kind if before.dtype.kind in "fV" else "biuf"  # noise makes fractions of whole-number buffers
    if values.dtype.kind not in kinds:
        raise BadReplyError(f"array {name!r} must hold {before.dtype}, got {shown(str(values.dtype))}")
    if values.dtype.kind == "f" and not min(before.dtype.itemsize, 8) <= values.dtype.itemsize <= 8:
        raise BadReplyError(f"array {name!r} must hold {before.dtype}, got {values.dtype}")
    if values.shape != before.shape:
        raise BadReplyError(f"array {name!r} must have shape {before.shape}, got {values.shape}")
    if values.dtype.kind == "V":
        return
    if values.dtype.kind != "f" or values.dtype.itemsize < 4:
        values = values.astype(np.float64)
    flat = values.ravel(order="K")
    with np.errstate(all="ignore"):
        square = float(np.vdot(flat, flat))
    if not square < LARGEST_SQUARE:
        what = "numbers above 1e15" if np.isfinite(values).all() else "NaN or infinity"
        raise BadReplyError(f"array {name!r} must hold finite numbers of a usable size, got {what}")


def check_metrics(content: RecordDict, weight_key: str) -> None:
    """Reject a reply without one MetricRecord of numbers, or with a weight that is not finite and above 0."""
    records = content.metric_records
    if len(records) != 1:
        raise BadReplyError(f"it must hold one MetricRecord, got {len(records)}")
    (metrics,) = records.values()
    for name, value in metrics.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > LARGEST_WHOLE:
                raise BadReplyError(f"metric {shown(name)} must be a number, got a whole number beyond 2^63")
    weight = metrics.get(weight_key, 1.0)
    if isinstance(weight, list):
        raise BadReplyError(f"{weight_key!r} must be one number, got {shown(weight)}")
    if not math.isfinite(weight) or weight <= 0:
        raise BadReplyError(f"{weight_key!r} must be finite and above 0, got {weight:g}")


def reply_weight(reply: Message, weight_key: str) -> float:
    """The weight of a checked reply; 1 if it has none."""
    (metrics,) = reply.content.metric_records.values()
    return float(metrics.get(weight_key, 1.0))  # type: ignore[arg-type]


def _drop_unlike_most(found: RoundReplies, weight_key: str) -> None:
    """Drop the replies whose records or metrics differ from those of most replies; in a tie, those without weights."""
    kinds = [_records_of(reply) for reply in found.good]
    if len(set(kinds)) < 2:
        return
    counts = Counter(kinds)
    usual = max(counts, key=lambda kind: (counts[kind], any(name == weight_key for name, _ in kind[1])))
    for reply, kind in zip(list(found.good), kinds, strict=True):
        if kind != usual:
            odd = sorted({name for name, _ in set(kind[1]) ^ set(usual[1])}) or sorted(set(kind[0]) - set(usual[0]))
            found.drop(reply, f"its records or metrics are not those of most replies: {', '.join(map(repr, odd))}")


def _records_of(reply: Message) -> tuple[tuple[str, ...], tuple[tuple[str, int], ...]]:
    """Names of the records that Flower compares, and the metrics with their lengths, -1 for a single number."""
    ((key, metrics),) = reply.content.metric_records.items()
    names = (*reply.content.array_records, key)
    listed = ((name, len(value) if isinstance(value, list) else -1) for name, value in metrics.items())
    return names, tuple(sorted(listed))


def _drop_implausible_weights(found: RoundReplies, weight_key: str, equal_weights: bool) -> None:
    """Drop the replies with a weight far from that of others or, where weights must be equal, another than most."""
    weights = [reply_weight(reply, weight_key) for reply in found.good]
    if len(set(weights)) < 2:
        return
    middle, (usual, count) = float(np.median(weights)), Counter(weights).most_common(1)[0]
    for reply, weight in zip(list(found.good), weights, strict=True):
        if not middle / UNEQUAL <= weight <= UNEQUAL * middle:
            found.drop(reply, f"{weight_key!r} is {weight:g}, but {middle:g} in the middle of the round's replies")
        elif equal_weights and weight != usual and 2 * count > len(weights):
            found.drop(reply, f"{weight_key!r} must be that of all others, {usual:g}, got {weight:g}")


class CanaryClaims:
    """Which reply is which canary: as clients report it, checked against the server's own designation.

    Without a designation, a canary that two nodes report in one round belongs to the node that reported it last without
    contradiction. If there is none, both replies are bad.
    """

    def __init__(self, canaries: int, designation: Designation) -> None:
        self._canaries, self._designation = canaries, designation
        self._owners: dict[int, int] = {}

    def read(self, found: RoundReplies) -> dict[int, Message]:
        """The replies that are canaries, by canary. Bad ones are dropped from the round's replies."""
        claims: dict[int, list[Message]] = {}
        for reply in list(found.good):
            if REPLY not in reply.content:
                continue
            try:
                index = self._index_in(reply, found.round_number)
            except BadReplyError as error:
                found.drop(reply, str(error))
                continue
            del reply.content[REPLY]  # the strategy has no use for it
            claims.setdefault(index, []).append(reply)
        for index, replies in list(claims.items()):
            if len(replies) > 1:
                claims[index] = self._of_the_owner(index, replies, found)
        return {index: replies[0] for index, replies in claims.items() if replies}

    def settle(self, canaries: Mapping[int, Message]) -> None:
        """Note which node sent which canary."""
        self._owners |= {index: reply.metadata.src_node_id for index, reply in canaries.items()}

    @property
    def one_each(self) -> bool:
        """Whether no node has sent two canaries."""
        return len(set(self._owners.values())) == len(self._owners)

    def _index_in(self, reply: Message, round_number: int) -> int:
        record = reply.content[REPLY]
        index = record.get("canary") if isinstance(record, ConfigRecord) and len(record) == 1 else None
        if type(index) is not int or not 0 <= index < self._canaries:
            got = shown(dict(record)) if isinstance(record, ConfigRecord) else type(record).__name__
            raise BadReplyError(f"it must name one canary of 0..{self._canaries - 1}, got {got}")
        if self._designation.names_nodes:
            named = self._designation.index_of(reply.metadata.src_node_id, round_number)
            if named != index:
                truth = "no canary" if named is None else f"canary {named}"
                raise BadReplyError(f"it claims to be canary {index}, but the server named its node {truth}")
        return index

    def _of_the_owner(self, index: int, replies: list[Message], found: RoundReplies) -> list[Message]:
        """The reply of the canary's known node, if there is one; the others are dropped."""
        nodes = [reply.metadata.src_node_id for reply in replies]
        owner = self._owners.get(index)
        for reply, node in zip(replies, nodes, strict=True):
            if node != owner:
                others = ", ".join(str(each) for each in nodes if each != node)
                found.drop(
                    reply,
                    f"canary {index} came from node {others} too in this round: each node needs its own canary-id",
                )
        return [reply for reply, node in zip(replies, nodes, strict=True) if node == owner]


def describe_dropped(dropped: Sequence[DroppedReply]) -> list[str]:
    """One sentence for each node and reason, for the result's warnings."""
    rounds: dict[tuple[int, str], list[int]] = {}
    for each in dropped:
        rounds.setdefault((each.node, each.why), []).append(each.round_number)
    lines = []
    for (node, why), numbers in list(rounds.items())[:NAMED_NODES]:
        listed = ", ".join(map(str, numbers[:NAMED_ROUNDS])) + (", ..." if len(numbers) > NAMED_ROUNDS else "")
        where = f"round {listed}" if len(numbers) == 1 else f"{len(numbers)} rounds ({listed})"
        lines.append(f"the reply of node {node} was dropped in {where}: {why}")
    if len(rounds) > NAMED_NODES:
        lines.append(f"{len(dropped)} replies were dropped in all: the log names the rest")
    return lines


def own_config(config: Mapping[str, Any]) -> ConfigRecord:
    """A copy of a config that shares nothing with the caller's."""
    return ConfigRecord({name: list(value) if isinstance(value, list) else value for name, value in config.items()})
