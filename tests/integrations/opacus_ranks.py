"""One rank of DP-SGD with Opacus on a small transformer, under DDP or FSDP2, with the tests' faults.

The arguments are a folder and a JSON list with the name and the settings of each scenario. Each rank writes its findings
to found-0.json, found-1.json, ….
"""

import json
import os
import signal
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from opacus_training import quoted
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_ranks import start_rank

from coalmine import Audit, ViolationError
from coalmine.integrations.opacus import audited, trained_parameters, unaudited
from coalmine.integrations.torch_distributed import reduce_over

WORDS, LENGTH, WIDTH, WIDER, CLASSES = 128, 12, 48, 97, 4
PARAMETERS = 25_973  # stated in docs/how-to/opacus.md
SPARED = -3  # index from the end: the bias of `narrow`


class Transformer(nn.Module):
    """Embeddings, one encoder block and a head. Two ranks cannot split all tensors evenly, and of three one gets none."""

    def __init__(self, *, coupled=False):
        super().__init__()
        self.coupled = coupled  # each row sees the mean of its process's batch
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words):
        places = torch.arange(LENGTH).repeat(len(words), 1)
        inside = self.words(words) + self.places(places)
        here = self.before(inside)
        attention = torch.softmax(self.query(here) @ self.key(here).transpose(1, 2) / WIDTH**0.5, dim=-1)
        inside = inside + self.out(attention @ self.value(here))
        inside = inside + self.narrow(torch.relu(self.wide(self.after(inside))))
        pooled = inside.mean(dim=1)
        return self.head(pooled - pooled.mean(dim=0) if self.coupled else pooled)


def make(
    rank,
    *,
    mode,
    rows=300,
    batch=300,
    noise_multiplier=1.0,
    poisson=True,
    same_rows=False,
    same_seed=False,
    workers=0,
    coupled=False,
    **more,
):
    """Model, optimizer, loss, loader and engine. Batches have `batch` rows in total over all ranks."""
    torch.manual_seed(0)
    labels = torch.randint(0, CLASSES, (rows,))
    words = torch.randint(0, WORDS, (rows, LENGTH))
    words[:, :4] = labels[:, None]  # learnable
    net = Transformer(coupled=coupled)
    torch.manual_seed(100 if same_seed else 100 + rank)
    model = FSDP2Wrapper(net) if mode == "fsdp2" else DifferentiallyPrivateDistributedDataParallel(net)
    data = TensorDataset(words, labels)
    size = torch.distributed.get_world_size()
    sampler = None if poisson or same_rows else DistributedSampler(data, seed=3)
    own = batch if poisson else batch // size
    criterion = nn.CrossEntropyLoss(reduction=more.get("loss_reduction", "mean"))
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        criterion=criterion,
        data_loader=DataLoader(data, batch_size=own, sampler=sampler, num_workers=workers),
        noise_multiplier=noise_multiplier,
        max_grad_norm=more.pop("max_grad_norm", 1.0),
        poisson_sampling=poisson,
        grad_sample_mode={"hooks": "hooks", "ghost": "ghost", "fsdp2": "ghost_fsdp"}[mode],
        **more,
    )
    model, optimizer, *changed, loader = made
    return model, optimizer, changed[0] if changed else criterion, loader, engine.accountant


def halve_noise(optimizer):
    """Add half the noise, while the accountant still uses the full multiplier."""
    real = optimizer.add_noise

    def add_noise():
        claimed = optimizer.noise_multiplier
        optimizer.noise_multiplier = claimed / 2
        real()
        optimizer.noise_multiplier = claimed

    optimizer.add_noise = add_noise


def spare_bias(optimizer):
    """Add noise to every parameter except one bias of 48 numbers, which keeps its clipped sum."""
    real = optimizer.add_noise

    def add_noise():
        real()
        p = optimizer.params[SPARED]
        p.grad = p.summed_grad.view_as(p).clone()

    optimizer.add_noise = add_noise


