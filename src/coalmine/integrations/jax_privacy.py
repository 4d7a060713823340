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
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Unpack
from warnings import warn

import numpy as np

try:
    import dp_accounting
    import jax
    import jax.numpy as jnp
    import optax
    from jax.flatten_util import ravel_pytree
    from jax_privacy.batch_selection import BatchSelectionStrategy
    from jax_privacy.experimental.execution_plan import DPExecutionPlan
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix
except ImportError as error:
    raise ImportError("auditing jax_privacy needs: pip install 'coalmine[jax]'") from error

from coalmine.argument_checks import count_of, one_number, shown, whole_number
from coalmine.audit.audit import Audit
from coalmine.audit.claim import Claim
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.pipeline_record import CLOSED_FORM
from coalmine.audit.result import AuditResult
from coalmine.audit.schedule import Indices
from coalmine.canaries.array_types import is_traced
from coalmine.estimators.amplification import PLD
from coalmine.estimators.correlated import BandedNoise
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson
from coalmine.integrations.journal import Journal
from coalmine.integrations.setup import (
    CLIP_SCALE,
    AuditSettings,
    new_audit_settings,
    nonnegative,
    own_audit,
    positive,
    refuse_finished,
    watch_noise,
)

__all__ = ["AuditState", "AuditedPrivatizer", "audited", "banded_noise", "named_leaves"]
USUAL_CANARIES = 1_000  # default number, if the data set has as many examples
MOST_BANDS = 256  # the coefficients of a strategy matrix are read from its first 256 steps
SAME = 1e-4  # relative to the length of a column: smaller coefficients are rounding errors
STREAMS_SAME = 1e-3  # in standard deviations: smaller differences in the noise are single-precision rounding


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
        return _Watched(strategy, self._steps)

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
    stddev: float | None = None,
    clip_norm: float | None = None,
    noising_matrix: Any = None,
    steps: int | None = None,
    num_examples: int | None = None,
    sampling_probability: float | None = None,
    dp_event: Any = None,
    through_clip: bool = False,
    **settings: Unpack[AuditSettings],
) -> Any:
    """The same privatizer with canaries in its steps and an `audit`; or the same `DPExecutionPlan` with such a privatizer.

    `params` is the model before training, any pytree. Each of its arrays gets its own noise gauge. `stddev` is the one that
    the privatizer was made with. `clip_norm` is the most that one example adds to the clipped sum: `grad_fn.sensitivity()`.
    For a privatizer with correlated noise, also pass its `noising_matrix`, and the number of `steps` that it was made for.
    From a plan, all of these are read unless you give them, and its batch selection is watched.

    `settings` are `canaries`, `unobserved`, `delta`, `directory`, `claim` and `on_violation` as in `Audit`, and either
    `seed` or `seed_file`. An `audit` of your own replaces all of these settings. Make it with
    `Audit.for_model(named_leaves(params), …)`, under correlated noise with the `noise` that `banded_noise` returns.

    With `num_examples`, the size of the data set, each canary is paired with one example. Take batches from a `watched`
    strategy, or pass each batch to `next_step`. There can be at most as many canaries as examples; the default is 1,000.
    Without `num_examples` the batch selection is not observed: each canary is in a step with `sampling_probability`, drawn
    from the audit's seed.

    With `through_clip` canaries enter `clipped_grad` as rows of the batch, ten times too long, so the audit checks the clip
    too: see `AuditedPrivatizer.canary_loss`. Otherwise they join the clipped sum at the clip norm.

    `privatizer.audit.finish` takes `noise_state`, the state after the last step, `params`, the final model, `claim`,
    `accounted_epsilon` and `task`. `dp_event` is the event that the accountant composes. If it is a Poisson-sampled Gaussian
    mechanism and the batch selection is observed, its epsilon is the default claim. If the selection is not observed, its
    epsilon gets a second verdict. Under correlated noise the default claim is the mechanism's, for the most exposed canary.
    """
    plan = privatizer if isinstance(privatizer, DPExecutionPlan) else None
    inner = privatizer if plan is None else plan.noise_addition_transform
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"privatizer must be an optax transformation or a DPExecutionPlan of jax_privacy, got {shown(privatizer)}"
        )
    if isinstance(inner, AuditedPrivatizer):
        raise ValueError("this privatizer is audited already: pass the one that jax_privacy made")
    if plan is not None:
        closure = inspect.getclosurevars(inner.update).nonlocals
        stddev = closure.get("stddev") if stddev is None else stddev
        noising_matrix = closure.get("noising_matrix") if noising_matrix is None else noising_matrix
        steps = getattr(plan.batch_selection_strategy, "iterations", None) if steps is None else steps
        clip_norm = plan.clipped_grad(lambda: None).sensitivity() if clip_norm is None else clip_norm
        dp_event = plan.dp_event if dp_event is None else dp_event
    for name, value in {"stddev": stddev, "clip_norm": clip_norm}.items():
        if value is None:
            raise TypeError(f"audited() needs the privatizer's {name}, which jax_privacy does not expose: pass {name}=")
    assert stddev is not None
    assert clip_norm is not None
    law, column = (None, 1.0) if noising_matrix is None else banded_noise(noising_matrix, steps)
    mechanism = _Mechanism(nonnegative("stddev", stddev) / column, positive("clip_norm", clip_norm), law, dp_event)
    names, treedef, model = _named_leaves(params)
    selection = _new_selection(num_examples, sampling_probability, settings)
    audit = _set_up_audit(model, law, settings)
    selection.attach(audit)
    watch_noise(audit, settings.get("on_violation"), mechanism.noise_multiplier)
    if through_clip:
        _ = audit.rotated_canaries  # raises an error if the audit's canaries cannot be compiled
    transformation = AuditedPrivatizer(*_init_and_update(inner, through_clip=through_clip))
    transformation.audit = audit
    transformation._steps = _Steps(audit, mechanism, selection, names, treedef, model, through_clip=through_clip)
    if plan is None:
        return transformation
    strategy = plan.batch_selection_strategy
    if selection.observed and isinstance(strategy, BatchSelectionStrategy):
        strategy = transformation.watched(strategy)
    return dataclasses.replace(plan, noise_addition_transform=transformation, batch_selection_strategy=strategy)


