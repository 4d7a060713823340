"""FLSim 0.1: the server clips each user's change, averages, and adds noise."""

from types import SimpleNamespace

import torch

from coalmine.testing.client_rows import client_rows
from studies.field.project import Check, Project, bare, part


def server(noise, users=50):
    bare("flsim", "flsim.privacy", "flsim.common", "flsim.utils", "flsim.utils.fl")
    setting = SimpleNamespace(
        noise_multiplier=noise, target_delta=1e-5, alphas=[2.0, 8.0], noise_seed=0, clipping_value=1.0
    )
    engine = part("flsim.privacy.privacy_engine", "GaussianPrivacyEngine")(setting, users, 1_000)
    engine.attach(torch.nn.Linear(1_000, 1, bias=False))
    clipper = part("flsim.privacy.user_update_clip", "UserUpdateClipper")()

    def release(rows):
        changes = [torch.nn.Linear(1_000, 1, bias=False) for _ in client_rows(rows)]
        total = torch.nn.Linear(1_000, 1, bias=False)
        for change, row in zip(changes, rows, strict=True):
            change.weight.data = torch.as_tensor(row[None], dtype=torch.float32)
            clipper.clip(change, 1.0)
        total.weight.data = sum(change.weight.data for change in changes) / users
        engine.add_noise(total, 1.0 / users)  # as DPRoundReducer.reduce does
        return total.weight.detach()[0]

    return release


PROJECT = Project(
    packages=("flsim==0.1.0",), where="flsim/privacy/privacy_engine.py and flsim/reducers/dp_round_reducer.py",
    claim="`noise_multiplier` and `clipping_value` of the setting: max_norm · multiplier / users (comment in reduce)",
    checks=(
        Check(name="clip of a user, noise of a round", make=server, expected="PASS", why="each user clipped, noise z·C/n",
              options={"dim": 1_000, "clients": 50, "aggregate": "mean"}),
    ),
)  # fmt: skip
