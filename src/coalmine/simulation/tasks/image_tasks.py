"""Image tasks: scikit-learn's digits (the default), MNIST by writer, Fashion-MNIST and federated EMNIST."""

import gzip
import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.engines import Examples
from coalmine.simulation.models import cnn_dropout, mlp
from coalmine.simulation.population import Consecutive, partition_by_owner, random_partition
from coalmine.simulation.randomness import numpy_stream
from coalmine.simulation.tasks.cache import Arrays, cached_arrays, starts_of, tensor, write_clients
from coalmine.simulation.tasks.task import Task, missing_files
from coalmine.simulation.tasks.tff_files import Split, find_splits, select_test_examples

DIGITS_CLIENTS, DIGITS_TESTED = 200, 297
FASHION_CLIENTS = 600
WRITER = 2  # the column of the writer in QMNIST's labels

# sha256 of the unpacked contents, since mirrors compress the same file differently.
MNIST = {
    "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "qmnist-train-labels-idx2-int.gz": "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
}
FASHION = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
EMNIST = ("fed_emnist_train.h5", "fed_emnist_test.h5")
EMNIST_DIGITS = ("fed_emnist_digitsonly_train.h5", "fed_emnist_digitsonly_test.h5")
SIDE = 28
_IDX_TYPES: dict[int, np.dtype[Any]] = {0x08: np.dtype(np.uint8), 0x0C: np.dtype(">i4")}


def digits() -> Task:
    """1,500 digits over 200 clients, and 297 test digits; the same split in every run."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("training needs: pip install 'coalmine[simulation]'") from error
    images, labels = load_digits(return_X_y=True)
    order = numpy_stream(0, "digits").permutation(len(labels))
    inputs = torch.tensor(images[order] / 16, dtype=torch.float32)
    classes = torch.tensor(labels[order], dtype=torch.int64)
    train = Examples(inputs[DIGITS_TESTED:], classes[DIGITS_TESTED:])
    test = Examples(inputs[:DIGITS_TESTED], classes[:DIGITS_TESTED])
    population = random_partition(len(train), DIGITS_CLIENTS, seed=0)
    return Task("digits", mlp(64, 128, 10), train, test, population, title="scikit-learn's handwritten digits")


def mnist_by_writer(folder: Path) -> Task:
    """60,000 digits by 539 writers, each a client; 10,000 test digits by other writers; the paper's CNN.

    The digits are dark on white, as in federated EMNIST, which this task can replace.
    """
    images, tests, classes, extended = (read_idx(folder / name, sha256=checksum) for name, checksum in MNIST.items())
    train = Examples(1 - _pixels(images).unsqueeze(1), _classes(extended[:, 0]))
    test = Examples(1 - _pixels(tests).unsqueeze(1), _classes(classes))
    population = partition_by_owner(extended[:, WRITER])
    title = DATASETS["mnist-by-writer"].title
    return Task("mnist-by-writer", cnn_dropout(10), train, test, population, title=title)


def fashion_mnist(folder: Path) -> Task:
    """60,000 pictures of clothes, randomly assigned to 600 clients; 10,000 test pictures; two dense layers."""
    images, classes, tests, truth = (read_idx(folder / name, sha256=checksum) for name, checksum in FASHION.items())
    train = Examples(_pixels(images).flatten(start_dim=1), _classes(classes))
    test = Examples(_pixels(tests).flatten(start_dim=1), _classes(truth))
    population = random_partition(len(train), FASHION_CLIENTS, seed=0)
    title = DATASETS["fashion-mnist"].title
    return Task("fashion-mnist", mlp(784, 32, 10), train, test, population, title=title)


def emnist(folder: Path) -> Task:
    """Characters of 62 classes, each writer a client (Section 5.2); the paper's CNN of 1,206,590 parameters.

    Pixels are as in the files: 1 is white, 0 is ink. Every writer is in the training and in the test set. Accuracy is
    measured on the first 10,000 test characters, with writers in a fixed order.
    """
    return _emnist("emnist", folder, EMNIST, classes=62)


def emnist_digits(folder: Path) -> Task:
    """The digits of EMNIST: 10 classes, and the CNN of 1,199,882 parameters."""
    return _emnist("emnist-digits", folder, EMNIST_DIGITS, classes=10)


def _emnist(name: str, folder: Path, names: tuple[str, str], *, classes: int) -> Task:
    splits = find_splits(folder, names)
    if splits is None:
        raise missing_files(folder, names, name)
    train, test = (
        _characters(f"{name}-{part}", split, classes) for part, split in zip(("train", "test"), splits, strict=True)
    )
    rows = select_test_examples(starts_of(test))
    return Task(
        name,
        cnn_dropout(classes),
        Examples(tensor(train["pixels"]).unsqueeze(1), tensor(train["classes"])),
        Examples(tensor(test["pixels"][rows]).unsqueeze(1), tensor(test["classes"][rows])),
        Consecutive(starts_of(train)),
        title=DATASETS[name].title,
    )


def _characters(recipe: str, split: Split, classes: int) -> Arrays:
    writers = (
        _check_characters(features["pixels"], features["label"], classes, f"{split.path.name}: writer {writer}")
        for writer, features in split.read("pixels", "label")
    )
    return cached_arrays(recipe, (split.path,), lambda cache: write_clients(cache, writers, source=split.path))


def _check_characters(pixels: Any, labels: Any, classes: int, where: str) -> Arrays:
    pictures = np.asarray(pixels, dtype=np.float32)
    if len(pictures) and pictures[0].size != SIDE * SIDE:
        raise ValueError(f"{where} must have pictures of 28 by 28, got {pictures[0].size} numbers")
    pictures = pictures.reshape(-1, SIDE, SIDE)
    if len(pictures) and not (pictures.min() >= 0 and pictures.max() <= 1):
        raise ValueError(f"{where} must have pixels from 0 to 1, got {pictures.min():g} to {pictures.max():g}")
    if len(labels) and not (np.min(labels) >= 0 and np.max(labels) < classes):
        raise ValueError(f"{where} must have classes from 0 to {classes - 1}, got {np.min(labels)} to {np.max(labels)}")
    return {"pixels": pictures, "classes": np.asarray(labels, dtype=np.int64)}


def read_idx(path: Path, *, sha256: str) -> Any:
    """The array in a gzipped idx file. Raises ValueError unless the unpacked bytes have this checksum."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist: run `coalmine data {path.parent.name}`, or give its folder's parent with --data-dir"
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file ({error}); fetch it again") from None
    array = parse_idx(content, name=str(path))
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ValueError(f"{path} does not hold the published data: sha256 {digest[:16]}…, expected {sha256[:16]}…")
    return array


def parse_idx(content: bytes, *, name: str) -> Any:
    """The array in the unpacked bytes of an idx file: bytes or big-endian 32-bit integers of any shape."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise ValueError(f"{name} is not an idx file of bytes or 32-bit integers: it begins with {content[:4].hex()}")
    dtype, dimensions = _IDX_TYPES[content[2]], content[3]
    start = 4 + 4 * dimensions
    shape = np.frombuffer(content[4:start], dtype=">u4").tolist()
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    if len(shape) != dimensions or len(content) - start != size:
        raise ValueError(
            f"{name} is incomplete: its header announces {size} bytes of shape {shape}, but {len(content) - start} follow"
        )
    return np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)


def _pixels(images: Any) -> torch.Tensor:
    return torch.from_numpy(images.copy()).to(torch.float32).div_(255)


def _classes(labels: Any) -> torch.Tensor:
    return torch.from_numpy(labels.astype("int64"))
