"""Engines on a CUDA device against autograd in fp64; benchmarks/rounds_cuda.py measures the time."""

import numpy as np
import pytest
import torch

from coalmine.simulation.batches import draw_batches
from coalmine.simulation.engines.fast.cnn_clients import CnnTogether
from coalmine.simulation.engines.fast.lstm_clients import LstmTogether
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples
from coalmine.simulation.engines.plain.one_by_one import OneByOne
from coalmine.simulation.models import cnn_dropout, word_lstm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _batches(sizes, examples, batch_size):
    rng = np.random.default_rng(5)
    owned = [rng.choice(examples, size, replace=False) for size in sizes]
    return draw_batches(owned, epochs=1, batch_size=batch_size, rng=rng)


def _collected(engine, vector, batches):
    return torch.cat([rows.clone() for rows in engine.updates(vector, batches)])


def _error(found, expected):
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


# A few times the rounding error of the same clients on a CPU: 1.6e-5 in fp32, 4.5e-4 with factors rounded to tf32.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 5e-3)])
def test_lstm_engine_on_cuda_matches_one_by_one(precision, tolerance):
    """Ragged clients with several steps, twice, because a second call takes different code paths on a GPU."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 204, (150, 21), generator=generator)
    tokens[torch.arange(21) > torch.randint(1, 21, (150,), generator=generator).unsqueeze(1)] = 0
    examples = Examples(tokens[:, :-1].short(), tokens[:, 1:].short()).to("cuda")
    model, client = word_lstm(200), ClientSettings(learning_rate=0.5, batch_size=8)
    vector = model.initial(torch.Generator().manual_seed(1)).cuda()
    batches = _batches((3, 40, 1, 16, 17, 5, 33, 8), 150, 8)
    expected = _collected(OneByOne(model, examples, client), vector.double(), batches)
    engine = LstmTogether(model, examples, client, memory_limit=1.0, precision=precision)
    for _ in range(2):
        assert _error(_collected(engine, vector, batches), expected) < tolerance


# The same for the CNN: 1.8e-5 and 4.7e-2, where tf32 changes the result of a ReLU or a pool for a few pixels.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 0.15)])
def test_cnn_engine_on_cuda_matches_one_by_one(precision, tolerance):
    """Smooth images, on which rounding changes hardly any ReLU or pool."""
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(100, 1, 7, 7, generator=generator)
    images = torch.nn.functional.interpolate(coarse, size=(28, 28), mode="bicubic").cuda()
    labels = torch.randint(10, (100,), generator=generator).cuda()
    model, client = cnn_dropout(), ClientSettings(learning_rate=0.02, batch_size=8)
    vector = model.initial(torch.Generator().manual_seed(1)).cuda()
    batches = _batches((3, 20, 9), 100, 8)
    expected = _collected(OneByOne(model, Examples(images.double(), labels), client), vector.double(), batches)
    engine = CnnTogether(model, Examples(images, labels), client, memory_limit=1.0, precision=precision)
    for _ in range(3):
        assert _error(_collected(engine, vector, batches), expected) < tolerance
