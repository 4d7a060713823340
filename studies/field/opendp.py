"""OpenDP 0.16: a Gaussian measurement of a vector."""

import numpy as np

from studies.field.project import Check, Project


def vector(noise):
    import opendp.prelude as dp

    dp.enable_features("contrib", "honest-but-curious")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=1_000), dp.l2_distance(T=float)
    measurement = dp.m.make_gaussian(*space, scale=noise)

    def release(rows):
        clipped = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)  # ours: its input has distance 1
        return np.array(measurement(clipped.sum(axis=0).tolist()))

    return release


PROJECT = Project(
    packages=("opendp==0.16.0", "deprecated==1.2.18", "wrapt==1.17.3"), where="make_gaussian, in its Rust core",
    claim="`measurement.map(1.0)` = 0.5: ρ of zero-concentrated privacy for an L2 distance of 1, at scale 1",
    checks=(
        Check(name="make_gaussian on a vector", make=vector, expected="PASS", options={"dim": 1_000, "aggregate": "sum"},
              why="ρ = ½ is noise multiplier 1; the clip is ours"),
    ),
)  # fmt: skip
