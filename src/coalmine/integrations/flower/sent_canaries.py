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
from coalmine.integrations.flower.arrays import Layout, Row, array_values

SHORTEST, LONGEST = 0.5, 1.02  # of the clip norm, and of the length that was announced
ALIKE = 0.02  # by which canaries of one round may differ in length
NOTICED = 0.3  # of one canary's length: a sum that is off by more is looked at canary by canary
ROUNDING = 8.0  # steps of the replies' precision, relative to the model: what rounding leaves of a short update
STDS, SCREENED_STDS = 6.0, 4.0  # of chance
FEWEST = 3  # canaries of which most can decide
TELLING = 0.05  # cosine of a real update with the canaries' sum above which it holds canaries


class CanaryCheck:
    """Compares a round's replies with the canaries; `current` is the model that was sent."""

    def __init__(self, audit: Audit, layout: Layout, current: Row) -> None:
        self._audit, self._layout, self._current = audit, layout, current
        self._sum: tuple[list[int], Row] | None = None

    def wrong(self, canaries: Mapping[int, Message], *, clip_norm: float, scale: float, noisy: bool) -> dict[int, str]:
        """The canaries whose reply is something else than the canary, with the reason.

        A canary may arrive clipped, or as long as it was sent, and if `noisy` with noise that clients add. It must be like
        most of the others: one that is not clipped among clipped ones is wrong, since a missing clip would show in most.
        """
        if not canaries:
            return {}
        indices, current = sorted(canaries), self._current
        summed, update = np.zeros_like(current), np.empty_like(current)
        for index in indices:
            self._update_into(update, canaries[index])
            summed += update
        rounding = rounding_of(canaries[indices[0]], current)
        along, rest = _parts(summed, self._sum_of(indices))
        most = LONGEST * scale * clip_norm + rounding
        if SHORTEST * clip_norm <= along <= most and rest <= NOTICED * along + rounding * math.sqrt(len(indices)):
            return {}
        found = {}
        for index in indices:
            self._update_into(update, canaries[index])
            found[index] = _parts(update, self._audit.update(index, 1.0, like=current))
        return _unlike_most(found, len(current), clip_norm, most, rounding, few=len(found) < FEWEST and not noisy)

    def holding(self, others: Row, real: Sequence[Message], present: list[int]) -> list[Message]:
        """The real replies that hold the present canaries, which only a client who knows the seed can send.

        They raise the canaries' scores, and so frame an honest pipeline. Where most replies do, it is not one client's
        doing. `others` is the sum of all real replies: where it shows nothing, none of them is looked at.
        """
        length = _length(others)
        if not present or not length:
            return []
        total = self._sum_of(present)
        unit = total / _length(total)
        chance = 1 / math.sqrt(len(unit))
        if float(np.vdot(others, unit)) <= SCREENED_STDS * chance * length:
            return []
        update, found = np.empty_like(self._current), []
        for reply in real:
            self._update_into(update, reply)
            if float(np.vdot(update, unit)) > max(TELLING, STDS * chance) * _length(update):
                found.append(reply)
        return found if 2 * len(found) <= len(real) or len(real) == 1 else []

    def _sum_of(self, indices: list[int]) -> Row:
        """The sum of canaries, which the audit takes again itself in the rounds whose noise it measures by layers.

        Without layers it measures less in some rounds; that it must not find the sum at hand leaves this as it is.
        """
        if self._sum is None or self._sum[0] != indices:
            by_layers = bool(self._audit.settings.layers)
            total = self._audit.updates(indices if by_layers else indices[::-1], 1.0, like=self._current)
            if len(indices) == 1 and not by_layers:
                self._audit.updates([], 1.0, like=self._current)
            self._sum = indices, total
        return self._sum[1]

    def _update_into(self, out: Row, reply: Message) -> None:
        (record,) = reply.content.array_records.values()
        self._layout.update_into(out, record, self._current)


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


def rounding_of(reply: Message, current: Row) -> float:
    """How long the error of an update is that comes from rounding the model, in the precision of a reply's arrays."""
    (record,) = reply.content.array_records.values()
    dtypes = {array_values(array).dtype for array in record.values()}
    step = max((float(np.finfo(dtype).eps) for dtype in dtypes if dtype.kind == "f"), default=0.0)
    return ROUNDING * step * _length(current)


def _parts(vector: Row, unit: Any) -> tuple[float, float]:
    """How much of `unit` a vector holds, and the length of the rest."""
    square = float(np.vdot(unit, unit))
    along = float(np.vdot(vector, unit)) / square
    return along, _length(vector - np.asarray(along * unit, dtype=vector.dtype))


def _length(vector: Row) -> float:
    return math.sqrt(float(np.vdot(vector, vector)))
