"""Files of TensorFlow Federated, read one client at a time and without TensorFlow.

Two formats hold the same data: for each client, arrays with one entry per example. TensorFlow Federated used HDF5 before
April 2021, and SQLite with one protobuf per example since then.
"""

import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from coalmine.simulation.population import Indices
from coalmine.simulation.randomness import numpy_stream

TEST_EXAMPLES = 10_000
Values = Any  # an array of numbers, or a list of bytes


class ClientFile(Protocol):
    """The clients of one split of a data set."""

    def clients(self) -> list[str]:
        """Their ids, sorted."""
        ...

    def read(self, client: str, features: Sequence[str]) -> dict[str, Values]:
        """These features of a client's examples: numbers as an array, texts as a list of bytes."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Split:
    """The file that holds the training or the test part of a data set, and the function that opens it."""

    path: Path
    open: Callable[[], ClientFile]

    def read(self, *features: str) -> Iterator[tuple[str, dict[str, Values]]]:
        """Each client's id and features, clients in the order of their ids."""
        with closing(self.open()) as file:
            for client in file.clients():
                yield client, file.read(client, features)


@dataclass(frozen=True, kw_only=True)
class Names:
    """File names of a data set, training before test."""

    hdf5: tuple[str, str]
    sqlite: str
    sqlite_splits: tuple[str, str]


def find_splits(folder: Path, names: Names) -> tuple[Split, Split] | None:
    """The training and the test split, from HDF5 files or else from SQLite; None where the folder has neither."""
    if all((folder / name).is_file() for name in names.hdf5):
        train, test = (folder / name for name in names.hdf5)
        return Split(train, lambda: Hdf5Clients(train)), Split(test, lambda: Hdf5Clients(test))
    if (path := folder / names.sqlite).is_file():
        first, second = names.sqlite_splits
        return Split(path, lambda: SqliteClients(path, first)), Split(path, lambda: SqliteClients(path, second))
    if (path := folder / f"{names.sqlite}.lzma").is_file():
        raise ValueError(f"{path} is still packed: unpack it to {names.sqlite} (`xz --format=lzma --decompress` does)")
    return None


def order_of_tests(clients: int) -> Indices:
    """The order in which test clients are taken until there are enough examples, the same in every run."""
    return numpy_stream(0, "test clients").permutation(clients).astype(np.int64)


def chosen_for_tests(starts: Indices) -> Indices:
    """Indices of the first 10,000 examples of the test clients in that order."""
    order = order_of_tests(len(starts) - 1)
    sizes = np.diff(starts)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), TEST_EXAMPLES)) + 1
    chosen = [np.arange(starts[client], starts[client + 1]) for client in order[:enough].tolist()]
    return np.concatenate([np.arange(0), *chosen])[:TEST_EXAMPLES]


class Hdf5Clients:
    """examples/CLIENT/FEATURE, the first axis being the example."""

    def __init__(self, path: Path) -> None:
        try:
            import h5py
        except ImportError as error:
            raise ImportError(f"{path} is HDF5, which needs: pip install 'coalmine[simulation]'") from error
        self.path = path
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} is not a complete HDF5 file ({error})") from None
        if not isinstance(self._file.get("examples"), h5py.Group):
            self._file.close()
            raise ValueError(f"{path} has no group `examples`, so it is not a file of TensorFlow Federated")

    def clients(self) -> list[str]:
        return sorted(self._file["examples"])

    def read(self, client: str, features: Sequence[str]) -> dict[str, Values]:
        group = self._file["examples"][client]
        missing = [feature for feature in features if feature not in group]
        if missing:
            raise ValueError(f"{self.path}: client {client} has no {missing[0]}, but {', '.join(group)}")
        try:
            found = {feature: _plain(group[feature][()]) for feature in features}
        except OSError as error:
            raise ValueError(f"{self.path} is damaged at client {client} ({error})") from None
        return _same_length(found, f"{self.path}: client {client}")

    def close(self) -> None:
        self._file.close()


class SqliteClients:
    """A row of `examples` for each example of each split: a tf.train.Example; `client_metadata` lists the clients."""

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.split = path, split
        self._database = _database(path, "examples", "client_metadata")
        with _named_errors(path):
            found = self._database.execute("SELECT DISTINCT split_name FROM client_metadata").fetchall()
        splits = sorted(str(name) for (name,) in found)
        if split not in splits:
            self._database.close()
            raise ValueError(f"{path} has no split {split}, but {', '.join(splits) or 'none at all'}")

    def clients(self) -> list[str]:
        query = "SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?"
        with _named_errors(self.path):
            return sorted(str(client) for (client,) in self._database.execute(query, (self.split,)))

    def read(self, client: str, features: Sequence[str]) -> dict[str, Values]:
        query = "SELECT serialized_example_proto FROM examples WHERE client_id = ? AND split_name = ? ORDER BY rowid"
        found: dict[str, list[Values]] = {feature: [] for feature in features}
        with _named_errors(self.path, f" at client {client}"):
            for (blob,) in self._database.execute(query, (client, self.split)):
                example = read_example(blob, features)
                for feature in features:
                    found[feature].append(example[feature])
        return {feature: _stacked(values) for feature, values in found.items()}

    def close(self) -> None:
        self._database.close()


def _database(path: Path, *tables: str) -> sqlite3.Connection:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    # Immutable, since SQLite cannot write a lock on a read-only medium.
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
    try:
        with _named_errors(path):
            there = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
        missing = [table for table in tables if table not in there]
        if missing:
            raise ValueError(f"{path} has no table {missing[0]}")
    except ValueError:
        database.close()
        raise
    return database


