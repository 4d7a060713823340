"""PyVacy 0.0.32: optimizers that clip and add noise in their step."""

from coalmine.testing.torch import step_release
from studies.field.project import Check, Project, bare, part


def sgd(noise):
    bare("pyvacy", "pyvacy.optim")

    def make_step(model):
        optimizer = part("pyvacy.optim.dp_optimizer", "DPSGD")(1.0, noise, 100, model.parameters(), lr=1.0)

        def step(batch):
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()

        return step

    return step_release(make_step, [(600,), (400,)])


PROJECT = Project(
    packages=("pyvacy==0.0.32",),
    where="pyvacy/optim/dp_optimizer.py:19",
    claim="`l2_norm_clip`: upper bound on the gradient's norm; `noise_multiplier`: std over clip (docstring)",
    checks=(
        Check(name="DPSGD", make=sgd, expected="not PASS", options={"dim": 1_000},
              why="the gradient of the batch is clipped, not each example's, and the noise is divided by √batch"),
    ),
)  # fmt: skip
