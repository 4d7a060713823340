"""The initial and the final model of a run as files, one .npy row each, and their digests."""

import hashlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.log.files import remove_drafts, write_atomically
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Singles
from coalmine.measure.vectors import shared_sha256

STRETCH = 2**18  # numbers
INITIAL, FINAL = "initial.npy", "model.npy"  # in the run directory


def model_digest(pieces: Iterable[Singles], ranks: Ranks, *, sharded: bool, dim: int, path: Path | None = None) -> str:
    """The SHA-256 of a model's numbers, which `coalmine.measure.vectors.model_sha256` computes of a whole row.

    Every rank calls it with its pieces. A model whose shards are in several processes has the digest of the shards' digests.
    With a `path`, rank 0 also writes a model that is not sharded there.
    """

    def digest_here() -> str:
        if ranks.rank and not sharded:
            return ""
        digest = hashlib.sha256()
        if path is None or sharded:
            for data in _stretches(pieces):
                digest.update(data)
        else:
            remove_drafts(path)
            write_atomically(path, _npy(pieces, dim, digest))
        return digest.hexdigest()

    return shared_sha256(ranks.gather(digest_here), sharded=sharded)


def read_initial(path: Path, dim: int) -> Any:
    """The initial model that an earlier start of the run has stored; None if there is none that can be it."""
    try:
        row = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return np.array(row) if row.shape == (dim,) and row.dtype == np.float32 else None


def _stretches(pieces: Iterable[Singles]) -> Iterator[bytes]:
    """The numbers as bytes, a few at a time: a piece may be as large as the model."""
    for piece in pieces:
        for at in range(0, len(piece), STRETCH):
            yield np.ascontiguousarray(piece[at : at + STRETCH], dtype="<f4").tobytes()


def _npy(pieces: Iterable[Singles], dim: int, digest: Any) -> Iterator[bytes]:
    """A file in numpy's format, in pieces; the digest takes the numbers on the way."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (dim,)})
    yield header.getvalue()
    for data in _stretches(pieces):
        digest.update(data)
        yield data
