"""Aggregates of some rounds again, without Flower's noise and with one reply replaced by a zero update."""

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from coalmine.argument_checks import Floats, one_line
from coalmine.integrations.flower.arrays import array_values
from coalmine.integrations.flower.sent_round import SentRound, only_record
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.replay.plan import ReplayPlan, rows_of
from coalmine.replay.randomness import Randomness
from coalmine.replay.step import Comparison, Run
from coalmine.replay.witness import read_step, unshown, witness
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.replayed_rows import UNTESTED, ReplayedStep

NOT_LAST = "no DifferentialPrivacy… wrapper is outermost, so the noise cannot be told from what clients sent"
NOT_FLOWERS = "a strategy of your own may do more than aggregate, such as save files (replay=True repeats it)"
SHARE = 4.0  # aggregations of replays for each planned round: a round's training costs far more
LATER = 4  # where the number of rounds is unknown, one is drawn from here to twice as far, and so on
LARGEST = 1 << 26  # numbers in all replies of a round whose aggregate is computed again


class ReplayedAggregates:
    """Which rounds of a run are replayed, and what they showed."""

    def __init__(self, wrapped: Wrapped, key: bytes, *, wanted: bool | None) -> None:
        self._wrapped, self._key = wrapped, key
        self.left_out: str | None = None
        if wanted is False:
            self.left_out = "replay=False"
        elif wrapped.private is not wrapped.strategy:
            # Noise that is added last cannot hide in the change: whatever stands before it, the change is that of a reply.
            self.left_out = NOT_LAST
        elif wanted is None and not wrapped.is_flowers_own:
            self.left_out = NOT_FLOWERS
        self.plan = ReplayPlan.of(None, key, later=LATER)
        self.steps: list[ReplayedStep] = []

    def begin(self, planned: int | None, earlier: Sequence[Mapping[str, Any]]) -> None:
        """The rounds of this run, and those that were replayed before a restart."""
        if planned is not None:
            self.plan = ReplayPlan.of(planned, self._key, share=SHARE)
        self.steps = [step for line in earlier if (step := read_step(line.get("replayed"))) is not None]

    def take(self, server_round: int, sent: SentRound, replies: Sequence[Message], share: float) -> dict[str, Any]:
        """Replay a round before its aggregation if it is due; returns what its line of metrics holds.

        `share` is that of a reply of the largest weight in the average.
        """
        done = max((step.step for step in self.steps), default=0)
        if self.left_out or len(replies) < 2 or not self.plan.is_due(sent.number, done):
            return {}
        if len(replies) * sent.layout.dim > LARGEST:
            step = unshown(sent.number, "the replies are too large to be aggregated again")
        else:
            step = self._replayed(server_round, sent, replies, share)
        self.steps.append(step)
        return {"replayed": step.to_dict()}

    def _replayed(self, server_round: int, sent: SentRound, replies: Sequence[Message], share: float) -> ReplayedStep:
        before, log = Randomness(), logging.getLogger("flwr")  # where every aggregation says what it does
        silent, log.disabled = log.disabled, True
        try:
            runner = _Aggregates(self._wrapped, server_round, sent, replies, before)
            drawn = rows_of(sent.number, len(replies), self.plan.rows, self._key)
            rows = list(dict.fromkeys([runner.loudest(), *drawn]))[: self.plan.rows]
            unit = sent.clip_norm * share
            comparison = Comparison(runner, np.ones(len(replies)), unit, "zero-out", None, most_cases=self.plan.rows)
            # A client that does not clip may send anything: only what the server clips may be made longer.
            outcome = comparison.of_rows(rows, extremes=self._wrapped.clips_on_server)
            return witness(sent.number, outcome)
        except Exception as error:  # whatever it is, the training goes on
            return unshown(
                sent.number, f"the round could not be replayed ({type(error).__name__}: {one_line(str(error))[:200]})"
            )
        finally:
            log.disabled = silent
            before.restore()

    @property
    def item(self) -> AuditedItem | None:
        """Why no round can be replayed; None if some can be."""
        return None if self.left_out is None else AuditedItem("rows", "not checked", f"{self.left_out}: {UNTESTED}")


class _Aggregates:
    """The model that the strategy makes of a round's replies, each of whose updates is scaled by a factor."""

    takes_weights, resizes, draws = False, False, False

    def __init__(
        self,
        wrapped: Wrapped,
        server_round: int,
        sent: SentRound,
        replies: Sequence[Message],
        randomness: Randomness,
    ) -> None:
        self._twin = wrapped.copied(silent=True)
        self._twin.private.num_sampled_clients = len(
            replies
        )  # extra replies are some, which an accountant would refuse
        self._round, self._sent, self._replies, self._randomness = server_round, sent, replies, randomness
        model = sent.model
        assert model is not None
        self._model = {name: array_values(array) for name, array in model.items()}
        kinds = [values.dtype for values in self._model.values() if values.dtype.kind == "f"]
        self.unit = max(float(np.finfo(kind).eps) for kind in kinds)
        self.precision = self.unit

    def run(self, batch: Floats, weights: Any = None, after: Mapping[str, Any] | None = None) -> Run:
        self._randomness.restore()
        replies = [self._scaled(reply, float(factor)) for reply, factor in zip(self._replies, batch, strict=True)]
        arrays, _ = copy.deepcopy(self._twin).strategy.aggregate_train(self._round, replies)
        if arrays is None:
            raise ValueError("the strategy makes no model of the round")
        names = self._sent.layout.names
        return Run({name: np.asarray(array_values(arrays[name]), np.float64).reshape(-1) for name in names}, {})

    def loudest(self) -> int:
        """The reply that seems to count most for its length: where updates do not meet, that is what it adds."""
        with_all, without = (self.run(np.full(len(self._replies), factor)).release for factor in (1.0, 0.0))
        gap = np.concatenate([part - without[name] for name, part in with_all.items()])
        update, counted = np.empty_like(self._sent.current), []
        for reply in self._replies:
            length = self._sent.update_into(update, reply) ** 0.5
            counted.append(float(update @ gap) / max(length * min(length, self._sent.clip_norm), 1e-300))
        return int(np.argmax(counted))

    def _scaled(self, reply: Message, factor: float) -> Message:
        """A copy of a reply, whose update is scaled: a strategy may change the replies that it gets."""
        (key,) = reply.content.array_records
        sent = only_record(reply)
        content: dict[str, Any] = dict(reply.content.items())
        content[key] = (
            sent if factor == 1 else ArrayRecord({name: self._array(name, sent[name], factor) for name in sent})
        )
        other = copy.copy(reply)
        other.content = RecordDict(content)
        return other

    def _array(self, name: str, array: Array, factor: float) -> Array:
        before, values = self._model[name], array_values(array)
        if name in self._sent.layout.left_out:
            return Array(np.array(before if factor == 0 else values))
        scaled = np.asarray(before + factor * (values - before), dtype=values.dtype)
        if not factor and values.size and name == self._sent.layout.names[0]:  # Flower's clip divides by the length
            scaled.flat[0] = np.nextafter(scaled.flat[0], scaled.dtype.type(np.inf))
        return Array(scaled)
