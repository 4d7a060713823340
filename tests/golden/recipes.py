"""How each golden run was made: loops with known faults, and one run for each integration.

A recipe writes a finished run into a directory. `CLAIMS` lists further claims on which the recorded rounds of a run are
judged, so that one log shows several verdicts.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coalmine import (
    Audit,
    AuditedItem,
    Claim,
    FixedSize,
    Poisson,
    Shuffled,
    TreeNoise,
    amplified_epsilon,
    mechanism_epsilon,
)

SEED = b"the golden runs' own seed"
DELTA, DIM, CANARIES, UNOBSERVED = 1e-5, 1_200, 40, 80
TESTS = Path(__file__).parents[1]


def epsilon_of(noise: float = 1.0, times: int = 1) -> float:
    """The epsilon of a client in `times` rounds."""
    return float(mechanism_epsilon(noise, delta=DELTA, participations=times))


def loop(
    path: Path,
    *,
    rounds: int = 6,
    presentations: int | None = 6,
    stated: Any = 2.0,
    true: Any = None,
    claim: Claim | float | None = None,
    clients: int | None = None,
    items: tuple[AuditedItem, ...] = (),
    others: Callable[[int, np.ndarray], np.ndarray | None] = lambda _, total: total,
    noise_std: Callable[[int, float], float | None] = lambda _, std: std,
    clip_norm: float | None = 1.0,
    present: Callable[[int, np.ndarray], np.ndarray] = lambda _, canaries: canaries,
    arriving: Callable[[np.ndarray], np.ndarray] = lambda canaries: canaries,
    size: Any = 1.0,
    correlate: Callable[[np.ndarray, int], np.ndarray] = lambda noise, _: noise,
    decimals: int | None = None,
    law: Callable[[np.ndarray, int], np.ndarray] = lambda noise, _: noise,
    participants: Callable[[int], int] | None = None,
    divisor: Callable[[int], float] = lambda _: 1.0,
    moved: float = 1.0,
    model: Any = None,
    dim: int = DIM,
    canaries: int = CANARIES,
    unobserved: int = UNOBSERVED,
    skipped: tuple[int, ...] = (),
    seed: int = 0,
    expected: bool = False,
    analytical: float | None = None,
    **settings: Any,
) -> None:
    """Rounds in numpy, in units of the clip norm. What a fault changes is an argument."""
    rng = np.random.default_rng(seed)
    common = {
        "canaries": canaries,
        "unobserved": unobserved,
        "seed": SEED,
        "delta": DELTA,
        "directory": path,
    } | settings
    common["claim"] = claim
    if presentations is not None:
        common |= {"rounds": rounds, "presentations": presentations}
    audit = Audit(dim, **common) if model is None else Audit.for_model(model(), **common)
    stated_noise = np.broadcast_to(np.asarray(stated, float), rounds)
    true_noise = stated_noise if true is None else np.broadcast_to(np.asarray(true, float), rounds)
    sizes = np.broadcast_to(np.asarray(size, float), rounds)
    draws = correlate(rng.normal(size=(rounds, dim)), rounds)
    weights = np.zeros(dim)
    for number in range(1, rounds + 1):
        planned = (
            audit.canaries_in_round(number)
            if presentations is not None or "sampling" in settings
            else np.arange(canaries)
        )
        listed = present(number, planned)
        real = 3 * rng.normal(size=dim) / math.sqrt(dim)
        sent = arriving(listed)
        total = (
            real
            + vector(audit.updates(sent, 1.0), dim) * sizes[number - 1]
            + law(true_noise[number - 1] * draws[number - 1], number)
        )
        n = divisor(number)
        if number in skipped:
            continue
        if decimals is not None:
            total = np.round(total, decimals)
        weights = weights + moved * total / n
        given = others(number, real)
        std = noise_std(number, float(stated_noise[number - 1]))
        audit.observe_round(
            number,
            shaped(total / n, model),
            present=listed,
            others=None if given is None else shaped(given / n, model),
            noise_std=None if std is None else std / n,
            clip_norm=None if clip_norm is None else clip_norm / n,
            participants=None if participants is None else participants(number),
        )
    if moved or expected:
        audit.observe_final(shaped(weights + 1, model), initial=shaped(np.ones(dim), model))
    audit.finish(claim=None, clients=clients, audited=items, analytical_epsilon=analytical)
    audit.close()


def vector(update: Any, dim: int) -> np.ndarray:
    """A model's update as one vector."""
    if not isinstance(update, dict):
        return np.asarray(update)
    return np.concatenate([np.ravel(value) for value in update.values()]).astype(float)


