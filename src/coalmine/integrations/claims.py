"""What a framework's settings claim of the noise, so that the audit can judge it."""

import math
from dataclasses import replace

import numpy as np

from coalmine.audit.adversaries import presented_times
from coalmine.audit.audit import Audit
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon


def most_presentations(audit: Audit) -> int:
    """How often the canary that took part most often did so; 1 before the first round."""
    return max(int(presented_times(audit.log, audit.settings).max()), 1)


def usual_presentations(audit: Audit) -> int:
    """How often most canaries took part (the more often, of groups alike), as the first row of known-others has it.

    1 before the first round. What `coalmine run` gives its analytical epsilon for.
    """
    counts = np.bincount(presented_times(audit.log, audit.settings))
    counts[0] = 0
    return max(int(len(counts) - 1 - np.argmax(counts[::-1])) if counts.any() else 1, 1)


def of_the_heaviest(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim of a client who weighs `weight` times as much as a canary: what canaries read is that much less."""
    if weight <= 1 or claim.accounting == "amplified" or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit)
    return replace(claim, sensitivity=weight * math.sqrt(times))


def noise_claim(audit: Audit, noise_multiplier: float) -> Claim:
    """That this noise was added in every round: the mechanism's epsilon for the canaries shown most often.

    Canaries shown less often are judged by the same noise at their own number of presentations.
    """
    times = most_presentations(audit)
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta, participations=times))
    return Claim(epsilon=epsilon, participations=times)
