"""Shakespeare: the next character of what a role says, from TensorFlow Federated's files or from plays by role."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.models import character_lstm
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks.cache import Arrays, Writer, cached_arrays
from coalmine.simulation.tasks.jsonl import read_jsonl, texts, title_of
from coalmine.simulation.tasks.sentences import next_symbols
from coalmine.simulation.tasks.splits import Names, Split, chosen_for_tests, find_splits, missing, starts_of
from coalmine.simulation.tasks.symbols import PADDING, snippet_rows
from coalmine.simulation.tasks.task import Task

NAMES = Names(
    hdf5=("shakespeare_train.h5", "shakespeare_test.h5"),
    sqlite="shakespeare.sqlite",
    sqlite_splits=("train", "test"),
    fedjax=("shakespeare_train.sqlite", "shakespeare_test.sqlite"),
)
BY_ROLE = "shakespeare_by_role.jsonl.gz"
BY_ROLE_SHA256 = "e46894f099f80823b5cd38db9a4602fcf34e5c81da72134a16a9cd961f3b8b4b"

Roles = Iterator[tuple[list[bytes], list[bytes]]]  # speeches to learn from, and to be tested on


def shakespeare(folder: Path) -> Task:
    """Speeches in rows of 80 characters, each role a client, and the two LSTM layers of 820,522 parameters.

    Of the plays by role, roles with one speech are left out, and of every other role the last fifth of the speeches,
    rounded up, is for testing: the first 10,000 rows of the roles in an order that is always the same.
    """
    splits = find_splits(folder, NAMES)
    if splits is not None:
        learnt = _of_split("shakespeare-train", splits[0])
        tested = _of_split("shakespeare-test", splits[1])
        title = DATASETS["shakespeare"].title
    else:
        path = folder / BY_ROLE
        if not path.is_file():
            raise missing(folder, (NAMES.hdf5[0], NAMES.sqlite, NAMES.fedjax[0], BY_ROLE), "shakespeare")
        learnt, tested = (_by_role(path, part) for part in (0, 1))
        title = title_of(path, DATASETS["shakespeare-by-role"].title, sha256=BY_ROLE_SHA256)
    return Task(
        "shakespeare",
        character_lstm(),
        next_symbols(learnt["rows"]),
        next_symbols(tested["rows"][chosen_for_tests(starts_of(tested))]),
        Consecutive(starts_of(learnt)),
        unscored_labels=(PADDING,),
        title=title,
    )


def _of_split(recipe: str, split: Split) -> Arrays:
    def build(writer: Writer) -> None:
        file = split.open()
        try:
            _write(writer, (file.read(client, ("snippets",))["snippets"] for client in file.clients()), split.path)
        finally:
            file.close()

    return cached_arrays(recipe, (split.path,), build)


def _by_role(path: Path, part: int) -> Arrays:
    recipe = ("shakespeare-by-role-train", "shakespeare-by-role-test")[part]
    return cached_arrays(recipe, (path,), lambda writer: _write(writer, (role[part] for role in _roles(path)), path))


def _roles(path: Path) -> Roles:
    for where, found in read_jsonl(path):
        speeches = texts(found.get("snippets"), where)
        tested = -(-len(speeches) // 5)
        if len(speeches) > 1:
            yield speeches[:-tested], speeches[-tested:]


def _write(writer: Writer, roles: Iterator[list[bytes]], path: Path) -> None:
    starts = [0]
    for snippets in roles:
        rows = [snippet_rows(snippet) for snippet in snippets]
        if rows:
            writer.append("rows", np.concatenate(rows))
            starts.append(starts[-1] + sum(map(len, rows)))
    if len(starts) == 1:
        raise ValueError(f"{path} has no speeches")
    writer.append("starts", np.array(starts, dtype=np.int64))
