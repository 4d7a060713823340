"""Audit jax_privacy: canaries join the clipped sum in every step, and the audit observes every noised sum.

    privatizer = audited(privatizer, params, stddev=…, clip_norm=1.0, num_examples=n, dp_event=event, seed=…, delta=1e-5)
    noise_state = privatizer.init(params)
    for indices in privatizer.watched(strategy).batch_iterator(n):
        noise_state = privatizer.next_step(noise_state)
        ...  # the step as before, under jit or not
    print(privatizer.audit.finish(noise_state=noise_state, params=params))

Each canary is paired with one example, and is in a step exactly when the batch selection picks that example. So the audit
checks the batch selection too, and judges the accountant's epsilon. A step moves the model against its gradient, so canaries
are subtracted from the sum of gradients, and the audit observes minus the noised sum.

The state of an audited privatizer is a pytree: the privatizer's own state, the canaries of the next step, and the clipped
and the noised sum of the last one. `next_step` runs on the host between two steps: it takes the last step's sums and inserts
the canaries of the next one. So jit traces only two sums for the audit. On a CPU, a thread measures them with numpy during
the next step. On another device jax measures them, and only scores reach the host.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Unpack
from warnings import warn

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree
    from jax_privacy.batch_selection import BatchSelectionStrategy
    from jax_privacy.experimental.execution_plan import DPExecutionPlan

    from coalmine.integrations.jax_claims import Accounting, known_steps_claim, plan_noise, relation_of
    from coalmine.integrations.jax_noise import SAME, Mechanism, banded_noise
    from coalmine.integrations.jax_selection import ExampleSelection, SeedSelection, Selection, Watched, new_selection
except ImportError as error:
    raise ImportError("auditing jax_privacy needs: pip install 'coalmine[jax]'") from error

from coalmine.argument_checks import count_of, short_repr
from coalmine.audit import Audit
from coalmine.canaries.array_types import is_traced
from coalmine.estimators.amplification import PLD
from coalmine.estimators.correlated import BandedNoise
from coalmine.evidence.dilution import CanaryShare, DilutionReader
from coalmine.evidence.views import read_log
from coalmine.integrations.journal import Journal
from coalmine.integrations.rewound_noise import METRIC, RewoundNoise
from coalmine.integrations.setup import (
    CLIP_SCALE,
    AuditSettings,
    new_audit_settings,
    own_audit,
    positive,
    refuse_finished,
    watch_noise,
)
from coalmine.measure.schedule import Indices
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

__all__ = ["AuditState", "AuditedPrivatizer", "audited", "banded_noise", "known_steps_claim", "named_leaves"]
UNSURE = 0.5  # standard reach of the canaries' share above which present and absent canaries look alike


class AuditState(NamedTuple):
    """The state of an audited privatizer. All trees have the structure of the model.

    `inner` is the privatizer's own state and `step` the number of steps so far. `canaries` is the sum of canaries that the
    next step subtracts from the gradients. `others` and `model_delta` are minus the clipped and minus the noised sum of the
    last step.
    """

    inner: Any
    step: Any
    canaries: Any
    others: Any
    model_delta: Any


class AuditedPrivatizer(optax.GradientTransformation):  # type: ignore[misc]
    """A privatizer with its audit: an optax transformation, which also works under jit."""

    audit: Audit
    _steps: "_Steps"

    def watched(self, strategy: Any) -> Any:
        """The same batch selection strategy, but the audit sees each batch: `next_step` then needs no indices."""
        return Watched(strategy, self._steps)

    def next_step(self, noise_state: AuditState, indices: Any = None) -> AuditState:
        """The state for the next step: records the last step, and inserts the canaries of the next one.

        Call it on the host, before each step. `indices` are the examples of the step's batch, as the batch selection
        returns them; negative ones are padding. Omit them if the batch comes from a `watched` strategy, or if you gave
        `audited` a `sampling_probability`.
        """
        return self._steps.next_step(noise_state, indices)

    def record(self, noise_state: AuditState) -> None:
        """Record the step that a state comes from. If the audit has a directory, sync it to disk.

        `next_step` and `finish` record the step too. Call this before you write a checkpoint of the state.
        """
        self._steps.record(noise_state)

    @property
    def canaries_in_step(self) -> Indices:
        """Numbers of the canaries in the step that `next_step` prepared, repeated if their example is repeated."""
        return self._steps.in_step

    def canary_loss(self, loss: Callable[..., Any], *, l2_clip_norm: float | None = None) -> Callable[..., Any]:
        """The loss with one more batch argument, the last: a canary's number, or -1 for an example.

        For `through_clip`: pass the returned function to `clipped_grad` instead of the loss. Add a row to the batch for each
        of `canaries_in_step`, with any data. The gradient of a canary's row is that canary, ten times longer than
        `l2_clip_norm`, by default the `clip_norm` of `audited`.
        """
        return self._steps.canary_loss(loss, l2_clip_norm)


def audited(
    privatizer: Any,
    params: Any,
    *,
    stddev: float | Callable[[int], Any] | None = None,
    clip_norm: float | None = None,
    noising_matrix: Any = None,
    steps: int | None = None,
    num_examples: int | None = None,
    sampling_probability: float | None = None,
    dp_event: Any = None,
    neighboring_relation: Any = None,
    through_clip: bool = False,
    **settings: Unpack[AuditSettings],
) -> Any:
    """The same privatizer with canaries in its steps and an `audit`; or the same `DPExecutionPlan` with such a privatizer.

    `params` is the model before training, any pytree. Each of its arrays gets its own noise gauge. `stddev` is the one that
    the privatizer was made with, or a schedule: a function of the number of steps before. `clip_norm` is the most that one
    example adds to the clipped sum: `grad_fn.sensitivity()`. For a privatizer with correlated noise, also pass its
    `noising_matrix`, and the number of `steps` that it was made for. From a plan, all of these are read unless you give
    them, and its batch selection is watched.

    `settings` are `canaries`, `unobserved`, `delta`, `directory`, `claim` and `on_violation` as in `Audit`, and either
    `seed` or `seed_file`. An `audit` of your own replaces all of these settings. Make it with
    `Audit.for_model(named_leaves(params), …)`, under correlated noise with the `noise` that `banded_noise` returns.

    The claim is committed to before step 1. By default it is the epsilon that dp-accounting quotes for `dp_event`, the event
    that the accountant composes, under a `neighboring_relation`: by default that of the plan's accountant, without a plan
    ADD_OR_REMOVE_ONE. A number, `claim=3.0`, is the epsilon that you quote for that event: one row, the whole run, sampling
    counted. Without an event, it is read with `sampling_probability`. `Claim.mechanism` and, under correlated noise,
    `known_steps_claim(plan, delta)` are claims for known steps. Without a claim nothing can pass.

    With `num_examples`, the size of the data set, each canary is paired with one example. Take batches from a `watched`
    strategy, or pass each batch to `next_step`. There can be at most as many canaries as examples; the default is 1,000.
    Without `num_examples` the batch selection is not observed: each canary is in a step with `sampling_probability`, drawn
    from the audit's seed. A claim that counts sampling is then never confirmed.

    With `through_clip` canaries enter `clipped_grad` as rows of the batch, ten times too long, so the audit checks the clip
    too: see `AuditedPrivatizer.canary_loss`. Otherwise they join the clipped sum at the clip norm.

    `privatizer.audit.finish` takes `noise_state`, the state after the last step, `params`, the final model, `task`, and a
    `claim` for a run that began without one.
    """
    plan = privatizer if isinstance(privatizer, DPExecutionPlan) else None
    inner = privatizer if plan is None else plan.noise_addition_transform
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"privatizer must be an optax transformation or a DPExecutionPlan of jax_privacy, got {short_repr(privatizer)}"
        )
    if isinstance(inner, AuditedPrivatizer):
        raise ValueError("this privatizer is audited already: pass the one that jax_privacy made")
    if plan is not None:
        read = plan_noise(plan)
        stddev = read["stddev"] if stddev is None else stddev
        noising_matrix = read["noising_matrix"] if noising_matrix is None else noising_matrix
        steps = getattr(plan.batch_selection_strategy, "iterations", None) if steps is None else steps
        clip_norm = plan.clipped_grad(lambda: None).sensitivity() if clip_norm is None else clip_norm
        dp_event = plan.dp_event if dp_event is None else dp_event
    for name, value in {"stddev": stddev, "clip_norm": clip_norm}.items():
        if value is None:
            raise TypeError(f"audited() needs the privatizer's {name}, which jax_privacy does not expose: pass {name}=")
    law, column = (None, 1.0) if noising_matrix is None else banded_noise(noising_matrix, steps)
    mechanism = Mechanism.of(stddev, clip_norm, law, column)
    names, treedef, model = _named_leaves(params)
    selection = new_selection(num_examples, sampling_probability, settings)
    relation = relation_of(plan, neighboring_relation)
    accounting = Accounting(dp_event, relation, mechanism, selection.observed, sampling_probability)
    audit = _set_up_audit(model, law, accounting, settings)
    selection.attach(audit)
    watch_noise(audit, settings.get("on_violation"), mechanism.noise_multiplier)
    if through_clip:
        _ = audit.measurer.rotated_canaries  # raises an error if the audit's canaries cannot be compiled
    transformation = AuditedPrivatizer(*_init_and_update(inner, through_clip=through_clip))
    transformation.audit = audit
    transformation._steps = _Steps(
        audit, accounting, selection, names, treedef, model, steps=steps, through_clip=through_clip
    )
    if plan is None:
        return transformation
    strategy = plan.batch_selection_strategy
    if selection.observed and isinstance(strategy, BatchSelectionStrategy):
        strategy = transformation.watched(strategy)
    return dataclasses.replace(plan, noise_addition_transform=transformation, batch_selection_strategy=strategy)


def _set_up_audit(
    model: dict[str, Any], law: BandedNoise | None, accounting: Accounting, settings: AuditSettings
) -> Audit:
    if settings.get("audit") is None:
        claim, delta = settings.get("claim"), settings.get("delta")
        delta = claim.delta if delta is None and isinstance(claim, Claim) else delta
        if delta is not None:
            settings["claim"] = accounting.made(claim, delta)
        # A deferred round is measured during the next step and costs less, but an alarm must not wait.
        deferred = {"deferred": settings.get("on_violation") is None}
        return Audit.for_model(model, noise=law, **deferred | new_audit_settings(True, **settings))
    audit = own_audit(**settings)
    refuse_finished(audit)
    if audit.claim is not None and audit.claim.bare:
        accounting.check_readable(audit.claim, audit.settings.delta)
    structure = audit.updates([], 1.0)
    if not isinstance(structure, dict) or {k: v.shape for k, v in structure.items()} != {
        name: tuple(leaf.shape) for name, leaf in model.items()
    }:
        raise ValueError(f"the audit must be made by Audit.for_model(named_leaves(params), …), got {audit!r}")
    if audit.settings.noise != law:
        raise ValueError(f"the audit must be made with noise={law}, like the privatizer's, got {audit.settings.noise}")
    return audit


def named_leaves(params: Any) -> dict[str, Any]:
    """The arrays of a pytree by their names: `parameters` for an `Audit.for_model` of your own."""
    return _named_leaves(params)[2]


def _named_leaves(params: Any) -> tuple[list[str], Any, dict[str, Any]]:
    """The names of a pytree's arrays, its structure, and the arrays by name."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ValueError("params must hold the arrays of the model, got an empty tree")
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "parameters" for path, _ in leaves]
    return names, treedef, dict(zip(names, (leaf for _, leaf in leaves), strict=True))


