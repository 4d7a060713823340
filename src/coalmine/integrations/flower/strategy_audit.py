"""The audit of a wrapped strategy: its checkpoints, what it covers, and its finish."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, MetricRecord

from coalmine.audit import Audit
from coalmine.integrations.flower.claims import read_claim
from coalmine.integrations.flower.exposures import participations_item, whole_run_claim
from coalmine.integrations.flower.ledger import NodeLedger
from coalmine.integrations.flower.model_audit import ModelAudit, if_known
from coalmine.integrations.flower.modes import NO_CANARY, CanaryClients, CanarySource, Mode
from coalmine.integrations.flower.replayed import ReplayedAggregates
from coalmine.integrations.flower.replies import describe_dropped
from coalmine.integrations.flower.scope import (
    SAMPLER,
    adaptive_clip_warning,
    clipping_item,
    others_item,
    tensors_item,
)
from coalmine.integrations.flower.server_checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from coalmine.integrations.flower.views import SERVER, Views
from coalmine.integrations.flower.warning_log import WarningLog, logger
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.integrations.recorder import FinishedRun
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem


class StrategyAudit(ModelAudit):
    """The audit of a strategy.

    `scale` is the length of a canary in clip norms, and `others_left_out` the reason why the real clients' part of a round
    is not known; None if it is.
    """

    def __init__(
        self,
        core: Audit,
        wrapped: Wrapped,
        source: CanarySource,
        *,
        mode: Mode,
        scale: float,
        others_left_out: str | None,
        replay: bool | None,
    ) -> None:
        self.wrapped, self._source, self._mode = wrapped, source, mode
        self.scale, self.others_left_out = scale, others_left_out
        self.warnings = WarningLog()
        self.ledger = NodeLedger(wrapped, self.warnings)
        self.views = Views()
        self.replays = ReplayedAggregates(wrapped, core.schedule.key, wanted=replay)
        privacy = {"clip_norm": wrapped.clip_norm} | if_known("noise_multiplier", wrapped.noise_multiplier)
        super().__init__(core, privacy=privacy, canaries={"mode": mode, "scale": scale}, strategy=wrapped.names)

    def add_views(self, views: Views, *, own_audit: bool) -> None:
        """Audit what others than the public see, too. Rejects views whose replies the audit does not see."""
        for name in views.by_name:
            if own_audit:
                raise ValueError(f"the view {name} needs audited() to make the audits: omit audit=")
            if self._mode != "client":
                raise ValueError(f"the view {name} needs canaries that clients send: mode 'client', got {self._mode!r}")
            if name != SERVER and not (self.wrapped.private is None and self.wrapped.is_linear):
                raise ValueError(
                    f"the view {name} needs noise on clients and a strategy that averages like FedAvg: a coalition knows "
                    "no share of a server's noise"
                )
        self.views = views

    def begin(self, initial: Mapping[str, Array], planned: int | None = None) -> None:
        """Start or resume, as `ModelAudit` does, and recall what was seen of nodes."""
        super().begin(initial, planned)
        for text in self.layout.warnings:
            self.warnings.add(text)
        lines = self.directory.read_metrics() if self.directory is not None and self.last_round else []
        if lines:
            self.ledger.restore_rounds(lines)
        self.replays.begin(planned, lines)

    def resume(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """The number of finished rounds and the model after them. The audit rewinds to that round."""
        saved = None
        if self.directory is not None:
            saved = load_checkpoint(self.directory.path, recorded_rounds=self.last_round)
        done, arrays, state, seen = saved or Checkpoint(0, initial, {}, {})
        self.ledger.restore_exposures(seen)
        self._source.owners.update(map(tuple, seen.get("owners", np.zeros((0, 2), np.uint64)).tolist()))
        self.ledger.rewound += self.last_round - done
        self.rewind_to(done)
        self.views.rewind_to(done)
        if done:
            logger.info("resuming after round %d", done)
            for text in self.wrapped.resume(state, done):
                self.warnings.add(text)
        return done, arrays

    def save(self, server_round: int, model: ArrayRecord | None) -> None:
        """Save a checkpoint after a round, if there is a directory."""
        if self.directory is None or model is None:
            return
        self.flush(sync=True)  # a checkpoint must never be ahead of the audit, even after a power cut
        self.views.flush()
        seen = self.ledger.exposures.to_arrays() | {"owners": _as_rows(self._source.owners)}
        save_checkpoint(self.directory.path, self.number(server_round), model, self.wrapped.state, seen)

    def with_accuracy(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """The user's function, which also records the accuracy that it returns."""

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = evaluate_fn(server_round, arrays)
            accuracy = None if metrics is None else metrics.get("accuracy")
            if server_round and isinstance(accuracy, int | float):
                self.add_accuracy(server_round, float(accuracy))
            return metrics

        return evaluate

    def finish(self, *, claim: Any = None, task: str | None = None) -> AuditResult:
        """Observe the final model, and return the result. If the audit has a directory, it is also written there.

        `task` is the name of the training task. Give a `claim` only if the audit was made without one.
        """
        if not self.has_begun:
            raise ValueError("there is nothing to finish: call start() first")
        self._warn_of_rounds()
        self.note_replayed(self.replays.steps)
        noise, seen = self.wrapped.noise_multiplier, self.ledger.exposures
        late = read_claim(claim, self.settings.delta)
        completed = whole_run_claim(self.claim or late, self.core, seen)
        spent = self.wrapped.spent
        if spent is not None:
            logger.info("Flower's accountant: epsilon %.4g at delta %g", spent.epsilon, spent.delta)
        note, entries = seen.described(self.core, noise, equal_weights=not self.ledger.weights_differ)
        self.first_failure = next(iter(self.ledger.failures), None)
        run = FinishedRun(
            noise=noise,
            weight=seen.heaviest_weight(noise) if completed is not None and completed.amplified else 1.0,
            sampler_observed=self._source.one_each,
            accounted_epsilon=None if spent is None else float(spent.epsilon),
            completed=completed,
            pipeline=self.wrapped.facts,
            items=self.items(completed),
            notes=note,
            warnings=[*self.warnings.texts, *self.ledger.described(), *describe_dropped(self.ledger.dropped)],
            entries=entries | {"nodes": self.ledger.nodes(self.core, noise), "views": self.views.finish(task)},
        )
        return self.conclude_models(late, run, task=task)

    def close(self) -> None:
        """Unlock the directories of the audit and of its views."""
        self.views.close()
        super().close()

    def items(self, claim: Claim | None = None) -> list[AuditedItem]:
        """The parts of the pipeline that this audit has checked so far or not, each with its reason."""
        tensors = tensors_item(len(self.settings.layers), self.others_left_out)
        amplified = claim is not None and claim.amplified
        times = None if amplified else participations_item(claim, self.ledger.exposures, rewound=self.ledger.rewound)
        items = (
            clipping_item(self._mode, self.wrapped, self.scale),
            self.ledger.ratio.item,
            others_item(self.others_left_out),
            tensors,
            times,
            self.replays.item,
            SAMPLER,
        )
        return [item for item in items if item is not None]

    def _warn_of_rounds(self) -> None:
        """Warn of what the rounds showed about the whole run."""
        unreported = isinstance(self._source, CanaryClients) and not self._source.reported and not self.ledger.failures
        if unreported and not any(entry.present.size for entry in self.log.observed):
            self.warnings.add(NO_CANARY)
        if self.ledger.frozen and self.wrapped.adds_noise:
            self.warnings.add(
                f"no real client changed {', '.join(self.ledger.frozen)}, but Flower adds noise to every array: if they are "
                "frozen parameters or buffers, do not send them with the model"
            )
        if self.others_left_out is not None:
            self.warnings.add(f"known-others was left out: {self.others_left_out}")
        adaptive = adaptive_clip_warning(self.core, self.wrapped)
        if adaptive is not None:
            self.warnings.add(adaptive)


def _as_rows(owners: Mapping[int, int]) -> Any:
    """Canaries and their nodes, one row each, for a checkpoint."""
    return np.array(sorted(owners.items()), np.uint64).reshape(-1, 2)
