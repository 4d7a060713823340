"""Checks that canary clients sent their canary and nothing else, and that real clients sent no canary.

The server knows every canary, so it can compare. If all is well, one sum over all canaries is enough. Only if that sum is
off, each canary is compared separately, which takes one transform each.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Message

from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import Row, array_values
from coalmine.integrations.flower.sent_round import SentRound, only_record

SHORTEST, LONGEST = (
    0.5,
    1.02,
)  # length of a canary: at least this many clip norms, at most this much of the announced length
SAME_LENGTH = 0.02  # relative difference in length allowed between canaries of one round
SUM_ERROR = 0.3  # of one canary's length: if the sum is off by more, each canary is compared separately
ROUNDING = 8.0  # rounding error of an update, in steps of the replies' precision, relative to the model
STDS, SCREENED_STDS = 6.0, 4.0  # thresholds, in standard deviations of chance
FEWEST = 3  # canaries that are needed for a majority
UNCLIPPED = 1.5  # canaries longer than this many clip norms were not clipped
AT_CLIP = 1e-3  # relative difference to the clip norm allowed for an update that was clipped
FEWEST_CLIPPED = 2  # real updates of the clip norm's length that show that clients clip
COARSE = 0.02  # of the clip norm: if updates are rounded by more, their length does not show a clip
HOLDS_CANARIES = 0.05  # a real update holds canaries if its cosine with their sum is above this


class CanaryCheck:
    """Compares the replies of a round with the canaries."""

    def __init__(self, audit: Audit, sent: SentRound) -> None:
        self._audit, self._sent, self._current = audit, sent, sent.current
        self._sum: tuple[list[int], Row] | None = None
        self.length = 0.0  # mean length of the canaries that were compared last

    def wrong_canaries(self, canaries: Mapping[int, Message], *, scale: float, noisy: bool) -> dict[int, str]:
        """The canaries whose reply is not the canary, with the reason.

        A canary may arrive clipped or unclipped, and with the clients' noise if `noisy`. It must be like the majority: an
        unclipped canary among clipped ones is wrong, because a missing clip would show in most of them.
        """
        if not canaries:
            return {}
        indices, current, clip_norm = sorted(canaries), self._current, self._sent.clip_norm
        summed, update = np.zeros_like(current), np.empty_like(current)
        for index in indices:
            self._update_into(update, canaries[index])
            summed += update
        rounding = max(rounding_error(canaries[index], current) for index in indices)
        along, rest = _parts(summed, self._sum_of(indices))
        self.length = along
        most = LONGEST * scale * clip_norm + rounding
        if SHORTEST * clip_norm <= along <= most and rest <= SUM_ERROR * along + rounding * math.sqrt(len(indices)):
            return {}
        lengths = {}
        for index in indices:
            self._update_into(update, canaries[index])
            lengths[index] = _parts(update, self._audit.update(index, 1.0, like=current))
        few = len(lengths) < FEWEST and not noisy
        return _unlike_majority(lengths, len(current), clip_norm, most, rounding, few=few)

    def holding(self, index: int, replies: Sequence[Message], *, scale: float) -> list[Message]:
        """Those of some replies that hold a canary, alone or beside a client's noise."""
        clip_norm, unit = self._sent.clip_norm, self._audit.update(index, 1.0, like=self._current)
        update, holding = np.empty_like(self._current), []
        for reply in replies:
            self._update_into(update, reply)
            along, rest = _parts(update, unit)
            slack = STDS * rest / math.sqrt(len(update)) + rounding_error(reply, self._current)
            if max(SHORTEST * clip_norm - slack, slack) <= along <= LONGEST * scale * clip_norm + slack:
                holding.append(reply)
        return holding

    def replies_with_canaries(self, others: Row, real: Sequence[Message], present: list[int]) -> list[Message]:
        """The real replies that hold the present canaries, which only a client who knows the seed can send.

        Such replies raise the canaries' scores, so that an honest pipeline seems to leak. If most replies do this, the cause
        is not a single client, and none is returned. `others` is the sum of all real replies: if it holds no canaries, the
        replies are not read.
        """
        length = _length(others)
        if not present or not length:
            return []
        total = self._sum_of(present)
        unit = total / _length(total)
        chance = 1 / math.sqrt(len(unit))
        if float(np.vdot(others, unit)) <= SCREENED_STDS * chance * length:
            return []
        update, holding = np.empty_like(self._current), []
        for reply in real:
            self._update_into(update, reply)
            if float(np.vdot(update, unit)) > max(HOLDS_CANARIES, STDS * chance) * _length(update):
                holding.append(reply)
        return holding if 2 * len(holding) <= len(real) or len(real) == 1 else []

    def bypass_clip(self, real: Sequence[Message], lengths: Sequence[float]) -> bool:
        """Whether canaries are longer than the clip norm although the real clients clip.

        Real updates with the clip norm's own length were clipped. Without any, nothing shows that clients clip.
        """
        clip_norm, rounding = self._sent.clip_norm, [rounding_error(reply, self._current) for reply in real]
        if self.length <= UNCLIPPED * clip_norm or max(rounding, default=0.0) > COARSE * clip_norm:
            return False
        pairs = list(zip(lengths, rounding, strict=True))
        at_clip = sum(abs(length - clip_norm) <= AT_CLIP * clip_norm + error for length, error in pairs)
        longer = sum(length > (1 + AT_CLIP) * clip_norm + error for length, error in pairs)
        return at_clip >= FEWEST_CLIPPED and not longer

    def _sum_of(self, indices: list[int]) -> Row:
        """The sum of canaries. An audit caches its last sum; one with layers needs it again to measure a round's noise.

        An audit without layers must not find this sum in its cache: it would then measure the noise's law in more rounds.
        """
        if self._sum is None or self._sum[0] != indices:
            by_layers = bool(self._audit.settings.layers)
            total = self._audit.updates(indices if by_layers else indices[::-1], 1.0, like=self._current)
            if len(indices) == 1 and not by_layers:
                self._audit.updates([], 1.0, like=self._current)
            self._sum = indices, total
        return self._sum[1]

    def _update_into(self, out: Row, reply: Message) -> None:
        self._sent.layout.update_into(out, only_record(reply), self._current)


