"""APPFL 1.12: noise on a client's model after its local training."""

import torch

from coalmine.testing.torch import step_release
from studies.field.project import Check, Project, bare, part

RATE = 0.05


def client(noise, steps=20):
    bare("appfl", "appfl.privacy")

    def make_step(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

        def step(batch):
            for _ in range(steps):  # as the trainer does with clip_grad: line 625 and the loop around it
                optimizer.zero_grad()
                model(batch).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2)
                optimizer.step()
            perturb = part("appfl.privacy.dp", "gaussian_mechanism_output_perturb")
            model.load_state_dict(perturb(model, 2.0 * 1.0 * RATE * noise, 5.0))  # the sensitivity of lines 437 to 439

        return step

    return step_release(make_step, [(600,), (400,)], learning_rate=RATE)


ONE = {"dim": 1_000, "clients": 1, "adjacency": "replace-one"}
PROJECT = Project(
    packages=("appfl==1.12.0",), where="appfl/algorithm/trainer/vanilla_trainer.py:438 and appfl/privacy/dp.py:35",
    claim="`epsilon` of the training configuration (5 here), with sensitivity 2·clip·learning rate",
    checks=(
        Check(name="one local step", make=lambda noise: client(noise, 1), epsilon=5.0, expected="PASS", options=ONE,
              why="the sensitivity is that of one step; the loop is ours, after the trainer's"),
        Check(name="20 local steps", make=client, epsilon=5.0, expected="VIOLATION", options=ONE,
              why="each of 20 steps moves the model by the clip norm, and the noise is for one"),
    ),
)  # fmt: skip
