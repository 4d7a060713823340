"""Whether clients sent what they should: canaries their canary and nothing else, real clients no canary.

The server knows every canary, so it compares. One sum over all canaries is enough where all is well; only if it is off does
each canary take a transform of its own.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message

from coalmine.audit.audit import Audit
from coalmine.integrations.flower.arrays import Layout, Row

SHORTEST, LONGEST = 0.5, 1.02  # of the clip norm, and of the length that was announced
ALIKE = 0.02  # by which canaries of one round may differ in length
NOTICED = 0.3  # of one canary's length: a sum that is off by more is looked at canary by canary
ROUNDING = 1e-6  # of the model's length: what single precision leaves of a short update
STDS, SCREENED_STDS = 6.0, 4.0  # of chance
FEWEST = 3  # canaries of which most can decide
TELLING = 0.05  # cosine of a real update with the canaries' sum above which it holds canaries


def wrong_canaries(
    canaries: Mapping[int, Message],
    audit: Audit,
    layout: Layout,
    current: Row,
    *,
    clip_norm: float,
    scale: float,
    noisy: bool,
) -> dict[int, str]:
    """The canaries whose reply is something else than the canary, with the reason.

    A canary may arrive clipped, or as long as it was sent, and if `noisy` with noise that clients add. It must be like most
    of the others: one that is not clipped among clipped ones is wrong, since a missing clip would show in most.
    """
    if not canaries:
        return {}
    indices = sorted(canaries)
    summed, update = np.zeros_like(current), np.empty_like(current)
    for index in indices:
        _update_into(update, canaries[index], layout, current)
        summed += update
    rounding = ROUNDING * _length(current)
    total = audit.updates(_not_the_rounds_own(indices, audit), 1.0, like=current)
    along, rest = _parts(summed, total)
    most = LONGEST * scale * clip_norm + rounding
    if SHORTEST * clip_norm <= along <= most and rest <= NOTICED * along + rounding * math.sqrt(len(indices)):
        return {}
    found = {}
    for index in indices:
        _update_into(update, canaries[index], layout, current)
        found[index] = _parts(update, audit.update(index, 1.0, like=current))
    return _unlike_most(found, len(current), clip_norm, most, rounding, few=len(found) < FEWEST and not noisy)


def _unlike_most(
    found: Mapping[int, tuple[float, float]], dim: int, clip_norm: float, most: float, rounding: float, *, few: bool
) -> dict[int, str]:
    """Each canary's length along itself and the length of the rest, compared with their medians."""
    usual_rest = 0.0 if few else float(np.median([rest for _, rest in found.values()]))
    slack = STDS * usual_rest / math.sqrt(dim) + rounding
    wrong = {}
    for index, (along, rest) in found.items():
        if not SHORTEST * clip_norm - slack <= along <= most + slack:
            wrong[index] = f"it must send canary {index}, got {along / clip_norm:.3g} clip norms of it"
        elif rest > (0.5 * along if few else 1.5 * usual_rest + ALIKE * abs(along)) + rounding:
            wrong[index] = f"it must send canary {index} alone, got {rest / clip_norm:.3g} clip norms of something else"
    usual = float(np.median([along for index, (along, _) in found.items() if index not in wrong] or [0.0]))
    for index, (along, _) in found.items():
        if index not in wrong and abs(along - usual) > ALIKE * abs(usual) + slack:
            wrong[index] = (
                f"it sends canary {index} {along / clip_norm:.3g} clip norms long, where most canaries are "
                f"{usual / clip_norm:.3g} long"
            )
    return wrong


def hidden_canaries(
    others: Row, real: Sequence[Message], present: Sequence[int], audit: Audit, layout: Layout, current: Row
) -> list[Message]:
    """The real replies that hold the present canaries, which only a client who knows the seed can send.

    They raise the canaries' scores, and so frame an honest pipeline. Where most replies are so, it is not a client's doing.
    """
    length = _length(others)
    if not len(present) or not length:
        return []
    total = audit.updates(_not_the_rounds_own(list(present), audit), 1.0, like=current)
    unit = total / _length(total)
    if float(np.vdot(others, unit)) <= SCREENED_STDS * length / math.sqrt(len(current)):
        return []
    telling = max(TELLING, STDS / math.sqrt(len(current)))
    update, found = np.empty_like(current), []
    for reply in real:
        _update_into(update, reply, layout, current)
        if float(np.vdot(update, unit)) > telling * _length(update):
            found.append(reply)
    return found if 2 * len(found) <= len(real) or len(real) == 1 else []


def _not_the_rounds_own(indices: list[int], audit: Audit) -> list[int]:
    """The canaries in an order that the audit uses again only where it takes their sum anyway.

    An audit without layers takes the sum in some rounds, and measures less in the others.
    """
    return indices if audit.settings.layers else indices[::-1]


def _update_into(out: Row, reply: Message, layout: Layout, current: Row) -> None:
    (record,) = reply.content.array_records.values()
    layout.update_into(out, record, current)


def _parts(vector: Row, unit: Any) -> tuple[float, float]:
    """How much of `unit` a vector holds, and the length of the rest."""
    square = float(np.vdot(unit, unit))
    along = float(np.vdot(vector, unit)) / square
    return along, _length(vector - np.asarray(along * unit, dtype=vector.dtype))


def _length(vector: Row) -> float:
    return math.sqrt(float(np.vdot(vector, vector)))
