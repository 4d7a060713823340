"""Files in the idx format of MNIST, packed by gzip."""

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}


def read_idx(path: Path, *, sha256: str) -> Any:
    """The array that the file holds, refused unless its unpacked bytes have this checksum."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not there: `coalmine data get {path.parent.name}`, or name its folder's parent by --data-dir"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is no whole gzip file ({error}); fetch it again") from None
    array = parse_idx(content, name=str(path))
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ValueError(f"{path} does not hold the published data: sha256 {found[:16]}…, expected {sha256[:16]}…")
    return array


def parse_idx(content: bytes, *, name: str) -> Any:
    """The array in the unpacked bytes of an idx file: bytes or big-endian 32-bit integers of any shape."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise ValueError(f"{name} is not an idx file of bytes or 32-bit integers: it begins with {content[:4].hex()}")
    dtype, dimensions = _TYPES[content[2]], content[3]
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
    wanted = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(shape) != dimensions or len(content) - start != wanted:
        raise ValueError(
            f"{name} is not whole: its head promises {wanted} bytes of shape {shape}, {len(content) - start} follow"
        )
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)