@contextmanager
def _named_errors(path: Path, where: str = "") -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, ValueError) as error:
        raise ValueError(f"{path} is damaged{where} ({error})") from None


def _plain(values: Any) -> Values:
    """An array of numbers as it is, an array of texts as a list of bytes."""
    array = np.asarray(values)
    if array.dtype.kind not in "OSU":
        return array
    return [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel().tolist()]


def _same_length(found: dict[str, Values], where: str) -> dict[str, Values]:
    if len({len(values) for values in found.values()}) > 1:
        lengths = ", ".join(f"{len(values)} {feature}" for feature, values in found.items())
        raise ValueError(f"{where} must have as many of each, got {lengths}")
    return found


def _stacked(values: list[Values]) -> Values:
    """The values of all examples: texts as a list, single numbers as an array, several numbers as rows."""
    if not values or isinstance(values[0], bytes):
        return values
    array = np.stack(values)
    return array[:, 0] if array.shape[1] == 1 else array


# tf.train.Example: {1: Features {1: map entry {1: name, 2: Feature {1: bytes_list | 2: float_list | 3: int64_list}}}},
# each list repeated in its field 1; numbers packed or not.

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


def read_example(blob: bytes, features: Sequence[str]) -> dict[str, Values]:
    """These features of a serialised tf.train.Example: float32 or int64 arrays, or the bytes where it is one text."""
    try:
        found = _example(blob, {feature.encode(): feature for feature in features})
    except (TypeError, IndexError, struct.error) as error:
        raise ValueError(f"an example is damaged ({error})") from None
    missing = [feature for feature in features if feature not in found]
    if missing:
        raise ValueError(f"an example has no {missing[0]}")
    return found


def _example(blob: bytes, wanted: Mapping[bytes, str]) -> dict[str, Values]:
    found: dict[str, Values] = {}
    for field, container in _fields(blob, 0, len(blob)):
        if field != 1 or not isinstance(container, tuple):
            continue
        for entry_field, entry in _fields(blob, *container):
            if entry_field == 1 and isinstance(entry, tuple) and _may_be_wanted(blob, entry[0], wanted):
                name, value = _entry(blob, *entry)
                if name in wanted and value is not None:
                    found[wanted[name]] = _feature(blob, *value)
    return found


def _may_be_wanted(blob: bytes, start: int, wanted: Mapping[bytes, str]) -> bool:
    """False if an entry begins with a short name, as all known ones do, that is not wanted."""
    head = blob[start : start + 2]
    if len(head) < 2 or head[0] != 0x0A or head[1] > 127:
        return True
    return blob[start + 2 : start + 2 + head[1]] in wanted


def _entry(blob: bytes, start: int, end: int) -> tuple[bytes, tuple[int, int] | None]:
    name, value = b"", None
    for field, content in _fields(blob, start, end):
        if field == 1 and isinstance(content, tuple):
            name = blob[content[0] : content[1]]
        elif field == 2 and isinstance(content, tuple):
            value = content
    return name, value


def _feature(blob: bytes, start: int, end: int) -> Values:
    for kind, content in _fields(blob, start, end):
        if kind in (1, 2, 3) and isinstance(content, tuple):
            items = [item for field, item in _fields(blob, *content) if field == 1]
            return (_texts, _floats, _integers)[kind - 1](blob, items)
    raise ValueError("a feature is empty")


def _texts(blob: bytes, items: list[Any]) -> bytes:
    if len(items) != 1:
        raise ValueError(f"a feature must be one text, got {len(items)}")
    start, end = items[0]
    return blob[start:end]


def _floats(blob: bytes, items: list[Any]) -> Values:
    pieces = [blob[item[0] : item[1]] if isinstance(item, tuple) else struct.pack("<I", item) for item in items]
    return np.frombuffer(b"".join(pieces), dtype="<f4").astype(np.float32, copy=False)


def _integers(blob: bytes, items: list[Any]) -> Values:
    numbers: list[int] = []
    for item in items:
        if isinstance(item, tuple):
            place, end = item
            while place < end:
                number, place = _varint(blob, place, end)
                numbers.append(number)
        else:
            numbers.append(item)
    return np.array([number - (1 << 64) if number >> 63 else number for number in numbers], dtype=np.int64)


def _fields(blob: bytes, start: int, end: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """The fields of a protobuf message: number, and where its content lies, or the content itself if it is a number."""
    place = start
    while place < end:
        key, place = _varint(blob, place, end) if blob[place] > 127 else (blob[place], place + 1)
        kind = key & 7
        if kind == LENGTH:
            size, place = _varint(blob, place, end) if place >= end or blob[place] > 127 else (blob[place], place + 1)
            content: int | tuple[int, int] = (place, place + size)
            place += size
        elif kind == VARINT:
            content, place = _varint(blob, place, end)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            content = int.from_bytes(blob[place : place + size], "little")
            place += size
        else:
            raise ValueError(f"a protobuf has no fields of kind {kind}")
        if place > end:
            raise ValueError("a protobuf ends too early")
        yield key >> 3, content


def _varint(blob: bytes, place: int, end: int) -> tuple[int, int]:
    number = shift = 0
    while place < end and shift < 70:
        byte = blob[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, place
        shift += 7
    raise ValueError("a protobuf ends too early")
