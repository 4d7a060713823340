"""deepee 0.1.9: one replica of the model for each example of a batch."""

import torch

from coalmine.testing.torch import step_release
from studies.field.project import Check, Project, bare, mocked, part


def loop(noise, cleared=False, **options):
    bare("deepee")
    mocked("deepee.snooper", "deepee.watchdog")
    in_turn = lambda models, inputs: [model(each) for model, each in zip(models, inputs, strict=True)]  # noqa: E731
    torch.nn.parallel.parallel_apply = in_turn  # torch's own needs a GPU

    def make_step(model):
        wrapped = part("deepee.wrapper", "PrivacyWrapper")(model, 50, 1.0, noise, **options)
        optimizer = torch.optim.SGD(wrapped.wrapped_model.parameters(), lr=1.0)

        def step(batch):
            optimizer.zero_grad()
            for replica in wrapped.models if cleared else ():
                replica.zero_grad()
            wrapped(batch).sum().backward()
            wrapped.clip_and_accumulate()
            wrapped.noise_gradient()
            optimizer.step()
            wrapped.prepare_next_batch()

        return step

    return step_release(make_step, [(600,), (400,)])


ONCE = {"dim": 1_000, "clients": 50}
PROJECT = Project(
    packages=("deepee==0.1.9",), where="deepee/wrapper.py:230, 247 and 289",
    claim="a model suitable for DP-SGD learning, with `L2_clip` and `noise_multiplier` (docstring of PrivacyWrapper)",
    checks=(
        Check(name="loop of the docstring", make=loop, expected="not PASS", options=ONCE,
              why="replicas' gradients are never cleared: a row goes on into every later step"),
        Check(name="replicas cleared by hand", make=lambda noise: loop(noise, True), expected="PASS", options=ONCE,
              why="each example's gradient is clipped by itself, noise z·C/n on the mean"),
        Check(name="`seed=42`", make=lambda noise: loop(noise, True, seed=42), expected="VIOLATION", options=ONCE,
              why="the generator is seeded before every tensor of every step: always the same noise"),
    ),
)  # fmt: skip
