"""Text tasks: Stack Overflow and Stack Exchange by word, Shakespeare by character."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.engines import Examples
from coalmine.simulation.models import character_lstm, word_lstm
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks.cache import Arrays, Writer, cached_arrays, starts_of, tensor, write_clients
from coalmine.simulation.tasks.symbols import (
    PADDING,
    Vocabulary,
    most_used_words,
    read_word_counts,
    sentence_rows,
    snippet_rows,
)
from coalmine.simulation.tasks.task import Task, missing_files
from coalmine.simulation.tasks.tff_files import (
    TEST_EXAMPLES,
    Hdf5Clients,
    Split,
    find_splits,
    order_of_test_clients,
    select_test_examples,
)

STACKOVERFLOW = ("stackoverflow_train.h5", "stackoverflow_test.h5")
WORD_COUNT = "stackoverflow.word_count"
STACKEXCHANGE = "stackexchange_by_user.jsonl.gz"
STACKEXCHANGE_SHA256 = "1305f121a97cc5fa03613beefa785834778e1bf3459932002439bc9b891326c2"
FEWEST_SENTENCES = 5  # per training client of Stack Exchange
SHAKESPEARE = ("shakespeare_train.h5", "shakespeare_test.h5")
BY_ROLE = "shakespeare_by_role.jsonl.gz"
BY_ROLE_SHA256 = "e46894f099f80823b5cd38db9a4602fcf34e5c81da72134a16a9cd961f3b8b4b"


def stackoverflow(folder: Path) -> Task:
    """Sentences of 342,477 users before 2018, each user a client (Section 5.1); the paper's LSTM for the next word.

    The vocabulary is the first 10,000 words of stackoverflow.word_count. Accuracy is measured on the first 10,000
    sentences after 2018, with users in a fixed order. The sentences stay on disk, 42 bytes each; a round reads only those
    of its clients.
    """
    splits = find_splits(folder, STACKOVERFLOW)
    if splits is None:
        raise missing_files(folder, STACKOVERFLOW, "stackoverflow")
    counts = folder / WORD_COUNT
    if not counts.is_file():
        raise missing_files(folder, (WORD_COUNT,), "stackoverflow")
    vocabulary = read_word_counts(counts)
    train = _all_sentences(splits[0], counts, vocabulary)
    test = _test_sentences(splits[1], counts, vocabulary)
    return Task(
        "stackoverflow",
        word_lstm(len(vocabulary.words)),
        next_symbols(train["rows"]),
        next_symbols(test["rows"]),
        Consecutive(starts_of(train)),
        unscored_labels=vocabulary.unscored,
        title=DATASETS["stackoverflow"].title,
    )


def _all_sentences(split: Split, counts: Path, vocabulary: Vocabulary) -> Arrays:
    users = ({"rows": sentence_rows(features["tokens"], vocabulary)} for _, features in split.read("tokens"))
    return cached_arrays(
        "stackoverflow-train", (split.path, counts), lambda writer: write_clients(writer, users, source=split.path)
    )


def _test_sentences(split: Split, counts: Path, vocabulary: Vocabulary) -> Arrays:
    def build(writer: Writer) -> None:
        left = TEST_EXAMPLES
        with closing(Hdf5Clients(split.path)) as file:
            clients = file.clients()
            for number in order_of_test_clients(len(clients)).tolist():
                rows = sentence_rows(file.read(clients[number], ("tokens",))["tokens"], vocabulary)[:left]
                writer.append("rows", rows)
                left -= len(rows)
                if not left:
                    break
        if left == TEST_EXAMPLES:
            raise ValueError(f"{split.path} has no test examples")

    return cached_arrays("stackoverflow-test", (split.path, counts), build)


def stackexchange(folder: Path) -> Task:
    """Sentences of 5,022 users, each a client, and the paper's LSTM for next words.

    Clients are the users with at least five sentences; the vocabulary is the 10,000 words that most of them use. Accuracy
    is measured on the 8,704 sentences of the 3,654 users with fewer than five. No user is in both groups.
    """
    path = folder / STACKEXCHANGE
    if not path.is_file():
        raise missing_files(folder, (STACKEXCHANGE,), "stackexchange")
    arrays = cached_arrays("stackexchange", (path,), lambda writer: _build_stackexchange(path, writer))
    vocabulary = Vocabulary(tuple(arrays["words"].tobytes().split(b"\n")))
    return Task(
        "stackexchange",
        word_lstm(len(vocabulary.words)),
        next_symbols(arrays["rows"]),
        next_symbols(arrays["tested_rows"]),
        Consecutive(starts_of(arrays)),
        unscored_labels=vocabulary.unscored,
        title=title_of(path, DATASETS["stackexchange"].title, sha256=STACKEXCHANGE_SHA256),
    )


def _build_stackexchange(path: Path, writer: Writer) -> None:
    users = _users(path)
    clients = {user: sentences for user, sentences in users.items() if len(sentences) >= FEWEST_SENTENCES}
    others = [sentence for user, sentences in users.items() if user not in clients for sentence in sentences]
    if not clients or not others:
        raise ValueError(
            f"{path} must have users with at least {FEWEST_SENTENCES} sentences, for training, and users with fewer, for "
            "testing"
        )
    vocabulary = most_used_words(clients.values())
    writer.append("words", np.frombuffer(b"\n".join(vocabulary.words), dtype=np.uint8))
    rows = ({"rows": sentence_rows(sentences, vocabulary)} for sentences in clients.values())
    write_clients(writer, rows, source=path)
    writer.append("tested_rows", sentence_rows(others, vocabulary))


def _users(path: Path) -> dict[str, list[bytes]]:
    """Each user's sentences, users in the order of their ids."""
    users: dict[str, list[bytes]] = {}
    for where, record in read_jsonl(path):
        posts = record.get("posts")
        if not isinstance(posts, list) or not all(isinstance(post, dict) for post in posts):
            raise ValueError(f"{where} must have a list of posts")
        if record["client_id"] in users:
            raise ValueError(f"{where} has user {record['client_id']}, who is on an earlier line")
        users[record["client_id"]] = [text for post in posts for text in texts(post.get("sentences"), where)]
    return dict(sorted(users.items()))


