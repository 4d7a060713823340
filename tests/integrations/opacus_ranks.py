"""One rank of DP-SGD with Opacus on a small transformer, under DDP or FSDP2, and the faults that tests put in.

The argument is JSON: a list of settings, one for each training in turn. Rank 0 writes what it finds to found.json.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from torch_ranks import start_rank

from coalmine.integrations.opacus import audited
from coalmine.integrations.torch_distributed import reduce_over

WORDS, LENGTH, WIDTH, CLASSES = 128, 12, 48, 10


class Transformer(nn.Module):
    """Embeddings, one encoder block and a head: 25,450 parameters."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        places = torch.arange(LENGTH).repeat(len(words), 1)
        inside = self.words(words) + self.places(places)
        here = self.before(inside)
        attention = torch.softmax(self.query(here) @ self.key(here).transpose(1, 2) / WIDTH**0.5, dim=-1)
        inside = inside + self.out(attention @ self.value(here))
        inside = inside + self.narrow(torch.relu(self.wide(self.after(inside))))
        return self.head(inside.mean(dim=1))


def make(rank, *, mode, rows=300, batch=300, noise_multiplier=1.0, poisson=True, same_rows=False, workers=0, **more):
    """Model, optimizer, loss, loader and engine. Batches of `batch` rows in all, over the ranks together."""
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (rows,))
    words = torch.randint(0, WORDS, (rows, LENGTH))
    words[:, :4] = labels[:, None]  # learnable
    net = Transformer()
    torch.manual_seed(100 + rank)
    model = FSDP2Wrapper(net) if mode == "fsdp2" else DifferentiallyPrivateDistributedDataParallel(net)
    data = TensorDataset(words, labels)
    size = torch.distributed.get_world_size()
    sampler = None if poisson or same_rows else DistributedSampler(data, seed=3)
    own = batch if poisson else batch // size
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(data, batch_size=own, sampler=sampler, num_workers=workers),
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
        grad_sample_mode={"hooks": "hooks", "ghost": "ghost", "fsdp2": "ghost_fsdp"}[mode],
        **more,
    )
    model, optimizer, *changed, loader = made
    return model, optimizer, changed[0] if changed else nn.CrossEntropyLoss(), loader, engine.accountant


def halve_noise(optimizer):
    """Add half the noise; the accountant still reads the whole multiplier."""
    real = optimizer.add_noise

    def add_noise():
        claimed = optimizer.noise_multiplier
        optimizer.noise_multiplier = claimed / 2
        real()
        optimizer.noise_multiplier = claimed

    optimizer.add_noise = add_noise


def train(
    rank, folder, *, steps, name="run", halved=False, observe=True, physical=None, die=None, timeout=50, **settings
):
    """What rank 0 finds. `die` is the rank that kills itself, and the round in which it does.

    With a directory, every step leaves a checkpoint, and a restart goes on from there.
    """
    own = {name: settings.pop(name) for name in ("canaries", "through_clip", "on_violation") if name in settings}
    checkpoint = None
    if "directory" in settings:
        own["directory"] = folder / settings.pop("directory")
        checkpoint = folder / f"{own['directory'].name}-rank{rank}.pt"
    model, optimizer, loss, loader, accountant = make(rank, **settings)
    if halved:
        halve_noise(optimizer)
    rate = {"data_loader": loader} if observe else {"sampling_probability": 1 / len(loader)}
    optimizer = audited(
        optimizer,
        model,
        seed=b"a seed for tests only",
        delta=1e-5,
        reduce=reduce_over(timeout=timeout),
        **own,
        **rate,
    )
    audit = optimizer.audit
    if checkpoint is not None and checkpoint.exists():
        audit.rewind_to(load(checkpoint, optimizer, accountant))
    first = audit.last_round
    real_noise = optimizer.add_noise

    def add_noise():
        real_noise()
        if die == [rank, audit.last_round + 1]:
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.add_noise = add_noise
    manager = BatchMemoryManager(data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer)
    while audit.last_round < steps:
        with manager if physical else nullcontext(loader) as batches:
            for words, labels in batches:
                optimizer.zero_grad()
                loss(model(words), labels).backward()
                optimizer.step()
                if checkpoint is not None:
                    save(checkpoint, optimizer, accountant, audit.last_round)
                print("round", audit.last_round, flush=True)
                if audit.last_round >= steps:
                    break
    result = audit.finish(task=name)
    if rank:
        assert result is None
        return None
    found = facts(result, audit) | {"first": first}
    audit.close()
    return found


def save(path, optimizer, accountant, step):
    """This rank's shards and accountant, written whole or not at all."""
    torch.save({"step": step, "accountant": accountant.state_dict(), "shards": shards(optimizer)}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load(path, optimizer, accountant):
    """Put a checkpoint back; the step that it is of."""
    saved = torch.load(path, weights_only=False)
    for here, there in zip(shards(optimizer), saved["shards"], strict=True):
        here.copy_(there)
    accountant.load_state_dict(saved["accountant"])
    return saved["step"]


def shards(optimizer):
    return [p.to_local() if hasattr(p, "to_local") else p for p in (p.detach() for p in optimizer.params)]


def facts(result, audit):
    """What the tests look at."""
    rounds = list(audit.log.rounds())
    return {
        "verdict": result.verdict.outcome,
        "reason": result.verdict.reason,
        "claim": result.claim.epsilon,
        "estimates": {rung: one.headline.estimate.epsilon for rung, one in result.adversaries.items()},
        "participants": [item.participants for item in rounds],
        "present": [len(item.present) for item in rounds],
        "clip_norms": sorted({item.clip_norm for item in rounds}),
        "coverage": {item.name: [item.status, item.detail] for item in result.audited},
        "gauges": {gauge.name: gauge.status for gauge in result.gauges},
        "notes": list(result.notes),
        "text": str(result),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, _, (folder, trainings) = start_rank()
    try:
        found = [train(rank, Path(folder), **settings) for settings in json.loads(trainings)]
    except ConnectionError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
