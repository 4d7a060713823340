"""Records a sequence of global models: each round for the audit, with its line of metrics, and the final model."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array

from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import Layout, Row, load_row, save_row
from coalmine.integrations.flower.warning_log import logger
from coalmine.integrations.journal import Journal
from coalmine.integrations.setup import refuse_finished
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim

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