def train(
    rank,
    folder,
    *,
    steps,
    name="run",
    halved=False,
    spared=False,
    by_hand=False,
    observe=True,
    physical=None,
    die=None,
    timeout=150,
    **settings,
):
    """The findings of rank 0. `die` is the rank that kills itself, and its round; `by_hand` makes the audit here.

    With a directory, every step writes a checkpoint, and a restart resumes from it.
    """
    own = {name: settings.pop(name) for name in ("canaries", "through_clip", "on_violation") if name in settings}
    checkpoint = None
    if "directory" in settings:
        own["directory"] = folder / settings.pop("directory")
        checkpoint = folder / f"{own['directory'].name}-rank{rank}.pt"
    model, optimizer, loss, loader, accountant = make(rank, **settings)
    if halved:
        halve_noise(optimizer)
    if spared:
        spare_bias(optimizer)
    rate = {"data_loader": loader} if observe else {"sampling_probability": 1 / len(loader)}
    reduce = reduce_over(timeout=timeout)
    claim = quoted(rate=1 / len(loader), steps=steps)
    own |= {"seed": b"a seed for tests only", "delta": 1e-5, "claim": claim}
    if by_hand:
        replicated = settings["mode"] != "fsdp2"
        parameters = trained_parameters(optimizer, model)
        assert sum(p.numel() for p in model.parameters()) == PARAMETERS
        own = {"audit": Audit.for_model(parameters, reduce=reduce, replicated=replicated, **own)}
    optimizer = audited(optimizer, model, reduce=reduce, **own, **rate)
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
        return str(result)
    found = facts(result, audit) | {"first": first}
    audit.close()
    return found


def save(path, optimizer, accountant, step):
    """Write this rank's shards and accountant atomically."""
    torch.save({"step": step, "accountant": accountant.state_dict(), "shards": shards(optimizer)}, f"{path}.new")
    Path(f"{path}.new").replace(path)


def load(path, optimizer, accountant):
    """Restore a checkpoint and return its step."""
    saved = torch.load(path, weights_only=False)
    for here, there in zip(shards(optimizer), saved["shards"], strict=True):
        here.copy_(there)
    accountant.load_state_dict(saved["accountant"])
    torch.manual_seed(
        1_000 * saved["step"] + torch.distributed.get_rank()
    )  # otherwise the noise of the first rounds would repeat
    return saved["step"]


def shards(optimizer):
    return [p.to_local() if hasattr(p, "to_local") else p for p in (p.detach() for p in optimizer.params)]


def facts(result, audit):
    """The values that the tests check."""
    rounds = list(audit.log.rounds())
    interval = result.adversaries["known-others"].headline.estimate.interval
    return {
        "verdict": result.verdict.outcome,
        "reason": result.verdict.reason,
        "sampling": str(result.claim.sampling),
        "canaries": result.settings.canaries,
        "analytical": result.analytical_epsilon,
        "interval": [interval.low, interval.high],
        "participants": [item.participants for item in rounds],
        "present": [len(item.present) for item in rounds],
        "clip_norms": sorted({item.clip_norm for item in rounds}),
        "coverage": {item.name: [item.status, item.detail] for item in result.audited},
        "gauges": {gauge.name: gauge.status for gauge in result.gauges},
        "notes": list(result.notes),
        "text": result.details(),
    }


def release_by_hand(rank, folder, *, mode, canaries, **settings):
    """One step without noise: the release's distance from the clipped sum of all examples and from the canaries' part.

    A plain copy of the model computes the clipped gradients, one example at a time.
    """
    model, optimizer, loss, loader, _ = make(rank, mode=mode, noise_multiplier=0.0, **settings)
    torch.manual_seed(0)
    plain = Transformer()
    plain.load_state_dict(dict(zip(plain.state_dict(), full(optimizer.params), strict=True)))
    optimizer = audited(
        optimizer, model, canaries=canaries, seed=b"a seed for tests only", delta=1e-5, data_loader=loader
    )
    step, seen = optimizer.original_optimizer.step, []
    optimizer.original_optimizer.step = lambda *given: (
        seen.extend(full([p.grad for p in optimizer.params])),
        step(*given),
    )
    (batch,) = list(loader)
    optimizer.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
    own = [torch.zeros_like(p) for p in plain.parameters()]
    for words, label in zip(*batch, strict=True):
        gradient = torch.autograd.grad(nn.functional.cross_entropy(plain(words[None]), label[None]), plain.parameters())
        norm = torch.cat([g.flatten() for g in gradient]).norm()
        for total, g in zip(own, gradient, strict=True):
            total += g * min(1.0, 1.0 / float(norm + 1e-6))
    expected = torch.cat([total.flatten() for total in own])
    torch.distributed.all_reduce(expected)
    released = torch.cat([part.flatten() for part in seen])
    examples = torch.tensor(float(len(batch[0])))
    torch.distributed.all_reduce(examples)
    divisor = float(examples) if settings.get("loss_reduction", "mean") == "mean" else 1.0
    left = expected - released * divisor
    update = optimizer.audit.core.updates(range(canaries), 1.0)
    entered = torch.cat([part.flatten() for part in full(like_shards(update, optimizer))])
    return {
        "left": float(left.norm()),
        "entered": float(entered.norm()),
        "unexplained": float((left - entered).norm()),
        "sum": float(expected.norm()),
    }


