"""What a framework's settings claim of the noise, so that the audit can judge it."""

import numpy as np

from coalmine.audit.audit import Audit
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon


def most_presentations(audit: Audit) -> int:
    """How often the canary that took part most often did so; 1 before the first round."""
    times = np.zeros(audit.settings.canaries, dtype=np.int64)
    for item in audit.log.rounds():
        times[item.present] += 1
    return max(int(times.max()), 1)


def noise_claim(audit: Audit, noise_multiplier: float) -> Claim:
    """That this noise was added in every round: the mechanism's epsilon for the canaries shown most often.

    Canaries shown less often are judged by the same noise at their own number of presentations.
    """
    times = most_presentations(audit)
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta, participations=times))
    return Claim(epsilon=epsilon, participations=times)