def banded_noise(noising_matrix: Any, steps: int | None) -> tuple[BandedNoise | None, float]:
    """The noise of a privatizer for an `Audit`, and the length of a column of its strategy matrix C.

    `noising_matrix` is C⁻¹, a StreamingMatrix or an array. The noise is None if it is independent in every step.
    """
    if isinstance(noising_matrix, StreamingMatrix):
        if steps is None:
            raise TypeError("audited() needs the number of steps that the noising matrix is for: pass steps=")
        rounds = whole_number("steps", steps, minimum=1)
        inverse = np.asarray(noising_matrix.materialize(min(rounds, MOST_BANDS)), np.float64)
    else:
        inverse = np.asarray(noising_matrix, np.float64)
        if inverse.ndim != 2 or inverse.shape[0] != inverse.shape[1]:
            raise ValueError(f"noising_matrix must be a square matrix, got shape {inverse.shape}")
        rounds = len(inverse)
    if not np.isfinite(inverse).all() or np.triu(inverse, 1).any() or not np.diag(inverse).all():
        raise ValueError("noising_matrix must be finite and lower triangular, without zeros on its diagonal")
    first = np.linalg.inv(inverse[:MOST_BANDS, :MOST_BANDS])[:, 0]
    length = float(np.linalg.norm(first))
    bands = int(np.flatnonzero(np.abs(first) > SAME * length).max()) + 1
    # The matrix is identified by its effect on a few random streams.
    streams = np.random.default_rng(0).normal(size=(rounds, 4)).astype(np.float32)
    noised = np.asarray(noising_matrix @ jnp.asarray(streams), np.float64) * length
    if bands == 1 and np.allclose(noised, streams, atol=STREAMS_SAME):
        return None, length
    falling = np.minimum.accumulate(
        np.maximum(first[:bands], 0.0)
    )  # removes rounding; a real rise makes the streams differ below
    # The last step cuts off some columns. They are shorter, unless the strategy normalises every column.
    for planned in (rounds + bands - 1, rounds):
        noise = BandedNoise(rounds=planned, coefficients=tuple(falling))
        encoder = noise.encoder()
        decoded = np.array([encoder.add(number, row) for number, row in enumerate(noised, start=1)])
        if np.allclose(decoded, streams, atol=STREAMS_SAME):
            return noise, length
    raise ValueError(
        "the inverse of noising_matrix must be a banded Toeplitz matrix whose coefficients are positive and do not "
        "increase; other correlated noise cannot be audited yet"
    )


