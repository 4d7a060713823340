"""DP-SGD with Opacus as a user would write it, on learnable or random data, with the tests' faults."""

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from coalmine.integrations.opacus import audited

WARNINGS = (
    "ignore:divide by zero encountered in log",  # Opacus, at sample rate 1
    "ignore:Secure RNG turned off",
    "ignore:Optimal order is",
    "ignore:Full backward hook",
    "ignore:.*alphas",
)


def make(
    *,
    examples=1_000,
    batch=1_000,
    learnable=True,
    mode="hooks",
    noise_multiplier=1.0,
    clip_norm=1.0,
    seed=0,
    poisson=None,
    **more,
):
    """Model, optimizer, loss, loader and engine: 9,648 parameters, all examples in each step unless `batch` is smaller."""
    torch.manual_seed(seed)
    labels = torch.randint(0, 10, (examples,))
    data = torch.randn(examples, 50)
    if learnable:
        data += 3 * torch.randn(10, 50)[labels]
    model = nn.Sequential(nn.Linear(50, 158), nn.ReLU(), nn.Linear(158, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(data, labels), batch_size=batch, shuffle=poisson is False)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=noise_multiplier,
        max_grad_norm=clip_norm,
        poisson_sampling=batch < examples if poisson is None else poisson,
        grad_sample_mode=mode,
        **more,
    )
    if mode == "ghost":
        model, optimizer, loss, loader = made
    else:
        model, optimizer, loader = made
        loss = nn.CrossEntropyLoss()
    return model, optimizer, loss, loader, engine


def quoted(*, rate=1.0, steps, noise_multiplier=1.0, delta=1e-5):
    """The epsilon that Opacus's accountant quotes for these steps."""
    accountant = PRVAccountant()
    accountant.history = [(noise_multiplier, rate, steps)]
    return accountant.get_epsilon(delta)


def dimension(optimizer):
    return sum(p.numel() for p in optimizer.params)


def train(*, through_clip=False, **settings):
    """A finished audit, its result and the engine, with the settings of `start`."""
    optimizer, engine = start(through_clip=through_clip, **settings)
    return optimizer.audit, optimizer.audit.finish(), engine


def start(
    steps=5,
    canaries=400,
    sampling_probability=1.0,
    physical=None,
    fault=None,
    through_clip=None,
    seed=0,
    directory=None,
    observe=False,
    claim="quoted",
    replay=True,
    unit=None,
    **settings,
):
    """A trained optimizer with an unfinished audit, and the engine. `fault` changes the optimizer before the audit does.

    With `observe`, canaries join the steps of their rows in the loader; otherwise they are sampled on their own. The claim
    is what the accountant quotes for the steps, unless another is given.
    """
    model, optimizer, loss, loader, engine = make(seed=seed, **settings)
    if fault:
        fault(optimizer)
    noise = settings.get("noise_multiplier", 1.0)
    if claim == "quoted":
        rate = 1 / len(loader) if observe else sampling_probability
        claim = quoted(rate=rate, steps=steps, noise_multiplier=noise) if noise else None
    coin = {"sampling_probability": sampling_probability, "rng": np.random.default_rng(seed)}
    optimizer = audited(
        optimizer,
        model,
        canaries=canaries,
        seed=bytes([seed]) + b"tests only",
        delta=1e-5,
        through_clip=through_clip,
        directory=directory,
        claim=claim,
        replay=replay,
        unit=unit,
        **({"data_loader": loader} if observe else coin),
    )
    audit = optimizer.audit
    while audit.last_round < steps:
        if physical:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as smaller:
                run_epoch(model, optimizer, loss, smaller, audit, steps)
        else:
            run_epoch(model, optimizer, loss, loader, audit, steps)
    return optimizer, engine


def run_epoch(model, optimizer, loss, loader, audit, steps):
    for data, labels in loader:
        optimizer.zero_grad()
        loss(model(data), labels).backward()
        optimizer.step()
        if audit.last_round >= steps:
            return


def halve_noise(optimizer):
    """Add half the noise, while the accountant still uses the full multiplier."""
    real = optimizer.add_noise

    def add_noise():
        claimed = optimizer.noise_multiplier
        optimizer.noise_multiplier = claimed / 2
        real()
        optimizer.noise_multiplier = claimed

    optimizer.add_noise = add_noise


def forget_clip(optimizer):
    """Leave every gradient unclipped."""
    real = optimizer.clip_and_accumulate

    def clip_and_accumulate():
        claimed = optimizer.max_grad_norm
        optimizer.max_grad_norm = 1e9
        real()
        optimizer.max_grad_norm = claimed

    optimizer.clip_and_accumulate = clip_and_accumulate


def spare_last_bias(optimizer):
    """Add noise to every parameter except the last, a bias of 10 numbers."""
    real = optimizer.add_noise

    def add_noise():
        real()
        last = optimizer.params[-1]
        last.grad = last.summed_grad.view_as(last).clone()

    optimizer.add_noise = add_noise
