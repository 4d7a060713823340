"""Reader for TensorFlow Federated's HDF5 files, one client at a time; features have one entry per example."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.simulation.population import Indices
from coalmine.simulation.randomness import numpy_stream

TEST_EXAMPLES = 10_000
Values = Any  # an array of numbers, or a list of bytes


@dataclass(frozen=True)
class Split:
    """The file that holds the training or the test part of a data set."""

    path: Path

    def read(self, *features: str) -> Iterator[tuple[str, dict[str, Values]]]:
        """Each client's id and features, clients in the order of their ids."""
        with closing(Hdf5Clients(self.path)) as file:
            for client in file.clients():
                yield client, file.read(client, features)


def find_splits(folder: Path, names: tuple[str, str]) -> tuple[Split, Split] | None:
    """The training and the test split, or None if the folder does not have both files."""
    train, test = (folder / name for name in names)
    return (Split(train), Split(test)) if train.is_file() and test.is_file() else None


def order_of_test_clients(clients: int) -> Indices:
    """The fixed order in which test clients are used until there are enough examples."""
    return numpy_stream(0, "test clients").permutation(clients).astype(np.int64)


def select_test_examples(starts: Indices) -> Indices:
    """Indices of the first 10,000 test examples, with clients in the order of order_of_test_clients."""
    order = order_of_test_clients(len(starts) - 1)
    sizes = np.diff(starts)[order]
    enough = int(np.searchsorted(np.cumsum(sizes), TEST_EXAMPLES)) + 1
    indices = [np.arange(starts[client], starts[client + 1]) for client in order[:enough].tolist()]
    return np.concatenate([np.arange(0), *indices])[:TEST_EXAMPLES]


class Hdf5Clients:
    """The clients of a file. Arrays are at examples/CLIENT/FEATURE; their first axis is the example."""

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
            raise ValueError(f"{path} has no group `examples`, so it is not a TensorFlow Federated file")

    def clients(self) -> list[str]:
        """The sorted client ids."""
        return sorted(self._file["examples"])

    def read(self, client: str, features: Sequence[str]) -> dict[str, Values]:
        """These features of a client's examples: numbers as an array, texts as a list of bytes."""
        group = self._file["examples"][client]
        missing = [feature for feature in features if feature not in group]
        if missing:
            raise ValueError(f"{self.path}: client {client} has no {missing[0]}; it has {', '.join(group)}")
        try:
            values = {feature: _to_plain(group[feature][()]) for feature in features}
        except OSError as error:
            raise ValueError(f"{self.path} is damaged at client {client} ({error})") from None
        return _check_lengths(values, f"{self.path}: client {client}")

    def close(self) -> None:
        self._file.close()


def _to_plain(values: Any) -> Values:
    """An array of numbers unchanged, or an array of texts as a list of bytes."""
    array = np.asarray(values)
    if array.dtype.kind not in "OSU":
        return array
    return [text.encode() if isinstance(text, str) else bytes(text) for text in array.ravel().tolist()]


def _check_lengths(features: dict[str, Values], where: str) -> dict[str, Values]:
    if len({len(entries) for entries in features.values()}) > 1:
        lengths = ", ".join(f"{len(entries)} {feature}" for feature, entries in features.items())
        raise ValueError(f"{where} must have the same number of each feature, got {lengths}")
    return features