def shaped(values: np.ndarray, model: Callable[[], dict[str, np.ndarray]] | None) -> Any:
    """A vector in the shape of the model."""
    if model is None:
        return values
    taken, start = {}, 0
    for name, array in model().items():
        taken[name] = values[start : start + array.size].reshape(array.shape).astype(array.dtype)
        start += array.size
    return taken


def small_model() -> dict[str, np.ndarray]:
    return {"weights": np.zeros((30, 39), np.float32), "bias": np.zeros(30, np.float32)}


def lacking(number_lacking: set[int]) -> Callable[[int, Any], Any]:
    """What a round is given, except in these rounds."""
    return lambda number, value: None if number in number_lacking else value


def coin(rate: float, seed: int = 5) -> Callable[[int, np.ndarray], np.ndarray]:
    """Canaries join by a coin of the pipeline's own."""
    rng = np.random.default_rng(seed)
    return lambda _, canaries: np.flatnonzero(rng.random(canaries.size) < rate)


def sampled(scheme: Any, epsilon: float | None = None, noise: float = 1.0, **more: Any) -> Claim:
    """An amplified claim, by default of the accountant's epsilon."""
    given = epsilon or float(amplified_epsilon(noise, scheme, DELTA)) * 1.001
    return Claim(given, **({"sampling": scheme, "noise_multiplier": noise, "sampler_observed": True} | more))


def tree_noise(noise: np.ndarray, rounds: int) -> np.ndarray:
    """Noise of tree aggregation: that of a round's own node minus that of its children."""
    return np.linalg.solve(encoder(TreeNoise(rounds=rounds), rounds), noise)


def encoder(scheme: Any, rounds: int) -> np.ndarray:
    """The matrix C, from the columns of the identity."""
    made, identity = scheme.encoder(), np.eye(rounds)
    return np.array([made.add(number, identity[number - 1].copy()) for number in range(1, rounds + 1)])


ROUNDS = 24  # of sampled runs
SAMPLED = {"rounds": ROUNDS, "presentations": None, "stated": 1.0, "canaries": 100, "unobserved": 20}
POISSON, SHUFFLED = Poisson(0.1, rounds=ROUNDS), Shuffled(8, epochs=3)
FIXED = FixedSize(20, 200, rounds=ROUNDS)
TWELVE = epsilon_of(2.0, 6)
LAYERS = [("first", 1_000), ("last", 200)]