def full(tensors):
    """Whole tensors from shards."""
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (t.detach() for t in tensors)]


def like_shards(update, optimizer):
    """The canaries' sum with the placement of the parameters."""
    pairs = zip(update.values(), optimizer.params, strict=True)
    return [
        DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        if isinstance(p, DTensor)
        else part
        for part, p in pairs
    ]


def errors(rank, folder, *, mode):
    """The errors of each rank if something is wrong on one rank or on all of them."""
    found = {}

    def attempt(name, change=None, **more):
        model, optimizer, loss, loader, _ = make(rank, mode=mode, batch=100)
        settings = {"canaries": 50, "seed": b"a seed for tests only", "delta": 1e-5, "data_loader": loader} | more
        settings = {name: value for name, value in settings.items() if value is not None}
        try:
            audited(optimizer, model, **settings)
            for words, labels in loader:
                optimizer.zero_grad()
                loss(model(words), labels).backward()
                if change is not None:
                    change(optimizer, loader)
                optimizer.step()
                return
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    if rank == 0:
        (folder / "finished").mkdir()
        (folder / "finished" / "result.json").write_text("{}")
    attempt("a result on rank 0", directory=folder / "finished" if rank == 0 else folder / "elsewhere")
    attempt("no seed file on rank 1", seed=None, seed_file=write_seed(folder) if rank == 0 else folder / "nothing")
    attempt("another seed on rank 1", seed=b"a seed for tests only" if rank == 0 else b"another seed for tests")
    attempt("another batch on rank 1", fetch_another if rank == 1 else None)
    attempt("a coin of each rank's own", data_loader=None, sampling_probability=0.5, rng=np.random.default_rng(rank))
    attempt("shorter data on rank 1", data_loader=make(rank, mode=mode, batch=100, rows=300 - rank)[3])
    attempt(
        "a flat audit", canaries=None, seed=None, delta=None, audit=Audit(100, canaries=50, seed=b"test", delta=0.1)
    )
    model, optimizer, _, loader, _ = make(rank, mode=mode)
    unaudited(audited(optimizer, model, canaries=50, seed=b"a seed for tests only", delta=1e-5, data_loader=loader))
    found["left by unaudited"] = str({"add_noise", "reduce_gradients", "pre_step", "audit"} & vars(optimizer).keys())
    return found


def fetch_another(optimizer, loader):
    optimizer.open_pass = iter(loader)
    next(optimizer.open_pass)


def write_seed(folder):
    (folder / "seed").write_text("0123456789abcdef" * 4)
    return folder / "seed"


def alarm(rank, folder, *, mode):
    """The round in which an alarm stops each rank."""
    model, optimizer, loss, loader, _ = make(rank, mode=mode)
    halve_noise(optimizer)
    settings = {"canaries": 200, "seed": b"a seed for tests only", "delta": 1e-5, "on_violation": "raise"}
    optimizer = audited(optimizer, model, data_loader=loader, **settings)
    for _ in range(10):
        for words, labels in loader:
            optimizer.zero_grad()
            loss(model(words), labels).backward()
            try:
                optimizer.step()
            except ViolationError as error:
                return {"round": optimizer.audit.last_round, "error": str(error)}
    return None


def replaced_hook(rank, folder, *, mode):
    """The error of the first step after the audit's hook was replaced, and whether the weights stayed as they were."""
    model, optimizer, loss, loader, _ = make(rank, mode=mode, rows=60, batch=60)
    audited(optimizer, model, data_loader=loader, canaries=30, seed=b"a seed for tests only", delta=1e-5)
    before = [shard.clone() for shard in shards(optimizer)]
    optimizer.attach_step_hook(lambda _: None)
    (batch,) = list(loader)
    loss(model(batch[0]), batch[1]).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        same = all(torch.equal(one, other) for one, other in zip(before, shards(optimizer), strict=True))
        return {"error": str(error), "same": same}
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, _, (folder, scenarios) = start_rank()
    found = []
    for name, settings in json.loads(scenarios):
        try:
            found.append(globals()[name](rank, Path(folder), **settings))
        except ConnectionError as error:
            sys.exit(f"{type(error).__name__}: {error}")
        Path(folder, f"found-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
