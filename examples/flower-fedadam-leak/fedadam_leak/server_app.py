"""The server: FedAdam in a wrapper that adds noise to the model that Adam made, not to what Adam is fed."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam

from coalmine.integrations.flower import Audit, AuditedStrategy
from fedadam_leak.task import accuracy, initial_model

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """How good the model is after a round."""
    return MetricRecord({"accuracy": accuracy(arrays)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and say what was found."""
    settings = context.run_config
    clients, canaries, nodes = (int(settings[name]) for name in ("clients", "canaries", "nodes"))
    model = initial_model()
    size = sum(array.numpy().size for array in model.values())
    seed = int(settings["canary-seed"])
    strategy = DifferentialPrivacyClientSideFixedClipping(
        FedAdam(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes),
        noise_multiplier=float(settings["noise-multiplier"]),
        clipping_norm=float(settings["clipping-norm"]),
        num_sampled_clients=nodes,
    )
    audit = Audit(size, canaries=canaries, seed=seed, delta=1e-5, directory=settings["directory"])
    strategy = AuditedStrategy(strategy, audit, "client", seed=seed, canary_partitions=range(clients, nodes))
    strategy.start(
        grid,
        model,
        num_rounds=int(settings["num-rounds"]),
        timeout=float(settings["timeout"]),
        evaluate_fn=evaluate,
    )
    print(strategy.finish())
