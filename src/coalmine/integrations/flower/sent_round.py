"""What the server sends in a round of training, and the updates that come back to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import ArrayRecord, Message

from coalmine.integrations.flower.arrays import RecordLayout, Row


@dataclass(frozen=True)
class SentRound:
    """The messages of a round and the model in them. `number` is the audit's, `current` the model as one row."""

    number: int
    clip_norm: float
    messages: tuple[Message, ...]
    available: int  # number of nodes to sample from
    layout: RecordLayout
    current: Row

    @property
    def model(self) -> ArrayRecord | None:
        """The model that was sent; None without any message."""
        return None if not self.messages else only_record(self.messages[0])

    def update_into(self, out: Row, reply: Message) -> float:
        """Write a reply's update into `out`. Returns its squared length, with the arrays that the audit leaves out.

        Flower's clip counts those arrays too.
        """
        record, before = only_record(reply), self.model
        self.layout.update_into(out, record, self.current)
        square = float(np.vdot(out, out))
        for name in self.layout.left_out:
            assert before is not None
            gap = np.asarray(record[name].numpy() - before[name].numpy(), dtype=np.float64)
            square += float(np.vdot(gap, gap))
        return square

    def clipped_sum(self, replies: Sequence[Message], shares: Sequence[float]) -> tuple[Row, list[float]]:
        """These replies' part of an average in which each has its share, and the length of each update before the clip.

        The pipeline's own clip is under test, so it cannot be used here. Each reply is read once and never copied.
        """
        summed, update, lengths = np.zeros_like(self.current), np.empty_like(self.current), []
        for reply, share in zip(replies, shares, strict=True):
            length = self.update_into(update, reply) ** 0.5
            update *= share * min(1.0, self.clip_norm / max(length, 1e-300))
            summed += update
            lengths.append(length)
        return summed, lengths


def only_record(message: Message) -> ArrayRecord:
    """The one ArrayRecord of a message or a checked reply."""
    (record,) = message.content.array_records.values()
    return record
