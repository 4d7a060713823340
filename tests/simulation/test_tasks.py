import gzip
import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from coalmine.simulation import load_task
from coalmine.simulation.models import accuracy, mlp, model_by_name
from coalmine.simulation.population import VirtualClients, partition_by_owner, random_partition
from coalmine.simulation.tasks.image_tasks import parse_idx, read_idx

DATA = os.environ.get("COALMINE_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="COALMINE_DATA_DIR names no folder with the real data")


def test_digits_are_split_over_200_clients():
    task = load_task("digits")
    shares = [task.population.examples(client) for client in range(len(task.population))]
    assert len(shares) == 200
    assert sorted(np.concatenate(shares)) == list(range(1500))
    sizes = {len(share) for share in shares}
    assert min(sizes) >= 3
    assert max(sizes) == task.population.most_examples <= 12
    assert len(task.test) == 297
    assert task.model.dim == 64 * 128 + 128 + 128 * 10 + 10
    assert task.train.inputs.min() == 0
    assert task.train.inputs.max() == 1


def test_digits_split_is_deterministic():
    first, second = load_task("digits"), load_task("digits")
    assert torch.equal(first.train.inputs, second.train.inputs)
    assert first.population.examples(7).tolist() == second.population.examples(7).tolist()


def test_virtual_clients_have_their_own_examples():
    population = load_task("digits", clients=100_000).population
    assert isinstance(population, VirtualClients)
    assert len(population) == 100_000
    examples = population.examples(99_999)
    assert examples.tolist() == population.examples(99_999).tolist()
    assert len(set(examples.tolist())) == 7
    assert examples.tolist() != population.examples(99_998).tolist()


@needs_data
def test_mnist_by_writer_has_539_writers_of_60000_digits():
    task = load_task("mnist-by-writer", data_dir=Path(str(DATA)))
    sizes = [len(task.population.examples(writer)) for writer in range(len(task.population))]
    assert (len(sizes), sum(sizes), min(sizes), max(sizes)) == (539, 60_000, 19, 131)
    assert len(task.test) == 10_000
    assert task.model.dim == 1_199_882
    assert task.train.inputs.shape == (60_000, 1, 28, 28)
    assert task.train.inputs.mean() > 0.8  # dark on white
    assert torch.bincount(task.train.labels).tolist()[:3] == [5923, 6742, 5958]  # MNIST's counts


@needs_data
def test_fashion_mnist_has_ten_equal_classes():
    task = load_task("fashion-mnist", data_dir=Path(str(DATA)))
    assert torch.bincount(task.train.labels).tolist() == [6000] * 10
    assert torch.bincount(task.test.labels).tolist() == [1000] * 10
    assert task.model.dim == 25_450
    assert len(task.population) == 600


def idx_file(path: Path, array: np.ndarray) -> str:
    content = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content))
    return hashlib.sha256(content).hexdigest()


def test_idx_files_are_read_as_written(tmp_path):
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    checksum = idx_file(tmp_path / "a.gz", array)
    np.testing.assert_array_equal(read_idx(tmp_path / "a.gz", sha256=checksum), array)


def test_damaged_files_are_reported(tmp_path):
    path = tmp_path / "a.gz"
    checksum = idx_file(path, np.arange(24, dtype=np.uint8))
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="does not hold the published data: sha256 "):
        read_idx(path, sha256="0" * 64)
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        read_idx(path, sha256=checksum)
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        read_idx(path, sha256=checksum)
    path.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"does not exist: run `coalmine data .*`, or give its folder's parent with --data-dir",
    ):
        read_idx(path, sha256=checksum)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x08\x01\0\0\0\x05abc", r"its header announces 5 bytes of shape \[5\], but 3 follow"),
        (b"\0\0\x0d\x01\0\0\0\x05abcde", "is not an idx file of bytes or 32-bit integers: it begins with 00000d01"),
        (b"PK", "is not an idx file"),
        (b"\0\0\x08\x03\0\0\0\x05", "is incomplete"),
    ],
)
def test_bytes_that_are_not_idx_are_rejected(content, message):
    with pytest.raises(ValueError, match=message):
        parse_idx(content, name="file")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cifar"}, "task must be one of digits, mnist-by-writer, fashion-mnist, .*, shakespeare, got 'cifar'"),
        (
            {"name": "digits", "clients": 10},
            "task digits has 200 clients, so task.clients must be at least 200, got 10",
        ),
        (
            {"name": "fashion-mnist", "data_dir": Path("/no/such/folder")},
            "the data folder /no/such/folder does not exist",
        ),
        ({"name": "fashion-mnist"}, "give their folder with --data-dir or COALMINE_DATA_DIR"),
    ],
)
def test_invalid_tasks_are_rejected(arguments, message, monkeypatch, tmp_path):
    monkeypatch.delenv("COALMINE_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_task(**arguments)


def test_partition_by_owner_assigns_examples_to_owners():
    partition = partition_by_owner(["b", "a", "b", "c", "a", "b"])
    assert [partition.examples(client).tolist() for client in range(3)] == [[1, 4], [0, 2, 5], [3]]
    with pytest.raises(ValueError, match="5 examples are too few for 6 clients"):
        random_partition(5, 6, seed=0)


def test_model_is_determined_by_its_name():
    assert model_by_name("mlp-64-128-10").shapes == mlp(64, 128, 10).shapes
    assert model_by_name("cnn-dropout-62").dim == 1_206_590
    with pytest.raises(
        ValueError, match="model must be like mlp-64-128-10, cnn-dropout-10 or word-lstm-10000, got 'lstm'"
    ):
        model_by_name("lstm")


def test_accuracy_is_the_share_of_correct_predictions():
    model = mlp(3, 3)
    vector = torch.cat([torch.eye(3).flatten(), torch.zeros(3)])  # predicts the index of the largest input
    inputs = torch.eye(3).repeat(5, 1)
    labels = torch.arange(3).repeat(5)
    labels[0] = 2
    assert accuracy(model, vector, inputs, labels, batch=4) == pytest.approx(14 / 15)
