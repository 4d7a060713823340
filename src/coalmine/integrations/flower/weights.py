"""How much each reply counts in a round's average, and whether canaries count as much as the heaviest client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Message

from coalmine.verdict.coverage import AuditedItem


def reply_weight(reply: Message, weight_key: str) -> float:
    """The weight of a checked reply; 1 if it has none."""
    (metrics,) = reply.content.metric_records.values()
    return float(metrics.get(weight_key, 1.0))  # type: ignore[arg-type]


def reply_weights(replies: Sequence[Message], weight_key: str) -> list[float]:
    """The weights of checked replies."""
    return [reply_weight(reply, weight_key) for reply in replies]


def largest_unequal(weights: Sequence[float]) -> float | None:
    """The largest weight; None if all are equal."""
    return max(weights) if len(set(weights)) > 1 else None


@dataclass(frozen=True)
class Averaged:
    """The replies that a round averages, their weights in it, and the canaries among them."""

    replies: list[Message]
    weights: list[float]
    canaries: Mapping[int, Message]

    @cached_property
    def index_of(self) -> dict[int, int]:
        """The canary in a reply, by the reply's id()."""
        return {id(reply): index for index, reply in self.canaries.items()}

    @cached_property
    def canary_weights(self) -> list[float]:
        """The weights of the canaries."""
        pairs = zip(self.replies, self.weights, strict=True)
        return [weight for reply, weight in pairs if id(reply) in self.index_of]

    @property
    def canary_share(self) -> float:
        """A canary's share of the average; without any, that of a reply of mean weight."""
        if not self.canary_weights:
            return 1 / max(len(self.replies), 1)
        return float(np.mean(self.canary_weights)) / sum(self.weights)

    @property
    def largest_share(self) -> float:
        """The share of the average that a reply of the largest weight has; 0 without replies."""
        return max(self.weights, default=0.0) / max(sum(self.weights), 1e-300)

    @property
    def differ(self) -> bool:
        """Whether replies have different weights."""
        return len(set(self.weights)) > 1

    @property
    def metrics(self) -> dict[str, float]:
        """The weights for the round's line of metrics, if they differ."""
        if not self.canary_weights or not self.differ:
            return {}
        lightest, heaviest = min(self.canary_weights), max(self.canary_weights)
        return {"heaviest_client": max(self.weights), "lightest_canary": lightest, "heaviest_canary": heaviest}

    def warning(self, weight_key: str, *, noise_is_sized: bool) -> str:
        """What follows from different weights."""
        largest = max(self.weights)
        basis = "the noise is sized" if noise_is_sized else "an epsilon of one clip norm per client is"
        text = (
            f"clients have different weights (by {weight_key!r}), up to {largest / np.mean(self.weights):.3g} times "
            f"the mean, but {basis} for equal weights: send the same number from all"
        )
        if self.canary_weights and max(self.canary_weights) < largest:
            text += (
                f"; the heaviest canary weighs {max(self.canary_weights) / largest:.3g} of the heaviest client, so the "
                "audit measures less than that client leaks, and the verdict accounts for this factor"
            )
        return text


class WeightRatio:
    """The weight of a round's heaviest client over that of its lightest canary: the largest ratio over all rounds."""

    def __init__(self) -> None:
        self.rounds = 0  # rounds with canaries
        self.to_lightest = 1.0

    def add(self, heaviest: float, lightest_canary: float) -> None:
        """Add a round with canaries."""
        if lightest_canary > 0:
            self.rounds += 1
            self.to_lightest = max(self.to_lightest, heaviest / lightest_canary)

    def add_stored(self, line: Mapping[str, Any]) -> None:
        """Add a round of before a restart, from its line of metrics."""
        if line.get("canaries"):
            self.add(line.get("heaviest_client", 1.0), line.get("lightest_canary", 1.0))

    @property
    def item(self) -> AuditedItem:
        """Whether the canaries weighed as much as the heaviest client."""
        if self.rounds == 0:
            return AuditedItem("weights", "not checked", "no canary took part in any round")
        if self.to_lightest > 1:
            reason = f"the heaviest client weighed up to {self.to_lightest:.3g} times as much as a canary of its round"
            return AuditedItem("weights", "not checked", reason)
        return AuditedItem("weights", "checked", "every canary weighed as much as the heaviest client of its round")
