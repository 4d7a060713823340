"""plato-learn 1.0: processors that add noise to the features that a client sends."""

import torch

from studies.field.project import Check, Project, bare, part


def gaussian(noise, epsilon=10.0):
    bare("plato", "plato.processors")
    kind = part("plato.processors.feature_gaussian", "Processor")
    processor = kind(epsilon=epsilon, delta=1e-5, sensitivity=noise, client_id=1, trainer=None)

    def release(rows):  # the values that `process` passes to its method, in double precision
        return processor.method(torch.as_tensor(rows[0]).numpy(), None)[0]

    return release


ONE = {"dim": 1_000, "clients": 1, "scale": 1.0}
PROJECT = Project(
    packages=("plato-learn==1.0",), where="plato/processors/feature_gaussian.py:18",
    claim="local differential privacy using the Gaussian mechanism, with `epsilon`, `delta` and `sensitivity`",
    checks=(
        Check(name="Gaussian features, ε = 10", make=gaussian, epsilon=10.0, expected="VIOLATION", options=ONE,
              why="2 ln(1.25/δ)·Δ²/ε² is a variance, and is used as a std"),
        Check(name="Gaussian features, ε = 3", make=lambda noise: gaussian(noise, 3.0), epsilon=3.0, expected="PASS",
              options=ONE, why="a variance above 1 is larger than its root: more noise than needed"),
    ),
)  # fmt: skip
