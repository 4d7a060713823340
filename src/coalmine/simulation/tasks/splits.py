"""Where the training and the test examples of a data set lie, in whichever format they are there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coalmine.simulation.population import Indices
from coalmine.simulation.randomness import numpy_stream
from coalmine.simulation.tasks.cache import Arrays
from coalmine.simulation.tasks.tff_files import ClientFile, FedjaxClients, Hdf5Clients, SqliteClients

TEST_EXAMPLES = 10_000


@dataclass(frozen=True)
class Split:
    """The file with a part of a data set, and how it is opened."""

    path: Path
    open: Callable[[], ClientFile]


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the files of a data set are called, training before test."""

    hdf5: tuple[str, str]
    sqlite: str
    sqlite_splits: tuple[str, str]
    fedjax: tuple[str, str]


def find_splits(folder: Path, names: Names) -> tuple[Split, Split] | None:
    """Training and test split in TensorFlow Federated's HDF5, its SQLite, or fedjax's: the first that is there."""
    if all((folder / name).is_file() for name in names.hdf5):
        train, test = (folder / name for name in names.hdf5)
        return Split(train, lambda: Hdf5Clients(train)), Split(test, lambda: Hdf5Clients(test))
    if (path := folder / names.sqlite).is_file():
        first, second = names.sqlite_splits
        return Split(path, lambda: SqliteClients(path, first)), Split(path, lambda: SqliteClients(path, second))
    if all((folder / name).is_file() for name in names.fedjax):
        train, test = (folder / name for name in names.fedjax)
        return Split(train, lambda: FedjaxClients(train)), Split(test, lambda: FedjaxClients(test))
    if (path := folder / f"{names.sqlite}.lzma").is_file():
        raise ValueError(f"{path} is still packed: unpack it to {names.sqlite} (`xz --format=lzma --decompress` does)")
    return None


def missing(folder: Path, names: Sequence[str], dataset: str) -> FileNotFoundError:
    """The error that says which files a task could read, and how to get them."""
    return FileNotFoundError(
        f"{folder} holds none of {', '.join(names)}: `coalmine data get {dataset}`, or name the folder above by --data-dir "
        "(docs/data.md)"
    )


def order_of_tests(clients: int) -> Indices:
    """The test clients in the order in which they are taken until there are enough examples; always the same."""
    return numpy_stream(0, "test clients").permutation(clients).astype(np.int64)


def chosen_for_tests(starts: Indices) -> Indices:
    """The numbers of the first 10,000 examples of the test clients in that order."""
    order = order_of_tests(len(starts) - 1)
    sizes = np.diff(starts)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), TEST_EXAMPLES)) + 1
    chosen = [np.arange(starts[client], starts[client + 1]) for client in order[:enough].tolist()]
    return np.concatenate([np.arange(0), *chosen])[:TEST_EXAMPLES]


def starts_of(arrays: Arrays) -> Indices:
    """Where each client's examples start, in memory."""
    return np.array(arrays["starts"], dtype=np.int64)
