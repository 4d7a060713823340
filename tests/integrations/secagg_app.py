"""SecAgg+ with canaries: the workflow of Flower's legacy API in a Ray simulation; prints every round's cosines as JSON.

The server sees only masked updates, so clients add the canaries (`canary_mod`) and the audit sees models (`Observer`).
"""

import json

import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import fixedclipping_mod, secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from coalmine import Audit
from coalmine.integrations.flower import Observer, canary_mod

DIM, CANARIES, REAL = 2_000, 12, 4
NODES = REAL + CANARIES
INITIAL = [np.random.default_rng(3).normal(size=DIM - 10).astype(np.float32), np.zeros(10, np.float32)]


class Client(NumPyClient):
    def fit(self, parameters, config):
        return [values + 1e-5 for values in parameters], 1, {}


client = ClientApp(client_fn=lambda context: Client().to_client(), mods=[secaggplus_mod, fixedclipping_mod, canary_mod])
server = ServerApp()


@server.main()
def main(grid, context):
    audit = Audit(DIM, canaries=CANARIES, seed=5, delta=1e-5)
    watch = Observer(audit, lambda number, arrays, config: (0.0, {}), clip_norm=1.0, participants=NODES)
    announcement = watch.announce(INITIAL, seed=5, canary_partitions=range(REAL, NODES))
    strategy = FedAvg(
        fraction_evaluate=0.0,
        min_fit_clients=NODES,
        min_available_clients=NODES,
        on_fit_config_fn=lambda number: announcement,
        evaluate_fn=watch,
        initial_parameters=ndarrays_to_parameters(INITIAL),
    )
    private = DifferentialPrivacyClientSideFixedClipping(strategy, 0.0, 1.0, NODES)
    legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=2), strategy=private)
    masked = SecAggPlusWorkflow(num_shares=5, reconstruction_threshold=3, max_weight=2, clipping_range=8.0)
    DefaultWorkflow(fit_workflow=masked)(grid, legacy)
    print("cosines " + json.dumps([item.cosines.tolist() for item in audit.log.rounds()]), flush=True)


if __name__ == "__main__":
    run_simulation(server, client, num_supernodes=NODES, backend_config={"client_resources": {"num_cpus": 1}})
