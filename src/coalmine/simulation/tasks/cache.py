"""Arrays computed once from large files, then memory-mapped from disk: unread parts use no memory."""

import hashlib
import json
import logging
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from coalmine.data.folders import cache_folder
from coalmine.log.files import lock_file
from coalmine.simulation.population import Indices

VERSION = 1  # of the cache format; a new version rebuilds everything
HASHED = 64 << 20  # bytes; larger files are hashed only at their ends
LARGE = 10**9  # bytes; reading more is logged as a warning
WAIT = 0.05  # seconds between two attempts to lock

log = logging.getLogger(__name__)
Arrays = Mapping[str, "np.ndarray[Any, np.dtype[Any]]"]


class Writer:
    """Arrays that grow by rows on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._rows: dict[str, int] = {}
        self._hashes: dict[str, Any] = {}

    def append(self, name: str, rows: "np.ndarray[Any, np.dtype[Any]]") -> None:
        """Add rows to the array of this name; all must have the same type and shape."""
        if name not in self._files:
            self._files[name] = (self._folder / f"{name}.bin").open("wb")
            self._kinds[name] = (rows.dtype, rows.shape[1:])
            self._rows[name] = 0
            self._hashes[name] = hashlib.sha256()
        if (rows.dtype, rows.shape[1:]) != self._kinds[name]:
            raise ValueError(
                f"rows of {name} must be {self._kinds[name][0]} of shape {self._kinds[name][1]}, got {rows.dtype} of shape "
                f"{rows.shape[1:]}"
            )
        content = np.ascontiguousarray(rows).tobytes()
        self._files[name].write(content)
        self._hashes[name].update(content)
        self._rows[name] += len(rows)

    def finish(self) -> None:
        """Flush the arrays and write their index."""
        index = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            dtype, shape = self._kinds[name]
            index[name] = {
                "dtype": dtype.str,
                "shape": [self._rows[name], *shape],
                "sha256": self._hashes[name].hexdigest(),
            }
        self.close()
        (self._folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def cached_arrays(recipe: str, sources: Sequence[Path], build: Callable[[Writer], None]) -> Arrays:
    """The arrays that `build` makes from the sources, as read-only memory maps; built once, then read from the cache.

    They are rebuilt when VERSION, the recipe's name, or a source's size, date or content has changed. A killed process
    leaves no entry that a later call would accept as complete.
    """
    folder = cache_folder()
    entry = folder / f"{recipe}-{_key(recipe, sources)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{entry.name}.lock"):
            arrays = _open_entry(entry)
            return arrays if arrays is not None else _build_entry(entry, sources, build)
    except OSError as error:
        if error.errno is None or not _is_in_folder(error.filename, folder):
            raise
        raise OSError(
            f"the cache {folder} cannot be written ({error.strerror}); choose another folder with COALMINE_CACHE_DIR"
        ) from None


def write_clients(writer: Writer, clients: Iterable[Arrays], *, source: Path) -> None:
    """Append every client's arrays, and the array `starts` of first rows; clients without examples are left out."""
    starts = [0]
    for arrays in clients:
        count = len(next(iter(arrays.values())))
        if count:
            for name, rows in arrays.items():
                writer.append(name, rows)
            starts.append(starts[-1] + count)
    if len(starts) == 1:
        raise ValueError(f"{source} has no examples")
    writer.append("starts", np.array(starts, dtype=np.int64))


def starts_of(arrays: Arrays) -> Indices:
    """The first row of each client, copied into memory."""
    return np.array(arrays["starts"], dtype=np.int64)


def _build_entry(entry: Path, sources: Sequence[Path], build: Callable[[Writer], None]) -> Arrays:
    size = sum(source.stat().st_size for source in sources)
    log.log(
        logging.WARNING if size > LARGE else logging.INFO,
        "reading %.2f GB once into %s; later runs start immediately",
        size / 1e9,
        entry,
    )
    draft = entry.with_name(f".{entry.name}.new")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process, since we hold the lock
    draft.mkdir()
    writer = Writer(draft)
    try:
        build(writer)
        writer.finish()
        shutil.rmtree(entry, ignore_errors=True)
        draft.rename(entry)
    except BaseException:
        writer.close()
        shutil.rmtree(draft, ignore_errors=True)
        raise
    arrays = _open_entry(entry)
    assert arrays is not None  # it was just written
    return arrays


def _open_entry(entry: Path) -> Arrays | None:
    """The arrays of an entry, or None if it is missing or incomplete."""
    if not entry.is_dir():
        return None
    try:
        index = json.loads((entry / "index.json").read_text(encoding="utf-8"))
        return {name: _map_array(entry / f"{name}.bin", **kind) for name, kind in index.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s is damaged (%s) and will be rebuilt", entry, error)
        return None


def _map_array(path: Path, *, dtype: str, shape: list[int], sha256: str) -> "np.ndarray[Any, np.dtype[Any]]":
    kind = np.dtype(dtype)
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    if not size:
        return np.zeros(shape, dtype=kind)
    if size <= HASHED and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{path.name} does not match its checksum")
    return np.memmap(path, dtype=kind, mode="r", shape=tuple(shape))


def _key(recipe: str, sources: Sequence[Path]) -> str:
    if not re.fullmatch(r"[\w-]+", recipe):
        raise ValueError(f"a recipe must be a name of letters, digits, - and _, got {recipe!r}")
    fingerprints = [[str(source.absolute()), *fingerprint(source)] for source in sources]
    return hashlib.sha256(json.dumps([VERSION, recipe, fingerprints]).encode()).hexdigest()[:20]


def fingerprint(path: Path) -> tuple[int, int, str]:
    """Size, date in nanoseconds, and sha256 of a file; for a large file, of its first and last MiB."""
    status = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if status.st_size <= HASHED:
            digest.update(file.read())
        else:
            digest.update(file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
    return status.st_size, status.st_mtime_ns, digest.hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock, so that a second process waits and then reuses the arrays of the first."""
    while (held := lock_file(path)) is None:
        time.sleep(WAIT)
    try:
        yield
    finally:
        held.release()


def _is_in_folder(filename: Any, folder: Path) -> bool:
    return not isinstance(filename, str) or Path(filename).is_relative_to(folder) or folder.is_relative_to(filename)


def tensor(array: "np.ndarray[Any, np.dtype[Any]]") -> torch.Tensor:
    """A tensor that shares the memory of the array. The array may be read-only, since examples are never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)
