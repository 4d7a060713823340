"""Stack Exchange, 15 sites: the next word of its users' sentences. It stands in for Stack Overflow."""

from pathlib import Path

import numpy as np

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.models import word_lstm
from coalmine.simulation.population import Consecutive
from coalmine.simulation.tasks.cache import Writer, cached_arrays
from coalmine.simulation.tasks.jsonl import read_jsonl, texts, title_of
from coalmine.simulation.tasks.sentences import next_symbols
from coalmine.simulation.tasks.splits import missing, starts_of
from coalmine.simulation.tasks.symbols import Vocabulary, most_used_words, sentence_rows
from coalmine.simulation.tasks.task import Task

FILE = "stackexchange_by_user.jsonl.gz"
SHA256 = "1305f121a97cc5fa03613beefa785834778e1bf3459932002439bc9b891326c2"
FEWEST = 5  # sentences of a client


def stackexchange(folder: Path) -> Task:
    """Sentences of 5,022 users, each a client, and the paper's LSTM for next words.

    Clients are the users with five sentences or more; the vocabulary is the 10,000 words that most of them use. Tested is
    on the 8,704 sentences of the 3,654 users who wrote fewer than five: nobody is in both.
    """
    path = folder / FILE
    if not path.is_file():
        raise missing(folder, (FILE,), "stackexchange")
    arrays = cached_arrays("stackexchange", (path,), lambda writer: _build(path, writer))
    vocabulary = Vocabulary(tuple(arrays["words"].tobytes().split(b"\n")))
    return Task(
        "stackexchange",
        word_lstm(len(vocabulary.words)),
        next_symbols(arrays["rows"]),
        next_symbols(arrays["tested_rows"]),
        Consecutive(starts_of(arrays)),
        unscored_labels=vocabulary.unscored,
        title=title_of(path, DATASETS["stackexchange"].title, sha256=SHA256),
    )


def _build(path: Path, writer: Writer) -> None:
    users = _users(path)
    clients = {user: sentences for user, sentences in users.items() if len(sentences) >= FEWEST}
    others = [sentence for user, sentences in users.items() if user not in clients for sentence in sentences]
    if not clients or not others:
        raise ValueError(
            f"{path} must have users with {FEWEST} sentences or more, who train, and users with fewer, who are tested on"
        )
    vocabulary = most_used_words(clients.values())
    writer.append("words", np.frombuffer(b"\n".join(vocabulary.words), dtype=np.uint8))
    for sentences in clients.values():
        writer.append("rows", sentence_rows(sentences, vocabulary))
    sizes = [len(sentences) for sentences in clients.values()]
    writer.append("starts", np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))
    writer.append("tested_rows", sentence_rows(others, vocabulary))


def _users(path: Path) -> dict[str, list[bytes]]:
    """Each user's sentences, users in the order of their ids."""
    users: dict[str, list[bytes]] = {}
    for where, found in read_jsonl(path):
        posts = found.get("posts")
        if not isinstance(posts, list) or not all(isinstance(post, dict) for post in posts):
            raise ValueError(f"{where} must have a list of posts")
        if found["client_id"] in users:
            raise ValueError(f"{where} has user {found['client_id']}, who was there before")
        users[found["client_id"]] = [text for post in posts for text in texts(post.get("sentences"), where)]
    return dict(sorted(users.items()))
