"""Jagielski et al. 2020 (arXiv 2006.07709): epsilon from Clopper-Pearson bounds on the error rates of one threshold test.

As published, a first batch of trained models chooses the threshold and a second one tests it. Most later
work, including the paper (Section 5), takes the best threshold on the same scores, which invalidates the 95 %. Both
variants are here.
"""

import numpy.typing as npt

from coalmine.estimators.bounds import epsilon_lower_bound
from coalmine.estimators.literature.literature_row import LiteratureRow

REFERENCE = "Jagielski et al. 2020, arXiv 2006.07709"


def jagielski2020_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """Clopper-Pearson at the best threshold of the same scores, as the method is mostly used: not a bound."""
    value = epsilon_lower_bound(observed, null=unobserved, delta=delta, confidence=confidence, method="clopper-pearson")
    return LiteratureRow(
        name="Jagielski 2020, best threshold",
        reference=REFERENCE,
        value=value,
        kind="heuristic",
        confidence=confidence,
        assumptions="independent scores; holds at one threshold, and the best of all is taken",
        threshold="chosen on the same data, not corrected",
    )


def jagielski2020_split_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """The threshold chosen on one half of the scores and tested on the other: a bound, as published."""
    value = epsilon_lower_bound(observed, null=unobserved, delta=delta, confidence=confidence, method="split")
    return LiteratureRow(
        name="Jagielski 2020, split",
        reference=REFERENCE,
        value=value,
        kind="valid bound",
        confidence=confidence,
        assumptions="independent scores; the threshold comes from one half of them, the rates from the other",
        threshold="fixed in advance",
    )