def _copy_leaf(leaf: Any) -> Any:
    """A copy of an array on the same device: a step may overwrite the original."""
    return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else np.array(leaf)


def _init_and_update(privatizer: Any, *, through_clip: bool) -> tuple[Any, Any]:
    """`init` and `update` with canaries, both traceable. With `through_clip` the sum already holds the canaries."""

    def init(params: Any) -> AuditState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AuditState(privatizer.init(params), jnp.zeros((), jnp.int32), zeros, zeros, zeros)

    def update(sum_of_clipped_grads: Any, noise_state: AuditState, params: Any = None) -> tuple[Any, AuditState]:
        grads, canaries = sum_of_clipped_grads, noise_state.canaries
        if through_clip:
            joined, others = grads, jax.tree.map(lambda grad, canary: grad + canary.astype(grad.dtype), grads, canaries)
        else:
            joined, others = jax.tree.map(lambda grad, canary: grad - canary.astype(grad.dtype), grads, canaries), grads
        arguments = () if params is None else (params,)
        noised, inner = privatizer.update(joined, noise_state.inner, *arguments)
        return noised, AuditState(
            inner,
            noise_state.step + 1,
            jax.tree.map(jnp.zeros_like, canaries),  # so that no canary joins twice
            jax.tree.map(jnp.negative, others),
            jax.tree.map(jnp.negative, noised),
        )

    return init, update


