"""Federated averaging in NVFlare with two sites and ten canary sites, audited.

    python -m venv .venv-nvflare && .venv-nvflare/bin/pip install 'coalmine[nvflare]'
    .venv-nvflare/bin/python examples/nvflare/job.py

Nothing here adds noise, so every canary is seen: the audit says what plain averaging gives away.
"""

import argparse
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv, set_per_site_config

from coalmine.audit.seeds import write_seed
from coalmine.integrations.nvflare import AuditFilter, CanaryFilter

DIM, CANARIES, SITES = 1_000, 10, 12


def main(out: Path) -> None:
    """Run the job in this machine's simulator, and print where the result is."""
    seed = out.absolute() / "seed"
    out.mkdir(parents=True, exist_ok=True)
    write_seed(seed)
    recipe = NumpyFedAvgRecipe(
        name="audited",
        model=np.ones(DIM).tolist(),
        min_clients=SITES,
        num_rounds=3,
        train_script=str(Path(__file__).parent / "client.py"),
        params_transfer_type=TransferType.DIFF,
    )
    names = [f"site-{number}" for number in range(1, SITES + 1)]
    set_per_site_config(recipe, {name: {} for name in names})
    for index, name in enumerate(names[-CANARIES:]):
        canary = CanaryFilter(canary=index, dim=DIM, clip_norm=1.0, seed_file=str(seed))
        recipe.add_client_output_filter(canary, tasks=["train"], clients=[name])
    audit = AuditFilter(DIM, CANARIES, 1e-5, str(seed), str(out.absolute()), clip_norm=1.0)
    recipe.add_server_input_filter(audit, tasks=["train"])
    recipe.execute(SimEnv(clients=names, num_threads=2))
    print(f"coalmine compare {out}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/nvflare"))
    main(parser.parse_args().out)
