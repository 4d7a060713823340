"""Optax 0.2.8: a transformation that clips, averages and adds noise."""

import jax

from coalmine.testing.optax import transformation_release
from studies.field.project import Check, Project, part


def aggregate(noise):
    make = part("optax.contrib", "differentially_private_aggregate")
    return transformation_release(make(l2_norm_clip=1.0, noise_multiplier=noise, key=jax.random.key(0)))


PROJECT = Project(
    packages=("optax==0.2.8",),
    where="optax/contrib/_privacy.py, differentially_private_aggregate",
    claim="`noise_multiplier`: ratio of standard deviation to the clipping norm (its documentation)",
    checks=(
        Check(name="differentially_private_aggregate", make=aggregate, expected="PASS",
              why="each gradient is clipped, noise z·C/n on the mean", options={"dim": 1_000, "aggregate": "mean"}),
    ),
)  # fmt: skip
