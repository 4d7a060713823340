"""An Optax transformation under test, in its own process: a process with JAX's threads must not fork, and tests do."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
from requires import require

if find_spec("optax") is None:
    require("optax")

PROGRAM = """
import json, jax, numpy as np, optax
from coalmine import mechanism_noise
from coalmine.testing import check_private
from coalmine.testing.optax import transformation_release

z = float(mechanism_noise(3.0, delta=1e-5))
check = {"epsilon": 3.0, "delta": 1e-5, "dim": 1_500, "clients": 60, "aggregate": "mean"}
key, private = jax.random.key(0), optax.contrib.differentially_private_aggregate
mean_noise = optax.add_noise((z / 60) ** 2, 0.0, key)
clipped_mean = lambda rows: optax.per_example_global_norm_clip([rows], 1.0)[0][0] / 60
params = {"w": jax.numpy.ones((50, 29)), "b": jax.numpy.ones(50)}
rng = np.random.default_rng(1)
rows = rng.normal(size=(4, 1_500))
again = transformation_release(private(1.0, z, key))

def outcome(transformation, **settings):
    result = check_private(transformation_release(transformation, **settings), **check)
    return [str(result.verdict.outcome), result.trainer.check.likely_fault]

def error(act):
    try:
        act()
    except (TypeError, ValueError) as caught:
        return [type(caught).__name__, str(caught)]

found = {
    "honest": outcome(private(1.0, z, key)),
    "halved": outcome(private(1.0, z / 2, key)),
    "no clip": outcome(mean_noise, aggregate=lambda rows: rows.mean(axis=0)),
    "own clip": outcome(mean_noise, aggregate=clipped_mean),
    "clip of the mean": outcome(optax.chain(optax.clip_by_global_norm(1.0), mean_noise), aggregate=lambda g: g.mean(axis=0)),
    "tree": outcome(private(1.0, z, key), params=params),
    "noise of two calls": [float(again(10 * rows)[0]) for _ in range(2)],
    "exact": float(np.abs(transformation_release(private(2.0, 0.0, key), params=params)(rows)
             - (2 * rows / np.linalg.norm(rows, axis=1)[:, None]).mean(axis=0)[None]).max()),
    "not summed": error(lambda: transformation_release(mean_noise)(rows)),
    "wrong size": error(lambda: transformation_release(mean_noise, params=params)(rows[:, :10])),
    "no transformation": error(lambda: transformation_release(print)),
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["honest", "own clip", "tree"])
def test_honest_transformations_pass(found, case):
    assert found[case] == ["PASS", None]


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        ("halved", "half of it is missing"),
        ("no clip", "updates are not clipped"),
        ("clip of the mean", "The sum or the mean may be clipped instead"),
    ],
)
def test_faulty_transformations_fail_with_their_fault(found, case, fault):
    outcome, likely = found[case]
    assert outcome == "VIOLATION"
    assert fault in likely


def test_every_call_adds_fresh_noise(found):
    first, second = found["noise of two calls"]
    assert first != second


def test_a_tree_without_noise_is_the_mean_of_the_clipped_rows(found):
    """Rows and releases list the leaves in JAX's order, sorted by name."""
    assert found["exact"] < 1e-6


def test_unsupported_transformations_are_rejected_with_a_remedy(found):
    assert found["not summed"][0] == "ValueError"
    assert "pass the code that clips and sums them as aggregate=…" in found["not summed"][1]
    assert found["wrong size"] == [
        "ValueError",
        "updates must have 1500 numbers for each client, got 10; pass dim=1500",
    ]
    assert found["no transformation"][0] == "TypeError"
