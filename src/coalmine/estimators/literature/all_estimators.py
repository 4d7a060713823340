"""Every estimator on the same scores: the paper's, coalmine's, and the published ones of Table 1."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from coalmine.estimators.bounds import Null, epsilon_lower_bound, score_array
from coalmine.estimators.gaussian_fit import epsilon_estimate
from coalmine.estimators.literature.agrawal import agrawal_row
from coalmine.estimators.literature.canife import AuditedRounds, canife_row
from coalmine.estimators.literature.jagielski2020 import jagielski2020_row, jagielski2020_split_row
from coalmine.estimators.literature.jagielski2023 import Checkpoints, jagielski2023_rows
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.mahloujifar import mahloujifar_fixed_row, mahloujifar_row
from coalmine.estimators.literature.nasr import nasr_row, nasr_simultaneous_row
from coalmine.estimators.literature.pillutla import Trials, pillutla_rows
from coalmine.estimators.literature.steinke import steinke_fixed_row, steinke_row
from coalmine.estimators.literature.xiang import xiang_row
from coalmine.estimators.literature.zanella_beguelin import zanella_beguelin_row

PAPER = "Andrew et al. 2024, arXiv 2302.03098"
TWO_SAMPLE_ESTIMATORS: tuple[
    Callable[..., LiteratureRow], ...
] = (  # these need the observed and unobserved scores of one run
    jagielski2020_row,
    jagielski2020_split_row,
    zanella_beguelin_row,
    steinke_row,
    steinke_fixed_row,
    mahloujifar_row,
    mahloujifar_fixed_row,
    xiang_row,
    nasr_row,
    nasr_simultaneous_row,
    agrawal_row,
)


class SeveralRuns(TypedDict, total=False):
    """Input that some estimators need besides the scores of one run."""

    trials: Trials | None
    checkpoints: Checkpoints | None
    audited_rounds: AuditedRounds | None
    sampling_probability: float | None
    rounds: int | None


def compare_estimators(
    observed: npt.ArrayLike,
    unobserved: npt.ArrayLike | None,
    *,
    delta: float,
    confidence: float = 0.95,
    null: Null | None = None,
    null_dof: float = math.inf,
    **several: Unpack[SeveralRuns],
) -> tuple[LiteratureRow, ...]:
    """Every estimator on the same scores; coalmine's and the paper's own rows come first. High scores mean present.

    `null` is the law of an unobserved score, if it is known, and `null_dof` the number of directions from which its std
    was estimated. coalmine's and the paper's rows use it; the others use the `unobserved` scores, as published. A row
    without its input has no value and states what it needs. `trials` are scores of several runs: a table of observed and
    one of unobserved scores, with a row per run. `checkpoints` are the same with a row per checkpoint. `audited_rounds`
    are the same with a row per audited round, out of `rounds` rounds with a client's `sampling_probability`.

    >>> unobserved = np.linspace(-1.73, 1.73, 1000)
    >>> rows = compare_estimators(unobserved + 1, unobserved, delta=1e-6)
    >>> [f"{row.name}: {row.value:.2f}" for row in rows if row.value is not None][:2]
    ["coalmine's estimate: 4.89", "coalmine's lower bound: 3.48"]
    """
    return (
        *own_rows(
            observed, unobserved if null is None else null, delta=delta, confidence=confidence, null_dof=null_dof
        ),
        *literature_rows(observed, unobserved, delta=delta, confidence=confidence, **several),
    )


def own_rows(
    observed: npt.ArrayLike,
    null: Null | None,
    *,
    delta: float,
    confidence: float = 0.95,
    null_dof: float = math.inf,
) -> tuple[LiteratureRow, ...]:
    """coalmine's estimate and bound, and the paper's (Algorithms 2 and 3, Section 5)."""
    if null is None:
        raise ValueError("the null is missing: give unobserved scores, or their law as null=")
    settings: dict[str, Any] = {"null": null, "delta": delta}
    estimated = settings | {"null_dof": null_dof, "confidence": None}

    def row(name: str, value: float, kind: str, assumptions: str, threshold: str = "none") -> LiteratureRow:
        return LiteratureRow(
            name=name,
            reference=PAPER if name.startswith("paper") else "coalmine",
            value=value,
            kind=kind,
            confidence=None if kind == "estimate" else confidence,
            controls="client model update",
            receives="final model, or intermediate models",
            assumptions=assumptions,
            threshold=threshold,
        )

    return (
        row(
            "coalmine's estimate",
            epsilon_estimate(observed, variance="auto", **estimated).epsilon,
            "estimate",
            "independent normal scores; the null's std unless an F test rejects it",
        ),
        row(
            "coalmine's lower bound",
            epsilon_lower_bound(observed, confidence=confidence, **settings),
            "valid bound",
            "independent scores, whatever their law",
            "chosen on the same data, corrected",
        ),
        row(
            "paper's ε",
            epsilon_estimate(observed, variance="fitted", **estimated).epsilon,
            "estimate",
            "independent normal scores; their own std",
        ),
        row(
            "paper's ε_lo",
            epsilon_lower_bound(observed, confidence=confidence, method="paper", **settings),
            "heuristic",
            "independent scores; holds at one threshold, and the best of all is taken",
            "chosen on the same data, not corrected",
        ),
    )


def literature_rows(
    observed: npt.ArrayLike,
    unobserved: npt.ArrayLike | None,
    *,
    delta: float,
    confidence: float = 0.95,
    **several: Unpack[SeveralRuns],
) -> tuple[LiteratureRow, ...]:
    """The rows of the published estimators, without coalmine's and the paper's own."""
    level: dict[str, float] = {"delta": delta, "confidence": confidence}
    return (
        *_two_sample_rows(observed, unobserved, level),
        *pillutla_rows(several.get("trials"), **level),
        *jagielski2023_rows(several.get("checkpoints"), **level),
        canife_row(
            several.get("audited_rounds"),
            sampling_probability=several.get("sampling_probability"),
            rounds=several.get("rounds"),
            **level,
        ),
    )


def _two_sample_rows(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike | None, level: dict[str, float]
) -> tuple[LiteratureRow, ...]:
    scores = score_array("observed", observed)
    if unobserved is not None:
        return tuple(estimator(scores, unobserved, **level) for estimator in TWO_SAMPLE_ESTIMATORS)
    rows = (estimator(np.arange(10.0), np.arange(10.0), **level) for estimator in TWO_SAMPLE_ESTIMATORS)
    return tuple(replace(row, value=None, needs="needs scores of unobserved canaries") for row in rows)
