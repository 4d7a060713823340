"""TensorFlow Federated's HDF5 files, tested on small files written by h5py."""

import numpy as np
import pytest
from formats import tff_hdf5

from coalmine.simulation.tasks.tff_files import Hdf5Clients

PIXELS = np.linspace(0, 1, 2 * 784, dtype=np.float32).reshape(2, 28, 28)


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
    with pytest.raises(ValueError, match="client a has no pixels; it has"):
        file.read("a", ("pixels",))
    file.close()


def test_hdf5_texts_of_fixed_length_are_read(tmp_path):
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("examples/a/snippets", data=np.array([b"to be", b"or"], dtype="S8"))
    assert Hdf5Clients(tmp_path / "a.h5").read("a", ("snippets",))["snippets"] == [b"to be", b"or"]


def test_hdf5_pixels_are_unchanged(tmp_path):
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
    tff_hdf5(tmp_path / "a.h5", {})
    with pytest.raises(ValueError, match="has no group `examples`"):
        Hdf5Clients(tmp_path / "a.h5")
    tff_hdf5(tmp_path / "b.h5", {"a": {"pixels": PIXELS, "label": np.array([1])}})
    with pytest.raises(ValueError, match="client a must have the same number of each feature, got 2 pixels, 1 label"):
        Hdf5Clients(tmp_path / "b.h5").read("a", ("pixels", "label"))
