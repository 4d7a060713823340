"""The formats of TensorFlow Federated, on files that the tests' own encoders wrote."""

import sqlite3
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from formats import example, message, tff_hdf5, tff_sqlite

from coalmine.simulation.tasks.tff_files import (
    Hdf5Clients,
    SqliteClients,
    read_example,
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


def test_integers_keep_their_sign_and_all_bits():
    numbers = np.array([0, 1, -1, 127, 128, 2**62, -(2**63), 2**63 - 1])
    for is_packed in (True, False):
        assert read_example(example({"n": numbers}, packed=is_packed), ("n",))["n"].tolist() == numbers.tolist()


def test_only_requested_features_are_decoded():
    assert read_example(example(STACK_OVERFLOW), ("tokens",)) == {"tokens": b"how do i join ?"}
    assert read_example(example(STACK_OVERFLOW), ("score",))["score"].tolist() == [-3]


def test_examples_encoded_by_the_protobuf_library_are_decoded():
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


def test_examples_truncated_anywhere_are_rejected():
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
def test_invalid_examples_are_rejected(blob, problem):
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


def test_hdf5_texts_and_numbers_are_read(tmp_path):
    clients = {
        "b": {"tokens": [b"how do i", b"caf\xc3\xa9"], "score": np.array([1, -2])},
        "a": {"tokens": [b"x"], "score": np.array([5])},
    }
    tff_hdf5(tmp_path / "a.h5", clients)
    file = Hdf5Clients(tmp_path / "a.h5")
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


def test_hdf5_pixels_come_through_unchanged(tmp_path):
    clients = {"f0000_14": {"pixels": PIXELS, "label": np.array([1, 2], dtype=np.int32)}}
    tff_hdf5(tmp_path / "a.h5", clients)
    file = Hdf5Clients(tmp_path / "a.h5")
    found = file.read("f0000_14", ("pixels", "label"))
    np.testing.assert_array_equal(found["pixels"], PIXELS)
    assert found["label"].tolist() == [1, 2]
    file.close()


def test_files_of_another_format_are_rejected(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"hello" * 100)
    with pytest.raises(ValueError, match="is not a complete HDF5 file"):
        Hdf5Clients(path)
    with pytest.raises(ValueError, match=r"is damaged \(file is not a database\)"):
        SqliteClients(path, "train")
    with pytest.raises(FileNotFoundError, match="is not there"):
        SqliteClients(tmp_path / "none", "train")
    sqlite3.connect(tmp_path / "empty").execute("CREATE TABLE other (a TEXT)").connection.close()
    with pytest.raises(ValueError, match="has no table examples"):
        SqliteClients(tmp_path / "empty", "train")
    tff_hdf5(tmp_path / "a.h5", {})
    with pytest.raises(ValueError, match="has no group `examples`"):
        Hdf5Clients(tmp_path / "a.h5")
    tff_hdf5(tmp_path / "b.h5", {"a": {"pixels": PIXELS, "label": np.array([1])}})
    with pytest.raises(ValueError, match="client a must have as many of each, got 2 pixels, 1 label"):
        Hdf5Clients(tmp_path / "b.h5").read("a", ("pixels", "label"))


def test_damaged_row_error_names_the_client(tmp_path):
    path = tmp_path / "a.sqlite"
    tff_sqlite(path, {"train": {"ann": [{"tokens": b"a b"}]}})
    with sqlite3.connect(path) as database:
        database.execute("UPDATE examples SET serialized_example_proto = substr(serialized_example_proto, 1, 9)")
    database.close()
    with pytest.raises(ValueError, match=r"is damaged at client ann \(a protobuf ends too early\)"):
        SqliteClients(path, "train").read("ann", ("tokens",))


@settings(max_examples=300)
@given(st.data())
def test_changed_bytes_are_decoded_or_rejected(data):
    """Never an error that a user could not understand."""
    blob = bytearray(example(STACK_OVERFLOW))
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        read_example(bytes(blob), ("tokens", "score"))
