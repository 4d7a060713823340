"""Which nodes are canaries, where the server says so."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from coalmine.audit.audit import Audit
from coalmine.audit.rounds import write_atomically
from coalmine.checks import one_number, shown

NAME = "audit/nodes.json"


class Designation:
    """Canaries by node id: as named, or a fraction of the nodes by a hash of their ids, keyed by the audit's commitment.

    A node that is designated keeps its canary, also over a restart of the server where the audit has a directory. A node
    that comes back under another id is another node and may get the next canary, until all are given away.
    """

    def __init__(self, audit: Audit, nodes: float | Mapping[int, int] | None) -> None:
        self._key = audit.commitment.sha256.encode()[:64]
        self._canaries = audit.settings.canaries
        self._path: Path | None = None
        self._given: dict[int, int] = {}
        self._fraction = 0.0
        if isinstance(nodes, Mapping):
            self._given = {int(node): int(index) for node, index in nodes.items()}
            if not self._fits(self._given):
                raise ValueError(f"canary_nodes must name different canaries of 0..{self._canaries - 1}, got {nodes}")
        elif nodes is not None:
            self._fraction = one_number("canary_nodes", nodes)
            if not 0 < self._fraction <= 1:
                raise ValueError(f"canary_nodes must be a fraction in (0, 1] or name nodes, got {self._fraction}")
            self._path = None if audit.directory is None else audit.directory.path / NAME
            if self._path is not None and self._path.exists():
                self._given = self._read(self._path)

    def index_of(self, node: int) -> int | None:
        """The canary of a node, None for a real client."""
        if node in self._given:
            return self._given[node]
        if len(self._given) >= self._canaries or self._share(node) >= self._fraction:
            return None
        self._given[node] = len(self._given)
        if self._path is not None:
            write_atomically(self._path, (json.dumps(self._given) + "\n").encode())
        return self._given[node]

    def _read(self, path: Path) -> dict[int, int]:
        """The canaries that were given away before a restart."""
        text = path.read_text(errors="replace")
        try:
            given = {int(node): int(index) for node, index in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            given = None
        if given is None or not self._fits(given):
            raise ValueError(
                f"{path} must name different canaries of 0..{self._canaries - 1} by node, got {shown(text)}; "
                "remove it to give canaries to nodes anew"
            )
        return given

    def _fits(self, given: Mapping[int, int]) -> bool:
        """Whether all are canaries of this audit, and none is given twice."""
        indices = set(given.values())
        return len(indices) == len(given) and all(0 <= index < self._canaries for index in indices)

    def _share(self, node: int) -> float:
        """A number in [0, 1) that is the node's own."""
        digest = hashlib.blake2b(str(node).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) / 2**64
