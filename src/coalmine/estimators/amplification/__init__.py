"""Epsilon amplified by sampling: the attacker does not know in which rounds a client takes part.

These values hold for the whole run. Against an attacker who knows the client's rounds, `mechanism_epsilon` applies
instead. The accounting is done by dp-accounting and PLD_accounting, which are imported on use.
"""

from coalmine.estimators.amplification.amplified import PLD, UNAMPLIFIED, AmplifiedEpsilon
from coalmine.estimators.amplification.epsilon import amplified_epsilon, least_epsilon
from coalmine.estimators.amplification.noise import amplified_noise
from coalmine.estimators.amplification.noise_schedule import merged_strengths

__all__ = [
    "PLD",
    "UNAMPLIFIED",
    "AmplifiedEpsilon",
    "amplified_epsilon",
    "amplified_noise",
    "least_epsilon",
    "merged_strengths",
]
