"""`nccl` with one rank on one GPU: the run of `coalmine run` with and without a process group.

A group of one rank takes the same path as more do: a broadcast and a sum through nccl, a few numbers through gloo. More than
one GPU was never tried. The digits and a CNN on random pictures are trained both ways, and the models compared.

    python -m benchmarks.ranks_cuda
"""

import os
import socket
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks.rounds_cuda import pictures
from coalmine.audit import Audit
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import RunConfig
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.distributed.rank_environment import join_group, place_from
from coalmine.simulation.distributed.rank_group import RankGroup
from coalmine.simulation.distributed.rounds import RankSums
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import client_engine
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.population import Partition
from coalmine.simulation.tasks import Task

ROUNDS = 8
TOLERANCE = 1e-4  # what docs/how-to/training.md says of two runs on a GPU


def join() -> RankGroup:
    """A group of one rank, as torchrun would make it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = place_from({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert place is not None
    return join_group(place, device="cuda")


def whole_runs() -> float:
    """The relative difference of the models of two whole runs in directories."""
    from coalmine.simulation.training_run import start

    config = RunConfig.from_dict(
        merged(task_defaults("digits"), {"rounds": 20, "canaries": {"count": 100}, "engine": {"device": "cuda"}})
    )
    with tempfile.TemporaryDirectory() as folder:
        group = join()
        assert group.backend == "nccl", group.backend
        outcome = start(config, Path(folder) / "ranks", ranks=group)
        start(config, Path(folder) / "alone")
        print(f"digits: {outcome.trainer.engine}, through {group.backend}; {outcome}")
        one, other = (np.load(Path(folder) / name / "model.npy") for name in ("ranks", "alone"))
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def cnn_rounds(*, in_group: bool) -> tuple[torch.Tensor, float]:
    """The CNN's model after some rounds, and the milliseconds of one."""
    work = pictures()
    settings = {"rounds": 1_000, "evaluate_every": 1_000, "participation": {"clients_per_round": work.clients}}
    config = RunConfig.from_dict(
        merged(merged(task_defaults("mnist-by-writer"), settings), {"engine": {"device": "cuda", "precision": "fp32"}})
    )
    starts = np.arange(work.clients + 1) * work.each
    task = Task("pictures", work.model, work.examples, work.examples, Partition(np.arange(starts[-1]), starts))
    audit = Audit(
        work.model.dim,
        canaries=1000,
        unobserved=1000,
        seed=1,
        delta=1e-6,
        rounds=config.rounds,
        layers=work.model.sizes,
        deferred=True,
    )
    engine = client_engine("auto", work.model, work.examples, config.client, memory_limit=32.0, precision="fp32")
    planned = PlannedPrivacy(config, plan_cohorts(config, work.clients, audit.canaries_in_round), work.clients)
    training = Training(planned, task=task, engine=engine, audit=audit)
    if in_group:
        training.clients_sum = RankSums(join(), training.sums).compute
    state, taken = training.initial_state(), []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        training.round(state)
        torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    engine.close()
    return state.model_vector, statistics.median(taken[2:])


def main() -> int:
    """Print the differences and the times; 1 if a difference is too large."""
    if not torch.cuda.is_available():
        print("skipped: this benchmark needs a CUDA device")
        return 0
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, nccl {nccl}")
    needed = [name for name in ("sklearn", "safetensors") if find_spec(name) is None]
    if needed:
        print(f"whole runs in directories are skipped: they need {' and '.join(needed)}")
    digits = 0.0 if needed else whole_runs()
    (ranked, in_group), (plain, alone) = cnn_rounds(in_group=True), cnn_rounds(in_group=False)
    cnn = float((ranked - plain).norm() / plain.norm())
    print(f"models differ by {digits:.1e} (digits) and {cnn:.1e} (CNN, {ROUNDS} rounds); at most {TOLERANCE:g} may be")
    print(f"a round of the CNN takes {in_group:.1f} ms in a group of one rank, {alone:.1f} ms without")
    return 0 if max(digits, cnn) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
