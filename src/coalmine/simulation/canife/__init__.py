"""CANIFE (Maddock et al. 2023, arXiv 2210.02912): canaries that are samples, crafted for one model and one round.

The second way to make a canary. A random unit vector is nearly orthogonal to every gradient by itself; a sample is not,
so one is looked for whose gradient is. Everything here works on several models of one architecture at once, one for
each run of a study.
"""

from coalmine.simulation.canife.crafting import CanifeSettings, CraftedCanaries, craft_canaries, interference
from coalmine.simulation.canife.gradients import Gradients, SampleGradients, sample_gradients
from coalmine.simulation.canife.mock_rounds import drawn, mock_scores, noisy_sums, softened

__all__ = [
    "CanifeSettings",
    "CraftedCanaries",
    "Gradients",
    "SampleGradients",
    "craft_canaries",
    "drawn",
    "interference",
    "mock_scores",
    "noisy_sums",
    "sample_gradients",
    "softened",
]
