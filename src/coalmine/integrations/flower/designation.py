"""Which nodes are canaries, where the server says so."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from coalmine.audit.audit import Audit
from coalmine.checks import one_number, shown, whole_number
from coalmine.integrations.flower.turns import canary_in_round
from coalmine.storage.files import write_atomically

NAME = "audit/nodes.json"
Nodes = float | Mapping[int, int | Iterable[int]]


class Designation:
    """Canaries by node id: as named, or a fraction of the nodes by a hash of their ids, keyed by the audit's commitment.

    A named node may have several canaries; it takes their roles in turn, one in each round. A designated node keeps its
    canaries, also over a restart of the server where the audit has a directory. A node that returns under another id is
    another node and may get the next canary, until all are assigned.
    """

    def __init__(self, audit: Audit, nodes: Nodes | None) -> None:
        self._key = audit.commitment.sha256.encode()[:64]
        self._canaries = audit.settings.canaries
        self._path: Path | None = None
        self._given: dict[int, tuple[int, ...]] = {}
        self._fraction = 0.0
        if isinstance(nodes, Mapping):
            self._given = {int(node): _listed(canaries) for node, canaries in nodes.items()}
            if not self._fits(self._given):
                raise ValueError(f"canary_nodes must name different canaries of 0..{self._canaries - 1}, got {nodes}")
        elif nodes is not None:
            self._fraction = one_number("canary_nodes", nodes)
            if not 0 < self._fraction <= 1:
                raise ValueError(f"canary_nodes must be a fraction in (0, 1] or name nodes, got {self._fraction}")
            self._path = None if audit.directory is None else audit.directory.path / NAME
            if self._path is not None and self._path.exists():
                self._given = self._read(self._path)

    def index_of(self, node: int, round_number: int) -> int | None:
        """The canary whose role a node takes in a round, None for a real client."""
        if node not in self._given:
            if len(self._given) >= self._canaries or self._share(node) >= self._fraction:
                return None
            self._given[node] = (len(self._given),)
            if self._path is not None:
                assigned = {node: index for node, (index,) in self._given.items()}
                write_atomically(self._path, (json.dumps(assigned) + "\n").encode())
        return canary_in_round(self._given[node], round_number)

    def _read(self, path: Path) -> dict[int, tuple[int, ...]]:
        """The canaries that were assigned before a restart."""
        text = path.read_text(errors="replace")
        given: dict[int, tuple[int, ...]] | None
        try:
            given = {int(node): (int(index),) for node, index in json.loads(text).items()}
        except (ValueError, TypeError, AttributeError):
            given = None
        if given is None or not self._fits(given):
            raise ValueError(
                f"{path} must name different canaries of 0..{self._canaries - 1} by node, got {shown(text)}; "
                "remove it to assign canaries to nodes anew"
            )
        return given

    def _fits(self, given: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether every node has at least one canary, all are canaries of this audit, and none is assigned twice."""
        indices = [index for canaries in given.values() for index in canaries]
        different = len(set(indices)) == len(indices)
        return different and all(given.values()) and all(0 <= index < self._canaries for index in indices)

    def _share(self, node: int) -> float:
        """A number in [0, 1) that is the node's own."""
        digest = hashlib.blake2b(str(node).encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


def _listed(canaries: int | Iterable[int]) -> tuple[int, ...]:
    """One canary or several, as a tuple."""
    listed = canaries if isinstance(canaries, Iterable) else [canaries]
    return tuple(whole_number("a canary in canary_nodes", index, minimum=0) for index in listed)
