"""The audit of a sequence of global models: each round with its line of metrics, and the final model."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array

from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import RecordLayout, Row, load_row
from coalmine.integrations.flower.warning_log import logger
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.integrations.setup import refuse_finished
from coalmine.log.model_file import INITIAL
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim


class ModelAudit(FrameworkAudit):
    """Audits the global model from round to round. Round numbers continue those in the audit's directory."""

    trainer = Trainer("flower", "flwr", "client")
    layout: RecordLayout  # of the first model, set by `begin`
    current: Row

    def __init__(self, core: Audit, *, privacy: dict[str, float], canaries: dict[str, Any], **config: Any) -> None:
        refuse_finished(core)
        super().__init__(core, privacy=privacy, canaries=canaries, **config)
        self.first_failure: str | None = None  # reason of the first failed reply
        self.has_begun = False
        self.on_begin: Callable[[int | None], None] = lambda planned: None  # says what is audited
        self._accuracy: float | None = None

    def begin(self, initial: Mapping[str, Array], planned: int | None = None) -> None:
        """Start, or resume after the rounds in the directory, with the model that is trained from here.

        `planned` is the number of rounds, if it is known.
        """
        core = self.core
        refuse_finished(core)
        self.layout = RecordLayout.of(initial)
        if self.layout.dim != core.settings.dim:
            raise ValueError(
                f"the audit must have dim = {self.layout.dim}, the model's number of floating-point values, got {core!r}"
            )
        self._earlier_rounds = core.last_round
        self.current = self.layout.row(initial)
        self._initial = self._first_model()
        self.commit(initial=self._initial, planned=planned or core.settings.rounds)
        self.on_begin(planned or core.settings.rounds)
        self._tally: dict[str, int] = {}
        if core.directory is not None:
            core.directory.rewind_metrics_to(core.last_round)
            self._count(core.directory.read_metrics())
        self.has_begun = True

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
        self.core.observe_round(
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
        self.recorder.add_round(number, canaries=len(present), **line)
        self._count([line])

    def add_accuracy(self, server_round: int, value: float) -> None:
        """Record the accuracy that the user's own evaluation measured after a round."""
        self._accuracy = value
        self.recorder.add_round(self.number(server_round), accuracy=value)

    def conclude_models(self, claim: Claim | float | None, run: FinishedRun, *, task: str | None) -> AuditResult:
        """Observe the final model, then judge the claim, and return and write the result."""
        self._check_model_changed()
        self.core.rewind_to(self.core.last_round)  # drop the final model of an earlier call
        self.core.observe_final(self.current, initial=self._initial)
        if any(self._tally.values()):
            counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self._tally.items())
            logger.warning("the audit missed something: %s", counts)
        known = if_known("noise_multiplier", run.noise) | if_known("accuracy", self._accuracy)
        entries = {"missed": dict(self._tally), **known, **run.entries}
        return self.conclude(claim, replace(run, entries=entries), task=task)

    def _check_model_changed(self) -> None:
        """Raise an error if no round changed the model, with the reason of the first failed reply."""
        if not np.array_equal(self.current, self._initial):
            return
        rounds = len(self.core.log.numbers)
        if rounds == 0:
            raise ValueError("an audit needs at least one round, got none: start() with num_rounds of 1 or more")
        reason = self.first_failure or "look for errors in the clients' logs"
        raise ValueError(f"every round was skipped ({rounds} of {rounds}), so there is nothing to audit: {reason}")

    def _first_model(self) -> Row:
        """The model before round 1; after a restart, from the directory."""
        if self.core.directory is None:
            return self.current
        path = self.core.directory.path / INITIAL
        if self._earlier_rounds and path.exists():
            return load_row(path, self.current)
        return self.current

    def _count(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for name in ("skipped", "failed", "missing", "dropped", "lost_canaries"):
                self._tally[name] = self._tally.get(name, 0) + int(line.get(name, 0))


def if_known(name: str, value: float | None) -> dict[str, float]:
    """An entry, or none if the value is None."""
    return {} if value is None else {name: value}
