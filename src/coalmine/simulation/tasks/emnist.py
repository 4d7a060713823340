"""Federated EMNIST: handwritten characters by writer, from the files of TensorFlow Federated, of fedjax or of LEAF."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import cnn_dropout
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks.cache import Arrays, Writer, cached_arrays, tensor
from coalmine.simulation.tasks.leaf import read_leaf
from coalmine.simulation.tasks.splits import Names, Split, chosen_for_tests, find_splits, missing, starts_of
from coalmine.simulation.tasks.task import Task

SIDE = 28
CHARACTERS = Names(
    hdf5=("fed_emnist_train.h5", "fed_emnist_test.h5"),
    sqlite="emnist_all.sqlite",
    sqlite_splits=("all_train", "all_test"),
    fedjax=("federated_emnist_train.sqlite", "federated_emnist_test.sqlite"),
)
DIGITS = Names(
    hdf5=("fed_emnist_digitsonly_train.h5", "fed_emnist_digitsonly_test.h5"),
    sqlite="emnist_all.sqlite",
    sqlite_splits=("digits_only_train", "digits_only_test"),
    fedjax=("federated_emnist_digitsonly_train.sqlite", "federated_emnist_digitsonly_test.sqlite"),
)

Writers = Iterator[tuple[str, Any, Any]]  # id, pixels, classes


@dataclass(frozen=True)
class Source:
    """Files with the characters of all writers, and the reading of them."""

    paths: tuple[Path, ...]
    read: Callable[[], Writers]


def emnist(folder: Path) -> Task:
    """Characters of 62 classes, each writer a client (Section 5.2); the paper's CNN of 1,206,590 parameters.

    Pixels are as in the files: 1 is white, 0 is ink. Every writer is in training and in test; tested is on the first
    10,000 test characters of the writers in an order that is always the same.
    """
    return _task("emnist", folder, CHARACTERS, classes=62)


def emnist_digits(folder: Path) -> Task:
    """The digits alone: 10 classes, the CNN of 1,199,882 parameters."""
    return _task("emnist-digits", folder, DIGITS, classes=10)


def _task(name: str, folder: Path, names: Names, *, classes: int) -> Task:
    title = DATASETS[name].title
    splits = find_splits(folder, names)
    if splits is not None:
        train, test = (_of_split(split) for split in splits)
    else:
        train, test = _of_leaf(folder, name, names, classes)
        title += " (LEAF)"
    learnt = _arrays(f"{name}-train", train, classes)
    tested = _arrays(f"{name}-test", test, classes)
    rows = chosen_for_tests(starts_of(tested))
    return Task(
        name,
        cnn_dropout(classes),
        Examples(tensor(learnt["pixels"]).unsqueeze(1), tensor(learnt["classes"])),
        Examples(tensor(tested["pixels"][rows]).unsqueeze(1), tensor(tested["classes"][rows])),
        Consecutive(starts_of(learnt)),
        title=title,
    )


def _arrays(recipe: str, source: Source, classes: int) -> Arrays:
    def build(writer: Writer) -> None:
        starts = [0]
        for who, pixels, labels in source.read():
            pictures = _checked(pixels, labels, classes, f"{source.paths[0].name}: writer {who}")
            if len(pictures):
                writer.append("pixels", pictures)
                writer.append("classes", np.asarray(labels, dtype=np.int64))
                starts.append(starts[-1] + len(pictures))
        if len(starts) == 1:
            raise ValueError(f"{source.paths[0]} has no characters")
        writer.append("starts", np.array(starts, dtype=np.int64))

    return cached_arrays(recipe, source.paths, build)


def _checked(pixels: Any, labels: Any, classes: int, where: str) -> Any:
    pictures = np.asarray(pixels, dtype=np.float32)
    if len(pictures) and pictures[0].size != SIDE * SIDE:
        raise ValueError(f"{where} must have pictures of 28 by 28, got {pictures[0].size} numbers")
    pictures = pictures.reshape(-1, SIDE, SIDE)
    if len(pictures) and not (pictures.min() >= 0 and pictures.max() <= 1):
        raise ValueError(f"{where} must have pixels from 0 to 1, got {pictures.min():g} to {pictures.max():g}")
    if len(labels) and not (np.min(labels) >= 0 and np.max(labels) < classes):
        raise ValueError(f"{where} must have classes from 0 to {classes - 1}, got {np.min(labels)} to {np.max(labels)}")
    return pictures


def _of_split(split: Split) -> Source:
    def read() -> Writers:
        file = split.open()
        try:
            for client in file.clients():
                found = file.read(client, ("pixels", "label"))
                yield client, found["pixels"], found["label"]
        finally:
            file.close()

    return Source((split.path,), read)


def _of_leaf(folder: Path, name: str, names: Names, classes: int) -> tuple[Source, Source]:
    """Files that LEAF's `preprocess.sh -t sample` has put into train/ and test/."""
    train, test = (tuple(sorted((folder / part).glob("*.json"), key=_numbered)) for part in ("train", "test"))
    if not train or not test:
        raise missing(folder, (names.hdf5[0], names.sqlite, names.fedjax[0], "train/*.json of LEAF"), name)

    def chosen(paths: tuple[Path, ...]) -> Writers:
        for user, pixels, labels in read_leaf(paths):
            kept = labels < classes if classes == 10 else slice(None)
            yield user, pixels[kept], labels[kept]

    return Source(train, lambda: chosen(train)), Source(test, lambda: chosen(test))


def _numbered(path: Path) -> tuple[list[int], str]:
    """all_data_2… before all_data_10…."""
    digits = "".join(character if character.isdigit() else " " for character in path.name)
    return [int(number) for number in digits.split()], path.name