LOOPS: dict[str, dict[str, Any]] = {
    "plain": {"claim": TWELVE, "clients": 20, "analytical": TWELVE},
    "half-noise": {"claim": TWELVE, "true": 1.0},
    "model": {"claim": TWELVE, "model": small_model},
    "blocks": {"claim": TWELVE, "model": small_model, "blocks": [700, 500]},
    "sphere": {"claim": TWELVE, "kind": "sphere"},
    "groups": {"claim": Claim(epsilon_of(2.0, 3), participations=3), "presentations": (3, 6)},
    "tree": {"claim": Claim(8.0), "noise": TreeNoise(rounds=6), "correlate": tree_noise, "unobserved": 200},
    "no-claim": {},
    "no-claim-less-noise": {"true": 0.9},
    "no-others": {"claim": TWELVE, "others": lambda *_: None, "clients": 4},
    "others-doubled": {"claim": TWELVE, "others": lambda _, total: 2 * total},
    "rounds-without-others": {"claim": TWELVE, "others": lacking({2, 3})},
    "rounds-without-noise": {"claim": TWELVE, "noise_std": lacking({4})},
    "no-noise-std": {"claim": TWELVE, "noise_std": lambda *_: None},
    "no-canaries": {"claim": TWELVE, "present": lambda *_: np.arange(0)},
    "one-canary-less-noise": {"claim": TWELVE, "present": lambda *_: np.array([3]), "true": 1.2},
    "no-canaries-no-noise": {"claim": TWELVE, "present": lambda *_: np.arange(0), "true": 1e-5},
    "one-canary": {"claim": TWELVE, "present": lambda *_: np.array([3])},
    "undetected": {"claim": TWELVE, "arriving": lambda _: np.arange(0), "clip_norm": None},
    "flipped": {"claim": TWELVE, "size": -1.0, "clip_norm": None},
    "unknown-participations": {"claim": TWELVE, "presentations": None},
    "uneven": {"claim": epsilon_of(0.5, 6), "stated": 0.5, "arriving": lambda canaries: canaries[: len(canaries) // 2]},
    "short": {"claim": epsilon_of(0.3, 6), "stated": 0.3, "size": 0.7},
    "too-weak": {"claim": epsilon_of(8.0, 1), "presentations": 1, "stated": 8.0},
    "schedule": {"claim": Claim(12.0, participations=6), "stated": [1.6, 1.8, 2, 2.2, 2.4, 2.6]},
    "varied": {"claim": Claim(9.5, participations=3), "stated": [1, 1, 1, 2, 2, 2], "clip_norm": None},
    "much-louder-round": {"claim": Claim(epsilon_of(2.0), participations=1), "size": [1, 1, 3.5, 1, 1, 1]},
    "louder-round-of-a-schedule": {
        "claim": Claim(2.8, participations=1),
        "stated": [1.6, 1.8, 2, 2.2, 2.4, 2.6],
        "size": [1, 1, 1, 1, 1, 5],
    },
    "louder-schedule": {
        "claim": Claim(8.0, participations=6),
        "stated": [1.6, 1.8, 2, 2.2, 2.4, 2.6],
        "size": 2.0,
        "clip_norm": None,
        "canaries": 60,
    },
    "alarm": {"claim": TWELVE, "true": 0.8, "on_violation": "warn"},
    "pipeline-fault": {
        "claim": TWELVE,
        "items": (AuditedItem("clipping", "failed", "a client sent 3 times the clip norm"),),
    },
    "rounded": {"claim": TWELVE, "decimals": 0},
    "too-long": {"claim": TWELVE, "true": 2.6},
    "laplace": {
        "claim": TWELVE,
        "law": lambda noise, number: 2 * np.random.default_rng(number).laplace(size=DIM) / 2**0.5,
    },
    "repeated-noise": {"claim": TWELVE, "law": lambda noise, _: 2 * np.random.default_rng(1).normal(size=DIM)},
    "not-trained": {"claim": TWELVE, "moved": 0.0, "expected": True, "layers": LAYERS},
    "sampled": {"claim": sampled(POISSON), "sampling": POISSON, **SAMPLED},
    "sampled-own-coin": {"claim": sampled(POISSON), "present": coin(0.1), **SAMPLED},
    "sampled-few": {
        "claim": sampled(Poisson(0.015, rounds=3), noise=0.3),
        "present": coin(0.015),
        **SAMPLED | {"rounds": 3, "stated": 0.3},
    },
    "sampled-twice-as-often": {"claim": sampled(POISSON), "present": coin(0.25), **SAMPLED},
    "sampled-divisor": {
        "claim": sampled(POISSON),
        "present": coin(0.1),
        "divisor": lambda number: 20 + number % 3,
        "participants": lambda number: 20 + number % 3,
        **SAMPLED,
    },
    "shuffled": {
        "claim": sampled(SHUFFLED),
        "sampling": SHUFFLED,
        **SAMPLED | {"participants": lambda number: 20 + number % 3},
    },
    "fixed-size": {
        "claim": sampled(FIXED),
        "sampling": FIXED,
        **SAMPLED | {"participants": lambda _: 20},
    },
}


def train_flower(path: Path) -> None:
    """Flower in one process, with canaries as extra clients."""
    from flower_training import (
        REAL,
        LoopGrid,
        client_app,
        finish_as_stated,
        initial_arrays,
        new_audit,
        nodes,
        run,
        server_side,
    )

    from coalmine.integrations.flower import audited

    audit = new_audit(canaries=12, dim=1_200, seed=SEED, unobserved=60, directory=path)
    strategy = audited(server_side(REAL, noise=0.7, clip=0.4), audit=audit, mode="extra")
    run(strategy, LoopGrid(client_app(), nodes(canaries=0)), rounds=3, arrays=initial_arrays(1_200))
    finish_as_stated(strategy)
    audit.close()


def train_flower_clients(path: Path) -> None:
    """Flower in one process, with canaries that clients send."""
    from flower_training import (
        REAL,
        LoopGrid,
        client_app,
        finish_as_stated,
        initial_arrays,
        new_audit,
        nodes,
        run,
        server_side,
    )

    from coalmine.integrations.flower import audited, canary_mod

    audit = new_audit(canaries=12, dim=1_200, seed=SEED, unobserved=60, directory=path)
    strategy = audited(server_side(REAL + 12), audit=audit, mode="client", seed=SEED)
    run(strategy, LoopGrid(client_app([canary_mod]), nodes()), rounds=3, arrays=initial_arrays(1_200))
    finish_as_stated(strategy)
    audit.close()


def train_opacus(path: Path, *, physical: int | None = None, **settings: Any) -> None:
    """Opacus on 200 random examples, with canaries on the rows of its loader."""
    import torch
    from opacus import PrivacyEngine
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from coalmine.integrations.opacus import audited

    torch.manual_seed(0)
    data, labels = torch.randn(200, 20), torch.randint(0, 10, (200,))
    model = nn.Linear(20, 50)
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data, labels), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=True,
    )
    optimizer = audited(
        optimizer,
        model,
        canaries=40,
        unobserved=80,
        seed=SEED,
        delta=DELTA,
        directory=path,
        data_loader=loader,
        claim=8.0,
        **settings,
    )
    for features, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
    optimizer.audit.finish()
    optimizer.audit.close()


