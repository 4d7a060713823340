"""CANIFE (Maddock et al. 2022, arXiv 2210.02912): an epsilon for some rounds, composed into one for the whole run.

Each audited round gives an epsilon, which is converted into the noise multiplier σ̂ of a Gaussian mechanism with the same
epsilon. An accountant composes the rounds as Poisson-sampled Gaussian mechanisms. So the value depends on the accountant
as much as on the attack: it extends to rounds that were not audited, and assumes independent Gaussian noise in each.
"""

import math

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, finite_array, one_number, short_repr, unit_interval, whole_number
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.literature.literature_row import LiteratureRow
from coalmine.estimators.literature.thresholds import clopper_pearson, error_counts, score_tables
from coalmine.estimators.mechanism import mechanism_noise
from coalmine.estimators.rates import epsilon_from_rates

AuditedRounds = tuple[npt.ArrayLike, npt.ArrayLike]


def canife_row(
    audited_rounds: AuditedRounds | None,
    *,
    delta: float,
    confidence: float = 0.95,
    sampling_probability: float | None = None,
    rounds: int | None = None,
) -> LiteratureRow:
    """CANIFE's epsilon of the run: the lower bounds of the audited rounds, composed as if they were their epsilons.

    `audited_rounds` holds two tables, observed and unobserved scores, with a row per audited round in order. `rounds` is
    the number of rounds of the run (default: all were audited); `sampling_probability` is that of a client per round.
    """
    value, needs = None, "needs scores round by round (audited_rounds=)"
    if audited_rounds is not None and sampling_probability is None:
        needs = "needs the probability that a client is in a round (sampling_probability=)"
    elif audited_rounds is not None and sampling_probability is not None:
        value = canife_epsilon(
            round_epsilons(audited_rounds, delta=delta, confidence=confidence),
            delta=delta,
            sampling_probability=sampling_probability,
            rounds=rounds,
        )
    return LiteratureRow(
        name="CANIFE 2022",
        reference="Maddock et al. 2022, arXiv 2210.02912",
        value=value,
        kind="estimate",
        confidence=None,
        controls="client sample, privacy noise, minibatch",
        receives="intermediate models",
        assumptions="fresh Gaussian noise and Poisson sampling in every round; audited rounds stand for the others",
        threshold="chosen on the same data, not corrected",
        needs=None if value is not None else needs,
    )


def round_epsilons(audited_rounds: AuditedRounds, *, delta: float, confidence: float = 0.95) -> Floats:
    """Each audited round's epsilon: Clopper-Pearson on both rates, at the threshold with the fewest errors."""
    observed, unobserved = score_tables("audited_rounds", audited_rounds, fewest=FEWEST)
    failing = 1 - unit_interval("confidence", confidence)
    return np.array(
        [_round_epsilon(present, absent, delta, failing) for present, absent in zip(observed, unobserved, strict=True)]
    )


def canife_epsilon(
    per_round_epsilons: npt.ArrayLike, *, delta: float, sampling_probability: float, rounds: int | None = None
) -> float:
    """Epsilon of a run from those of its audited rounds, by dp-accounting's Rényi accountant.

    The audited rounds come in order, and each represents an equal share of all `rounds` (default: all were audited). A
    round with infinite epsilon makes the result infinite.

    >>> round(canife_epsilon([4.89] * 10, delta=1e-6, sampling_probability=0.01, rounds=1_000), 2)
    2.44
    """
    delta = unit_interval("delta", delta)
    noises = _noises(per_round_epsilons, delta)
    audited = noises.size
    total = audited if rounds is None else whole_number("rounds", rounds, minimum=audited)
    shares = np.diff(np.round(np.linspace(0, total, audited + 1)).astype(int))
    probability = one_number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(f"sampling_probability must lie in [0, 1], got {probability}")
    if probability == 0:
        return 0.0
    if noises.min() == 0:
        return math.inf
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise in np.unique(noises):
        event = PoissonSampledDpEvent(probability, GaussianDpEvent(float(noise)))
        accountant.compose(event, int(shares[noises == noise].sum()))
    return float(accountant.get_epsilon(delta))


def _noises(per_round_epsilons: npt.ArrayLike, delta: float) -> Floats:
    """σ̂ of each audited round: the noise multiplier whose Gaussian mechanism has its epsilon."""
    epsilons = np.asarray(per_round_epsilons, dtype=np.float64)
    limited = finite_array("per_round_epsilons", np.where(np.isposinf(epsilons), 0.0, epsilons))
    if limited.ndim != 1 or not limited.size or limited.min() < 0:
        raise ValueError(
            f"per_round_epsilons must be one row of epsilons of at least 0, got {short_repr(per_round_epsilons)}"
        )
    return np.asarray(mechanism_noise(epsilons, delta=delta))


def _round_epsilon(observed: Floats, unobserved: Floats, delta: float, failing: float) -> float:
    present, absent = np.sort(observed), np.sort(unobserved)
    false_negatives, false_positives = error_counts(present, absent)
    best = (false_negatives / present.size + false_positives / absent.size).argmin()
    log_fnr = np.log(clopper_pearson(false_negatives[best], present.size, failing / 2))
    log_fpr = np.log(clopper_pearson(false_positives[best], absent.size, failing / 2))
    return float(epsilon_from_rates(log_fpr, log_fnr, delta=delta))