class _Mechanism(NamedTuple):
    """The stated noise. `unit_std` is the std of the noise before it is correlated, for columns of length 1."""

    unit_std: float
    clip_norm: float
    law: BandedNoise | None
    event: Any

    @property
    def noise_multiplier(self) -> float:
        return self.unit_std / self.clip_norm

    def noise_std(self, step: int) -> float:
        """The standard deviation of a step's noise."""
        return self.unit_std * (1.0 if self.law is None else self.law.std(step))

    def accounted(self, delta: float, *, observed: bool) -> Claim | None:
        """The accountant's claim, amplified by sampling; None if the event is of another kind."""
        poisson = _poisson_event(self.event)
        if poisson is None or self.law is not None:
            return None
        noise, rate, steps = poisson
        accountant = dp_accounting.pld.PLDAccountant()
        accountant.compose(self.event)
        epsilon = float(accountant.get_epsilon(delta))
        if not 0 < epsilon < math.inf:
            return None
        return Claim(epsilon, sampling=Poisson(rate, rounds=steps), noise_multiplier=noise, sampler_observed=observed)


def _poisson_event(event: Any) -> tuple[float, float, int] | None:
    """Noise multiplier, rate and steps of a composed Poisson-sampled Gaussian event; None for other events."""
    if not isinstance(event, dp_accounting.SelfComposedDpEvent):
        return None
    sampled = event.event
    if not isinstance(sampled, dp_accounting.PoissonSampledDpEvent):
        return None
    if not isinstance(sampled.event, dp_accounting.GaussianDpEvent) or not sampled.event.noise_multiplier:
        return None
    return float(sampled.event.noise_multiplier), float(sampled.sampling_probability), int(event.count)


class _SeedSelection:
    """Each canary is in a step with a fixed probability, drawn from the audit's seed."""

    observed = False
    participants: int | None = None
    repeats: tuple[Indices, ...] = ()
    rows: int | None = None

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def attach(self, audit: Audit) -> None:
        self._audit = audit

    def canaries(self, step: int, indices: Any) -> Indices:
        if indices is not None:
            raise ValueError("next_step takes the batch's indices only if audited() was given num_examples")
        return self._audit.sampled_canaries(step, self.probability)


class _ExampleSelection:
    """Each canary is paired with one example of the data set: it is in a step whenever that example is in the batch.

    `repeats` lists the canaries whose examples are in the batch at least twice, three times and so on: they join as often.
    `participants` is the number of examples in the batch: canaries do not count.
    """

    observed = True
    participants: int | None = None
    repeats: tuple[Indices, ...] = ()

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.most_times = 1

    def attach(self, audit: Audit) -> None:
        count = audit.settings.canaries
        if count > self.rows:
            raise ValueError(
                f"canaries must be at most the {self.rows} examples of the data set, one for each, got {count}"
            )
        self._canary_of_row = np.full(self.rows, -1, dtype=np.int32)
        self._canary_of_row[audit.canary_rows(self.rows)] = np.arange(count)
        self._count = count

    def canaries(self, step: int, indices: Any) -> Indices:
        if indices is None:
            raise TypeError(
                "next_step needs the indices of the batch: take batches from privatizer.watched(strategy), or pass them"
            )
        picked = np.asarray(indices).reshape(-1)
        if picked.size and picked.dtype.kind not in "iu":
            raise ValueError(f"indices must be whole numbers, got {shown(indices)}")
        rows = picked[picked >= 0].astype(np.int64)  # negative ones pad a batch
        if rows.size and rows.max() >= self.rows:
            raise ValueError(f"indices must lie in 0..{self.rows - 1}, got {rows.max()}")
        self.participants = rows.size
        self.most_times = max(self.most_times, int(np.bincount(rows, minlength=1).max()))
        canaries = self._canary_of_row[rows]
        times = np.bincount(canaries[canaries >= 0], minlength=self._count)
        self.repeats = tuple(
            np.flatnonzero(times >= number).astype(np.int32) for number in range(2, int(times.max(initial=1)) + 1)
        )
        return np.flatnonzero(times).astype(np.int32)


