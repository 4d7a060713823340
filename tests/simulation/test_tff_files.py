"""The formats of TensorFlow Federated, fedjax and LEAF, on files that the tests' own encoders wrote."""

import sqlite3
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from formats import example, fedjax_sqlite, leaf_json, message, packed, tff_hdf5, tff_sqlite

from coalmine.simulation.tasks.leaf import read_leaf
from coalmine.simulation.tasks.tff_files import (
    FedjaxClients,
    Hdf5Clients,
    SqliteClients,
    read_example,
    read_msgpack,
)

PIXELS = np.linspace(0, 1, 2 * 784, dtype=np.float32).reshape(2, 28, 28)
STACK_OVERFLOW = {
    "creation_date": b"2018-02-28 19:06:18.34 UTC",
    "score": np.array([-3]),
    "tags": b"mysql|join",
    "title": b"a title",
    "tokens": b"how do i join ?",
    "type": b"question",
}


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_example_is_decoded(is_packed):
    blob = example({"pixels": PIXELS[1].ravel(), "label": np.array([61]), "name": b"f0000_14"}, packed=is_packed)
    found = read_example(blob, ("label", "pixels", "name"))
    np.testing.assert_array_equal(found["pixels"], PIXELS[1].ravel())
    assert found["pixels"].dtype == np.float32
    assert found["label"].tolist() == [61]
    assert found["name"] == b"f0000_14"


def test_whole_numbers_keep_their_sign_and_all_their_bits():
    numbers = np.array([0, 1, -1, 127, 128, 2**62, -(2**63), 2**63 - 1])
    for is_packed in (True, False):
        assert read_example(example({"n": numbers}, packed=is_packed), ("n",))["n"].tolist() == numbers.tolist()


def test_only_what_is_wanted_is_decoded():
    assert read_example(example(STACK_OVERFLOW), ("tokens",)) == {"tokens": b"how do i join ?"}
    assert read_example(example(STACK_OVERFLOW), ("score",))["score"].tolist() == [-3]


def test_google_s_own_protobuf_writes_what_is_read():
    """tf.train.Example built by the protobuf library from its description: an encoder that is not ours."""
    pytest.importorskip("google.protobuf")
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {"BytesList": 12, "FloatList": 2, "Int64List": 3}
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(kinds, start=1):
        feature.field.add(name=name.lower(), number=number, label=1, type=11, type_name=f".t.{name}", oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=1, type=9)
    entry.field.add(name="value", number=2, label=1, type=11, type_name=".t.Feature")
    features.field.add(name="feature", number=1, label=3, type=11, type_name=".t.Features.FeatureEntry")
    file.message_type.add(name="Example").field.add(
        name="features", number=1, label=1, type=11, type_name=".t.Features"
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))()
    theirs.features.feature["pixels"].floatlist.value.extend(PIXELS[0].ravel().tolist())
    theirs.features.feature["label"].int64list.value.extend([7, -7])
    theirs.features.feature["tokens"].byteslist.value.append(b"a b c")
    found = read_example(theirs.SerializeToString(), ("pixels", "label", "tokens"))
    np.testing.assert_array_equal(found["pixels"], PIXELS[0].ravel())
    assert found["label"].tolist() == [7, -7]
    assert found["tokens"] == b"a b c"
    ours = example({"label": np.array([7, -7]), "pixels": PIXELS[0].ravel(), "tokens": b"a b c"})
    assert type(theirs).FromString(ours) == theirs


def test_damaged_examples_are_refused_wherever_they_are_cut():
    blob = example({"tokens": b"how do i join ?", "label": np.array([300])})
    for length in range(len(blob)):
        with pytest.raises(ValueError, match=r"ends too early|has no"):
            read_example(blob[:length], ("tokens", "label"))


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        (b"\xff" * 20, "ends too early"),
        (message(1, message(1, message(1, b"tokens") + message(2, b""))), "a feature is empty"),
        (message(1, message(1, message(1, b"tokens") + message(2, message(1, b"")))), "must be one text, got 0"),
        (b"\x0b", "no fields of kind 3"),
        (message(1, message(1, b"\x0a")), "ends too early"),
        (message(1, message(1, message(1, b"tokens") + message(2, message(1, b"\x08\x01")))), "an example is damaged"),
    ],
)
def test_what_is_no_example_is_refused(blob, problem):
    with pytest.raises(ValueError, match=problem):
        read_example(blob, ("tokens",))


