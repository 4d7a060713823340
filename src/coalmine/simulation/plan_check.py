"""Whether what `coalmine run` committed to, and what its rounds state, follow from its config: for `coalmine verify`."""

import math
from typing import Any

import numpy as np

from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.log.commitment import json_equal
from coalmine.log.files import json_ready
from coalmine.simulation.config import RunConfig
from coalmine.simulation.noise_addition import noise_spread
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.run_audit import statement_of
from coalmine.simulation.training_run import load_task_of, plan
from coalmine.verification.check import Check, Evidence

KINDS = ("task", "level", "noise", "client_exposure", "unit", "clipping", "trust_model", "status", "source")
STATED = 1e-6  # relative difference of a number that a round states


def check_plan(known: Evidence) -> Check:
    """Recompute claim, facts and items from the committed config, and compare them; and every round with the plan."""
    assert known.config is not None
    try:
        config = RunConfig.from_dict({name: value for name, value in known.config.items() if name != "schema_version"})
        task = load_task_of(config)
        planned = plan(config, task, seed=known.seed)
    except (OSError, ValueError) as error:
        return Check("plan", None, f"the plan cannot be made again from config.toml: {error}")
    expected, stated = statement_of(planned, task), known.statement
    pairs = {"claim": (expected.claim, stated.claim), "watched": (expected.watched, stated.watched)}
    names = expected.facts.keys() | stated.facts.keys()
    pairs |= {name: (expected.facts.get(name), stated.facts.get(name)) for name in sorted(names)}
    wrong = [name for name, (ours, theirs) in pairs.items() if not json_equal(_plain(ours), _plain(theirs))]
    if wrong:
        return Check("plan", False, f"config.toml gives other values of {', '.join(wrong)} than were committed to")
    for item in known.log.kept:
        if fault := _fault(planned, item):
            return Check("plan", False, f"round {item.number} {fault}")
    return Check(
        "plan", True, "config.toml gives the claim, the facts and the items that were committed to, and each round"
    )


def _fault(planned: PlannedPrivacy, item: Any) -> str | None:
    """In what a round differs from the plan; None if in nothing."""
    config, cohort = planned.config, planned.cohorts.of_round(item.number)
    if item.participants != len(cohort):
        return f"states {item.participants} participants, and the config gives it {len(cohort)}"
    if not np.array_equal(np.sort(item.present), np.sort(cohort.canaries)):
        return "has other canaries than the config gives it"
    if item.scale != config.canaries.scale:
        return f"states canaries of scale {item.scale:g}, and the config {config.canaries.scale:g}"
    noise = planned.clipping.update_noise_multiplier * _spread(planned.law, item.number)
    stated = (item.noise_std or 0.0) / item.clip_norm
    if not math.isclose(stated, noise, rel_tol=STATED):
        return f"states a noise multiplier of {stated:.6g}, and the config {noise:.6g}"
    count = float(len(cohort) or 1) if config.divisor == "actual" else planned.cohorts.expected_size
    clip_norm = config.privacy.clip_norm / count
    if config.privacy.clipping == "fixed" and not math.isclose(item.clip_norm, clip_norm, rel_tol=STATED):
        return f"states a clip norm of {item.clip_norm:.6g}, and the config {clip_norm:.6g}"
    return None


def _spread(law: CorrelatedNoise | None, number: int) -> float:
    return float(noise_spread(law, number))


def _plain(value: Any, name: str = "") -> Any:
    """A value of JSON without the sentences and versions in it, which other versions of coalmine write differently."""
    if isinstance(value, dict):
        return {key: _plain(item, key) for key, item in json_ready(value).items()}
    if isinstance(value, list):
        return [_plain(item, name) for item in value]
    return None if isinstance(value, str) and name not in KINDS else value