def _unlike_majority(
    lengths: Mapping[int, tuple[float, float]], dim: int, clip_norm: float, most: float, rounding: float, *, few: bool
) -> dict[int, str]:
    """The canaries whose lengths differ from the medians: the length along the canary, or that of the rest."""
    usual_rest = 0.0 if few else float(np.median([rest for _, rest in lengths.values()]))
    slack = STDS * usual_rest / math.sqrt(dim) + rounding
    wrong = {}
    for index, (along, rest) in lengths.items():
        if not SHORTEST * clip_norm - slack <= along <= most + slack:
            wrong[index] = f"it must send canary {index}, got {along / clip_norm:.3g} clip norms of it"
        elif rest > (0.5 * along if few else 1.5 * usual_rest + SAME_LENGTH * abs(along)) + rounding:
            wrong[index] = f"it must send canary {index} alone, got {rest / clip_norm:.3g} clip norms of something else"
    usual = float(np.median([along for index, (along, _) in lengths.items() if index not in wrong] or [0.0]))
    for index, (along, _) in lengths.items():
        if index not in wrong and abs(along - usual) > SAME_LENGTH * abs(usual) + slack:
            wrong[index] = (
                f"it sends canary {index} {along / clip_norm:.3g} clip norms long, where most canaries are "
                f"{usual / clip_norm:.3g} long"
            )
    return wrong


def rounding_error(reply: Message, current: Row) -> float:
    """The length of an update's rounding error, from the model's length and the precision of a reply's arrays."""
    dtypes = {array_values(array).dtype for array in only_record(reply).values()}
    step = max((float(np.finfo(dtype).eps) for dtype in dtypes if dtype.kind == "f"), default=0.0)
    return ROUNDING * step * _length(current)


def _parts(vector: Row, unit: Any) -> tuple[float, float]:
    """The coefficient of a vector along `unit`, and the length of the rest."""
    square = float(np.vdot(unit, unit))
    along = float(np.vdot(vector, unit)) / square
    return along, _length(vector - np.asarray(along * unit, dtype=vector.dtype))


def _length(vector: Row) -> float:
    return math.sqrt(float(np.vdot(vector, vector)))
