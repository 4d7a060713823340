"""The numbers that an experiment publishes about a finished run, from its result and its log.

Tables, pictures and checks are made of these alone. docs/evidence/reproduction holds them for runs that took a
GPU and are not kept.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import gaussian_kde

from coalmine.data.catalogue import DATASETS
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.intervals import Interval
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.ladder import Scores, ladder, presented_times
from coalmine.log.rounds_file import RoundLog
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import Settings
from coalmine.result.audit_result import AuditResult, Row

RunNumbers = dict[str, Any]
POINTS = 61  # points of a density
DIGITS = "scikit-learn's handwritten digits"
FELL_APART = "An adaptive clip and the noise that goes with it can drive each other."


def read_finished(directory: Path) -> RunNumbers:
    """Everything that an experiment publishes about a run."""
    home = RunDirectory(directory)
    config, metrics, log = home.read_config(), home.read_metrics(), home.read_log()
    seen = [] if log.outcome is None else log.numbers  # the outcome is the last record
    _check_whole(directory / "audit" / "rounds.log", seen, config["rounds"])
    _check_whole(directory / "metrics.jsonl", [line["round"] for line in metrics], config["rounds"])
    result = AuditResult.from_dict(home.read_result())
    settings, told = result.settings, result.trainer
    update_noise, usual = _known(told.update_noise_multiplier), int(_known(told.presentations))
    scores = {(item.rung, item.presentations): item for item in ladder(log, settings)}
    task, times = config["task"]["name"], presented_times(log, settings)
    return {
        "run": directory.name,
        "task": task,
        "data": DATASETS[task].title if task in DATASETS else DIGITS,
        "dim": settings.dim,
        "delta": settings.delta,
        "rounds": config["rounds"],
        "clients_per_round": config["participation"]["clients_per_round"],
        "canaries": settings.canaries,
        "unobserved": settings.unobserved,
        "canary_slots": int(times.sum()),
        "canary_rounds": [int(times.min()), int(times.max())],  # fewest and most presentations of a canary
        "client_slots": sum(line["clients"] for line in metrics),
        "noise": config["privacy"]["noise"],
        "noise_multiplier": _known(told.noise_multiplier),
        "update_noise_multiplier": update_noise,
        "presentations": told.presentations,
        "analytical": result.analytical_epsilon,
        "update_epsilon": told.update_epsilon,
        "client_rounds": told.client_rounds,
        "client_epsilon": told.client_epsilon,
        "accuracy": told.accuracy,
        "verdict": None if result.verdict is None else str(result.verdict.outcome),
        "engine": told.engine,
        "device": config["engine"]["device"],
        "precision": config["engine"].get("precision"),
        "seconds": training_seconds(home),
        "clip_norms": _clip_norms(metrics),
        "rows": [
            _row(name, row, scores.get((name, row.presentations)), settings.delta, update_noise, usual)
            for name, adversary in result.adversaries.items()
            for row in adversary.rows
        ],
        "densities": _densities(log, settings, times),
    }


def _known(value: float | None) -> float:
    """A number that every trainer of coalmine writes."""
    assert value is not None
    return value


def _check_whole(path: Path, numbers: Sequence[int], rounds: int) -> None:
    """Reject a file that has lost rounds of a finished run."""
    if list(numbers) != list(range(1, rounds + 1)):
        raise ValueError(
            f"{path} is damaged: it does not hold all of a finished run of {rounds} rounds; restore it from a copy, or "
            "remove the run to train it again"
        )


def _row(
    rung: str, row: Row, scores: Scores | None, delta: float, update_noise: float, presentations: int
) -> dict[str, Any]:
    """A row of the result, with a wider interval and the analytical epsilon that known-others should recover."""
    estimate, wide = row.estimate, None
    if rung == "known-others" and scores is not None and scores.null is not None:
        wide = epsilon_estimate(
            scores.observed, null=scores.null, delta=delta, confidence=0.99, null_dof=scores.null_dof
        ).interval
    sensitivity = row.sensitivity or math.sqrt(row.presentations or presentations)
    test = estimate.anderson_darling
    return {
        "rung": rung,
        "presentations": row.presentations,
        "canaries": row.canaries,
        "epsilon": estimate.epsilon,
        "interval": _ends(estimate.interval),
        "interval_99": _ends(wide),
        "lower_bound": row.lower_bound,
        "paper_epsilon": row.paper_epsilon,
        "paper_lower_bound": row.paper_lower_bound,
        "floor": estimate.floor.q95,
        "anderson_darling": {"statistic": test.statistic, "p_value": test.p_value},
        "mean": estimate.mean,
        "std": estimate.std,
        "null_mean": estimate.null_mean,
        "null_std": estimate.null_std,
        "analytical": float(mechanism_epsilon(update_noise / sensitivity, delta=delta)),
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [float(interval.low), float(interval.high)]


def rung(reading: RunNumbers, name: str, presentations: int | None = None) -> dict[str, Any] | None:
    """The row of this adversary for its largest group of canaries, or for a given number of presentations."""
    rows = [row for row in reading["rows"] if row["rung"] == name]
    if presentations is not None:
        rows = [row for row in rows if row["presentations"] == presentations]
    return rows[0] if rows else None


def least_learnt(accuracies: Iterable[float]) -> float:
    """The accuracy below which a model has not learnt: half of the best one's."""
    return max(accuracies, default=0.0) / 2


def not_learnt(readings: Sequence[RunNumbers]) -> str:
    """A sentence about models of one task that have not learnt; empty if there are none."""
    least = least_learnt(reading["accuracy"] for reading in readings)
    lost = [
        f"{reading['accuracy']:.1%} at noise {reading['noise_multiplier']:g} (clip norm at the end "
        f"{reading['clip_norms'][-1]:.3g})"
        for reading in readings
        if reading["accuracy"] < least
    ]
    return (
        f"Not every model learnt: {', '.join(lost)}, where the best has {2 * least:.1%}. {FELL_APART}" if lost else ""
    )


def training_seconds(home: RunDirectory) -> float:
    """The training time, added up over restarts, at each of which the clock in the metrics starts again."""
    total = last = 0.0
    for line in home.read_metrics():
        seconds = float(line["seconds"])
        if seconds < last:
            total += last
        last = seconds
    return total + last


def _clip_norms(metrics: Sequence[dict[str, Any]]) -> list[float]:
    """The clip norm in the first, the middle and the last round."""
    norms = [float(line["clip_norm"]) for line in metrics]
    return [norms[0], norms[len(norms) // 2], norms[-1]] if norms else []


def _densities(log: RoundLog, settings: Settings, times: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    """Smoothed densities of the cosines with the final model times √d, so that the null is N(0, 1) (Figure 1)."""
    if log.final is None:
        return []
    cosines = np.asarray(log.final.cosines, dtype=np.float64)[: settings.canaries] * math.sqrt(settings.dim)
    found = []
    for number in np.unique(times[times > 0]):
        group = cosines[times == number]
        if group.size < 10 or group.min() == group.max():
            continue
        grid = np.linspace(group.min() - 1, group.max() + 1, POINTS)
        density = gaussian_kde(group)(grid)
        found.append({"presentations": int(number), "x": _short(grid), "density": _short(density)})
    return found


def _short(values: Any) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def numbers(value: Any) -> Any:
    """Restore numbers from JSON: "inf" becomes a number again."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return {"inf": math.inf, "-inf": -math.inf}.get(value, value) if isinstance(value, str) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON file of an experiment."""
    try:
        found = numbers(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); make it again with `python -m reproduction`") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    return found
