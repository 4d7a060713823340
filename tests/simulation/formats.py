"""Small files in the formats of others, written by encoders of the tests' own."""

import sqlite3
import struct
from pathlib import Path

import numpy as np


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    pieces = []
    while number >= 128:
        pieces.append(number % 128 + 128)
        number //= 128
    return bytes([*pieces, number])


def message(field: int, content: bytes) -> bytes:
    return varint(field * 8 + 2) + varint(len(content)) + content


def feature(values, *, packed: bool = True) -> bytes:
    """A tf.train.Feature: bytes, or a numpy array of float32 or of whole numbers."""
    if isinstance(values, bytes):
        return message(1, message(1, values))
    array = np.atleast_1d(values)
    if array.dtype.kind == "f":
        numbers = [struct.pack("<f", number) for number in array.tolist()]
        content = message(1, b"".join(numbers)) if packed else b"".join(varint(13) + number for number in numbers)
        return message(2, content)
    numbers = [varint(number) for number in array.tolist()]
    content = message(1, b"".join(numbers)) if packed else b"".join(varint(8) + number for number in numbers)
    return message(3, content)


def example(features: dict, *, packed: bool = True) -> bytes:
    """A tf.train.Example."""
    entries = [
        message(1, name.encode()) + message(2, feature(value, packed=packed)) for name, value in features.items()
    ]
    return message(1, b"".join(message(1, entry) for entry in entries))


def tff_sqlite(path: Path, splits: dict[str, dict[str, list[dict]]]) -> None:
    """splits[split][client] is a list of examples, each a dict of features."""
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        database.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        database.execute("CREATE INDEX by_client ON examples (client_id)")
        for split, clients in splits.items():
            for client, examples in clients.items():
                rows = [(split, client, example(features)) for features in examples]
                database.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
                database.execute("INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(examples)))
    database.close()


def tff_hdf5(path: Path, clients: dict[str, dict]) -> None:
    """clients[client][feature] is an array, or a list of bytes."""
    import h5py

    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, values in features.items():
                kind = h5py.string_dtype() if isinstance(values, list) else None
                file.create_dataset(f"examples/{client}/{name}", data=values, dtype=kind)
