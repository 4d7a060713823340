"""Audits the global models that an `evaluate_fn` sees, if the strategy cannot be wrapped."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coalmine.argument_checks import nonnegative, positive, whole_number
from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import RecordLayout, as_record
from coalmine.integrations.flower.canary_clients import Announcement, checked_partitions, checked_seed
from coalmine.integrations.flower.exposures import UNIT
from coalmine.integrations.flower.model_audit import ModelAudit
from coalmine.integrations.flower.scope import UNKNOWN_TO_OBSERVER, observer_items
from coalmine.integrations.flower.warning_log import logger
from coalmine.integrations.recorder import FinishedRun
from coalmine.integrations.setup import CLIP_SCALE, check_unit, checked_unit
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim


class ObserverAudit(ModelAudit):
    """The audit of the models that an observer sees. `scale` is the length of canaries, as it was announced."""

    scale = 1.0

    def __init__(self, core: Audit, *, clip_norm: float | None, noise: float | None) -> None:
        privacy = {"clip_norm": clip_norm or 0.0, "noise_multiplier": noise or 0.0}
        super().__init__(core, privacy=privacy, canaries={"mode": "observer"})
        self._noise = noise

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """Observe the final model, and return the result. If the audit has a directory, it is also written there."""
        if not self.has_begun:
            raise ValueError("no model was observed: pass this observer to start() as evaluate_fn")
        warnings = [*self.layout.warnings, f"known-others was left out: {UNKNOWN_TO_OBSERVER}"]
        logger.warning("%s", warnings[-1])
        accounted = Claim(1.0, unit=UNIT)  # bare: its participations are those of the audit's schedule
        items = observer_items(self.scale)
        run = FinishedRun(noise=self._noise, accounted=accounted, items=items, warnings=warnings)
        return self.conclude_models(claim, run, task=task)


class Observer:
    """An `evaluate_fn` for `Strategy.start`, or for a legacy strategy, that observes the model and then calls the user's.

    It sees only models. It warns of buffers, but cannot warn of unequal weights or of strategies that drop canaries.
    `present` returns the canaries of a round, counted from 1. The default is the audit's schedule if it has `rounds`,
    otherwise all canaries in every round. That is right if every node has one canary, trains in every round and never fails.
    If nodes are sampled or may fail, use `audited`, which reads the canaries from the replies.

    With `clip_norm`, `participants` (the number of updates that a round averages) and `noise_multiplier`, the noise is
    gauged too: its std is then noise_multiplier·clip_norm/participants. After training, call `observer.audit.finish`. It
    takes `claim`, unless the audit was made with one, and `task`, the name of the training task. Without a claim, the
    verdict is never PASS. `unit` names what is protected ("client" by default).
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
        unit: str | None = None,
    ) -> None:
        if noise_multiplier is not None and (clip_norm is None or participants is None):
            raise ValueError(
                "noise_multiplier needs clip_norm and participants too: the noise's std follows from all three"
            )
        self._evaluate = evaluate_fn
        self._clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._participants = None if participants is None else whole_number("participants", participants, minimum=1)
        self._noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._present = present or self._default_present
        named = checked_unit(unit)
        check_unit(audit.claim, named)
        self.audit = ObserverAudit(audit, clip_norm=self._clip_norm, noise=self._noise)
        self.audit.recorder.unit = named

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
        self.audit.scale = positive("scale", CLIP_SCALE if scale is None else scale)
        return Announcement.of(
            self.audit.core,
            clip_norm=self._clip_norm,
            scale=self.audit.scale,
            left_out=RecordLayout.of(as_record(initial)).left_out,
            seed=checked_seed(self.audit.core, seed),
            partitions=checked_partitions(canary_partitions),
        ).to_config()

    def __call__(self, server_round: int, arrays: Any, *rest: Any) -> Any:
        model = as_record(arrays)
        if not self.audit.has_begun:
            self.audit.begin(model)
            for text in self.audit.layout.warnings:
                logger.warning("%s", text)
        if server_round > 0:
            clip_norm = None
            if self._clip_norm is not None and self._participants is not None:
                clip_norm = self._clip_norm / self._participants  # in the units of the model delta, an average
            self.audit.observe(
                server_round,
                model,
                np.fromiter(self._present(self.audit.number(server_round)), dtype=np.int32),
                noise_std=None if self._noise is None or clip_norm is None else self._noise * clip_norm,
                canary_norm=clip_norm,
                scale=self.audit.scale,
                clip_norm=self._clip_norm,
            )
        return None if self._evaluate is None else self._evaluate(server_round, arrays, *rest)

    def _default_present(self, round_number: int) -> Iterable[int]:
        if self.audit.settings.rounds is not None:
            return [int(index) for index in self.audit.core.canaries_in_round(round_number)]
        return range(self.audit.settings.canaries)
