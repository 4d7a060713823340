"""An `evaluate_fn` that observes every global model: for strategies and workflows of their own, SecAgg+ among them."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coalmine.audit.audit import Audit
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.checks import whole_number
from coalmine.integrations.checks import nonnegative, positive
from coalmine.integrations.flower.announcement import Announcement, checked_partitions, checked_seed
from coalmine.integrations.flower.layout import Layout, as_record
from coalmine.integrations.flower.recorder import Recorder, logger
from coalmine.integrations.flower.scope import UNKNOWN_TO_OBSERVER, observer_items


def observer(
    audit: Audit,
    evaluate_fn: Callable[..., Any] | None = None,
    *,
    clip_norm: float | None = None,
    participants: int | None = None,
    noise_multiplier: float | None = None,
    present: Callable[[int], Iterable[int]] | None = None,
) -> "Observer":
    """An `evaluate_fn` for `Strategy.start`, or for a legacy strategy, that observes the model and then calls the user's.

    It sees models and nothing else. It warns of buffers, but cannot warn of unequal weights or of strategies that drop
    canaries. `present` returns the canaries of a round, counted from 1. The default is the audit's schedule if it has
    `rounds`, else all canaries in every round; that holds if every node has one canary, trains in every round and never
    fails. Where nodes are sampled or may fail, use AuditedStrategy, which reads the canaries from the replies. With
    `clip_norm`, `participants` (the number of updates that a round averages) and `noise_multiplier` the noise is gauged
    too: its std is then noise_multiplier·clip_norm/participants.
    """
    if noise_multiplier is not None and (clip_norm is None or participants is None):
        raise ValueError("a noise_multiplier needs clip_norm and participants too, for they make the noise's std")
    return Observer(audit, evaluate_fn, clip_norm, participants, noise_multiplier, present)


class Observer:
    """What `observer` returns. Call `finish` after training."""

    def __init__(
        self,
        audit: Audit,
        evaluate_fn: Callable[..., Any] | None,
        clip_norm: float | None,
        participants: int | None,
        noise_multiplier: float | None,
        present: Callable[[int], Iterable[int]] | None,
    ) -> None:
        self._audit, self._evaluate = audit, evaluate_fn
        self._clip_norm = None if clip_norm is None else positive("clip_norm", clip_norm)
        self._participants = None if participants is None else whole_number("participants", participants, minimum=1)
        self._noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._present = present or self._default_present
        self._scale = 1.0
        self._recorder: Recorder | None = None

    def announce(
        self,
        initial: Any,
        *,
        seed: int | bytes | None = None,
        scale: float = 10.0,
        canary_partitions: Iterable[int] | None = None,
    ) -> dict[str, Any]:
        """Entries for the train config, from which `canary_mod` knows what to send.

        `initial` is the model that training starts from: an ArrayRecord, a list of arrays, a torch Module or a state_dict.
        A node with several canaries needs 'server-round' in the train config too.
        """
        if self._clip_norm is None:
            raise ValueError("canaries are as long as the clip allows: give observer(..., clip_norm=)")
        self._scale = positive("scale", scale)
        return Announcement.of(
            self._audit,
            clip_norm=self._clip_norm,
            scale=self._scale,
            left_out=Layout.of(as_record(initial)).left_out,
            seed=checked_seed(self._audit, seed),
            partitions=checked_partitions(canary_partitions),
        ).to_config()

    def __call__(self, server_round: int, arrays: Any, *rest: Any) -> Any:
        model = as_record(arrays)
        if self._recorder is None:
            config = {
                "trainer": "flower",
                "privacy": {"clip_norm": self._clip_norm or 0.0, "noise_multiplier": self._noise or 0.0},
                "canaries": {"count": self._audit.settings.canaries, "mode": "observer"},
            }
            self._recorder = Recorder(self._audit, model, config)
            for text in self._recorder.layout.warnings:
                logger.warning("%s", text)
        if server_round > 0:
            size = None
            if self._clip_norm is not None and self._participants is not None:
                size = self._clip_norm / self._participants  # the units of the model delta, an average
            self._recorder.observe(
                server_round,
                model,
                np.fromiter(self._present(self._recorder.number(server_round)), dtype=np.int32),
                noise_std=None if self._noise is None or size is None else self._noise * size,
                canary_norm=size,
                scale=self._scale,
                clip_norm=self._clip_norm,
            )
        return None if self._evaluate is None else self._evaluate(server_round, arrays, *rest)

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """Observe the final model and return what was found; in a run directory, write it too, under the task's name."""
        if self._recorder is None:
            raise ValueError("nothing was observed; was this observer given to start() as evaluate_fn?")
        warnings = [*self._recorder.layout.warnings, f"known-others was left out: {UNKNOWN_TO_OBSERVER}"]
        logger.warning("%s", warnings[-1])
        items = observer_items(self._scale)
        return self._recorder.finish(claim, noise_multiplier=self._noise, task=task, audited=items, warnings=warnings)

    def _default_present(self, round_number: int) -> Iterable[int]:
        if self._audit.settings.rounds is not None:
            return [int(index) for index in self._audit.canaries_in_round(round_number)]
        return range(self._audit.settings.canaries)
