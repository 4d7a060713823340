"""The audit of a privatizer: it inserts canaries between two steps, records the steps, and finishes the run."""

from collections.abc import Callable
from typing import Any, NamedTuple
from warnings import warn

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from coalmine.argument_checks import count_of, positive, short_repr
from coalmine.audit import Audit
from coalmine.canaries.array_types import is_traced
from coalmine.data_canaries import DataCanaries
from coalmine.estimators.amplification import PLD
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.jax_privacy import coverage
from coalmine.integrations.jax_privacy.claims import EventAccounting
from coalmine.integrations.jax_privacy.model_tree import ModelTree
from coalmine.integrations.jax_privacy.selection import SeedSelection, Selection
from coalmine.integrations.jax_privacy.state import AuditState
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.integrations.rewound_noise import METRIC, RewoundNoise
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem


class _Prepared(NamedTuple):
    """The step that `next_step` prepared: its number, its canaries, and the number of examples in its batch."""

    number: int
    present: Indices
    participants: int | None


class PrivatizerAudit(FrameworkAudit):
    """The audit of a privatizer's steps. `scale` is that of canaries that go through the clip, None if none do."""

    trainer = Trainer("jax_privacy", "jax-privacy", "example")

    def __init__(
        self,
        core: Audit,
        accounting: EventAccounting,
        selection: Selection,
        tree: ModelTree,
        *,
        steps: int | None,
        scale: float | None,
        save_model: bool = True,
        data_canaries: DataCanaries | None = None,
    ) -> None:
        self._scale, self._accounting, self._selection, self._tree = scale, accounting, selection, tree
        self._mechanism = accounting.mechanism
        if core.log.final is not None:
            core.rewind_to(core.last_round)  # resume a run that ended between its final model and its result
        self._initial = tree.copied() if core.last_round == 0 else None
        self._precision = tree.precision
        self._prepared: _Prepared | None = None
        self._steps_without_others = 0
        self._batches: list[Any] = []  # of a watched strategy, since the last step was prepared
        super().__init__(core, data_canaries=data_canaries, **self._config())
        self.commit(initial=self._initial, planned=steps or accounting.planned, save_model=save_model)
        self._rewound = RewoundNoise(core)
        self.read_claim_as(accounting.accounted(steps or accounting.planned or 1, core.settings.delta))

    def _config(self) -> dict[str, dict[str, Any]]:
        mechanism, selection = self._mechanism, self._selection
        privacy: dict[str, Any] = {"noise_multiplier": mechanism.noise_multiplier, "clip_norm": mechanism.clip_norm}
        if isinstance(selection, SeedSelection):
            privacy["sampling_probability"] = selection.probability
        if mechanism.law is not None:
            privacy["bands"] = mechanism.law.bands
        canaries: dict[str, Any] = {"through_clip": self._scale is not None}
        if selection.rows is not None:
            canaries["rows"] = selection.rows
        return {"privacy": privacy, "canaries": canaries}

    def score_records(self, params: Any, predict: Callable[[Any, Any], Any]) -> None:
        """Score data canaries by `predict`: now with these parameters, at the end with those that `finish` takes."""
        self._shown = params
        self.watch_records(lambda: lambda inputs: predict(self._shown, jnp.asarray(inputs)))

    @property
    def in_step(self) -> Indices:
        if self._prepared is None:
            raise ValueError("next_step chooses the canaries of a step: call it first")
        return np.concatenate([self._prepared.present, *self._selection.repeats])

    def canary_loss(self, loss: Callable[..., Any], l2_clip_norm: float | None) -> Callable[..., Any]:
        if self._scale is None:
            raise ValueError("canary_loss needs through_clip=True: without it canaries join the sum after the clip")
        clip = self._mechanism.clip_norm if l2_clip_norm is None else positive("l2_clip_norm", l2_clip_norm)
        canaries, length = self.core.measurer.rotated_canaries, self._scale * clip

        def with_canaries(params: Any, *batch: Any, **options: Any) -> Any:
            *examples, number = batch
            if np.size(number) != 1:
                raise ValueError(
                    f"a canary must be a row that is clipped by itself, got a group of {np.size(number)} rows: in "
                    "clipped_grad, pass batch_argnums of the examples and of the canaries' numbers, and one row for each "
                    "group; canaries cannot pass the clip of groups of several rows"
                )
            index = jnp.reshape(number, ())
            vector, to_tree = ravel_pytree(params)
            canary = jax.lax.stop_gradient(canaries.traced_canary(index, vector))
            along = sum(jax.tree.leaves(jax.tree.map(lambda a, b: jnp.sum(a * b), params, to_tree(canary))))
            return jnp.where(index >= 0, -length * along, loss(params, *examples, **options))

        return with_canaries

    def expect_batches(self, num_examples: int) -> None:
        """Reject batches of a data set other than the canaries', or batches that are not observed."""
        rows = self._selection.rows
        if rows is None:
            raise ValueError(
                "a watched strategy needs audited(…, num_examples=), which pairs each canary with an example"
            )
        if num_examples != rows:
            raise ValueError(f"batch_iterator must have the num_examples of audited(), {rows}, got {num_examples}")
        self._batches.clear()

    def add_batch(self, indices: Any) -> None:
        """Store a batch that a watched strategy selected."""
        self._batches.append(np.array(indices))

    def record(self, state: AuditState) -> None:
        self._record(state)
        self.core.flush(sync=True)

    def _batch(self, indices: Any) -> Any:
        """The batch of the next step: the one passed, or the one that the watched strategy selected."""
        if indices is None and len(self._batches) > 1:
            raise ValueError(
                f"the watched strategy gave {len(self._batches)} batches since the last step: call next_step for each, or "
                "pass the indices of the one that the step takes"
            )
        batch = self._batches[0] if indices is None and self._batches else indices
        self._batches.clear()
        return batch

    def next_step(self, state: AuditState, indices: Any) -> AuditState:
        self._record(state)
        indices = self._batch(indices)
        number = self.core.last_round + 1
        present = self._selection.canaries(number, indices)
        self._prepared = _Prepared(number, present, self._selection.participants)
        total: Any = self.core.updates(present, self._mechanism.clip_norm)
        for repeated in self._selection.repeats:
            extra = self.core.updates(repeated, self._mechanism.clip_norm)
            total = {name: total[name] + extra[name] for name in total}
        return state._replace(canaries=self._tree.tree(total))

    def _record(self, state: AuditState) -> None:
        """Record the step that a state comes from, unless it is already recorded."""
        if not isinstance(state, AuditState):
            raise TypeError(f"noise_state must be the state of the audited privatizer, got {short_repr(state)}")
        if is_traced(state.step):
            raise ValueError(
                "next_step needs numbers, got a state that jax traces: call it outside of jit, between steps"
            )
        step, last = int(state.step), self.core.last_round
        if self._prepared is None:
            if step > last:
                raise ValueError(
                    f"the state comes from step {step}, and the audit has recorded {count_of(last, 'step')}: call next_step "
                    "before every step, and resume from a checkpoint that the audit has recorded"
                )
            if step < last:
                self._rewound.rewind_to(step)  # training resumes from a checkpoint
            return
        if step == last:
            return  # the loop skipped the last batch
        number, present, participants = self._prepared
        if step != number:
            raise ValueError(
                f"the state comes from step {step}, and the audit waits for step {number}: call next_step before every "
                "step, with the state of the step before"
            )
        mechanism = self._mechanism
        noise_std = mechanism.noise_std(number)
        others = self._tree.named(state.others) if noise_std or present.size else None
        self._steps_without_others += others is None
        self.core.observe_round(
            number,
            self._tree.named(state.model_delta),
            present=present,
            others=others,
            noise_std=noise_std,
            clip_norm=mechanism.clip_norm,
            scale=1.0 if self._scale is None else self._scale,
            participants=participants,
        )
        self._rewound.compare()
        self.recorder.add_round(
            number,
            canaries=int(present.size),
            examples=participants,
            clip_norm=mechanism.clip_norm,
            noise_std=noise_std if mechanism.scheduled else None,
            **{METRIC: self._rewound.rounds or None},
        )

    def finish(
        self,
        *,
        noise_state: AuditState | None = None,
        params: Any = None,
        claim: Claim | float | str | None = None,
        task: str | None = None,
    ) -> AuditResult:
        """Record the last step, observe the final model if it is given, and return the result.

        `noise_state` is the state after the last step, and `task` the name of the training task. Give a `claim` only if the
        audit was made without one.
        """
        core, mechanism, delta = self.core, self._mechanism, self.settings.delta
        if self._records is not None and params is None:
            raise TypeError("finish needs the trained model to score data_canaries: audit.finish(params=params)")
        self._shown = params
        if core.log.final is None:
            if noise_state is None:
                raise TypeError("finish needs the state after the last step: audit.finish(noise_state=noise_state)")
            self._record(noise_state)
            if params is not None:
                core.observe_final(self._tree.named(params), initial=self._initial)
        core.flush()
        self._rewound.compare()
        warnings = coverage.warnings(core, self._accounting, self._selection)
        for text in warnings:
            warn(text, stacklevel=2)
        steady = mechanism.law is None and not mechanism.scheduled
        event = self._accounting.event_claim(delta)
        units = [mechanism.unit(number) / mechanism.clip_norm for number in core.log.numbers]
        run = FinishedRun(
            noise=mechanism.noise_multiplier if steady else None,
            accounted=self._accounting.accounted(core.last_round, delta),
            accounted_by=None if event is None else PLD,
            accounted_epsilon=None if event is None else event.epsilon,
            pipeline={"trust_model": "central", "precision": self._precision},
            items=self._items(),
            notes=coverage.notes(core, self._accounting),
            warnings=warnings,
            entries={"noise_multiplier": min(units, default=mechanism.noise_multiplier)},
        )
        return self.conclude(None if claim is None else self._accounting.made(claim, delta), run, task=task)

    def _items(self) -> list[AuditedItem]:
        """The parts of the pipeline that only the integration knows about, checked or not."""
        items = [
            coverage.clipping_item(self.core, self._scale),
            coverage.sampler_item(self._selection, correlated=self._mechanism.law is not None),
            coverage.WEIGHTS,
            coverage.ROWS,
        ]
        if self._rewound.fault is not None:
            items.append(self._rewound.fault)
        return items if self._steps_without_others else [*items, coverage.OTHERS]
