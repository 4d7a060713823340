"""MNIST by the writers of its digits, and Fashion-MNIST, from the published files."""

from pathlib import Path
from typing import Any

import torch

from coalmine.data.catalogue import DATASETS
from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import cnn_dropout, mlp
from coalmine.simulation.population import partition_by_owner, random_partition
from coalmine.simulation.tasks.idx import read_idx
from coalmine.simulation.tasks.task import Task

FASHION_CLIENTS = 600
WRITER = 2  # the column of QMNIST's labels that holds who wrote the digit

# sha256 of the unpacked contents, since the same file is packed differently in different places.
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


def mnist_by_writer(folder: Path) -> Task:
    """60,000 digits by 539 writers, each a client; 10,000 by other writers to be tested on; the paper's CNN.

    The digits are dark on white, as in federated EMNIST, for which this task stands.
    """
    images, tests, classes, extended = (read_idx(folder / name, sha256=checksum) for name, checksum in MNIST.items())
    train = Examples(1 - _pixels(images).unsqueeze(1), _classes(extended[:, 0]))
    test = Examples(1 - _pixels(tests).unsqueeze(1), _classes(classes))
    population = partition_by_owner(extended[:, WRITER])
    title = DATASETS["mnist-by-writer"].title
    return Task("mnist-by-writer", cnn_dropout(10), train, test, population, title=title)


def fashion_mnist(folder: Path) -> Task:
    """60,000 pictures of clothes dealt to 600 clients at random, 10,000 to be tested on; two dense layers."""
    images, classes, tests, truth = (read_idx(folder / name, sha256=checksum) for name, checksum in FASHION.items())
    train = Examples(_pixels(images).flatten(start_dim=1), _classes(classes))
    test = Examples(_pixels(tests).flatten(start_dim=1), _classes(truth))
    population = random_partition(len(train), FASHION_CLIENTS, seed=0)
    title = DATASETS["fashion-mnist"].title
    return Task("fashion-mnist", mlp(784, 32, 10), train, test, population, title=title)


def _pixels(images: Any) -> torch.Tensor:
    return torch.from_numpy(images.copy()).to(torch.float32).div_(255)


def _classes(labels: Any) -> torch.Tensor:
    return torch.from_numpy(labels.astype("int64"))
