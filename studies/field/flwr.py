"""Flower 1.41: a server-side wrapper, and a mod for local privacy."""

from coalmine.testing.flower import strategy_release
from studies.field.project import Check, Project, part

STRATEGIES = "flwr.serverapp.strategy"


def server(noise):
    wrapper = part(STRATEGIES, "DifferentialPrivacyServerSideFixedClipping")
    return strategy_release(wrapper(part(STRATEGIES, "FedAvg")(fraction_train=0.1), noise, 1.0, 40))


def local(noise, epsilon=50.0):
    strategy = part(STRATEGIES, "FedAvg")(min_train_nodes=1, min_available_nodes=1)
    mod = part("flwr.clientapp.mod", "LocalDpMod")(1.0, noise, epsilon, 1e-5)
    return strategy_release(strategy, mods=[mod])


def modest(noise):
    return local(noise, epsilon=3.0)


ONE = {"dim": 1_000, "clients": 1}
PROJECT = Project(
    packages=("flwr==1.41.0",),
    where="flwr/serverapp/strategy/dp_fixed_clipping.py and flwr/clientapp/mod/localdp_mod.py",
    claim="`noise_multiplier` of the wrapper; `epsilon` and `delta` of LocalDpMod (their documentation)",
    checks=(
        Check(name="server side, fixed clip", make=server, expected="PASS", why="noise z·C/n on a mean of n equals",
              options={"dim": 1_000, "clients": 40, "aggregate": "mean"}),
        Check(name="LocalDpMod, ε = 3", make=modest, epsilon=3.0, expected="PASS", why="enough noise", options=ONE),
        Check(name="LocalDpMod, ε = 50", make=local, epsilon=50.0, expected="VIOLATION", options=ONE,
              why="the classic formula proves nothing above ε = 1: this noise has ε = 96.4"),
    ),
)  # fmt: skip
