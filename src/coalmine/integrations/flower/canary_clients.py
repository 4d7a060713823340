"""Canary clients: how a client learns which canary it is in a round, and the mod that sends the canary."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from coalmine.argument_checks import one_number, short_repr, whole_number
from coalmine.audit import Audit
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.seeds import is_guessable
from coalmine.integrations.flower.arrays import RecordLayout
from coalmine.log.commitment import Commitment
from coalmine.log.files import write_atomically
from coalmine.log.seed_file import read_seed
from coalmine.measure.settings import Settings

if TYPE_CHECKING:
    from flwr.clientapp.typing import ClientAppCallable

PREFIX = "coalmine-"
REPLY = "coalmine"  # the record in a reply that holds the canary's number
BYPASSED = "bypassed"  # its entry with the name of a mod that this canary did not go through
FAILED = "failed"  # its entry with the reason why this node cannot send its canary
PROTECTING = ("fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod", "secagg_mod", "secaggplus_mod")  # Flower's
ASSIGNED = "audit/nodes.json"
STRONG = "must be hard to guess, got a number below 2^64 or fewer than 8 bytes"
CHAINED = "make_ffn.<locals>"  # where Flower makes a chain of mods
LONGEST_CHAIN = 100
LONGEST_FAILURE = 1_000  # characters
PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
Nodes = float | Mapping[int, int | Iterable[int]]


def canary_mod(message: Message, context: Context, call_next: "ClientAppCallable") -> Message:
    """On a canary client, replace the update by the canary and report its number. Other clients train as usual.

    Put it last in `mods`, so that clipping, local noise and secure aggregation treat a canary like any client's update. A
    canary client trains too, so its reply has every record and metric that the strategy expects. One that cannot make its
    canary reports why, and the server drops its reply: an error would make Flower's wrappers skip the round of all.
    """
    config = next((c for c in message.content.config_records.values() if PREFIX + "dim" in c), None)
    if config is None or not message.metadata.message_type.startswith("train"):
        return call_next(message, context)
    announcement = Announcement.from_config(config)
    bypassed = bypassed_mod(call_next)
    if bypassed is not None and announcement.round_number is None:  # an Observer cannot drop the reply
        raise ValueError(mod_order(bypassed))
    (received,) = message.content.array_records.values()
    try:
        made = _made_canary(announcement, config, context, received)  # now, because the client may train in place
    except (ValueError, OSError) as error:
        if announcement.round_number is None:
            raise
        reply = call_next(message, context)
        if not reply.has_error():
            reply.content[REPLY] = ConfigRecord({FAILED: str(error)[:LONGEST_FAILURE]})
        return reply
    reply = call_next(message, context)
    if made is None or reply.has_error():
        return reply
    index, sent = made
    (name,) = reply.content.array_records
    reply.content[name] = sent
    reply.content[REPLY] = ConfigRecord({"canary": index})
    if bypassed is not None:
        reply.content.config_records[REPLY][BYPASSED] = bypassed
    return reply


def _made_canary(
    announcement: "Announcement", config: ConfigRecord, context: Context, received: ArrayRecord
) -> tuple[int, ArrayRecord] | None:
    """The canary that this node sends in this round: its number, and the model that holds it; None for a real client."""
    index = announcement.index_of(config, context.node_config)
    if index is None:
        return None
    layout = RecordLayout.of(received, announcement.left_out)
    if layout.dim != announcement.dim:
        raise ValueError(f"the audit is for {announcement.dim} numbers, but this model has {layout.dim}")
    update = announcement.update(index, announcement.seed_for(context.node_config), np.empty(0, layout.dtype))
    return index, layout.add_update(received, update)


def bypassed_mod(call_next: "ClientAppCallable") -> str | None:
    """The name of a mod of Flower's after this one that changes updates; None if there is none, or nothing shows it.

    Flower calls each mod from a closure over the mod and the rest of the chain.
    """
    chain: list[Any] = [call_next]
    for link in chain:  # grows
        name = getattr(link, "__name__", type(link).__name__)
        if name in PROTECTING:
            return str(name)
        cells = getattr(link, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells if CHAINED in getattr(link, "__qualname__", "")]
        chain += [inner for inner in held if callable(inner) and len(chain) < LONGEST_CHAIN]
    return None


def mod_order(bypassed: str | None = None) -> str:
    """What is wrong, and the right order, if canaries do not go through a mod; by default one that clips."""
    name, mod = ("the clients' clip", "...") if bypassed is None else (bypassed, bypassed)
    return f"canary_mod must be last in mods, or canaries bypass {name}: mods=[{mod}, canary_mod]"


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Instructions for canary clients: send an update of `scale` times the clip norm, in all arrays but `left_out`.

    `seed` generates the canaries. It is a secret, so omit it if canary nodes read it from a file (`coalmine-seed-file` in
    their node config). `partitions`, first and one past the last, are the partition ids that are canaries, in order.
    `record` holds the audit's settings and its commitment. It is public, and a node uses it to check that its seed is the
    audit's. If a node has several canaries, `round_number` decides which one it sends.
    """

    canaries: int
    dim: int
    kind: str
    clip_norm: float
    scale: float
    left_out: tuple[str, ...] = ()
    seed: int | bytes | None = None
    partitions: tuple[int, int] | None = None
    record: tuple[Settings, Commitment] | None = None
    round_number: int | None = None

    @classmethod
    def of(
        cls,
        audit: Audit,
        *,
        clip_norm: float,
        scale: float,
        left_out: tuple[str, ...],
        seed: int | bytes | None,
        partitions: range | None,
        round_number: int | None = None,
    ) -> "Announcement":
        """The instructions for the canaries of an audit."""
        settings = audit.settings
        return cls(
            canaries=settings.canaries,
            dim=settings.dim,
            kind=settings.kind,
            clip_norm=clip_norm,
            scale=scale,
            left_out=left_out,
            seed=seed,
            partitions=None if partitions is None else (partitions.start, partitions.stop),
            record=(settings, audit.commitment),
            round_number=round_number,
        )

    def to_config(self) -> dict[str, Any]:
        """Entries for a ConfigRecord, without lists, which the legacy API rejects."""
        entries: dict[str, Any] = {
            "canaries": self.canaries,
            "dim": self.dim,
            "kind": self.kind,
            "clip-norm": self.clip_norm,
            "scale": self.scale,
            "left-out": json.dumps(self.left_out),
        }
        if self.seed is not None:
            entries["seed"] = self.seed if isinstance(self.seed, bytes) else str(self.seed)
        if self.partitions is not None:
            entries["partitions"] = json.dumps(self.partitions)
        if self.round_number is not None:
            entries["round"] = self.round_number
        if self.record is not None:
            settings, commitment = self.record
            entries["record"] = json.dumps({"settings": settings.to_dict(), "commitment": vars(commitment)})
        return {PREFIX + name: value for name, value in entries.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Announcement":
        """The announcement in a config, the inverse of `to_config`."""

        def entry(name: str) -> Any:
            return config.get(PREFIX + name)

        seed, partitions = entry("seed"), json.loads(entry("partitions") or "null")
        number = entry("round")
        record = json.loads(entry("record") or "null")
        return cls(
            canaries=int(entry("canaries")),
            dim=int(entry("dim")),
            kind=str(entry("kind")),
            clip_norm=float(entry("clip-norm")),
            scale=float(entry("scale")),
            left_out=tuple(json.loads(entry("left-out"))),
            seed=int(seed) if isinstance(seed, str) else seed,
            partitions=None if partitions is None else (int(partitions[0]), int(partitions[1])),
            record=record and (Settings.from_dict(record["settings"]), Commitment(**record["commitment"])),
            round_number=None if number is None else int(number),
        )

    def index_of(self, config: Mapping[str, Any], node: Mapping[str, Any]) -> int | None:
        """The canary that a node sends in this round, None for a real client.

        The server's choice comes first, then `canary-id` in the node config, then the partition id.
        """
        assigned = config.get(PREFIX + "canary", node.get("canary-id"))
        if assigned is not None:
            canaries = parse_canaries(assigned, count=self.canaries)
            if len(canaries) == 1:
                return canaries[0]
            number = self.round_number or config.get("server-round")
            if number is None:
                raise ValueError(
                    "a node with several canaries must know the round: send 'server-round' in the train config, or give "
                    "the node a single canary-id"
                )
            return canary_in_round(canaries, int(number))
        partition = node.get("partition-id")
        if partition is None or self.partitions is None:
            return None
        index = int(partition) - self.partitions[0]
        return index if 0 <= index < min(self.canaries, self.partitions[1] - self.partitions[0]) else None

    def seed_for(self, node: Mapping[str, Any]) -> int | bytes:
        """The seed in the node's own file, or the announced one. A file without the audit's seed is rejected."""
        path = node.get(PREFIX + "seed-file")
        if path is None:
            if self.seed is None:
                raise ValueError(
                    "a canary needs the seed: set coalmine-seed-file='...' in its --node-config, or let the server "
                    "announce it (seed= instead of seed_file=)"
                )
            return self.seed
        seed = read_seed(Path(str(path)))
        if self.record is None or self.record[1].opens_to(seed, self.record[0]):
            refuse_guessable(
                seed, f"seed file {path}", "make one with coalmine seed, for the server and all canary nodes"
            )
            return seed
        settings, commitment = self.record
        if commitment.opens_to(Path(str(path)).read_bytes(), settings):
            raise ValueError(
                f"seed file {path} must be read in the same way everywhere, but the server's audit used its raw bytes: use "
                "audited(seed_file=...) or coalmine.read_seed there"
            )
        raise ValueError(
            f"seed file {path} must hold the seed of the server's audit, got another: copy the server's file"
        )

    def update(self, index: int, seed: int | bytes | SupportsIndex, like: Any) -> Any:
        """Canary `index` as a client's update."""
        kind = RotatedCanaries if self.kind == "rotated" else SphereCanaries
        return kind(self.canaries, self.dim, seed=seed).canary(index, like=like) * (self.clip_norm * self.scale)


def refuse_guessable(seed: SupportsIndex | bytes, name: str, remedy: str) -> None:
    """Reject a seed that can be guessed. The error does not show the seed."""
    if is_guessable(seed):
        raise ValueError(f"{name} {STRONG}: {remedy}")


def checked_seed(audit: Audit, seed: int | bytes | None) -> int | bytes | None:
    """The seed to announce. Another seed than the audit's is rejected: the audit could not detect its canaries."""
    if seed is not None and not audit.commitment.opens_to(seed, audit.settings):
        raise ValueError("seed must be the one that the audit was made with, got another: give both the same")
    return seed


def checked_partitions(ids: Iterable[int] | None) -> range | None:
    """The partition ids of canaries. They must be consecutive, because clients receive only the two ends."""
    if ids is None:
        return None
    if not isinstance(ids, Iterable):
        raise ValueError(f"canary_partitions must be a range or a list of partition ids, got {short_repr(ids)}")
    listed = [whole_number("a partition id in canary_partitions", each, minimum=0) for each in ids]
    if not listed or listed != list(range(listed[0], listed[-1] + 1)):
        raise ValueError(f"canary_partitions must be consecutive, at least one, got {short_repr(ids)}")
    return range(listed[0], listed[-1] + 1)


class Designation:
    """Canaries by node id: the given mapping, or a fraction of the nodes, chosen by a keyed hash of their ids.

    The hash's key is the audit's commitment. A node in the mapping may have several canaries; it sends them in turn, one in
    each round. A canary node keeps its canaries, even after a restart of the server if the audit has a directory. A node
    that returns under another id counts as another node and may get the next canary, until all are assigned.
    """

    def __init__(self, audit: Audit, nodes: Nodes | None) -> None:
        self._key = audit.commitment.sha256.encode()[:64]
        self._canaries = audit.settings.canaries
        self._path: Path | None = None
        self._assigned: dict[int, tuple[int, ...]] = {}
        self._fraction = 0.0
        if isinstance(nodes, Mapping):
            self._assigned = {int(node): _canary_tuple(canaries) for node, canaries in nodes.items()}
            _refuse_shared_canaries(self._assigned)
            if not self._fits(self._assigned):
                raise ValueError(
                    f"canary_nodes must name canaries in 0..{self._canaries - 1}, at least one for each node, "
                    f"got {short_repr(nodes)}"
                )
        elif nodes is not None:
            self._fraction = one_number("canary_nodes", nodes)
            if not 0 < self._fraction <= 1:
                raise ValueError(f"canary_nodes must be a fraction in (0, 1] or name nodes, got {self._fraction}")
            self._path = None if audit.directory is None else audit.directory.path / ASSIGNED
            if self._path is not None and self._path.exists():
                self._assigned = self._read(self._path)

    @property
    def names_nodes(self) -> bool:
        """Whether the server names the canary nodes. Otherwise nodes know on their own that they are canaries."""
        return bool(self._assigned) or self._fraction > 0

    @property
    def one_each(self) -> bool:
        """Whether every canary has its own node: then a canary takes part exactly when its node is sampled."""
        return len(self._assigned) == self._canaries

    def assign(self, nodes: Iterable[int]) -> None:
        """Assign canaries before nodes are sampled, so that the assignment does not depend on the sampling."""
        if self._fraction:
            for node in sorted(set(nodes) - self._assigned.keys()):
                self.index_of(node, 1)

    def index_of(self, node: int, round_number: int) -> int | None:
        """The canary that a node sends in a round, None for a real client."""
        if node not in self._assigned:
            if len(self._assigned) >= self._canaries or self._hash(node) >= self._fraction:
                return None
            self._assigned[node] = (len(self._assigned),)
            if self._path is not None:
                assigned = {node: index for node, (index,) in self._assigned.items()}
                write_atomically(self._path, (json.dumps(assigned) + "\n").encode())
        return canary_in_round(self._assigned[node], round_number)

    def _read(self, path: Path) -> dict[int, tuple[int, ...]]:
        """The canaries that were assigned before a restart."""
        text = path.read_text(errors="replace")
        assigned: dict[int, tuple[int, ...]] | None
        try:
            assigned = {int(node): (int(index),) for node, index in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            assigned = None
        if assigned is None or not self._fits(assigned):
            raise ValueError(
                f"{path} must name different canaries in 0..{self._canaries - 1} by node, got {short_repr(text)}; "
                "remove it to assign canaries to nodes again"
            )
        return assigned

    def _fits(self, assigned: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether every node has at least one canary, all are canaries of this audit, and none is assigned twice."""
        indices = [index for canaries in assigned.values() for index in canaries]
        different = len(set(indices)) == len(indices)
        return different and all(assigned.values()) and all(0 <= index < self._canaries for index in indices)

    def _hash(self, node: int) -> float:
        """The node's hash, as a number in [0, 1)."""
        digest = hashlib.blake2b(str(node).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


def _refuse_shared_canaries(assigned: Mapping[int, tuple[int, ...]]) -> None:
    """Reject a canary that two nodes share. The error names the canary and both nodes."""
    owners: dict[int, int] = {}
    for node, canaries in assigned.items():
        for index in canaries:
            if index in owners:
                nodes = f"nodes {owners[index]} and {node}" if owners[index] != node else f"node {node} twice"
                raise ValueError(
                    f"canary_nodes must name a different canary for each node, got canary {index} for {nodes}"
                )
            owners[index] = node


def _canary_tuple(canaries: int | Iterable[int]) -> tuple[int, ...]:
    """One canary or several, as a tuple."""
    indices = canaries if isinstance(canaries, Iterable) else [canaries]
    return tuple(whole_number("a canary in canary_nodes", index, minimum=0) for index in indices)


def canary_in_round(canaries: Sequence[int], round_number: int) -> int:
    """The canary that a node with several sends in a round, counted from 1: the first one in round 1, and so on.

    >>> [canary_in_round([4, 5, 6], number) for number in (1, 2, 3, 4)]
    [4, 5, 6, 4]
    """
    return canaries[(round_number - 1) % len(canaries)]


def parse_canaries(value: object, *, count: int) -> tuple[int, ...]:
    """The canaries that `canary-id` names in a node config: 3, "3", "0-49" or "0,7,20-29"; `count` is the total.

    >>> parse_canaries("0-2,7", count=10)
    (0, 1, 2, 7)
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"canary-id must be a number or text such as '0-49' or '0,3,7', got {short_repr(value)}")
    canaries: list[int] = []
    for part in str(value).split(","):
        match = PART.fullmatch(part)
        if match is None:
            raise ValueError(f"canary-id must be a number or text such as '0-49' or '0,3,7', got {short_repr(value)}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise ValueError(f"canary-id must lie in 0..{count - 1}, got {part.strip()}")
        canaries.extend(range(first, last + 1))
    if len(set(canaries)) < len(canaries):
        raise ValueError(f"canary-id must name each canary once, got {short_repr(value)}")
    return tuple(canaries)
