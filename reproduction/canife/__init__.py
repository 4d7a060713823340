"""CANIFE (Maddock et al. 2023, arXiv 2210.02912): canaries that are samples, crafted for one model and one round.

A random unit vector is nearly orthogonal to every gradient. The gradient of a sample is not, so CANIFE optimises a sample
until its gradient is. All functions work on several models of one architecture at once, one for each run of a study.
"""

from reproduction.canife.crafting import CanifeSettings, CraftedCanaries, craft_canaries, interference
from reproduction.canife.gradients import Gradients, SampleGradients, sample_gradients
from reproduction.canife.mock_rounds import mock_scores, noisy_sums, sample_batch, softened

__all__ = [
    "CanifeSettings",
    "CraftedCanaries",
    "Gradients",
    "SampleGradients",
    "craft_canaries",
    "interference",
    "mock_scores",
    "noisy_sums",
    "sample_batch",
    "sample_gradients",
    "softened",
]
