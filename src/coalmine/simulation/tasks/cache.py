"""Arrays computed once from large files, then memory-mapped from disk: unread parts use no memory."""

import hashlib
import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from coalmine.data.folders import cache_folder
from coalmine.simulation.population import Indices

VERSION = 1  # of the cache; raising it rebuilds everything
HASHED = 64 << 20  # files up to this size are hashed completely, larger ones at their ends
LARGE = 10**9

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
    """The arrays that `build` makes from the sources, built now or read from the cache, as read-only memory maps.

    They are rebuilt when a source's size, date or content, VERSION, or the recipe's name has changed. A process that is
    killed leaves nothing that a later call would take for complete.
    """
    folder = cache_folder()
    entry = folder / f"{recipe}-{_key(recipe, sources)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{entry.name}.lock"):
            found = _opened(entry)
            return found if found is not None else _made(entry, sources, build)
    except OSError as error:
        if error.errno is None or not _below(error.filename, folder):
            raise
        raise OSError(
            f"the cache {folder} cannot be written ({error.strerror}); name another folder by COALMINE_CACHE_DIR"
        ) from None


def write_clients(writer: Writer, clients: Iterable[Arrays], *, source: Path) -> None:
    """Append every client's arrays, and as `starts` where each client begins; clients without examples are left out."""
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
    """Where each client's examples start, in memory."""
    return np.array(arrays["starts"], dtype=np.int64)


def _made(entry: Path, sources: Sequence[Path], build: Callable[[Writer], None]) -> Arrays:
    size = sum(source.stat().st_size for source in sources)
    log.log(
        logging.WARNING if size > LARGE else logging.INFO,
        "reading %.2f GB once into %s; later runs start at once",
        size / 1e9,
        entry,
    )
    draft = entry.with_name(f".{entry.name}.new")
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process: we hold the lock
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
    found = _opened(entry)
    assert found is not None  # it was just written
    return found


def _opened(entry: Path) -> Arrays | None:
    """The arrays of an entry, or None where it is missing or incomplete."""
    if not entry.is_dir():
        return None
    try:
        index = json.loads((entry / "index.json").read_text(encoding="utf-8"))
        return {name: _mapped(entry / f"{name}.bin", **kind) for name, kind in index.items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        log.warning("%s is damaged (%s) and is rebuilt", entry, error)
        return None


def _mapped(path: Path, *, dtype: str, shape: list[int], sha256: str) -> "np.ndarray[Any, np.dtype[Any]]":
    kind = np.dtype(dtype)
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {size}")
    if not size:
        return np.zeros(shape, dtype=kind)
    if size <= HASHED and hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{path.name} has another checksum than it had")
    return np.memmap(path, dtype=kind, mode="r", shape=tuple(shape))


def _key(recipe: str, sources: Sequence[Path]) -> str:
    if not re.fullmatch(r"[\w-]+", recipe):
        raise ValueError(f"a recipe must be a name, got {recipe!r}")
    prints = [[str(source.absolute()), *fingerprint(source)] for source in sources]
    return hashlib.sha256(json.dumps([VERSION, recipe, prints]).encode()).hexdigest()[:20]


def fingerprint(path: Path) -> tuple[int, int, str]:
    """Size, date in nanoseconds, and sha256 of a file; of a large file, of its first and last MiB."""
    about = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if about.st_size <= HASHED:
            digest.update(file.read())
        else:
            digest.update(file.read(1 << 20))
            file.seek(-(1 << 20), os.SEEK_END)
            digest.update(file.read())
    return about.st_size, about.st_mtime_ns, digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock: a second process waits, then finds what the first has built."""
    try:
        import fcntl
    except ImportError:  # not available on Windows
        yield
        return
    with path.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _below(filename: Any, folder: Path) -> bool:
    return not isinstance(filename, str) or Path(filename).is_relative_to(folder) or folder.is_relative_to(filename)


def tensor(array: "np.ndarray[Any, np.dtype[Any]]") -> torch.Tensor:
    """A tensor over the same memory as the array, which may be read-only, since examples are never written."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(array)