def _new_selection(
    num_examples: int | None, sampling_probability: float | None, settings: AuditSettings
) -> _SeedSelection | _ExampleSelection:
    if (num_examples is None) == (sampling_probability is None):
        raise TypeError("audited() needs either num_examples, the size of the data set, or a sampling_probability")
    if num_examples is not None:
        rows = whole_number("num_examples", num_examples, minimum=1)
        if settings.get("audit") is None and settings.get("canaries") is None:
            settings["canaries"] = min(USUAL_CANARIES, rows)
        return _ExampleSelection(rows)
    assert sampling_probability is not None
    probability = one_number("sampling_probability", sampling_probability)
    if not 0 < probability <= 1:
        raise ValueError(f"sampling_probability must lie in (0, 1], got {probability}")
    return _SeedSelection(probability)


def _set_up_audit(model: dict[str, Any], law: BandedNoise | None, settings: AuditSettings) -> Audit:
    if settings.get("audit") is None:
        # A deferred round is measured during the next step and costs less, but an alarm must not wait.
        deferred = {"deferred": settings.get("on_violation") is None}
        return Audit.for_model(model, noise=law, **deferred | new_audit_settings(True, **settings))
    audit = own_audit(**settings)
    refuse_finished(audit)
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


class _Watched(BatchSelectionStrategy):  # type: ignore[misc]
    """A batch selection strategy that also passes each batch to the audit."""

    def __init__(self, strategy: Any, steps: "_Steps") -> None:
        if not isinstance(strategy, BatchSelectionStrategy):
            raise TypeError(
                f"watched() takes a strategy of jax_privacy.batch_selection that selects examples, got {shown(strategy)}"
            )
        self._strategy, self._steps = strategy, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._strategy, name)

    def __repr__(self) -> str:
        return f"watched({self._strategy!r})"

    def batch_iterator(self, num_examples: int, rng: Any = None) -> Iterator[Any]:
        """The batches of the strategy, unchanged."""
        self._steps.expect_batches(num_examples)
        for indices in self._strategy.batch_iterator(num_examples, rng):
            self._steps.add_batch(indices)
            yield indices


