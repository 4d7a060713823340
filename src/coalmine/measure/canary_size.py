"""How long each canary is in a round: as declared, or as measured."""

import math

from coalmine.argument_checks import Floats
from coalmine.measure.round_facts import RoundFacts
from coalmine.measure.settings import Settings

CREDIBLE_STDS = 4.0  # standard errors by which a canary's measured norm may differ from the declared one


def canary_size(products: Floats, rest: float, facts: RoundFacts, settings: Settings) -> tuple[float, bool]:
    """The norm of each present canary in a round, and whether it is the declared one.

    It is the declared norm if the measurement agrees with it, else the measured one. `products` are the vector's products
    with the canaries, and `rest` is its norm orthogonal to them.
    """
    measured, clip = float(products.mean()), float(facts.clip_norm)
    error = rest / math.sqrt(settings.free * len(products))
    if facts.clip_declared and abs(measured - clip) <= CREDIBLE_STDS * error:
        return clip, True
    return measured, False
