"""From global models to observed rounds: the part that strategy and observer share."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array

from coalmine.audit.audit import Audit
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.result import AuditResult
from coalmine.audit.schedule import Indices
from coalmine.audit.verdict import Claim
from coalmine.integrations.claims import noise_claim, of_the_heaviest
from coalmine.integrations.flower.checkpoint import load_row, save_row
from coalmine.integrations.flower.layout import Layout, Row
from coalmine.integrations.journal import Journal

logger = logging.getLogger("flwr.coalmine")  # shown where Flower shows its own
INITIAL, FINAL = "audit/initial.npy", "model.npy"


class Recorder:
    """Follows the global model from round to round. Rounds are counted on from where the audit's directory ends."""

    def __init__(self, audit: Audit, initial: Mapping[str, Array], config: Mapping[str, Any]) -> None:
        refuse_finished(audit)
        self.audit = audit
        self.layout = Layout.of(initial)
        if self.layout.dim != audit.settings.dim:
            raise ValueError(
                f"the audit must have dim = {self.layout.dim}, as many as the model has fractional numbers, got {audit!r}"
            )
        self._journal = Journal(audit, config)
        self.first_failure: str | None = None  # why the first reply that failed did so
        self._before = audit.last_round
        self.current = self.layout.row(initial)
        self._initial = self._first_model()
        self._tally: dict[str, int] = {}
        self._accuracy: float | None = None
        if audit.directory is not None and self._before:
            self._count_again(audit.directory.read_metrics())

    def number(self, server_round: int) -> int:
        """The audit's number of a round that Flower counts from 1 after every start."""
        return self._before + server_round

    def observe(
        self,
        server_round: int,
        model: Mapping[str, Array] | None,
        present: Indices,
        *,
        clear: bool = True,
        others: Row | None = None,
        noise_std: float | None = None,
        canary_norm: float | None = None,
        scale: float = 1.0,
        **counts: Any,
    ) -> None:
        """Record a round's new model. Without one, or if it is not `clear` who took part, the round counts as skipped.

        `canary_norm` is the length of a clipped canary in the new model, `scale` how many times too long canaries were when
        they entered the clip; `counts` go into the metrics.
        """
        number = self.number(server_round)
        new = self.current if model is None else self.layout.row(model)
        delta = new - self.current if clear else np.zeros_like(new)
        skipped = not delta.any()
        if skipped:
            others = None
        self.audit.observe_round(
            number,
            delta,
            present=present,
            others=others,
            noise_std=noise_std,
            clip_norm=canary_norm,
            scale=scale,
        )
        self.current = new
        told = {"skipped": int(skipped), **counts}
        self._journal.add_round(number, canaries=len(present), **told)
        self._count_again([told])

    def add_accuracy(self, server_round: int, value: float) -> None:
        """What the user's own evaluation said of a round's model."""
        self._accuracy = value
        self._journal.add_round(self.number(server_round), accuracy=value)

    def finish(
        self,
        claim: Claim | float | None,
        *,
        noise_multiplier: float | None,
        task: str | None,
        heaviest: float = 1.0,
        audited: Iterable[AuditedItem] = (),
        **more: Any,
    ) -> AuditResult:
        """Observe the final model, and return and write the result. Without a claim, the noise multiplier makes one.

        `heaviest` is the weight of the heaviest client over that of a canary: the claim is for that client.
        """
        self._check_that_training_moved()
        self.audit.rewind_to(self.audit.last_round)  # finish() may be called again: forget the final model
        self.audit.observe_final(self.current, initial=self._initial)
        if self.audit.directory is not None:
            save_row(self.audit.directory.path / FINAL, self.current)
        if claim is None and noise_multiplier:
            claim = noise_claim(self.audit, noise_multiplier)
        if claim is not None:
            asked = claim if isinstance(claim, Claim) else Claim(epsilon=claim)
            claim = of_the_heaviest(self.audit, asked, heaviest)
        if any(self._tally.values()):
            counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self._tally.items())
            logger.warning("the audit missed something: %s", counts)
        known: dict[str, Any] = {"missed": dict(self._tally)}
        if noise_multiplier is not None:
            known["noise_multiplier"] = noise_multiplier
        if self._accuracy is not None:
            known["accuracy"] = self._accuracy
        items = tuple(audited)
        return self._journal.finish(claim, noise=noise_multiplier, task=task, audited=items, **known, **more)

    def _check_that_training_moved(self) -> None:
        """Refuse to finish where no round changed the model; the reason of the first failed reply says why."""
        if not np.array_equal(self.current, self._initial):
            return
        rounds = len(self.audit.log.numbers)
        if rounds == 0:
            raise ValueError("an audit needs at least one round, got none: start() with num_rounds of 1 or more")
        why = self.first_failure or "look for errors in the clients' logs"
        raise ValueError(f"every round was skipped ({rounds} of {rounds}), so there is nothing to audit: {why}")

    def _first_model(self) -> Row:
        """The model before round 1, from the directory where the server was restarted."""
        if self.audit.directory is None:
            return self.current
        path = self.audit.directory.path / INITIAL
        if self._before and path.exists():
            return load_row(path, self.current)
        save_row(path, self.current)
        return self.current

    def _count_again(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            for name in ("skipped", "failed", "missing", "lost_canaries"):
                self._tally[name] = self._tally.get(name, 0) + int(line.get(name, 0))


def refuse_finished(audit: Audit) -> None:
    """Raise where the audit's directory holds a finished run: its old result says nothing about new clients."""
    if audit.directory is not None and (audit.directory.path / "result.json").exists():
        raise ValueError(
            f"{audit.directory.path} must not hold a finished run, got one of {audit.last_round} rounds with a result.json: "
            "name another directory"
        )
