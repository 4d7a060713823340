"""Nasr et al. 2023 (arXiv 2302.07956): bounds on the error rates, converted to Gaussian differential privacy.

A test of a μ-GDP mechanism has Φ⁻¹(1 - FPR) - Φ⁻¹(FNR) <= μ. So upper bounds on the two rates give a lower bound on μ,
and μ gives epsilon at any delta. The bound is tight for a Gaussian mechanism, since it uses more than one delta.
"""

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri_exp

from coalmine.argument_checks import Floats, unit_interval
from coalmine.estimators.best_threshold import best_threshold
from coalmine.estimators.bounds import Band, clopper_pearson_band, log_rates, one_of_two, simultaneous_band
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import sorted_scores

REFERENCE = "Nasr et al. 2023, arXiv 2302.07956"
CONTROLS = "train data, privacy noise, minibatch"
RECEIVES = "intermediate models"


def nasr_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """μ from Clopper-Pearson bounds at the best threshold, then epsilon: not a bound, as the threshold is chosen."""
    return LiteratureRow(
        name="Nasr 2023, best threshold",
        reference=REFERENCE,
        value=_epsilon(observed, unobserved, delta, confidence, clopper_pearson_band),
        kind="heuristic",
        confidence=confidence,
        controls=CONTROLS,
        receives=RECEIVES,
        assumptions="independent scores; a Gaussian mechanism; holds at one threshold, and the best of all is taken",
        threshold="chosen on the same data, not corrected",
    )


def nasr_simultaneous_row(
    observed: npt.ArrayLike, unobserved: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> LiteratureRow:
    """μ from bounds that hold at all thresholds simultaneously, then epsilon: a bound if the mechanism is Gaussian."""
    return LiteratureRow(
        name="Nasr 2023, all thresholds",
        reference=REFERENCE,
        value=_epsilon(observed, unobserved, delta, confidence, simultaneous_band),
        kind="valid bound",
        confidence=confidence,
        controls=CONTROLS,
        receives=RECEIVES,
        assumptions="independent scores; a Gaussian mechanism (otherwise not a bound)",
        threshold="chosen on the same data, corrected",
    )


def gdp_mu(log_fpr: npt.ArrayLike, log_fnr: npt.ArrayLike) -> Floats:
    """The smallest μ >= 0 whose μ-GDP allows a test with these error rates, given as logs."""
    return np.maximum(-ndtri_exp(np.asarray(log_fpr)) - ndtri_exp(np.asarray(log_fnr)), 0.0)


def _epsilon(observed: npt.ArrayLike, unobserved: npt.ArrayLike, delta: float, confidence: float, band: Band) -> float:
    present, absent = sorted_scores(observed, unobserved)
    failing = one_of_two(1 - unit_interval("confidence", confidence))
    mu, _ = best_threshold(
        gdp_mu,
        present,
        log_fpr=lambda t: log_rates(band, absent.size - np.searchsorted(absent, t), absent.size, failing),
        log_fnr=lambda t: log_rates(band, np.searchsorted(present, t), present.size, failing),
    )
    return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mu, 1.0), delta=unit_interval("delta", delta)))