def test_sqlite_clients_are_those_of_the_split_in_order(tmp_path):
    path = tmp_path / "emnist_all.sqlite"
    one = [{"pixels": PIXELS[0].ravel(), "label": np.array([3])}, {"pixels": PIXELS[1].ravel(), "label": np.array([4])}]
    other = [{"pixels": PIXELS[1].ravel(), "label": np.array([5])}]
    tff_sqlite(path, {"all_train": {"f0002_00": one, "f0001_41": other}, "all_test": {"f0003_00": other}})
    file = SqliteClients(path, "all_train")
    assert file.clients() == ["f0001_41", "f0002_00"]
    found = file.read("f0002_00", ("pixels", "label"))
    np.testing.assert_array_equal(found["pixels"], PIXELS.reshape(2, 784))
    assert found["label"].tolist() == [3, 4]
    assert file.read("f0003_00", ("label",)) == {"label": []}  # of another split
    file.close()
    with pytest.raises(ValueError, match="has no split digits_only_train, but all_test, all_train"):
        SqliteClients(path, "digits_only_train")


def test_hdf5_and_fedjax_hold_the_same(tmp_path):
    clients = {
        "b": {"tokens": [b"how do i", b"caf\xc3\xa9"], "score": np.array([1, -2])},
        "a": {"tokens": [b"x"], "score": np.array([5])},
    }
    tff_hdf5(tmp_path / "a.h5", clients)
    fedjax_sqlite(tmp_path / "a.sqlite", clients)
    for file in (Hdf5Clients(tmp_path / "a.h5"), FedjaxClients(tmp_path / "a.sqlite")):
        assert file.clients() == ["a", "b"]
        found = file.read("b", ("tokens", "score"))
        assert found["tokens"] == [b"how do i", b"caf\xc3\xa9"]
        assert found["score"].tolist() == [1, -2]
        with pytest.raises(ValueError, match="client a has no pixels, but"):
            file.read("a", ("pixels",))
        file.close()


def test_hdf5_texts_of_fixed_length_are_read_too(tmp_path):
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("examples/a/snippets", data=np.array([b"to be", b"or"], dtype="S8"))
    assert Hdf5Clients(tmp_path / "a.h5").read("a", ("snippets",))["snippets"] == [b"to be", b"or"]


def test_pixels_come_through_all_formats_unchanged(tmp_path):
    clients = {"f0000_14": {"pixels": PIXELS, "label": np.array([1, 2], dtype=np.int32)}}
    tff_hdf5(tmp_path / "a.h5", clients)
    fedjax_sqlite(tmp_path / "a.sqlite", clients)
    for file in (Hdf5Clients(tmp_path / "a.h5"), FedjaxClients(tmp_path / "a.sqlite")):
        found = file.read("f0000_14", ("pixels", "label"))
        np.testing.assert_array_equal(found["pixels"], PIXELS)
        assert found["label"].tolist() == [1, 2]
        file.close()


def test_files_that_are_something_else_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"hello" * 100)
    with pytest.raises(ValueError, match="is no whole HDF5 file"):
        Hdf5Clients(path)
    with pytest.raises(ValueError, match=r"is damaged \(file is not a database\)"):
        SqliteClients(path, "train")
    with pytest.raises(FileNotFoundError, match="is not there"):
        FedjaxClients(tmp_path / "none")
    sqlite3.connect(tmp_path / "empty").execute("CREATE TABLE other (a TEXT)").connection.close()
    with pytest.raises(ValueError, match="has no table examples"):
        SqliteClients(tmp_path / "empty", "train")
    with pytest.raises(ValueError, match="has no table federated_data"):
        FedjaxClients(tmp_path / "empty")
    tff_hdf5(tmp_path / "a.h5", {})
    with pytest.raises(ValueError, match="has no group `examples`"):
        Hdf5Clients(tmp_path / "a.h5")
    tff_hdf5(tmp_path / "b.h5", {"a": {"pixels": PIXELS, "label": np.array([1])}})
    with pytest.raises(ValueError, match="client a must have as many of each, got 2 pixels, 1 label"):
        Hdf5Clients(tmp_path / "b.h5").read("a", ("pixels", "label"))


def test_a_damaged_row_says_whose(tmp_path):
    path = tmp_path / "a.sqlite"
    tff_sqlite(path, {"train": {"ann": [{"tokens": b"a b"}]}})
    with sqlite3.connect(path) as database:
        database.execute("UPDATE examples SET serialized_example_proto = substr(serialized_example_proto, 1, 9)")
    database.close()
    with pytest.raises(ValueError, match=r"is damaged at client ann \(a protobuf ends too early\)"):
        SqliteClients(path, "train").read("ann", ("tokens",))


