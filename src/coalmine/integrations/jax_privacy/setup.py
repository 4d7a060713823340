"""Sets up the audit of a privatizer or a plan: `audited`."""

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import optax
from jax_privacy.batch_selection import BatchSelectionStrategy
from jax_privacy.experimental.execution_plan import DPExecutionPlan

from coalmine.argument_checks import short_repr
from coalmine.audit import Audit
from coalmine.data_canaries import DataCanaries
from coalmine.estimators.correlated import BandedNoise
from coalmine.integrations.jax_privacy.claims import UNIT, EventAccounting, plan_noise, relation_of
from coalmine.integrations.jax_privacy.model_tree import ModelTree
from coalmine.integrations.jax_privacy.noise import NoiseMechanism, banded_noise
from coalmine.integrations.jax_privacy.privatizer import AuditedPrivatizer
from coalmine.integrations.jax_privacy.privatizer_audit import PrivatizerAudit
from coalmine.integrations.jax_privacy.selection import new_selection
from coalmine.integrations.jax_privacy.state import init_and_update
from coalmine.integrations.records import checked_canaries
from coalmine.integrations.setup import (
    CLIP_SCALE,
    AuditSettings,
    checked_unit,
    followed,
    new_audit_settings,
    own_audit,
    refuse_finished,
    watch_noise,
)
from coalmine.verdict.claim import Claim


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
    data_canaries: DataCanaries | None = None,
    predict: Callable[[Any, Any], Any] | None = None,
    **settings: Unpack[AuditSettings],
) -> Any:
    """The same privatizer with canaries in its steps and an `audit`; or the same `DPExecutionPlan` with such a privatizer.

    `params` is the model before training, any pytree. Each of its arrays gets its own noise gauge. `stddev` is the one that
    the privatizer was made with, or a schedule: a function of the number of steps before. `clip_norm` is the most that one
    example adds to the clipped sum: `grad_fn.sensitivity()`. For a privatizer with correlated noise, also pass its
    `noising_matrix`, and the number of `steps` that it was made for. From a plan, all of these are read unless you give
    them, and its batch selection is watched.

    `settings` are `canaries`, `unobserved`, `delta`, `directory`, `claim` and `on_violation` as in `Audit`, and either
    `seed` or `seed_file`. `unit` names what an example holds ("row" by default). An `audit` of your own replaces all of
    these settings. Make it with `Audit.for_model(named_leaves(params), …)`, under correlated noise with the `noise` that
    `banded_noise` returns.

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

    `data_canaries`, records that `coalmine.data_canaries` made and inserted into the data, are scored before training and at
    the end, by the logits of `predict(params, inputs)`: the result then says what the model's outputs tell about them.

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
    if checked_canaries(data_canaries) is not None and not callable(predict):
        raise TypeError(
            f"data_canaries need predict=, a function of params and inputs to logits, got {short_repr(predict)}"
        )
    if data_canaries is not None and data_canaries.every is not None:
        raise ValueError("data_canaries must have every=None: jax_privacy shows the audit no parameters between steps")
    law, column = (None, 1.0) if noising_matrix is None else banded_noise(noising_matrix, steps)
    mechanism = NoiseMechanism.of(stddev, clip_norm, law, column)
    tree = ModelTree(params)
    selection = new_selection(num_examples, sampling_probability, settings)
    relation = relation_of(plan, neighboring_relation)
    row = checked_unit(settings.get("unit")) or UNIT
    accounting = EventAccounting(dp_event, relation, mechanism, selection.observed, sampling_probability, row)
    core = _set_up_audit(tree.arrays, law, accounting, settings)
    selection.attach(core)
    watch_noise(core, settings.get("on_violation"), mechanism.noise_multiplier)
    if through_clip:
        _ = core.measurer.rotated_canaries  # raises an error if the audit's canaries cannot be compiled
    transformation = AuditedPrivatizer(*init_and_update(inner, through_clip=through_clip))
    transformation.audit = PrivatizerAudit(
        core,
        accounting,
        selection,
        tree,
        steps=steps,
        scale=CLIP_SCALE if through_clip else None,
        save_model=settings.get("save_model", True),
        data_canaries=data_canaries,
    )
    if predict is not None:
        transformation.audit.score_records(params, predict)
    transformation.audit.follow(steps or accounting.planned, **followed(settings))
    if plan is None:
        return transformation
    strategy = plan.batch_selection_strategy
    if selection.observed and isinstance(strategy, BatchSelectionStrategy):
        strategy = transformation.watched(strategy)
    return dataclasses.replace(plan, noise_addition_transform=transformation, batch_selection_strategy=strategy)


def _set_up_audit(
    model: dict[str, Any], law: BandedNoise | None, accounting: EventAccounting, settings: AuditSettings
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