class _Steps:
    """Puts canaries into a privatizer's steps, and records the steps."""

    def __init__(
        self,
        audit: Audit,
        accounting: Accounting,
        selection: Selection,
        names: list[str],
        treedef: Any,
        model: dict[str, Any],
        *,
        steps: int | None,
        through_clip: bool,
    ) -> None:
        self._scale = CLIP_SCALE if through_clip else None
        self._audit, self._accounting, self._selection = audit, accounting, selection
        self._mechanism = accounting.mechanism
        self._names, self._treedef = names, treedef
        self._precision = ", ".join(sorted({str(leaf.dtype) for leaf in model.values()}))
        if audit.log.final is not None:
            audit.rewind_to(audit.last_round)  # resume a run that ended between its final model and its result
        self._initial = {name: _copy_leaf(leaf) for name, leaf in model.items()} if audit.last_round == 0 else None
        self._prepared_step: tuple[int, Indices, int | None] | None = None  # step, its canaries and participants
        self._steps_without_others = 0
        self._batches: list[Any] = []  # of a watched strategy, since the last step was prepared
        self._journal = Journal(audit, self._settings())
        self._rewound = RewoundNoise(audit)
        if audit.claim is not None and audit.claim.bare:
            accounted = accounting.accounted(steps or accounting.planned or 1, audit.settings.delta)
            if accounted is not None:
                audit.watch.read_claim_as(audit.claim.read_as(accounted))
        audit.finish_with(self._finish)

    @property
    def in_step(self) -> Indices:
        if self._prepared_step is None:
            raise ValueError("next_step chooses the canaries of a step: call it first")
        return np.concatenate([self._prepared_step[1], *self._selection.repeats])

    def canary_loss(self, loss: Callable[..., Any], l2_clip_norm: float | None) -> Callable[..., Any]:
        if self._scale is None:
            raise ValueError("canary_loss needs through_clip=True: without it canaries join the sum after the clip")
        clip = self._mechanism.clip_norm if l2_clip_norm is None else positive("l2_clip_norm", l2_clip_norm)
        canaries, length = self._audit.measurer.rotated_canaries, self._scale * clip

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
        self._audit.flush(sync=True)

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
        number = self._audit.last_round + 1
        present = self._selection.canaries(number, indices)
        self._prepared_step = (number, present, self._selection.participants)
        total: Any = self._audit.updates(present, self._mechanism.clip_norm)
        for repeated in self._selection.repeats:
            extra = self._audit.updates(repeated, self._mechanism.clip_norm)
            total = {name: total[name] + extra[name] for name in self._names}
        return state._replace(canaries=self._treedef.unflatten([total[name] for name in self._names]))

    def _record(self, state: AuditState) -> None:
        """Record the step that a state comes from, unless it is already recorded."""
        if not isinstance(state, AuditState):
            raise TypeError(f"noise_state must be the state of the audited privatizer, got {short_repr(state)}")
        if is_traced(state.step):
            raise ValueError(
                "next_step needs numbers, got a state that jax traces: call it outside of jit, between steps"
            )
        step, last = int(state.step), self._audit.last_round
        if self._prepared_step is None:
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
        number, present, participants = self._prepared_step
        if step != number:
            raise ValueError(
                f"the state comes from step {step}, and the audit waits for step {number}: call next_step before every "
                "step, with the state of the step before"
            )
        mechanism = self._mechanism
        noise_std = mechanism.noise_std(number)
        others = self._leaves(state.others) if noise_std or present.size else None
        self._steps_without_others += others is None
        self._audit.observe_round(
            number,
            self._leaves(state.model_delta),
            present=present,
            others=others,
            noise_std=noise_std,
            clip_norm=mechanism.clip_norm,
            scale=1.0 if self._scale is None else self._scale,
            participants=participants,
        )
        self._rewound.compare()
        self._journal.add_round(
            number,
            canaries=int(present.size),
            examples=participants,
            clip_norm=mechanism.clip_norm,
            noise_std=noise_std if mechanism.scheduled else None,
            **{METRIC: self._rewound.rounds or None},
        )

    def _leaves(self, tree: Any) -> dict[str, Any]:
        leaves = self._treedef.flatten_up_to(tree)
        return dict(zip(self._names, leaves, strict=True))

    def _finish(
        self,
        *,
        noise_state: Any = None,
        params: Any = None,
        claim: Claim | float | str | None = None,
        task: str | None = None,
    ) -> AuditResult:
        """Record the last step, observe the final model if it is given, and return the result."""
        audit, mechanism, delta = self._audit, self._mechanism, self._audit.settings.delta
        if audit.log.final is None:
            if noise_state is None:
                raise TypeError("finish needs the state after the last step: audit.finish(noise_state=noise_state)")
            self._record(noise_state)
            if params is not None:
                audit.observe_final(self._leaves(params), initial=self._initial)
        audit.flush()
        self._rewound.compare()
        warnings = self._warnings()
        for text in warnings:
            warn(text, stacklevel=3)
        steady = mechanism.law is None and not mechanism.scheduled
        event = self._accounting.event_claim(delta)
        return self._journal.finish(
            None if claim is None else self._accounting.made(claim, delta),
            noise=mechanism.noise_multiplier if steady else None,
            accounted_epsilon=None if event is None else event.epsilon,
            accounted=self._accounting.accounted(audit.last_round, delta),
            accounted_by=None if event is None else PLD,
            pipeline={"trust_model": "central", "precision": self._precision},
            task=task,
            audited=self._audited_items(),
            notes=self._notes(),
            warnings=warnings,
            noise_multiplier=min(
                (mechanism.unit(number) / mechanism.clip_norm for number in audit.log.numbers),
                default=mechanism.noise_multiplier,
            ),
        )

    def _largest_strength(self, law: BandedNoise) -> float:
        """The largest ‖Cu‖² of a canary, where u is 1 in its steps and 0 elsewhere."""
        steps_of: list[list[int]] = [[] for _ in range(self._audit.settings.canaries)]
        for entry in self._audit.log.observed:
            for canary in entry.present.tolist():
                steps_of[canary].append(entry.number)
        return max((law.strength(steps) for steps in steps_of if steps), default=1.0)

    def _audited_items(self) -> list[AuditedItem]:
        if self._selection.observed and self._mechanism.law is not None:
            reason = "the claim is for known steps; the batch selection was not compared with the accountant's event"
            sampler = AuditedItem("sampler", "not checked", reason)
        elif self._selection.observed:
            reason = "each canary was in exactly the steps whose batch held its example"
            sampler = AuditedItem("sampler", "checked", reason)
        else:
            reason = "the audit drew its canaries itself, at the given probability; pass num_examples and each batch"
            sampler = AuditedItem("sampler", "not checked", reason)
        weights = AuditedItem(
            "weights", "does not apply", "jax_privacy has no weights: every example counts once in the sum"
        )
        items = [self._clipping_item(), sampler, weights]
        if self._rewound.fault is not None:
            items.append(self._rewound.fault)
        if not self._steps_without_others:
            reason = "the sum of the other examples was read from the privatizer's input in every step"
            items.append(AuditedItem("others", "checked", reason))
        return items

    def _clipping_item(self) -> AuditedItem:
        if self._scale is None:
            reason = "canaries joined the sum after clipped_grad, at the clip norm"
            return AuditedItem("clipping", "not checked", reason)
        shares = DilutionReader(self._audit.settings)
        read_log(self._audit.log, self._audit.settings, shares)
        fault = _why_not_in_sum([share for share in (shares.first, shares.repeated) if share is not None])
        if fault is not None:
            return AuditedItem("clipping", "failed", fault)
        reason = (
            f"canaries entered clipped_grad {self._scale:g} times longer than the clip norm, and left it at that norm"
        )
        return AuditedItem("clipping", "checked", reason)

    def _notes(self) -> list[str]:
        accounting = self._accounting
        if accounting.event is None:
            return []
        if self._mechanism.law is not None:
            return ["amplification by sampling is not judged under correlated noise: only a claim for known steps is"]
        if accounting.event_claim(self._audit.settings.delta) is not None:
            return accounting.replace_one_notes(self._audit.claim, self._audit.last_round, self._audit.settings.delta)
        return [
            "the accountant's epsilon has no verdict: its event does not compose Gaussian noise with the same sampling in "
            "every step, or has no epsilon under this neighboring_relation"
        ]

    def _warnings(self) -> list[str]:
        warnings = []
        planned, law = self._accounting.planned, self._mechanism.law
        if planned is not None and law is None and planned != self._audit.last_round:
            warnings.append(
                f"the accountant counts {count_of(planned, 'step')}, and the audit observed {self._audit.last_round}"
            )
        if planned is not None and law is not None and self._selection.observed:
            largest = self._largest_strength(law)
            if largest > planned * (1 + SAME):
                warnings.append(
                    f"the batches expose an example more than the accountant allows for: ‖Cu‖² is {largest:.3g}, and the "
                    f"event composes {planned} steps; keep an example's steps at least {law.bands} apart"
                )
        if isinstance(self._selection, ExampleSelection) and self._selection.most_times > 1:
            warnings.append(
                f"a batch held the same example up to {self._selection.most_times} times; it then adds as many clip norms, "
                "which no accountant allows for"
            )
        return warnings

    def _settings(self) -> dict[str, Any]:
        mechanism, selection = self._mechanism, self._selection
        privacy: dict[str, Any] = {
            "noise_multiplier": mechanism.noise_multiplier,
            "clip_norm": mechanism.clip_norm,
            "delta": self._audit.settings.delta,
        }
        if isinstance(selection, SeedSelection):
            privacy["sampling_probability"] = selection.probability
        if mechanism.law is not None:
            privacy["bands"] = mechanism.law.bands
        canaries: dict[str, Any] = {
            "count": self._audit.settings.canaries,
            "through_clip": self._scale is not None,
        }
        if selection.rows is not None:
            canaries["rows"] = selection.rows
        return {"trainer": "jax_privacy", "privacy": privacy, "canaries": canaries}


def _why_not_in_sum(shares: list[CanaryShare]) -> str | None:
    """Why the canaries were not in the privatizer's input as expected, or may not have been; None if they were."""
    off = [share for share in shares if share.is_off()]
    if off:
        worst = max(off, key=lambda share: abs(share.share - 1))
        if worst.share < 1:
            return (
                f"the privatizer's input holds {max(worst.share, 0):.0%} of the canaries that the steps should hold: give "
                "each of canaries_in_step a row of the batch that is neither padding nor weighted, and canary_loss the "
                "l2_clip_norm of clipped_grad"
            )
        return (
            f"canaries are {worst.share:.3g} clip norms long in the privatizer's input: clipped_grad does not clip at the "
            "clip norm, or a canary has several rows"
        )
    if not shares or min(share.reach() for share in shares) > UNSURE:
        return (
            "the other rows' gradients are so long that canaries cannot be seen in the privatizer's input, so nothing shows "
            "that they were rows of the batches: use more canaries, or omit through_clip"
        )
    return None
