"""Stack Overflow: the next word of its users' sentences, from the files of TensorFlow Federated or of fedjax."""

from pathlib import Path

import numpy as np

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.models import word_lstm
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks.cache import Arrays, Writer, cached_arrays
from coalmine.simulation.tasks.sentences import next_symbols
from coalmine.simulation.tasks.splits import (
    TEST_EXAMPLES,
    Names,
    Split,
    find_splits,
    missing,
    order_of_tests,
    starts_of,
)
from coalmine.simulation.tasks.symbols import Vocabulary, read_word_counts, sentence_rows
from coalmine.simulation.tasks.task import Task

NAMES = Names(
    hdf5=("stackoverflow_train.h5", "stackoverflow_test.h5"),
    sqlite="stackoverflow.sqlite",
    sqlite_splits=("train", "test"),
    fedjax=("stackoverflow_train.sqlite", "stackoverflow_test.sqlite"),
)
WORD_COUNT = "stackoverflow.word_count"


def stackoverflow(folder: Path) -> Task:
    """Sentences of 342,477 users before 2018, each user a client (Section 5.1); the paper's LSTM.

    The vocabulary is the first 10,000 words of stackoverflow.word_count. Tested is on the first 10,000 sentences after
    2018 of the users in an order that is always the same. The sentences stay on disk, 42 bytes each, and only those of
    the clients of a round are read.
    """
    splits = find_splits(folder, NAMES)
    if splits is None:
        raise missing(folder, (NAMES.hdf5[0], NAMES.sqlite, NAMES.fedjax[0]), "stackoverflow")
    counts = folder / WORD_COUNT
    if not counts.is_file():
        raise missing(folder, (WORD_COUNT,), "stackoverflow")
    vocabulary = read_word_counts(counts)
    learnt = _train(splits[0], counts, vocabulary)
    tested = _test(splits[1], counts, vocabulary)
    return Task(
        "stackoverflow",
        word_lstm(len(vocabulary.words)),
        next_symbols(learnt["rows"]),
        next_symbols(tested["rows"]),
        Consecutive(starts_of(learnt)),
        unscored_labels=vocabulary.unscored,
        title=DATASETS["stackoverflow"].title,
    )


def _train(split: Split, counts: Path, vocabulary: Vocabulary) -> Arrays:
    def build(writer: Writer) -> None:
        starts = [0]
        file = split.open()
        try:
            for client in file.clients():
                rows = sentence_rows(file.read(client, ("tokens",))["tokens"], vocabulary)
                if len(rows):
                    writer.append("rows", rows)
                    starts.append(starts[-1] + len(rows))
        finally:
            file.close()
        if len(starts) == 1:
            raise ValueError(f"{split.path} has no sentences")
        writer.append("starts", np.array(starts, dtype=np.int64))

    return cached_arrays("stackoverflow-train", (split.path, counts), build)


def _test(split: Split, counts: Path, vocabulary: Vocabulary) -> Arrays:
    def build(writer: Writer) -> None:
        file = split.open()
        try:
            clients = file.clients()
            left = TEST_EXAMPLES
            for number in order_of_tests(len(clients)).tolist():
                rows = sentence_rows(file.read(clients[number], ("tokens",))["tokens"], vocabulary)[:left]
                writer.append("rows", rows)
                left -= len(rows)
                if not left:
                    break
        finally:
            file.close()
        if left == TEST_EXAMPLES:
            raise ValueError(f"{split.path} has no sentences to be tested on")

    return cached_arrays("stackoverflow-test", (split.path, counts), build)
