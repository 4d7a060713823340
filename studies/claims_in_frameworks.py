"""Rows of studies/claims.py that train a tiny model with Opacus, Flower or jax_privacy, imported when a row is run."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from coalmine import AuditResult, mechanism_epsilon
from studies.claim_rows import (
    FEWER_SEEDS,
    NEVER_PASSES,
    NOT_REFUTED,
    PASSES,
    STATED,
    Bar,
    Row,
)

HELPERS = Path(__file__).parents[1] / "tests" / "integrations"
DELTA, TARGET = 1e-5, 3.0
REFUTED_ALWAYS = Bar("VIOLATION", lambda run: run["outcome"] == "VIOLATION", 1.0)


def framework_rows() -> Iterator[Row]:
    """Every row that needs a framework."""
    yield from _opacus_rows()
    yield from _flower_rows()
    never = partial(Row, table="frameworks", needs="jax_privacy", seeds=FEWER_SEEDS, bars=(NEVER_PASSES,))
    yield never(name="jax_privacy, through_clip=True, but no canary row is added", run=_jax_without_canaries)


def _opacus_rows() -> Iterator[Row]:
    row = partial(Row, table="frameworks", needs="opacus")
    honest = (NOT_REFUTED, PASSES)
    yield row(name="Opacus, target ε 3, honest, claim 3 up front", run=_target, bars=honest)
    after = partial(_target, early=False)
    yield row(name="Opacus, target ε 3, honest, claim 3 at the end", run=after, bars=honest)
    halved = partial(_target, halved=True)
    yield row(name="Opacus, target ε 3, noise halved, claim 3 up front", run=halved, bars=(REFUTED_ALWAYS,))
    silent = partial(_target, halved=True, late=None, early=False)
    yield row(name="Opacus, target ε 3, noise halved, no claim", run=silent, bars=(NEVER_PASSES,))
    growing = "Opacus, honest ExponentialNoise, composed ε"
    for gamma in (0.8, 1.2):
        yield row(name=f"{growing}, × {gamma} per epoch", run=partial(_exponential, gamma=gamma), bars=honest)


def _here(*modules: str) -> list[Any]:
    """Helper modules of the tests of integrations."""
    if str(HELPERS) not in sys.path:
        sys.path.insert(0, str(HELPERS))
    warnings.simplefilter("ignore")  # of the frameworks, about random numbers and their own imports
    return [__import__(name) for name in modules]


def _target(seed: int, *, halved: bool = False, early: bool = True, late: float | None = TARGET) -> AuditResult:
    """Training for a target of 3, claimed before (`early`) or after it; the noise may be halved after the audit began."""
    (target,) = _here("opacus_target")
    run = target.Run(audit=False, seed=seed % 2**31)
    run.audited(seed=b"study of claims" + seed.to_bytes(5, "big"), claim=TARGET if early else None)
    if halved:
        run.optimizer.noise_multiplier /= 2
    run.train()
    return _result(run.finish() if early or late is None else run.finish(claim=late))


def _exponential(seed: int, *, gamma: float) -> AuditResult:
    """A schedule of Opacus, and the claim is its PRV accountant's epsilon of the list."""
    (target,) = _here("opacus_target")
    from opacus.accountants import PRVAccountant
    from opacus.schedulers import ExponentialNoise

    run = target.Run(audit=False, seed=seed % 2**31)
    accountant = PRVAccountant()
    each, first = target.STEPS // target.EPOCHS, run.optimizer.noise_multiplier
    accountant.history = [(first * gamma**epoch, target.RATE, each) for epoch in range(target.EPOCHS)]
    run.audited(seed=b"study of claims" + seed.to_bytes(5, "big"), claim=accountant.get_epsilon(DELTA))
    run.train(scheduler=ExponentialNoise(run.optimizer, gamma=gamma))
    return _result(run.finish())


def _result(result: Any) -> AuditResult:
    assert isinstance(result, AuditResult)
    return result