def test_msgpack_of_the_library_is_read():
    """fedjax packs with the msgpack library, in its shortest forms."""
    msgpack = pytest.importorskip("msgpack")

    def extension(value):
        if value.dtype == object:
            return msgpack.ExtType(4, msgpack.packb((value.shape, value.tolist())))
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))

    for count in (1, 2, 20, 40, 300, 70_000):
        arrays = {
            "n" * count: np.arange(-count, count),
            "t": np.array([b"x" * (count - 1), b""], dtype=object),
            "f": np.linspace(0, 1, count, dtype=np.float32).reshape(1, count),
        } | {f"{i}": np.array([i]) for i in range(min(count, 70))}
        found = read_msgpack(msgpack.packb(arrays, default=extension))
        assert list(found) == list(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)


def test_damaged_msgpack_is_refused_wherever_it_is_cut():
    blob = packed({"tokens": np.array([b"a"], dtype=object), "n": np.array([1, 2])})
    for length in range(len(blob)):
        with pytest.raises(ValueError, match="ends too early"):
            read_msgpack(blob[:length])
    with pytest.raises(ValueError, match="one dict of arrays"):
        read_msgpack(packed([1]))
    with pytest.raises(ValueError, match="is none that fedjax writes"):
        read_msgpack(packed({"a": 1})[:-9] + b"\xc0")
    with pytest.raises(ValueError, match="arrays must hold numbers"):
        read_msgpack(packed({"a": np.array([1 + 2j])}))


@settings(max_examples=300)
@given(st.data())
def test_bytes_that_were_changed_are_read_or_refused(data):
    """Never an error that a user could not understand."""
    blob = bytearray(
        data.draw(
            st.sampled_from(
                [example(STACK_OVERFLOW), packed({"tokens": np.array([b"a", b"b"], dtype=object), "n": np.arange(3)})]
            )
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    for read in (lambda: read_example(bytes(blob), ("tokens", "score")), lambda: read_msgpack(bytes(blob))):
        with suppress(ValueError):
            read()


def test_nested_too_deep():
    with pytest.raises(ValueError, match="a msgpack is damaged"):
        read_msgpack(b"\x91" * 100_000)


def test_a_damaged_fedjax_client_says_whose(tmp_path):
    path = tmp_path / "a.sqlite"
    fedjax_sqlite(path, {"ann": {"tokens": [b"x"]}})
    for blob, problem in ((b"junk", "header"), (zlib.compress(b"\xdf"), "ends too early")):
        with sqlite3.connect(path) as database:
            database.execute("UPDATE federated_data SET data = ?", (blob,))
        database.close()
        with pytest.raises(ValueError, match=f"is damaged at client ann .*{problem}"):
            FedjaxClients(path).read("ann", ("tokens",))


def test_leaf_users_come_file_after_file(tmp_path):
    leaf_json(tmp_path / "a.json", {"f1": (PIXELS.reshape(2, 784), [3, 40]), "f0": (PIXELS[:1].reshape(1, 784), [9])})
    leaf_json(tmp_path / "b.json", {"f2": (PIXELS[1:].reshape(1, 784), [61])})
    found = list(read_leaf([tmp_path / "a.json", tmp_path / "b.json"]))
    assert [user for user, _, _ in found] == ["f1", "f0", "f2"]
    np.testing.assert_allclose(found[0][1], PIXELS.reshape(2, 784), rtol=1e-7)
    assert found[0][2].tolist() == [3, 40]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no whole JSON file"),
        ("[]", "must have users, and user_data for each of them"),
        ('{"users": ["a"], "user_data": {}}', "must have users, and user_data for each of them"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]]}}}', "user a must have rows of numbers x and classes y"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1]], "y": [1, 2]}}}', "as many x as y, got 1 and 2"),
    ],
)
def test_json_that_is_not_leaf_s_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(read_leaf([tmp_path / "a.json"]))


def test_nobody_is_in_two_files(tmp_path):
    for name in ("a.json", "b.json"):
        leaf_json(tmp_path / name, {"f1": (PIXELS.reshape(2, 784), [3, 4])})
    with pytest.raises(ValueError, match="has user f1, who was in a file before"):
        list(read_leaf([tmp_path / "a.json", tmp_path / "b.json"]))