class _Steps:
    """Puts canaries into a privatizer's steps, and records the steps."""

    def __init__(
        self,
        audit: Audit,
        mechanism: _Mechanism,
        selection: _SeedSelection | _ExampleSelection,
        names: list[str],
        treedef: Any,
        model: dict[str, Any],
        *,
        through_clip: bool,
    ) -> None:
        self._scale = CLIP_SCALE if through_clip else None
        self._audit, self._mechanism, self._selection = audit, mechanism, selection
        self._names, self._treedef = names, treedef
        self._precision = ", ".join(sorted({str(leaf.dtype) for leaf in model.values()}))
        if audit.log.final is not None:
            audit.rewind_to(audit.last_round)  # resume a run that ended between its final model and its result
        self._initial = {name: _copy_leaf(leaf) for name, leaf in model.items()} if audit.last_round == 0 else None
        self._prepared_step: tuple[int, Indices, int | None] | None = None  # step, its canaries and participants
        self._steps_without_others = 0
        self._batches: list[Any] = []  # of a watched strategy, since the last step was prepared
        self._journal = Journal(audit, self._settings())
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
        canaries, length = self._audit.rotated_canaries, self._scale * clip

        def with_canaries(params: Any, *batch: Any, **options: Any) -> Any:
            *examples, number = batch
            index = jnp.reshape(number, (-1,))[0]
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
            raise TypeError(f"noise_state must be the state of the audited privatizer, got {shown(state)}")
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
            self._audit.rewind_to(step)  # training resumes from a checkpoint
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
        others = self._leaves(state.others) if mechanism.unit_std or present.size else None
        self._steps_without_others += others is None
        self._audit.observe_round(
            number,
            self._leaves(state.model_delta),
            present=present,
            others=others,
            noise_std=mechanism.noise_std(number),
            clip_norm=mechanism.clip_norm,
            scale=1.0 if self._scale is None else self._scale,
            participants=participants,
        )
        self._journal.add_round(
            number, canaries=int(present.size), examples=participants, clip_norm=mechanism.clip_norm
        )

    def _leaves(self, tree: Any) -> dict[str, Any]:
        leaves = self._treedef.flatten_up_to(tree)
        return dict(zip(self._names, leaves, strict=True))

    def _finish(
        self,
        *,
        noise_state: Any = None,
        params: Any = None,
        claim: Claim | float | None = None,
        accounted_epsilon: float | None = None,
        task: str | None = None,
    ) -> AuditResult:
        """Record the last step, observe the final model if it is given, and return the result."""
        audit, mechanism = self._audit, self._mechanism
        if audit.log.final is None:
            if noise_state is None:
                raise TypeError("finish needs the state after the last step: audit.finish(noise_state=noise_state)")
            self._record(noise_state)
            if params is not None:
                audit.observe_final(self._leaves(params), initial=self._initial)
        warnings = self._warnings()
        for text in warnings:
            warn(text, stacklevel=3)
        accounted = (
            mechanism.accounted(audit.settings.delta, observed=self._selection.observed) if audit.last_round else None
        )
        if accounted is not None and accounted_epsilon is not None:
            accounted = dataclasses.replace(accounted, epsilon=accounted_epsilon)
        elif accounted is not None:
            accounted_epsilon = accounted.epsilon
        noise = mechanism.noise_multiplier if mechanism.law is None else None
        claimed_by = None
        if claim is None and audit.claim is None and mechanism.law is not None and mechanism.unit_std:
            claim, claimed_by = self._correlated_claim(), CLOSED_FORM
        return self._journal.finish(
            claim,
            noise=noise,
            accounted_epsilon=accounted_epsilon,
            accounted=accounted,
            accounted_by=PLD,
            claimed_by=claimed_by,
            pipeline={"trust_model": "central", "precision": self._precision},
            task=task,
            audited=self._audited_items(),
            notes=self._notes(),
            warnings=warnings,
            noise_multiplier=mechanism.noise_multiplier,
        )

    def _correlated_claim(self) -> Claim:
        """The mechanism's epsilon under correlated noise, for the most exposed canary."""
        law, event = self._mechanism.law, _poisson_event(self._mechanism.event)
        assert law is not None
        largest = self._largest_strength(law)
        noise = self._mechanism.noise_multiplier if event is None else event[0]  # the accountant's, if there is one
        epsilon = float(mechanism_epsilon(noise / math.sqrt(largest), delta=self._audit.settings.delta))
        return Claim(epsilon, sensitivity=math.sqrt(largest))

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
        clipping = AuditedItem(
            "clipping", "not checked", "canaries joined the sum after clipped_grad, at the clip norm"
        )
        if self._scale is not None:
            reason = f"canaries entered clipped_grad {self._scale:g} times longer than the clip norm"
            clipping = AuditedItem("clipping", "checked", reason)
        weights = AuditedItem(
            "weights", "does not apply", "jax_privacy has no weights: every example counts once in the sum"
        )
        items = [clipping, sampler, weights]
        if not self._steps_without_others:
            reason = "the sum of the other examples was read from the privatizer's input in every step"
            items.append(AuditedItem("others", "checked", reason))
        return items

    def _notes(self) -> list[str]:
        event = self._mechanism.event
        if event is None:
            return []
        if self._mechanism.law is not None:
            return ["the verdict is for known steps: amplification by sampling is not judged under correlated noise"]
        if _poisson_event(event) is not None:
            return []
        return ["the accountant's epsilon has no verdict: its event is not a Poisson-sampled Gaussian mechanism"]

    def _warnings(self) -> list[str]:
        warnings = []
        event = _poisson_event(self._mechanism.event)
        if event is not None and self._mechanism.law is None and event[2] != self._audit.last_round:
            warnings.append(
                f"the accountant counts {count_of(event[2], 'step')}, and the audit observed {self._audit.last_round}"
            )
        law = self._mechanism.law
        if event is not None and law is not None and self._selection.observed:
            largest = self._largest_strength(law)
            if largest > event[2] * (1 + SAME):
                warnings.append(
                    f"the batches expose an example more than the accountant allows for: ‖Cu‖² is {largest:.3g}, and the "
                    f"event composes {event[2]} steps; keep an example's steps at least {law.bands} apart"
                )
        if isinstance(self._selection, _ExampleSelection) and self._selection.most_times > 1:
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
        if isinstance(selection, _SeedSelection):
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
