"""The ledger of nodes: how much each was exposed and weighed, which failed or were silent, whose replies were dropped."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import Message

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import FrozenArrays
from coalmine.integrations.flower.exposures import Exposures
from coalmine.integrations.flower.replies import NAMED_NODES, DroppedReply, RoundReplies, printable
from coalmine.integrations.flower.sent_round import SentRound, only_record
from coalmine.integrations.flower.warning_log import WarningLog, logger
from coalmine.integrations.flower.weights import Averaged, WeightRatio
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.result.trainer_section import SeenNode

LONGEST_REASON = 400  # characters kept of a failed reply's reason


class NodeLedger:
    """What the server saw of the nodes so far."""

    def __init__(self, wrapped: Wrapped, warnings: WarningLog) -> None:
        self._wrapped, self._warnings = wrapped, warnings
        self.dropped: list[DroppedReply] = []
        self.failures: list[str] = []  # the reasons of failed replies, each once
        self.failed: Counter[int] = Counter()  # failed replies, by node
        self.silent: Counter[int] = Counter()  # rounds without an answer, by node
        self.rewound = 0  # rounds that were released, and are trained again after a restart
        self.ratio = WeightRatio()
        self.weights_differ = False
        self.exposures = self._new_exposures()
        self._frozen: FrozenArrays | None = None

    def restore_exposures(self, seen: Mapping[str, Any]) -> None:
        """Continue after a restart, from the arrays of a checkpoint."""
        self.exposures = Exposures.from_arrays(seen) if seen else self._new_exposures()

    def restore_rounds(self, lines: list[dict[str, Any]]) -> None:
        """Continue after a restart, from the metrics of earlier rounds."""
        for line in lines:
            for node, why in line.get("dropped_replies", ()):
                self.dropped.append(DroppedReply(node, line["round"], why))
            self.failed.update(line.get("failed_nodes", ()))
            self.silent.update(line.get("silent_nodes", ()))
            self.ratio.add_stored(line)
        self.rewound += max((line.get("rewound", 0) for line in lines), default=0)

    def _new_exposures(self) -> Exposures:
        """Where a wrapper adds noise, one client's noise does not depend on its weight. With noise on clients it does."""
        return Exposures(in_noise=self._wrapped.adds_noise)

    def add_failures(self, round_number: int, failed: list[Message]) -> None:
        """Warn of failed replies, once for each reason."""
        self.failed.update(reply.metadata.src_node_id for reply in failed)
        for reply in failed:
            reason = _reason(str(reply.error.reason))
            if reason not in self.failures:
                self.failures.append(reason)
                self._warnings.add(f"node {reply.metadata.src_node_id} failed in round {round_number}: {reason}")

    def add_dropped(self, dropped: list[DroppedReply]) -> None:
        """Log each dropped reply, and keep it for the result."""
        for each in dropped:
            logger.warning("the reply of node %s in round %d was dropped: %s", each.node, each.round_number, each.why)
        self.dropped += dropped

    def add_round(self, sent: SentRound, averaged: Averaged, good: list[Message]) -> None:
        """Take the weights of a round, warn if they differ, and find the arrays that no real client changes."""
        if averaged.differ and not self.weights_differ:
            self.weights_differ = True
            sized = self._wrapped.private is not None
            self._warnings.add(averaged.warning(self._wrapped.weight_key, noise_is_sized=sized))
        if averaged.canary_weights:
            self.ratio.add(max(averaged.weights), min(averaged.canary_weights))
        if self._frozen is None:
            self._frozen = FrozenArrays(sent.layout.names)
        for reply in good:
            if id(reply) not in averaged.index_of:
                self._frozen.compare(only_record(sent.messages[0]), only_record(reply))

    def add_release(self, averaged: Averaged, noise_share: float) -> None:
        """Take the exposures of a released round; `noise_share` is the noise in the average, over the clip norm."""
        unit = noise_share if self.exposures.in_noise else averaged.canary_share
        self.exposures.add_replies(averaged, unit)

    def metrics(self, averaged: Averaged, replies: RoundReplies) -> dict[str, Any]:
        """The round's entries in the metrics."""
        self.silent.update(replies.silent)
        return {
            **averaged.metrics,
            "failed": len(replies.failed),
            "failed_nodes": sorted(reply.metadata.src_node_id for reply in replies.failed) or None,
            "missing": len(replies.silent),
            "silent_nodes": sorted(replies.silent) or None,
            "rewound": self.rewound or None,
            "dropped": len(replies.dropped),
            "dropped_replies": [[each.node, each.why] for each in replies.dropped] or None,
        }

    def nodes(self, audit: Audit, noise: float | None) -> tuple[SeenNode, ...]:
        """The nodes that the server saw, the most exposed first, then those that answered least."""
        seen, dropped = self.exposures.nodes, Counter(each.node for each in self.dropped)
        unheard = dropped + self.failed + self.silent
        order = sorted(
            seen.times.keys() | unheard.keys(), key=lambda node: (-seen.squares.get(node, 0), -unheard[node])
        )

        def epsilon(node: int) -> float | None:
            total = math.sqrt(seen.squares.get(node, 0.0))
            return self.exposures.epsilon(audit, noise, equal_weights=not self.weights_differ, total=total)

        return tuple(
            SeenNode(
                node=node,
                rounds=seen.times.get(node, 0),
                epsilon=epsilon(node),
                weight=seen.parts.get(node, 1.0),
                dropped=dropped[node],
                failed=self.failed[node],
                silent=self.silent[node],
            )
            for node in order[:NAMED_NODES]
        )

    def described(self) -> list[str]:
        """A sentence on the nodes that failed or did not answer, with the number of their rounds."""
        lines = []
        for counts, what in ((self.failed, "replied with an error"), (self.silent, "did not answer")):
            named = [f"node {node} in {count_of(count, 'round')}" for node, count in counts.most_common(NAMED_NODES)]
            if named:
                more = f", and {len(counts) - NAMED_NODES} more nodes" if len(counts) > NAMED_NODES else ""
                lines.append(f"{what}: {', '.join(named)}{more}")
        return lines

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the arrays that no real client has changed."""
        return () if self._frozen is None else self._frozen.names


def _reason(text: str) -> str:
    """A failed reply's reason on one line, without Flower's wrapping: <class 'ValueError'>:<'text'>."""
    line = " ".join(text.split())
    match = re.fullmatch(r"<class '[^']*'>:<'(.*)'>", line)
    return printable(line if match is None else match[1].strip(), LONGEST_REASON)
