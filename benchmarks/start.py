"""The time until Stack Exchange's 5,022 clients train: from a new process to the first client's first update.

Measured with an empty cache, when 241,796 sentences are read and converted to symbols, and again with a full cache.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from coalmine.data import DATASETS, data_folder

BAR = 20.0  # seconds


def first_update() -> None:
    """Do the work of `coalmine run --task stackexchange` until a client has trained."""
    from dataclasses import replace

    from coalmine.simulation.batches import draw_batches
    from coalmine.simulation.config import RunConfig
    from coalmine.simulation.config_sources import task_defaults
    from coalmine.simulation.training_run import prepared

    config = RunConfig.from_dict(task_defaults("stackexchange"))
    config = replace(config, engine=config.engine.resolved())
    with prepared(config, None, None) as training:
        state = training.initial_state()
        shortest = min(range(len(training.population)), key=lambda client: len(training.population.examples(client)))
        batches = draw_batches(
            [training.population.examples(shortest)], epochs=1, batch_size=16, rng=np.random.default_rng(0)
        )
        next(iter(training.engine.updates(state.model_vector, batches)))


def main() -> int:
    if not DATASETS["stackexchange"].is_in(data_folder()):
        print(f"Stack Exchange is not in {data_folder()}: not measured")
        return 0
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for state in ("empty", "filled"):
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", "from benchmarks.start import first_update; first_update()"],
                check=True,
                cwd=Path(__file__).parents[1],
                env=os.environ | {"COALMINE_CACHE_DIR": cache},
            )
            seconds.append(time.perf_counter() - start)
            print(f"5,022 clients train after {seconds[-1]:.1f} s, cache {state} (bar {BAR:.0f} s)")
    return 0 if max(seconds) <= BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
