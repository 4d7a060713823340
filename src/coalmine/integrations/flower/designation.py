"""Which nodes are canaries, where the server says so."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from coalmine.audit.audit import Audit
from coalmine.audit.rounds import write_atomically
from coalmine.checks import one_number

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
            outside = [index for index in self._given.values() if not 0 <= index < self._canaries]
            if outside or len(set(self._given.values())) < len(self._given):
                raise ValueError(f"canary_nodes must name different canaries of 0..{self._canaries - 1}, got {nodes}")
        elif nodes is not None:
            self._fraction = one_number("canary_nodes", nodes)
            if not 0 < self._fraction <= 1:
                raise ValueError(f"canary_nodes must be a fraction in (0, 1] or name nodes, got {self._fraction}")
            self._path = None if audit.directory is None else audit.directory.path / NAME
            if self._path is not None and self._path.exists():
                saved = json.loads(self._path.read_text())
                self._given = {int(node): int(index) for node, index in saved.items()}

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

    def _share(self, node: int) -> float:
        """A number in [0, 1) that is the node's own."""
        digest = hashlib.blake2b(str(node).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) / 2**64
