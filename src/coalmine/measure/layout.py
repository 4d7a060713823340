"""The layout of a model: which process holds which coordinates, in which blocks; agreed before the first round."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from coalmine.argument_checks import short_repr, whole_number
from coalmine.canaries.blocked import cut_into_blocks
from coalmine.measure.ranks import Ranks, differences
from coalmine.measure.trees import Tree

Layers = list[tuple[str, int]]


@dataclass(frozen=True)
class Layout:
    """The model over all processes: its layers, its blocks, and how much of each layer each process holds."""

    tree: Tree
    layers: Layers
    blocks: tuple[int, ...]
    processes: int
    shards: tuple[tuple[int, ...], ...]
    on_host: bool

    @property
    def dim(self) -> int:
        """The number of coordinates over all processes."""
        return sum(size for _, size in self.layers)

    @classmethod
    def of(cls, parameters: Any, ranks: Ranks, *, blocks: Sequence[int] | None, replicated: bool) -> "Layout":
        """The layout of a model, of which this process passes its parameters; every rank must call this."""
        trees: list[Tree] = []

        def describe() -> dict[str, Any]:
            tree = Tree(parameters)
            trees.append(tree)
            return {
                "layers": tree.layers,
                "blocks": _own_blocks(tree, blocks),
                "replicated": bool(replicated),
                "on_host": tree.on_host,
            }

        all_ranks = ranks.gather(describe)
        tree = trees[0]
        on_host = all(other.pop("on_host") for other in all_ranks)
        for rank, other in enumerate(all_ranks):
            theirs = other.pop("replicated")
            if theirs != bool(replicated):
                raise ValueError(
                    f"every rank must pass the same `replicated`, but it is {theirs} on rank {rank} and "
                    f"{bool(replicated)} on rank {ranks.rank}"
                )
        if replicated and ranks.several:
            for rank, other in enumerate(all_ranks):
                if other != all_ranks[0]:
                    raise ValueError(
                        f"every rank must hold the whole model, but rank {rank} has other parameters than rank 0"
                    )
            all_ranks = all_ranks[:1]
        sizes: dict[str, int] = {}
        for one in all_ranks:
            for name, size in one["layers"]:
                sizes[name] = sizes.get(name, 0) + size
        layers = [(name, size) for name, size in sizes.items() if size]
        if not layers:
            raise ValueError("parameters must hold floating-point numbers, got none; pass the model's own parameters")
        sharded = ranks.several and not replicated
        shards = tuple(tuple(dict(one["layers"]).get(name, 0) for name, _ in layers) for one in all_ranks)
        cut = tuple(int(size) for one in all_ranks for size in one["blocks"])
        return cls(tree, layers, cut, ranks.size, shards if sharded else (), on_host)


def _own_blocks(tree: Tree, blocks: Sequence[int] | None) -> list[int]:
    if tree.device_sizes and blocks is not None:
        raise ValueError(
            "blocks must be omitted for a model on several devices: each device's part is in blocks of its own"
        )
    if blocks is None:
        return [size for held in tree.device_sizes or (tree.dim,) for size in cut_into_blocks(held)]
    if not isinstance(blocks, Iterable):
        raise ValueError(f"blocks must list the sizes of blocks, got {short_repr(blocks)}")
    own = [whole_number("the size of a block", size, minimum=2) for size in blocks]
    if sum(own) != tree.dim:
        raise ValueError(f"blocks must add up to the {tree.dim} coordinates of the parameters here, got {sum(own)}")
    return own


def check_same(ranks: Ranks, **arguments: Any) -> None:
    """ValueError if ranks make an audit with different arguments; only digests of the seed are exchanged."""
    if not ranks.several:
        return
    own = {
        name: hashlib.sha256(b"coalmine same arguments\0" + _bytes(value)).hexdigest()[:16]
        for name, value in arguments.items()
    }
    digests = ranks.gather(lambda: own)
    rank = next((rank for rank, other in enumerate(digests) if other != digests[0]), None)
    if rank is None:
        return
    differing = [name for name in own if digests[rank][name] != digests[0][name]]
    open_ones = {name: arguments[name] for name in differing if not isinstance(arguments[name], bytes)}
    values = ranks.gather(lambda: open_ones)
    named = [f"{name} (secret)" for name in differing if name not in open_ones]
    named += [differences(values[0], values[rank], rank)] if open_ones else []
    raise ValueError(
        "every rank must make the audit with the same arguments, but "
        f"rank {rank} differs from rank 0 in {', '.join(named)}"
    )


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value, sort_keys=True).encode()