def _flower_rows() -> Iterator[Row]:
    """Eight real nodes and twelve canaries, unless the row says otherwise."""
    row = partial(Row, table="frameworks", needs="flwr", bars=(STATED,))
    light = range(9, 14)
    name = "Flower, 5 of 12 canaries report weight 0.5, claim 11.5"
    yield row(name=name, run=partial(_weighted, examples=lambda node: 5 if node in light else 10, rounds=5, claim=11.5))
    for weight in (20, 100):
        heavy = partial(_weighted, examples=partial(_one_heavy, weight=weight), rounds=3, claim=_of_one(3))
        yield row(name=f"Flower, one client at {weight} × the weight", run=heavy)
    equal = partial(_weighted, examples=lambda node: 10, rounds=3, claim=_of_one(3))
    yield row(name="Flower, equal weights, exact claim", run=equal, bars=(NOT_REFUTED,))
    once = partial(_in_turn, claim=_of_one(1))
    yield row(
        name="Flower, canary-id 0-9, 10 rounds, claim of one round", run=once, bars=(REFUTED_ALWAYS,), seeds=FEWER_SEEDS
    )
    whole = partial(_in_turn, claim=1.01 * _of_one(10))
    name = "Flower, canary-id 0-9, 10 rounds, claim of all"
    yield row(name=name, run=whole, bars=(NOT_REFUTED, PASSES), seeds=FEWER_SEEDS)


def _one_heavy(node: int, weight: int) -> int:
    return 10 * weight if node == 1 else 10


def _of_one(rounds: int) -> float:
    """The epsilon of a client with noise 1 in so many rounds."""
    return float(mechanism_epsilon(1.0, delta=DELTA, participations=rounds))


def _weighted(seed: int, *, examples: Callable[[int], int], rounds: int, claim: float) -> AuditResult:
    """Nodes that report this number of examples."""
    (flower,) = _here("flower_training")
    return _trained(seed, flower.nodes(), flower.CANARIES, rounds=rounds, claim=claim, examples=examples)


def _in_turn(seed: int, *, claim: float) -> AuditResult:
    """Four nodes with ten canaries each, one after the other, beside eight real ones."""
    (flower,) = _here("flower_training")
    configs = flower.nodes(flower.REAL, 0)
    configs += [{"canary-id": f"{10 * node}-{10 * node + 9}"} for node in range(4)]
    return _trained(seed, configs, 40, rounds=10, claim=claim)


def _trained(
    seed: int,
    configs: list[dict[str, Any]],
    canaries: int,
    *,
    rounds: int,
    claim: float,
    examples: Callable[[int], int] = lambda node: 10,
) -> AuditResult:
    (flower,) = _here("flower_training")
    from coalmine.integrations.flower import audited, canary_mod

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    secret = b"study of claims" + seed.to_bytes(5, "big")
    audit = flower.new_audit(canaries=canaries, dim=flower.SMALL, seed=secret)
    strategy = audited(flower.server_side(len(configs)), audit=audit, seed=secret)
    app = flower.client_app([canary_mod], examples=examples)
    grid = flower.LoopGrid(app, configs)
    flower.run(strategy, grid, rounds=rounds, seed=seed % 2**31, arrays=flower.initial_arrays(flower.SMALL))
    return _result(strategy.audit.finish(claim=claim))


def _jax_without_canaries(seed: int) -> AuditResult:
    """The canaries are expected among the clipped rows, but the loop adds none."""
    (helper,) = _here("jax_training")
    import jax_privacy

    privatizer = helper.gaussian(through_clip=True, canaries=300, seed=b"study of claims" + seed.to_bytes(5, "big"))
    grad_fn = jax_privacy.clipped_grad(
        privatizer.canary_loss(helper.loss), l2_clip_norm=1.0, batch_argnums=(1, 2, 3), microbatch_size=20
    )
    options = {"grad_fn": grad_fn, "through_clip": True, "rows_of_canaries": lambda _: []}
    return _result(privatizer.audit.finish(**helper.train(privatizer, helper.POISSON, **options)))
