"""SecretFlow 1.14: an aggregator that adds noise to the later layers of each client's model."""

import numpy as np

from studies.field.project import Check, Project, bare, mocked, part


class Device:
    """Runs what it is given at once, where SecretFlow sends it to a party."""

    def __call__(self, function):
        return lambda *arguments, **options: function(*arguments, **options)


def average(noise):
    del noise  # it is written in the code
    bare(
        "secretflow",
        "secretflow.security",
        "secretflow.security.aggregation",
        "secretflow.security.aggregation.experiment",
    )
    mocked("secretflow.device", "secretflow.security.aggregation.aggregator")
    import sys

    sys.modules["secretflow.device"].PYU = Device
    sys.modules["secretflow.device"].DeviceObject = type("DeviceObject", (), {})
    sys.modules["secretflow.security.aggregation.aggregator"].Aggregator = type(
        "Aggregator", (), {"_get_dtype": staticmethod(lambda array: None)}
    )
    aggregator = part("secretflow.security.aggregation.experiment.lldp_aggregator", "LLDPAggregator")(Device())

    class Sent(list):
        def to(self, device):
            return self

    return lambda clients: aggregator.average([Sent(map(np.asarray, client)) for client in clients], axis=0)


PROJECT = Project(
    packages=("secretflow==1.14.0b0",), where="secretflow/security/aggregation/experiment/lldp_aggregator.py:110",
    claim="layer-wise local differential privacy; σ is that of ε = 28 at δ = e⁻³, in the code alone",
    checks=(
        Check(name="LLDPAggregator.average", make=average, epsilon=28.0, expected="VIOLATION",
              why="not established, as no ε is documented: four layers get no noise, nothing is clipped",
              options={"clients": 1, "shapes": [(100,)] * 10}),
    ),
)  # fmt: skip
