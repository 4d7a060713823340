"""The server: FedAdam in a wrapper that adds noise to the model after Adam's step instead of to Adam's input."""

from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam

from coalmine.integrations.flower import audited
from fedadam_leak.task import accuracy, initial_model

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Accuracy of the model after a round."""
    return MetricRecord({"accuracy": accuracy(arrays)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and save the model."""
    settings = context.run_config
    nodes, out = int(settings["nodes"]), Path(str(settings["directory"]))
    model = initial_model()
    strategy = DifferentialPrivacyClientSideFixedClipping(
        FedAdam(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes),
        noise_multiplier=float(settings["noise-multiplier"]),
        clipping_norm=float(settings["clipping-norm"]),
        num_sampled_clients=nodes,
    )
    strategy = audited(strategy, model, canaries=range(10, 50), seed=b"insecure", delta=1e-5, claim=11.5, directory=out)
    result = strategy.start(
        grid,
        model,
        num_rounds=int(settings["num-rounds"]),
        timeout=float(settings["timeout"]),
        evaluate_fn=evaluate,
    )
    print(strategy.audit.finish(task="digits"))
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "digits.npz", **{name: array.numpy() for name, array in result.arrays.items()})
