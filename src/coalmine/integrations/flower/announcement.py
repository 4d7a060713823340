"""The settings that the server sends to canary clients, inside the ConfigRecord that every client gets."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from coalmine.audit.audit import Audit
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.checks import shown, whole_number
from coalmine.integrations.flower.turns import canary_in_round, parse_canaries
from coalmine.storage.record import Commitment, Settings
from coalmine.storage.seed_file import read_seed

PREFIX = "coalmine-"
REPLY = "coalmine"  # the record in which a canary tells the server which one it is


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """How to be a canary: send an update of `scale` times the clip norm, in the arrays that are not `left_out`.

    `seed` generates the canaries. It is a secret, so omit it where canary nodes read it from a file (`coalmine-seed-file` in
    their node config). `partitions`, first and past the last, are the partition ids that are canaries, in order. `record`
    holds the audit's settings and its commitment. It is public, and a node uses it to check that its seed is the audit's.
    `round_number` decides which of its canaries a node is, where it has several.
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
        """How to be one of the audit's canaries."""
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
        """Entries for a ConfigRecord: no lists, which the legacy API refuses."""
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
        """The inverse."""

        def told(name: str) -> Any:
            return config.get(PREFIX + name)

        seed, partitions = told("seed"), json.loads(told("partitions") or "null")
        number = told("round")
        record = json.loads(told("record") or "null")
        return cls(
            canaries=int(told("canaries")),
            dim=int(told("dim")),
            kind=str(told("kind")),
            clip_norm=float(told("clip-norm")),
            scale=float(told("scale")),
            left_out=tuple(json.loads(told("left-out"))),
            seed=int(seed) if isinstance(seed, str) else seed,
            partitions=None if partitions is None else (int(partitions[0]), int(partitions[1])),
            record=record and (Settings.from_dict(record["settings"]), Commitment(**record["commitment"])),
            round_number=None if number is None else int(number),
        )

    def index_of(self, config: Mapping[str, Any], node: Mapping[str, Any]) -> int | None:
        """Which canary a node is in this round, None for a real client.

        The server's choice comes first, then `canary-id` in the node config, then the partition id.
        """
        named = config.get(PREFIX + "canary", node.get("canary-id"))
        if named is not None:
            canaries = parse_canaries(named, count=self.canaries)
            if len(canaries) == 1:
                return canaries[0]
            number = self.round_number or config.get("server-round")
            if number is None:
                raise ValueError(
                    "a node with several canaries must know the round: send 'server-round' in the train config, or give "
                    "the node one canary-id"
                )
            return canary_in_round(canaries, int(number))
        partition = node.get("partition-id")
        if partition is None or self.partitions is None:
            return None
        index = int(partition) - self.partitions[0]
        return index if 0 <= index < min(self.canaries, self.partitions[1] - self.partitions[0]) else None

    def seed_for(self, node: Mapping[str, Any]) -> int | bytes:
        """The seed in the node's own file, else the announced one; refused where it is not the audit's seed."""
        path = node.get(PREFIX + "seed-file")
        if path is None:
            if self.seed is None:
                raise ValueError(
                    "a canary needs the seed: set coalmine-seed-file='...' in its --node-config, or let the server "
                    "announce it (seed= instead of seed_file=)"
                )
            return self.seed
        seed = read_seed(Path(str(path)))
        if self.record is None:
            return seed
        settings, commitment = self.record
        if commitment.opens_to(seed, settings):
            return seed
        if commitment.opens_to(Path(str(path)).read_bytes(), settings):
            raise ValueError(
                f"seed file {path} must be read in the same way everywhere, but the server's audit took its raw bytes: use "
                "audited(seed_file=...) or coalmine.read_seed there"
            )
        raise ValueError(
            f"seed file {path} must hold the seed of the server's audit, got another: copy the server's file"
        )

    def update(self, index: int, seed: int | bytes | SupportsIndex, like: Any) -> Any:
        """Canary `index` as an update of a client."""
        kind = RotatedCanaries if self.kind == "rotated" else SphereCanaries
        return kind(self.canaries, self.dim, seed=seed).canary(index, like=like) * (self.clip_norm * self.scale)


def checked_seed(audit: Audit, seed: int | bytes | None) -> int | bytes | None:
    """The seed to announce, refused unless it is the audit's: the audit cannot detect canaries of another seed."""
    if seed is not None and not audit.commitment.opens_to(seed, audit.settings):
        raise ValueError("seed must be the one that the audit was made with, got another: give both the same")
    return seed


def checked_partitions(ids: Iterable[int] | None) -> range | None:
    """The partition ids of canaries, refused unless they are consecutive: clients are sent only the two ends."""
    if ids is None:
        return None
    if not isinstance(ids, Iterable):
        raise ValueError(f"canary_partitions must be a range or a list of partition ids, got {shown(ids)}")
    listed = [whole_number("a partition id in canary_partitions", each, minimum=0) for each in ids]
    if not listed or listed != list(range(listed[0], listed[-1] + 1)):
        raise ValueError(f"canary_partitions must be consecutive, and one at least, got {shown(ids)}")
    return range(listed[0], listed[-1] + 1)
