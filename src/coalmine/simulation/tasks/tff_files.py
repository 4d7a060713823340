"""TensorFlow Federated's HDF5 files, read one client at a time: arrays with one entry per example."""

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
    """The training and the test split; None where the folder does not have both files."""
    train, test = (folder / name for name in names)
    return (Split(train), Split(test)) if train.is_file() and test.is_file() else None


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
        """Their ids, sorted."""
        return sorted(self._file["examples"])

    def read(self, client: str, features: Sequence[str]) -> dict[str, Values]:
        """These features of a client's examples: numbers as an array, texts as a list of bytes."""
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
