"""Audits a sequence of global models, also through an `evaluate_fn` if the strategy cannot be wrapped."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array

from coalmine.argument_checks import whole_number
from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import Layout, Row, as_record, load_row, save_row
from coalmine.integrations.flower.canary_clients import Announcement, checked_partitions, checked_seed
from coalmine.integrations.flower.exposures import UNIT
from coalmine.integrations.flower.scope import UNKNOWN_TO_OBSERVER, observer_items
from coalmine.integrations.journal import Journal
from coalmine.integrations.setup import CLIP_SCALE, nonnegative, positive, refuse_finished
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim

logger = logging.getLogger("flwr.coalmine")  # goes to the same handlers as Flower's own log
INITIAL, FINAL = "audit/initial.npy", "model.npy"


class Recorder:
    """Records the global model from round to round. Round numbers continue those in the audit's directory."""

    def __init__(self, audit: Audit, initial: Mapping[str, Array], config: Mapping[str, Any]) -> None:
        refuse_finished(audit)
        self.audit = audit
        self.layout = Layout.of(initial)
        if self.layout.dim != audit.settings.dim:
            raise ValueError(
                f"the audit must have dim = {self.layout.dim}, the model's number of floating-point values, got {audit!r}"
            )
        self._journal = Journal(audit, config)
        self.first_failure: str | None = None  # reason of the first failed reply
        self._earlier_rounds = audit.last_round
        self.current = self.layout.row(initial)
        self._initial = self._first_model()
        self._tally: dict[str, int] = {}
        self._accuracy: float | None = None
        if audit.directory is not None and self._earlier_rounds:
            self._count(audit.directory.read_metrics())

    def number(self, server_round: int) -> int:
        """The audit's number of a round. Flower counts from 1 after every start."""
        return self._earlier_rounds + server_round

    def observe(
        self,
        server_round: int,
        model: Mapping[str, Array] | None,
        present: Indices,
        *,
        others: Row | None = None,
        noise_std: float | None = None,
        canary_norm: float | None = None,
        scale: float = 1.0,
        participants: int | None = None,
        **counts: Any,
    ) -> None:
        """Record a round's new model. Without one, or if it holds NaN or infinity, the round counts as skipped.

        `canary_norm` is the length of a clipped canary in the new model. `scale` is the length of a canary in clip norms
        before the clip. `participants` is the number of averaged replies. `counts` go into the metrics.
        """
        number = self.number(server_round)
        new = self.current if model is None else self.layout.row(model)
        with np.errstate(all="ignore"):
            delta = new - self.current
        if not np.isfinite(delta).all():
            logger.warning("the model of round %d holds NaN or infinity, so this round is not audited", number)
            delta = np.zeros_like(new)
        skipped = not delta.any()
        if skipped or (others is not None and np.array_equal(delta, others)):  # there is neither noise nor a canary
            others = None
        self.audit.observe_round(
            number,
            delta,
            present=present,
            others=others,
            noise_std=noise_std,
            clip_norm=canary_norm,
            scale=scale,
            participants=participants,
        )
        self.current = new
        line = {"skipped": int(skipped), **counts}
        self._journal.add_round(number, canaries=len(present), **line)
        self._count([line])

    def add_accuracy(self, server_round: int, value: float) -> None:
        """Record the accuracy that the user's own evaluation measured after a round."""
        self._accuracy = value
        self._journal.add_round(self.number(server_round), accuracy=value)

    def finish(self, claim: Claim | float | None, *, noise_multiplier: float | None, **more: Any) -> AuditResult:
        """Observe the final model, then return and write the result. `more` are arguments of `Journal.finish`."""
        self._check_model_changed()
        self.audit.rewind_to(self.audit.last_round)  # drop the final model of an earlier call
        self.audit.observe_final(self.current, initial=self._initial)
        if self.audit.directory is not None:
            save_row(self.audit.directory.path / FINAL, self.current)
        if any(self._tally.values()):
            counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self._tally.items())
            logger.warning("the audit missed something: %s", counts)
        entries: dict[str, Any] = {"missed": dict(self._tally)}
        if noise_multiplier is not None:
            entries["noise_multiplier"] = noise_multiplier
        if self._accuracy is not None:
            entries["accuracy"] = self._accuracy
        return self._journal.finish(claim, noise=noise_multiplier, **entries, **more)

    def _check_model_changed(self) -> None:
        """Raise an error if no round changed the model, with the reason of the first failed reply."""
        if not np.array_equal(self.current, self._initial):
            return
        rounds = len(self.audit.log.numbers)
        if rounds == 0:
            raise ValueError("an audit needs at least one round, got none: start() with num_rounds of 1 or more")
        reason = self.first_failure or "look for errors in the clients' logs"
        raise ValueError(f"every round was skipped ({rounds} of {rounds}), so there is nothing to audit: {reason}")

    def _first_model(self) -> Row:
        """The model before round 1; after a restart, from the directory."""
        if self.audit.directory is None:
            return self.current
        path = self.audit.directory.path / INITIAL
        if self._earlier_rounds and path.exists():
            return load_row(path, self.current)
        save_row(path, self.current)
        return self.current

    def _count(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for name in ("skipped", "failed", "missing", "dropped", "lost_canaries"):
                self._tally[name] = self._tally.get(name, 0) + int(line.get(name, 0))


class Observer:
    """An `evaluate_fn` for `Strategy.start`, or for a legacy strategy, that observes the model and then calls the user's.

    It sees only models. It warns of buffers, but cannot warn of unequal weights or of strategies that drop canaries.
    `present` returns the canaries of a round, counted from 1. The default is the audit's schedule if it has `rounds`,
    otherwise all canaries in every round. That is right if every node has one canary, trains in every round and never fails.
    If nodes are sampled or may fail, use `audited`, which reads the canaries from the replies.

    With `clip_norm`, `participants` (the number of updates that a round averages) and `noise_multiplier`, the noise is
    gauged too: its std is then noise_multiplier·clip_norm/participants. After training, call `audit.finish`. It takes
    `claim`, unless the audit was made with one, and `task`, the name of the training task. Without a claim, the verdict is
    never PASS.
    """

    def __init__(
        self,
        audit: Audit,
        evaluate_fn: Callable[..., Any] | None = None,
        *,
        clip_norm: float | None = None,
        participants: int | None = None,
        noise_multiplier: float | None = None,
        present: Callable[[int], Iterable[int]] | None = None,
    ) -> None:
        if noise_multiplier is not None and (clip_norm is None or participants is None):
            raise ValueError(
                "noise_multiplier needs clip_norm and participants too: the noise's std follows from all three"
            )
        self.audit, self._evaluate = audit, evaluate_fn
        self._clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._participants = None if participants is None else whole_number("participants", participants, minimum=1)
        self._noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._present = present or self._default_present
        self._scale = 1.0
        self._recorder: Recorder | None = None
        audit.finish_with(self._finish)

    def announce(
        self,
        initial: Any,
        *,
        seed: int | bytes | None = None,
        scale: float | None = None,
        canary_partitions: Iterable[int] | None = None,
    ) -> dict[str, Any]:
        """Entries for the train config, which tell `canary_mod` what to send.

        `initial` is the model that training starts from: an ArrayRecord, a list of arrays, a torch Module or a state_dict.
        A node with several canaries needs 'server-round' in the train config too.
        """
        if self._clip_norm is None:
            raise ValueError("a canary is as long as the clip norm: give Observer(..., clip_norm=)")
        self._scale = positive("scale", CLIP_SCALE if scale is None else scale)
        return Announcement.of(
            self.audit,
            clip_norm=self._clip_norm,
            scale=self._scale,
            left_out=Layout.of(as_record(initial)).left_out,
            seed=checked_seed(self.audit, seed),
            partitions=checked_partitions(canary_partitions),
        ).to_config()

    def __call__(self, server_round: int, arrays: Any, *rest: Any) -> Any:
        model = as_record(arrays)
        if self._recorder is None:
            config = {
                "trainer": "flower",
                "privacy": {"clip_norm": self._clip_norm or 0.0, "noise_multiplier": self._noise or 0.0},
                "canaries": {"count": self.audit.settings.canaries, "mode": "observer"},
            }
            self._recorder = Recorder(self.audit, model, config)
            for text in self._recorder.layout.warnings:
                logger.warning("%s", text)
        if server_round > 0:
            clip_norm = None
            if self._clip_norm is not None and self._participants is not None:
                clip_norm = self._clip_norm / self._participants  # in the units of the model delta, an average
            self._recorder.observe(
                server_round,
                model,
                np.fromiter(self._present(self._recorder.number(server_round)), dtype=np.int32),
                noise_std=None if self._noise is None or clip_norm is None else self._noise * clip_norm,
                canary_norm=clip_norm,
                scale=self._scale,
                clip_norm=self._clip_norm,
            )
        return None if self._evaluate is None else self._evaluate(server_round, arrays, *rest)

    def _finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        if self._recorder is None:
            raise ValueError("no model was observed: pass this observer to start() as evaluate_fn")
        warnings = [*self._recorder.layout.warnings, f"known-others was left out: {UNKNOWN_TO_OBSERVER}"]
        logger.warning("%s", warnings[-1])
        items = observer_items(self._scale)
        return self._recorder.finish(
            claim,
            accounted=Claim(1.0, unit=UNIT),  # bare: its participations are those of the audit's schedule
            noise_multiplier=self._noise,
            task=task,
            audited=items,
            warnings=warnings,
        )

    def _default_present(self, round_number: int) -> Iterable[int]:
        if self.audit.settings.rounds is not None:
            return [int(index) for index in self.audit.canaries_in_round(round_number)]
        return range(self.audit.settings.canaries)
