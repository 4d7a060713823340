"""Make honest audits of several kinds for `.ci/versions.py`: python .ci/honest_run.py FOLDER.

Each has its own folder with `seed`, `model.npy` and `run`, the inputs of `coalmine verify`.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import coalmine

DIM, ROUNDS = 3_000, 12
KINDS: dict[str, dict[str, Any]] = {
    "layers": {"layers": [("first", 1_000), ("second", 2_000)], "presentations": 3},
    "sphere": {"kind": "sphere"},
    "momentum": {"momentum": 0.9, "presentations": (1, 2)},
    "tree": {"noise": coalmine.TreeNoise(rounds=ROUNDS)},
    "banded": {"noise": coalmine.BandedNoise.for_prefix_sums(ROUNDS, bands=3)},
}


def main() -> None:
    """Make one audit of each kind."""
    for name, settings in KINDS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True)
        coalmine.write_seed(folder / "seed")
        make(folder, settings)


def make(folder: Path, settings: dict[str, Any]) -> None:
    """Train with independent noise, whatever the settings say: only the audit's numbers are compared."""
    seed = coalmine.read_seed(folder / "seed")
    rng = np.random.default_rng(3)
    model = initial = rng.normal(size=DIM)
    with coalmine.Audit(
        DIM, canaries=100, seed=seed, delta=1e-5, rounds=ROUNDS, directory=folder / "run", claim=4.0, **settings
    ) as audit:
        for t in range(1, ROUNDS + 1):
            present = audit.canaries_in_round(t)
            others = 0.1 * rng.normal(size=DIM)
            delta = audit.updates(present, clip_norm=1.0) + others + rng.normal(size=DIM)
            audit.observe_round(t, delta, present=present, others=others, noise_std=1.0, clip_norm=1.0)
            model = model + delta
        audit.observe_final(model, initial=initial)
        audit.finish()
    np.save(folder / "model.npy", model)


if __name__ == "__main__":
    main()