def train_transformers(path: Path) -> None:
    """A random Llama with LoRA adapters in a Trainer."""
    import tempfile

    from lora_training import make, trainer_of

    from coalmine.integrations.transformers import audited

    callback = audited(canaries=20, unobserved=40, seed=SEED, delta=DELTA, claim=30.0, directory=path)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(make(rank=1, hidden=8), callback, Path(folder), steps=3).train()
    callback.finish(task="LoRA")
    callback.audit.close()


def train_jax(path: Path) -> None:
    """jax_privacy with Poisson sampling."""
    from jax_training import POISSON as STRATEGY
    from jax_training import gaussian, train

    privatizer = gaussian(directory=path, canaries=20, unobserved=20, seed=SEED, claim=10.0)
    privatizer.audit.finish(**train(privatizer, STRATEGY))
    privatizer.audit.close()


def simulate(path: Path, *options: str) -> None:
    """`coalmine run` on digits."""
    from frozen import command

    seed = path.parent / "seed.txt"
    seed.write_bytes(SEED)
    code, _, error = command(
        "run", "--out", path.name, "--seed-file", "seed.txt", "--rounds", "4", "--canaries", "20", "--workers", "1",
        "--device", "cpu", *options,
        where=path.parent,
    )  # fmt: skip
    if code not in (0, 1, 3):
        raise RuntimeError(f"coalmine run failed: {error}")


INTEGRATIONS: dict[str, Callable[[Path], None]] = {
    "flower-extra": train_flower,
    "flower-clients": train_flower_clients,
    "opacus-loader": train_opacus,
    "transformers-trainer": train_transformers,
    "jax-privacy": train_jax,
    "simulated-clients": lambda path: simulate(path, "--claim", "analytical"),
    "simulated-examples": lambda path: simulate(
        path, "--level", "example", "--pattern", "clients", "--claim", "accountant"
    ),
    "simulated-adaptive": lambda path: simulate(path, "--set", "privacy.clipping=adaptive"),
}

ONE = Claim(8.0, participations=1)
CLAIMS: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {
        "far too small": {"claim": 0.5},
        "a sensitivity": {"claim": Claim(8.0, sensitivity=1.5)},
        "an alarm was watched for": {"claim": TWELVE, "watched": True},
        "unlimited": {"claim": 1e6},
    },
    "half-noise": {"no claim": {"claim": None}, "watched": {"claim": TWELVE, "watched": True}},
    "schedule": {"too small": {"claim": Claim(3.0, participations=6)}, "for one round": {"claim": ONE}},
    "no-others": {"clients unknown": {"claim": TWELVE}, "large": {"claim": 100.0, "clients": 4}},
    "tree": {"without others": {"claim": 2.0}},
    "sampled": {
        "accounting": {"claim": sampled(POISSON, 0.5)},
        "sampler not observed": {"claim": sampled(POISSON, sampler_observed=False)},
        "too many rounds": {"claim": sampled(Poisson(0.1, rounds=60))},
        "mechanism": {"claim": Claim(epsilon_of(1.0, 12), participations=12)},
        "bare": {"claim": 6.0},
    },
    "sampled-own-coin": {
        "small": {"claim": sampled(POISSON, 0.5)},
        "too often": {"claim": sampled(Poisson(0.2, rounds=ROUNDS))},
        "rare": {"claim": sampled(Poisson(0.01, rounds=ROUNDS))},
    },
    "sampled-twice-as-often": {
        "generous": {"claim": sampled(POISSON, 50.0)},
        "twice": {"claim": sampled(Poisson(0.2, rounds=ROUNDS))},
    },
    "fixed-size": {"poisson": {"claim": sampled(POISSON)}, "range": {"claim": sampled(FIXED, 12.0)}},
    "shuffled": {"larger": {"claim": sampled(SHUFFLED, 60.0)}},
    "much-louder-round": {"larger": {"claim": Claim(8.0, participations=1)}, "for all": {"claim": TWELVE}},
    "louder-schedule": {
        "larger": {"claim": Claim(10.0, participations=6)},
        "for two": {"claim": Claim(6.0, participations=2)},
    },
    "varied": {
        "too small": {"claim": Claim(5.0, participations=3)},
        "for all": {"claim": Claim(7.0, participations=6)},
    },
}
