"""Cosines with vectors of every shape follow the exact null (Proposition 3.1), whatever the dimension.

Every cell below is a dim, a vector and a test: Kolmogorov-Smirnov or Anderson-Darling of the cosines against
`CosineNull(dim)`, over many seeds at 5 %, or over a few at 0.1 %. Under the null the number of rejections in a cell is
binomial. A cell fails if its number of rejections has a probability below `CELL`. With random seeds, all cells
together would raise a false alarm with probability at most 1e-4; the seeds are fixed.

Columns of a rotation are orthogonal, so k cosines with one vector are entries of one unit vector: they spread slightly
less than k independent ones. Here k is at most dim/16, where the tests cannot resolve the difference.
"""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_digits

from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.rotation import draw_rotation
from coalmine.estimators.null import CosineNull

# Critical values of the Anderson-Darling statistic for a fully specified law; sample size hardly matters.
ANDERSON_DARLING = {0.05: 2.492, 0.001: 5.97}
CELL = 1e-4 / 200  # seven dims of nine vectors, and five more vectors, two tests each: fewer than 200 cells

VECTORS = ["gaussian", "first", "middle", "last", "constant", "sparse", "block", "last quarter", "heavy-tailed"]
DIMS = {1_000: 100, 5_000: 100, 8_000: 100, 65_536: 25, 70_001: 25, 1_206_590: 5, 4_050_748: 5}  # dim: seeds


def make_vector(shape: str, dim: int) -> np.ndarray:
    rng = np.random.default_rng(dim)
    vector = np.zeros(dim)
    match shape:
        case "gaussian":
            vector[:] = rng.standard_normal(dim)
        case "first" | "middle" | "last":
            vector[{"first": 0, "middle": dim // 2, "last": dim - 1}[shape]] = 1.0
        case "constant":
            vector[:] = 1.0
        case "sparse":
            vector[rng.choice(dim, 20, replace=False)] = rng.standard_normal(20)
        case "block":
            vector[dim // 3 : dim // 3 + dim // 50] = 1.0
        case "last quarter":
            vector[-(dim // 4) :] = rng.standard_normal(dim // 4)
        case "heavy-tailed":
            vector[:] = rng.standard_cauchy(dim)
    return vector


def rejections(canaries: list, vector: np.ndarray) -> tuple[int, int]:
    """Numbers of seeds whose cosines Kolmogorov-Smirnov and Anderson-Darling reject."""
    null, level = CosineNull(len(vector)), level_of(len(canaries))
    smirnov = anderson = 0
    for each in canaries:
        uniforms = np.sort(null.cdf(each.cosines(vector)))
        smirnov += int(stats.kstest(uniforms, "uniform").pvalue < level)
        anderson += int(anderson_darling(uniforms) > ANDERSON_DARLING[level])
    return smirnov, anderson


def level_of(seeds: int) -> float:
    return 0.05 if seeds >= 20 else 0.001


def anderson_darling(uniforms: np.ndarray) -> float:
    """The Anderson-Darling statistic of sorted uniforms (Anderson and Darling, 1954)."""
    count = len(uniforms)
    tiny = np.finfo(float).tiny  # a cosine whose uniform rounds to 0 or 1 is a rejection, not an error
    logs = np.log(np.maximum(uniforms, tiny)) + np.log(np.maximum(1 - uniforms[::-1], tiny))
    return -count - np.sum((2 * np.arange(1, count + 1) - 1) * logs) / count


def most_allowed(seeds: int) -> int:
    """The largest allowed number of rejections: more have probability at most `CELL`. It is below the number of seeds."""
    allowed = int(stats.binom.isf(CELL, seeds, level_of(seeds)))
    assert allowed < seeds
    return allowed


@pytest.mark.parametrize("dim", [dim if dim == 1_000 else pytest.param(dim, marks=pytest.mark.full) for dim in DIMS])
def test_rotated_canaries_follow_the_null(dim):
    seeds = DIMS[dim]
    canaries = [RotatedCanaries(min(2000, dim // 16), dim, seed=seed) for seed in range(seeds)]
    single = np.float32 if dim > 10**6 else np.float64  # at these dims, for speed
    found = {shape: rejections(canaries, make_vector(shape, dim).astype(single)) for shape in VECTORS}
    assert max(max(pair) for pair in found.values()) <= most_allowed(seeds), found


@pytest.mark.parametrize("dim", [1_000, 8_000])
def test_sphere_canaries_follow_the_null(dim):
    canaries = [SphereCanaries(60, dim, seed=seed) for seed in range(20)]
    found = {shape: rejections(canaries, make_vector(shape, dim)) for shape in ("middle", "heavy-tailed")}
    assert max(max(pair) for pair in found.values()) <= most_allowed(20), found


def test_a_trained_network_follows_the_null():
    """The model delta of a small network trained on handwritten digits: layers of different scales, many exact zeros."""
    delta = trained_delta()
    assert (delta == 0).sum() > 50  # weights of pixels that are always black
    canaries = [RotatedCanaries(len(delta) // 16, len(delta), seed=seed) for seed in range(200)]
    found = rejections(canaries, delta)
    assert max(found) <= most_allowed(200), found


def trained_delta() -> np.ndarray:
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return (torch.nn.utils.parameters_to_vector(model.parameters()).detach() - start).numpy().astype(np.float64)


@pytest.mark.parametrize(
    ("wrong", "shape"),
    [
        ({"stages": 1}, "first"),
        ({"stages": 1}, "sparse"),
        ({"shuffled": False}, "first"),
        ({"shuffled": False}, "last quarter"),
    ],
)
def test_faulty_rotations_are_rejected(wrong, shape):
    """A rotation with only one stage, or without its shuffle just below a power of two, is rejected."""
    canaries = [RotatedCanaries(500, 8_000, seed=seed) for seed in range(20)]
    for each in canaries:
        each._rotation = draw_rotation(8_000, each._key, **wrong)
    assert max(rejections(canaries, make_vector(shape, 8_000))) > most_allowed(20)


def test_the_sum_of_squared_cosines_has_a_beta_law():
    """Σg² over half of all canaries is Beta(d/4, d/4), as for a uniform rotation; the conditional null relies on it.

    Kolmogorov-Smirnov at 1e-4 over 200 seeds, per vector.
    """
    dim = 1_000
    for shape in ("first", "constant", "gaussian", "last quarter"):
        vector = make_vector(shape, dim)
        squares = [np.sum(RotatedCanaries(dim // 2, dim, seed=seed).cosines(vector) ** 2) for seed in range(200)]
        assert stats.kstest(squares, stats.beta(dim / 4, dim / 4).cdf).pvalue > 1e-4, shape