def shakespeare(folder: Path) -> Task:
    """Speeches in rows of 80 characters, each role a client, and the two LSTM layers of 820,522 parameters.

    TensorFlow Federated's files are used if they exist, otherwise the plays by role. By role, roles with one speech are
    left out, and the last fifth of each role's speeches, rounded up, is for testing. Accuracy is measured on the first
    10,000 test rows, with roles in a fixed order.
    """
    splits = find_splits(folder, SHAKESPEARE)
    if splits is not None:
        train = _speeches("shakespeare-train", splits[0].path, _snippets(splits[0]))
        test = _speeches("shakespeare-test", splits[1].path, _snippets(splits[1]))
        title = DATASETS["shakespeare"].title
    else:
        path = folder / BY_ROLE
        if not path.is_file():
            raise missing_files(folder, (*SHAKESPEARE, BY_ROLE), "shakespeare")
        train = _speeches("shakespeare-by-role-train", path, (role[0] for role in _roles(path)))
        test = _speeches("shakespeare-by-role-test", path, (role[1] for role in _roles(path)))
        title = title_of(path, DATASETS["shakespeare-by-role"].title, sha256=BY_ROLE_SHA256)
    return Task(
        "shakespeare",
        character_lstm(),
        next_symbols(train["rows"]),
        next_symbols(test["rows"][select_test_examples(starts_of(test))]),
        Consecutive(starts_of(train)),
        unscored_labels=(PADDING,),
        title=title,
    )


def _speeches(recipe: str, path: Path, roles: Iterator[list[bytes]]) -> Arrays:
    clients = ({"rows": np.concatenate([snippet_rows(speech) for speech in role])} for role in roles if role)
    return cached_arrays(recipe, (path,), lambda writer: write_clients(writer, clients, source=path))


def _snippets(split: Split) -> Iterator[list[bytes]]:
    return (features["snippets"] for _, features in split.read("snippets"))


def _roles(path: Path) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Each role's speeches for training and for testing."""
    for where, record in read_jsonl(path):
        speeches = texts(record.get("snippets"), where)
        test_count = -(-len(speeches) // 5)
        if len(speeches) > 1:
            yield speeches[:-test_count], speeches[-test_count:]


def next_symbols(rows: Any) -> Examples:
    """Rows of length + 1 symbols as `length` inputs and their labels: two views of the same memory."""
    symbols = tensor(rows)
    return Examples(symbols[:, :-1], symbols[:, 1:])


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line's object, and its location for error messages."""
    try:
        with gzip.open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield f"{path}, line {number}", _parse_record(line, f"{path}, line {number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error})") from None


def _parse_record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    if not isinstance(record, dict) or not isinstance(record.get("client_id"), str):
        raise ValueError(f"{where} must be an object with a client_id")
    return record


def texts(values: Any, where: str) -> list[bytes]:
    """A list of texts as bytes."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{where} must have a list of texts")
    return [value.encode() for value in values]


def title_of(path: Path, title: str, *, sha256: str) -> str:
    """The title if the file has this checksum; otherwise the file's name and checksum."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return title if digest == sha256 else f"{path.name} with sha256 {digest[:12]}…"
