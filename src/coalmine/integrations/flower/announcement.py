"""What the server tells canary clients, inside the ConfigRecord that every client gets anyway."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from coalmine.audit.seeds import read_seed
from coalmine.canaries import RotatedCanaries, SphereCanaries

PREFIX = "coalmine-"
REPLY = "coalmine"  # the record in which a canary tells the server which one it is


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """How to be a canary: `scale` times too long an update, in the arrays that are not `left_out`.

    `seed` makes the canaries; it is a secret, so leave it out where canary nodes have a file of it (`coalmine-seed-file` in
    their node config). `partitions`, first and past the last, are the partition ids that are canaries, in order.
    """

    canaries: int
    dim: int
    kind: str
    clip_norm: float
    scale: float
    left_out: tuple[str, ...] = ()
    seed: int | bytes | None = None
    partitions: tuple[int, int] | None = None

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
        return {PREFIX + name: value for name, value in entries.items()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Announcement":
        """The inverse."""

        def told(name: str) -> Any:
            return config.get(PREFIX + name)

        seed, partitions = told("seed"), json.loads(told("partitions") or "null")
        return cls(
            canaries=int(told("canaries")),
            dim=int(told("dim")),
            kind=str(told("kind")),
            clip_norm=float(told("clip-norm")),
            scale=float(told("scale")),
            left_out=tuple(json.loads(told("left-out"))),
            seed=int(seed) if isinstance(seed, str) else seed,
            partitions=None if partitions is None else (int(partitions[0]), int(partitions[1])),
        )

    def index_of(self, config: Mapping[str, Any], node: Mapping[str, Any]) -> int | None:
        """Which canary a node is: the server's word, else `canary-id` in its config, else its partition id; None, none."""
        named = config.get(PREFIX + "canary", node.get("canary-id"))
        if named is not None:
            index = int(named)
            if not 0 <= index < self.canaries:
                raise ValueError(f"canary-id must lie in 0..{self.canaries - 1}, got {index}")
            return index
        partition = node.get("partition-id")
        if partition is None or self.partitions is None:
            return None
        index = int(partition) - self.partitions[0]
        return index if 0 <= index < min(self.canaries, self.partitions[1] - self.partitions[0]) else None

    def seed_for(self, node: Mapping[str, Any]) -> int | bytes:
        """The node's own seed file first, else what the server told."""
        path = node.get(PREFIX + "seed-file")
        if path is not None:
            return read_seed(Path(str(path)))
        if self.seed is None:
            raise ValueError(
                "a canary needs the seed: give its node coalmine-seed-file='...' in --node-config, or let the server tell it"
            )
        return self.seed

    def update(self, index: int, seed: int | bytes | SupportsIndex, like: Any) -> Any:
        """Canary `index` as an update of a client."""
        kind = RotatedCanaries if self.kind == "rotated" else SphereCanaries
        return kind(self.canaries, self.dim, seed=seed).canary(index, like=like) * (self.clip_norm * self.scale)
