"""Objax 1.8: gradients of a loss, clipped and with noise."""

import jax
import numpy as np

from studies.field.project import Check, Project, mocked


def gradients(noise, accumulated=False):
    for name, value in {
        "tree_map": jax.tree.map,
        "tree_leaves": jax.tree.leaves,
        "tree_flatten": jax.tree.flatten,
    }.items():
        if not hasattr(jax, name):
            setattr(jax, name, value)  # Objax was written for an older jax
    mocked("objax.jaxboard")
    import objax

    weights = objax.TrainVar(jax.numpy.zeros(1_000))
    loss = objax.Function(lambda x: (x @ weights.value).mean(), objax.VarCollection({"w": weights}))
    private = objax.privacy.dpsgd.PrivateGradValues(
        loss, loss.vars(), noise, 1.0, microbatch=1, use_norm_accumulation=accumulated
    )
    return lambda rows: np.asarray(private(jax.numpy.asarray(rows, "float32"))[0][0])


OPTIONS = {"dim": 1_000, "aggregate": "mean"}
PROJECT = Project(
    packages=("objax==1.8.0", "six==1.17.0", "parameterized==0.9.0"), where="objax/privacy/dpsgd/gradient.py:178",
    claim="`noise_multiplier`: scale of standard deviation for added noise in DP-SGD (docstring)",
    checks=(
        Check(name="PrivateGradValues", make=gradients, expected="PASS", options=OPTIONS, why="clip of each, noise z·C/n"),
        Check(name="with norm accumulation", make=lambda noise: gradients(noise, True), expected="PASS", options=OPTIONS,
              why="the same sum by weighted losses"),
    ),
)  # fmt: skip
