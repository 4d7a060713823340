"""One rank of a training run started by `test_sharded_audit.py`, with random numbers instead of gradients."""

import numpy as np
import torch

from coalmine import Audit

SHAPES = {"embedding": (301, 30), "weight": (64, 66), "bias": (130,), "head": (130, 41)}
ROUNDS, CLIENTS, CLAIMED = 20, 100, 1.0


def training(size, noise=1.0):
    """Each round's noise, and the other clients' sum in one part per rank."""
    rng = np.random.default_rng(11)
    for number in range(1, ROUNDS + 1):
        noise_tree = {
            name: torch.tensor(rng.normal(0, noise, shape), dtype=torch.float32) for name, shape in SHAPES.items()
        }
        others = [
            {name: torch.tensor(rng.normal(0, 0.02, shape), dtype=torch.float32) for name, shape in SHAPES.items()}
            for _ in range(size)
        ]
        yield number, noise_tree, others


def observe(audit, number, noise, others, everybody):
    """One round: `others` is this rank's part of `everybody`."""
    present = audit.canaries_in_round(number)
    canaries = audit.updates(present, 1.0)
    delta = {name: (noise[name] + canaries[name] + everybody[name]) / CLIENTS for name in noise}
    scaled_others = {name: value / CLIENTS for name, value in others.items()}
    stated = {"noise_std": CLAIMED / CLIENTS, "clip_norm": 1 / CLIENTS}
    audit.observe_round(number, delta, present=present, others=scaled_others, **stated)


def shard(tensor, rank, size):
    """Rows as FSDP2 splits them: the last ranks may have fewer, or none."""
    parts = torch.chunk(tensor, size)
    return parts[rank] if rank < len(parts) else tensor[:0]


def audit_of(rank, size, mode, noise, directory):
    from coalmine.integrations.torch_distributed import reduce_over

    options = {
        "canaries": 200,
        "seed": b"the secret of all ranks",
        "delta": 1e-5,
        "rounds": ROUNDS,
        "directory": directory,
    }
    whole = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if mode == "dtensor":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))

        def mine(tree):
            return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tree.items()}
    else:

        def mine(tree):
            return {name: shard(value, rank, size) for name, value in tree.items()}

    if mode == "replicated":
        audit = Audit.for_model(whole, reduce=reduce_over(), replicated=True, **options)
    else:
        audit = Audit.for_model(mine(whole), reduce=reduce_over(), **options)
    for number, noise_tree, parts in training(size, noise):
        everybody = {name: sum(part[name] for part in parts) for name in SHAPES}
        if mode == "replicated":
            observe(audit, number, noise_tree, parts[rank], everybody)
        else:
            observe(audit, number, mine(noise_tree), mine(everybody), mine(everybody))
    return audit


def main():
    from torch_ranks import start_rank

    rank, size, (mode, noise, directory) = start_rank()
    audit_of(rank, size, mode, float(noise), directory).close()


if __name__ == "__main__":
    main()
