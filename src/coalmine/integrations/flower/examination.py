"""Finds bad replies by what their updates hold, and drops them until the rest of the round is consistent."""

from typing import NamedTuple

from flwr.app import Message

from coalmine.integrations.flower.arrays import Row
from coalmine.integrations.flower.canary_clients import mod_order
from coalmine.integrations.flower.modes import NO_CANARY, CanaryClients, CanarySource
from coalmine.integrations.flower.replies import RoundReplies
from coalmine.integrations.flower.sent_canaries import CanaryCheck, rounding_error
from coalmine.integrations.flower.sent_round import SentRound
from coalmine.integrations.flower.strategy_audit import StrategyAudit
from coalmine.integrations.flower.weights import reply_weights

HOLDING = "it holds canaries but does not report one, so its node knows the seed"
UNCLIPPED = (
    "most real clients sent updates longer than the clip norm, although clients must clip, so such rounds cannot confirm a "
    "claim"
)


class Examined(NamedTuple):
    """A round's canaries, and the real clients' part of the average; None if it is not known."""

    canaries: dict[int, Message]
    others: Row | None


class Examiner:
    """Examines the rounds of an audit, whose canaries come from a source."""

    def __init__(self, audit: StrategyAudit, source: CanarySource) -> None:
        self._audit, self._wrapped, self._source = audit, audit.wrapped, source
        self._from_clients = isinstance(source, CanaryClients)

    def examine(self, sent: SentRound, replies: RoundReplies) -> Examined:
        """The canaries' replies and the real clients' part. Bad replies are dropped, and the rest is examined again."""
        check = CanaryCheck(self._audit.core, sent)
        self._source.begin(sent, replies, check)
        if isinstance(self._source, CanaryClients) and self._source.missing:
            self._audit.warnings.add(NO_CANARY)
        while True:
            canaries = self._source.canaries(sent, replies.good)
            canary_ids = {id(reply) for reply in canaries.values()}
            real = [reply for reply in replies.good if id(reply) not in canary_ids]
            if self._audit.others_left_out is not None:
                return Examined(canaries, None)
            key = self._wrapped.weight_key
            total = sum(reply_weights([*replies.good, *self._source.extra(canaries)], key))
            others, lengths = sent.clipped_sum(real, [weight / total for weight in reply_weights(real, key)])
            bad = self._too_long(sent, real, lengths)
            if 2 * len(bad) > len(real):  # not a single bad client: the canaries show whether clients clip
                self._audit.warnings.add(UNCLIPPED)
                return Examined(canaries, None)
            bad = bad or self._bypassing(check, canaries, real, lengths) or self._holding(check, others, canaries, real)
            if not bad:
                return Examined(canaries, others)
            for reply, why in bad:
                replies.drop(reply, why)

    def _too_long(self, sent: SentRound, real: list[Message], lengths: list[float]) -> list[tuple[Message, str]]:
        """The real replies that are longer than the clip norm, if clients must clip."""
        if not self._wrapped.clips_on_clients:
            return []
        return [
            (reply, f"its update is {length / sent.clip_norm:.3g} clip norms long, but clients must clip")
            for reply, length in zip(real, lengths, strict=True)
            if length > 1.01 * sent.clip_norm + rounding_error(reply, sent.current)
        ]

    def _bypassing(
        self, check: CanaryCheck, canaries: dict[int, Message], real: list[Message], lengths: list[float]
    ) -> list[tuple[Message, str]]:
        """All canaries, if they did not go through the clip that real clients' updates go through."""
        clipped = self._wrapped.clips_on_clients and self._from_clients and self._audit.scale > 1
        if not (canaries and clipped and check.bypass_clip(real, lengths)):
            return []
        return [(reply, mod_order()) for reply in canaries.values()]

    def _holding(
        self, check: CanaryCheck, others: Row, canaries: dict[int, Message], real: list[Message]
    ) -> list[tuple[Message, str]]:
        """The real replies that hold canaries."""
        if not self._from_clients:
            return []
        return [(reply, HOLDING) for reply in check.replies_with_canaries(others, real, sorted(canaries))]
