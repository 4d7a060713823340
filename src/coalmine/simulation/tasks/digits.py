"""The default task: scikit-learn's 1,797 handwritten digits of 8 by 8 points, which come with the package."""

import torch

from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import mlp
from coalmine.simulation.population import random_partition
from coalmine.simulation.randomness import numpy_stream
from coalmine.simulation.tasks.task import Task

CLIENTS, TEST_EXAMPLES = 200, 297


def digits() -> Task:
    """1,500 digits over 200 clients, 297 to be tested on; the same split in every run."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("training needs: pip install 'coalmine[simulation]'") from error
    images, labels = load_digits(return_X_y=True)
    order = numpy_stream(0, "digits").permutation(len(labels))
    inputs = torch.tensor(images[order] / 16, dtype=torch.float32)
    classes = torch.tensor(labels[order], dtype=torch.int64)
    train = Examples(inputs[TEST_EXAMPLES:], classes[TEST_EXAMPLES:])
    test = Examples(inputs[:TEST_EXAMPLES], classes[:TEST_EXAMPLES])
    population = random_partition(len(train), CLIENTS, seed=0)
    return Task("digits", mlp(64, 128, 10), train, test, population, title="scikit-learn's handwritten digits")
