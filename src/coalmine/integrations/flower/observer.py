"""Audits the global models that an `evaluate_fn` sees, if the strategy cannot be wrapped."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coalmine.argument_checks import whole_number
from coalmine.audit import Audit
from coalmine.integrations.flower.arrays import Layout, as_record
from coalmine.integrations.flower.canary_clients import Announcement, checked_partitions, checked_seed
from coalmine.integrations.flower.exposures import UNIT
from coalmine.integrations.flower.recorder import Recorder
from coalmine.integrations.flower.scope import UNKNOWN_TO_OBSERVER, observer_items
from coalmine.integrations.flower.warning_log import logger
from coalmine.integrations.setup import CLIP_SCALE, nonnegative, positive
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim


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
        audit.finish_with(self.finish)

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

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """Observe the final model, and return the result. If the audit has a directory, it is also written there."""
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
