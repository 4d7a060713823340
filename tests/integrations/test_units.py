"""What `unit=` names is in the result, the claim and the printout of every integration."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from requires import require

from coalmine import Claim, mechanism_epsilon

DIM, ROUNDS, CANARIES, DELTA = 1_000, 6, 40, 1e-5
EPSILON = float(mechanism_epsilon(1.0, delta=DELTA, participations=ROUNDS))
TERMS = {"canaries": CANARIES, "seed": b"units", "delta": DELTA, "claim": EPSILON}


def speaks_of(result, unit):
    first, text = str(result).splitlines()[0], result.details()
    assert f"for one {unit}" in first
    assert result.claim.unit == result.trainer.privacy_unit == unit
    assert f"one {unit}" in text
    return True


class Base:
    """Stands for a base class of a framework that is not installed."""

    def __init__(self, **settings):
        self.settings = settings


@pytest.fixture
def stand_ins(monkeypatch):
    """Import an integration with stand-ins for what it imports of its framework, unless that is installed."""

    def load(name, framework, parts):
        try:
            importlib.import_module(framework)
        except ImportError:
            monkeypatch.setitem(sys.modules, framework, ModuleType(framework))
            for module, names in parts.items():
                made = ModuleType(module)
                vars(made).update(names)
                monkeypatch.setitem(sys.modules, module, made)
        module = importlib.import_module(f"coalmine.integrations.{name}")
        monkeypatch.delitem(sys.modules, f"coalmine.integrations.{name}")
        return module

    return load


def noised_sum(audit, present, rng):
    return audit.core.updates(present, 1.0) + rng.normal(size=DIM)


def test_pfl_names_the_unit(stand_ins):
    base = type("Postprocessor", (Base,), {})
    pfl = stand_ins("pfl", "pfl", {"pfl.metrics": {"Metrics": dict}, "pfl.postprocessor.base": {"Postprocessor": base}})
    model = require("torch").nn.Linear(DIM, 1, bias=False)
    audit = pfl.audited(base(), model, clip_norm=1.0, noise_multiplier=1.0, unit="patient", **TERMS).audit
    rng, present = np.random.default_rng(0), list(range(CANARIES))
    for _ in range(ROUNDS):
        audit.observe(noised_sum(audit, present, rng), present, np.zeros(DIM), CANARIES)
    assert speaks_of(audit.finish(), "patient")


def test_nvflare_names_the_unit(stand_ins, tmp_path):
    class Recipe:
        def add_server_input_filter(self, audit, tasks):
            self.server = audit

        def ignore(self, *arguments, **settings):
            pass

        set_per_site_config = add_client_output_filter = ignore

    events, moments = SimpleNamespace(START_RUN=1, END_RUN=2), SimpleNamespace(AFTER_AGGREGATION=3)
    nvflare = stand_ins(
        "nvflare",
        "nvflare",
        {
            "nvflare.apis.dxo": {"DataKind": SimpleNamespace(WEIGHT_DIFF="diff")},
            "nvflare.apis.dxo_filter": {"DXOFilter": Base},
            "nvflare.apis.event_type": {"EventType": events},
            "nvflare.app_common.app_constant": {"AppConstants": SimpleNamespace(AGGREGATION_RESULT="sum")},
            "nvflare.app_common.app_event_type": {"AppEventType": moments},
            "nvflare.recipe.spec": {"Recipe": Recipe},
        },
    )
    if not issubclass(Recipe, nvflare.Recipe):
        pytest.skip("nvflare is installed: python -m studies.other_frameworks runs this")
    sites = [f"site-{index}" for index in range(CANARIES)]
    settings = {name: value for name, value in TERMS.items() if name != "canaries"}
    recipe = nvflare.audited(
        Recipe(), np.zeros(DIM), sites=sites, canaries=sites, clip_norm=1.0, noise_multiplier=1.0, unit="hospital",
        directory=tmp_path / "run", **settings,
    )  # fmt: skip
    rng, present = np.random.default_rng(0), list(range(CANARIES))
    with recipe.server._open() as audit:
        for _ in range(ROUNDS):
            audit.observe({"w": noised_sum(audit, present, rng) / CANARIES}, present, CANARIES)
    assert speaks_of(recipe.server.finish(), "hospital")


@pytest.fixture
def flower():
    require("flwr")
    return SimpleNamespace(
        **vars(importlib.import_module("flower_training")),
        integration=importlib.import_module("coalmine.integrations.flower"),
    )


def test_flower_names_the_unit(flower):
    strategy = flower.integration.audited(
        flower.server_side(flower.REAL), audit=flower.small_audit(), mode="extra", unit="hospital"
    )
    flower.small_run(strategy, flower.LoopGrid(flower.client_app(), flower.nodes(canaries=0)))
    assert speaks_of(flower.finish_as_stated(strategy), "hospital")


def test_an_observer_of_flower_names_the_unit(flower):
    observer = flower.integration.Observer
    replies = flower.REAL + flower.CANARIES
    watch = observer(flower.small_audit(), clip_norm=1.0, participants=replies, noise_multiplier=1.0, unit=" hospital ")
    announced = flower.config(**watch.announce(flower.initial_arrays(flower.SMALL), seed=flower.SEED))
    mod = flower.integration.canary_mod
    grid = flower.LoopGrid(flower.client_app([mod]), flower.nodes())
    flower.small_run(flower.server_side(replies), grid, train_config=announced, evaluate_fn=watch)
    assert speaks_of(watch.audit.finish(claim=20.0), "hospital")
    with pytest.raises(ValueError, match="unit must name what is protected"):
        observer(flower.small_audit(), unit="")
    with pytest.raises(ValueError, match="unit must be the one that the claim states, 'user', got 'hospital'"):
        observer(flower.small_audit(claim=Claim(3.0, unit="user")), unit="hospital")


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.full
def test_jax_privacy_names_the_unit():
    require("jax_privacy")
    training = importlib.import_module("jax_training")
    privatizer = training.gaussian(unit="diary entry", canaries=60, claim=30.0)
    assert speaks_of(privatizer.audit.finish(**training.train(privatizer, training.POISSON)), "diary entry")
