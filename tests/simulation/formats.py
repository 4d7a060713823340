"""Small files in the formats of others, written by encoders of the tests' own."""

import json
import sqlite3
import struct
import zlib
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


def packed(value) -> bytes:
    """msgpack, always in the longest form that there is."""
    if isinstance(value, dict):
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(packed(key) + packed(v) for key, v in value.items())
    if isinstance(value, list | tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    if isinstance(value, bytes):
        return b"\xc6" + struct.pack(">I", len(value)) + value
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if value.dtype == object:
        return _extension(4, packed([list(value.shape), value.ravel().tolist()]))
    return _extension(1, packed([list(value.shape), value.dtype.name, value.tobytes()]))


def _extension(kind: int, content: bytes) -> bytes:
    return b"\xc9" + struct.pack(">IB", len(content), kind) + content


def fedjax_sqlite(path: Path, clients: dict[str, dict]) -> None:
    with sqlite3.connect(path) as database:
        database.execute(
            "CREATE TABLE federated_data (client_id BLOB NOT NULL PRIMARY KEY, data BLOB NOT NULL, num_examples INTEGER)"
        )
        for client, features in clients.items():
            arrays = {
                name: np.array(values, dtype=object) if isinstance(values, list) else values
                for name, values in features.items()
            }
            blob = zlib.compress(packed(arrays))
            count = len(next(iter(arrays.values())))
            database.execute("INSERT INTO federated_data VALUES (?, ?, ?)", (client.encode(), blob, count))
    database.close()


def leaf_json(path: Path, users: dict[str, tuple]) -> None:
    """users[user] is pixels and classes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": np.asarray(x).tolist(), "y": np.asarray(y).tolist()} for user, (x, y) in users.items()}
    counts = [len(x) for x, _ in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))
