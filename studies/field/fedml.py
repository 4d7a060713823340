"""FedML 0.9.6: frames for central and local privacy."""

from types import SimpleNamespace

from coalmine.testing.torch import state_dicts
from studies.field.project import Check, Project, bare, part

ARGS = {"mechanism_type": "gaussian", "epsilon": 0.9, "delta": 1e-5}


def frame(module, kind, **args):
    bare("fedml", "fedml.core", "fedml.core.dp", "fedml.core.dp.frames")
    return part(f"fedml.core.dp.frames.{module}", kind)(SimpleNamespace(**ARGS, **args))


def central(noise, norm=1.0):
    import torch

    dp = frame("cdp", "GlobalDP", sensitivity=noise / 100, max_grad_norm=norm)

    def aggregate(clients):
        states = [state for _, state in dp.global_clip(clients)]
        return dp.add_global_noise({name: sum(state[name] for state in states) / len(states) for name in states[0]})

    return state_dicts(aggregate, {"w": torch.zeros(600), "b": torch.zeros(400)}, deltas=True)


def local(noise):
    dp = frame("ldp", "LocalDP", sensitivity=noise)
    return lambda rows: dp.add_local_noise({"w": part("torch", "as_tensor")(rows[0])})["w"]


ALL = {"epsilon": 0.9, "options": {"dim": 1_000}}
ONE = {"epsilon": 0.9, "options": {"dim": 1_000, "clients": 1}}
PROJECT = Project(
    packages=("fedml==0.9.6",), where="fedml/core/dp/frames/cdp.py and ldp.py",
    claim="`epsilon`, `delta` and `sensitivity` of its configuration",
    checks=(
        Check(name="cdp with max_grad_norm", make=central, expected="PASS", why="clip, mean, noise for C/n", **ALL),
        Check(name="cdp alone", make=lambda noise: central(noise, None), expected="VIOLATION", why="no clip", **ALL),
        Check(name="ldp", make=local, expected="VIOLATION", why="nothing is clipped", **ONE),
    ),
)  # fmt: skip
