"""Federated averaging of numpy arrays in NVFlare.

    python -m venv .venv-nvflare && .venv-nvflare/bin/pip install 'coalmine[nvflare]'
    .venv-nvflare/bin/python examples/nvflare/job.py

Nothing here adds noise, so an audit detects every canary: it shows how much plain averaging leaks.
"""

import argparse
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv

from coalmine.integrations.nvflare import audited

DIM = 1_000


def main(out: Path) -> None:
    """Run the job in the local simulator, in a subfolder of `out`."""
    sites = ["site-1", "site-2"]
    sites += [f"canary-{number}" for number in range(10)]
    recipe = NumpyFedAvgRecipe(
        name="averaging",
        model=np.ones(DIM).tolist(),
        min_clients=len(sites),
        num_rounds=3,
        train_script=str(Path(__file__).parent / "client.py"),
        params_transfer_type=TransferType.DIFF,
    )
    settings = {"seed_file": "canary-seed", "delta": 1e-5, "directory": out, "clip_norm": 1.0, "task": "averaging"}
    recipe = audited(recipe, np.ones(DIM), sites=sites, canaries=sites[2:], **settings)
    recipe.execute(SimEnv(clients=sites, num_threads=2, workspace_root=str(out.absolute() / "workspace")))
    print(recipe.audit.finish())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/nvflare"))
    main(parser.parse_args().out)
