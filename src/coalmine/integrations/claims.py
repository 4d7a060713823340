"""The claim that follows from a framework's noise multiplier, for the audit to judge."""

import math
from dataclasses import replace

import numpy as np

from coalmine.audit.audit import Audit
from coalmine.audit.ladder import presented_times
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon


def most_presentations(audit: Audit) -> int:
    """Largest number of rounds that one canary took part in; 1 before the first round."""
    return max(int(presented_times(audit.log, audit.settings).max()), 1)


def usual_presentations(audit: Audit) -> int:
    """Number of rounds that most canaries took part in, the larger one in a tie; 1 before the first round.

    The first row of known-others and the analytical epsilon of `coalmine run` are for this number.
    """
    counts = np.bincount(presented_times(audit.log, audit.settings))
    counts[0] = 0
    return max(int(len(counts) - 1 - np.argmax(counts[::-1])) if counts.any() else 1, 1)


def of_the_heaviest(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim for a client that weighs `weight` times as much as a canary, and so is that much more exposed."""
    if weight <= 1 or claim.accounting == "amplified" or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit)
    return replace(claim, sensitivity=weight * math.sqrt(times))


def noise_claim(audit: Audit, noise_multiplier: float) -> Claim:
    """The claim that every round had this noise: the mechanism's epsilon for the canaries presented most often.

    Canaries presented less often are judged by the same noise, at their own number of presentations.
    """
    times = most_presentations(audit)
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta, participations=times))
    return Claim(epsilon=epsilon, participations=times)
