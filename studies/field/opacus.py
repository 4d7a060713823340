"""Opacus 1.6: DP-SGD by per-example gradients."""

import torch

from coalmine.testing.opacus import optimizer_release
from studies.field.project import Check, Project, part


def flat(noise, kind="DPOptimizer", **options):
    parameters = [torch.nn.Parameter(torch.zeros(1_000)), torch.nn.Parameter(torch.zeros(1_000))]
    sgd = torch.optim.SGD(parameters, lr=1.0)
    options = {"max_grad_norm": 1.0, **options}
    made = part("opacus.optimizers", kind)(sgd, noise_multiplier=noise, expected_batch_size=100, **options)
    return optimizer_release(made)


def per_layer(noise):
    return flat(noise, "DPPerLayerOptimizer", max_grad_norm=[0.5**0.5, 0.5**0.5])


OPTIONS = {"dim": 2_000, "aggregate": "sum"}
PROJECT = Project(
    packages=("opacus==1.6.0",),
    where="opacus/optimizers/optimizer.py, add_noise",
    claim="`noise_multiplier`: the ratio of the noise's std to the sensitivity of a step (documentation of DPOptimizer)",
    checks=(
        Check(
            name="flat clip", make=flat, expected="PASS", why="each row is clipped, noise on the sum", options=OPTIONS
        ),
        Check(
            name="clip of each layer",
            make=per_layer,
            expected="PASS",
            why="noise for the norm of both",
            options=OPTIONS,
        ),
    ),
)
