"""The rounds in which the expensive gauges are measured. The secret key draws them, so nobody can plan around them."""

import hashlib

import numpy as np

from coalmine.measure.noise_law import MANY_COORDINATES
from coalmine.measure.settings import Settings

FEWEST = 8  # expensive rounds of a run of a large model, or all of its rounds if it has fewer
FIRST = 20  # rounds of a small model that are all measured in full
LONGEST = 50  # rounds of which at least one is measured in full, in any model
ENDLESS = 10**9  # more rounds than any run has
# Rounds up to this one, and the number of stretches that they are split into. One round is drawn from each stretch.
Plan = tuple[tuple[int, int], ...]
SMALL = ((FIRST, FIRST), (60, 20), (200, 28), (ENDLESS, (ENDLESS - 200) // 10))
LARGE = ((1, 1), (20, FEWEST - 1), (100, 4), (ENDLESS, (ENDLESS - 100) // LONGEST))


class ExpensiveRounds:
    """Whether the first, second, ... observed round is measured in full.

    The rounds are split into stretches, and the key draws one round of each. So every process of an audit, and a resumed
    run, draws the same rounds. A small model has short stretches: 20 of one round, 20 of two, then of five and of ten. A
    large one has eight equal stretches, or more if they would be longer than 50 rounds. If the number of rounds is not known
    beforehand, the first round is one stretch, the next 19 are seven.
    """

    def __init__(self, settings: Settings, key: bytes) -> None:
        self._key = key
        self._plan: Plan = SMALL
        if settings.dim > MANY_COORDINATES:
            self._plan = LARGE if settings.rounds is None else _planned(settings.rounds)

    def __contains__(self, order: int) -> bool:
        first, size = _stretch(order, self._plan)
        digest = hashlib.blake2b(first.to_bytes(8, "little"), key=self._key[:64], digest_size=16, person=b"expensive")
        drawn = np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little"))).integers(size)
        return order == first + int(drawn)


def _planned(rounds: int) -> Plan:
    stretches = min(max(FEWEST, -(-rounds // LONGEST)), rounds)
    return ((rounds, stretches), (rounds + ENDLESS, ENDLESS // LONGEST))


def _stretch(order: int, plan: Plan) -> tuple[int, int]:
    """The first round of the stretch that a round is in, and the stretch's size."""
    start = max((stop for stop, _ in plan if stop < order), default=0)
    stop, stretches = next(each for each in plan if each[0] >= order)
    length, place = stop - start, order - start
    index = (place * stretches - 1) // length
    first, after = index * length // stretches, (index + 1) * length // stretches
    return start + first + 1, after - first
