"""Audit Opacus: canaries take part in steps like examples, and the audit observes every noised gradient.

    model, optimizer, loader = PrivacyEngine().make_private(...)
    optimizer = audited(optimizer, model, data_loader=loader, claim=3.0, canaries=1_000, seed=..., delta=1e-5)
    ...  # train as usual
    print(optimizer.audit.finish())

Each canary is paired with one row of the data set, and is in a step exactly when the loader's sampler picks that row. So the
audit checks the sampler too, and judges the accountant's epsilon. A step moves the model against its gradient, so canaries
are subtracted from the gradient, and the audit observes minus the noised gradient.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import astuple, dataclass, fields
from typing import Any, NamedTuple, TypeVar, Unpack, cast
from warnings import warn

import numpy as np

try:
    import torch
    from opacus.grad_sample import GradSampleHooksFastGradientClipping
    from opacus.optimizers import (
        AdaClipDPOptimizer,
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DPPerLayerOptimizer,
    )
    from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
except ImportError as error:
    raise ImportError("auditing Opacus needs: pip install 'coalmine[opacus]'") from error

from coalmine.argument_checks import Floats, count_of, one_number, short_repr, whole_number
from coalmine.audit import Audit
from coalmine.evidence.gauges.training_gauges import FEWEST_ROUNDS
from coalmine.integrations.journal import Journal
from coalmine.integrations.opacus_accounting import (
    UNIT,
    Accounting,
    attached_accountant,
    number_of,
    update_noise_multiplier,
)
from coalmine.integrations.opacus_distributed import (
    REPLICATED,
    OneProcess,
    Replicated,
    Sharded,
    local,
    on_every_rank,
    own_slot,
    plain_names,
    reduce_for,
)
from coalmine.integrations.setup import CLIP_SCALE, AuditSettings, positive, watch_noise
from coalmine.integrations.watched_sampler import PickedRows, check_loader
from coalmine.measure.ranks import Ranks, Reduce
from coalmine.measure.schedule import Indices
from coalmine.measure.vectors import NotFiniteError
from coalmine.result.audit_result import AuditResult
from coalmine.result.other_rank import ResultOnRank0
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.pipeline_record import LONGEST_UNIT, ROW

__all__ = ["audited", "named_layers", "trained_parameters", "unaudited"]
# By default, canaries go through the clip if those of one step hold at most this many numbers: 64 MB in single precision,
# and 0.2 to 0.5 seconds per step on one core (a transform takes 8 to 33 ns per number).
MOST_THROUGH_CLIP = 1 << 24
USUAL_CANARIES = 1_000  # default number, if the data set has as many rows
DRAWN_AHEAD = 64  # steps whose canaries are drawn at once, if they are not those of the loader's rows
GUESSABLE = 1 << 32  # seeds below this are found by trying them all
ROUNDING = 0.01  # relative error of a sum of clipped gradients, as half precision may have
EARLY_STEPS = 10  # after this many steps, weights that have not moved give a warning
EVERY_STEP = AuditedItem(
    "participations", "checked", "a row is at most in every step, and the claim counts every step that ran"
)
HOOK_REPLACED = (
    "attach_step_hook replaced the audit's hook, so this step would not be audited: call it before audited(), which goes on "
    "calling that hook"
)
METHOD_REPLACED = (
    "add_noise or clip_and_accumulate of the optimizer was replaced, so this step would not be audited: replace it before "
    "audited(), which goes on calling it"
)
UNSEEN_STEP = (
    "this step moves the weights, but the audit saw no release: call step() of the optimizer that audited() returned, and "
    "make_private before audited(); unaudited(optimizer) ends the audit"
)
WRAPPERS = ("_module.", "_orig_mod.")  # GradSampleModule and torch.compile put these before a parameter's name
Optimizer = TypeVar("Optimizer", bound=DPOptimizer)


def audited(
    optimizer: Optimizer,
    model: "torch.nn.Module | Mapping[str, torch.Tensor] | None" = None,
    *,
    data_loader: "torch.utils.data.DataLoader[Any] | None" = None,
    sampling_probability: float | None = None,
    scale: float | None = None,
    through_clip: bool | None = None,
    rng: np.random.Generator | None = None,
    reduce: Reduce | None = None,
    steps: int | None = None,
    **settings: Unpack[AuditSettings],
) -> Optimizer:
    """The same optimizer with canaries in its steps, and its audit as `optimizer.audit`.

    `model` is the model that the optimizer trains, a dict of its named parameters, or its `state_dict`. Each parameter gets
    its own noise gauge. `settings` are `canaries`, `unobserved`, `delta`, `directory`, `claim`, `on_violation` and
    `deferred` as in `Audit`, and either `seed` or `seed_file`. An `audit` of your own replaces all of these settings;
    `named_layers` returns its layers.

    `claim` is the epsilon to judge, and is committed to before step 1. Without one nothing can pass. A number means what
    Opacus's accountant quotes for one row of the data set over the whole run, with sampling counted, for the steps that ran.
    `Claim(3.0, unit="document")` also names what a row holds, and `Claim.mechanism(10.0, participations=20)` is an epsilon
    without sampling. An accountant whose history is a plan is a claim too. The run's own accountant is not: it knows its
    epsilon only afterwards. `steps` is the number of planned steps. With a claim that counts sampling, `on_violation` needs
    it; without a claim, `on_violation` watches the noise multiplier.

    `data_loader` is the loader that `make_private` returned. The loop must use it, directly or in a `BatchMemoryManager`.
    Each canary is paired with one row of its data set, and is in a step exactly when the loader's sampler picks that row.
    There can be at most as many canaries as rows; the default is 1,000. Without `data_loader` the sampler is not observed:
    each canary is in a step with `sampling_probability`, that of an example, drawn from the audit's seed or from `rng`.

    With `through_clip`, canaries are rows of `grad_sample`, `scale` (10) times longer than the clip norm, so the audit
    checks the clip too. This needs per-example gradients and one clip norm (hooks mode, flat or adaptive clipping), and one
    transform for each canary in a step. Otherwise canaries join the clipped sum at the clip norm, which works in every
    mode. By default, canaries go through a flat clip if a step's canaries hold at most `MOST_THROUGH_CLIP` numbers. An
    adaptive clip would count them as clipped examples, so it needs `through_clip=True`. The accountant's step hook is still
    called.

    In several processes (DDP, FSDP2) every rank calls `audited` with the same arguments, and `finish` at the end. Rank 0 has
    the directory and the result. `reduce` sums over the ranks, by default `torch_distributed.reduce_over()`.

    `optimizer.audit.finish` takes these keywords, all optional:

    - `claim`: a claim for a run that began without one. It is judged, and the result says that it was made afterwards.
    - `accounted_epsilon`: the epsilon to report as the accountant's; by default the attached accountant is asked.
    - `initial`: the model before training, which `final-update` needs after a restart.
    - `task`: the name of the training task.
    - `unit`: the content of one row of the data set, such as "sentence", "document" or "user".

    If no weight has moved after ten steps, a RuntimeWarning says so early. A step that the audit does not see, because its
    hook or its optimizer was replaced, is a RuntimeError.
    """
    _check_optimizer(optimizer, through_clip)
    gradients = _gradients(optimizer, model, reduce)
    most, layers = gradients.most_canaries, None if model is None else named_layers(optimizer, model)

    def check_options() -> tuple[float, float | None, AuditedItem]:
        rate = sampling_probability
        if steps is not None:
            whole_number("steps", steps, minimum=1)
        if data_loader is not None:
            rate = _loader_rate(data_loader, rate, rng, every_rank=gradients.ranks.several)
            if settings.get("audit") is None and settings.get("canaries") is None:
                settings["canaries"] = min(USUAL_CANARIES, _row_count(data_loader), most)
        elif rate is None:
            raise TypeError("audited() needs data_loader, or the sampling_probability of an example")
        elif rng is not None and gradients.ranks.several:
            raise ValueError("rng may differ from rank to rank, so omit it: the audit's seed is used")
        own, count = settings.get("audit"), settings.get("canaries")
        expected = own.settings.canaries if isinstance(own, Audit) else count if isinstance(count, int) else 0
        if data_loader is not None and expected > _row_count(data_loader):
            raise ValueError(
                f"canaries must be at most the {_row_count(data_loader)} rows of the data set, one row for each, got "
                f"{expected}"
            )
        checked = _checked_options(optimizer, expected, rate, through_clip, scale)
        settings["claim"] = _checked_claim(optimizer, checked[0], steps, **settings)
        return checked

    probability, length, clipping = on_every_rank(gradients.ranks, check_options)
    audit = gradients.set_up_audit(layers, **settings)
    dim = sum(p.numel() for p in optimizer.params)
    if dim != audit.settings.dim:
        raise ValueError(f"the audit must have dim = {dim}, the number of the optimizer's parameters, got {audit!r}")
    watch_noise(audit, settings.get("on_violation"), optimizer.noise_multiplier)
    planned = audit.settings.rounds if steps is None else steps
    selection: _SeedSelection | _RowSelection
    if data_loader is None:
        selection = _SeedSelection(audit, probability, rng)
    else:
        selection = _RowSelection(audit, gradients, optimizer, data_loader)
    _OptimizerAudit(
        optimizer, audit, gradients, probability, length, selection, clipping=clipping, model=model, planned=planned
    )
    optimizer.audit = audit
    return optimizer


def unaudited(optimizer: Optimizer) -> Optimizer:
    """The same optimizer without its audit; the accountant's hook stays. Without an audit, nothing changes."""
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"optimizer must be the one that make_private returned, got {short_repr(optimizer)}")
    attached = getattr(optimizer.add_noise, "__self__", None)
    if isinstance(attached, _OptimizerAudit):
        attached.detach()
        del optimizer.audit
    return optimizer


def named_layers(
    optimizer: DPOptimizer, model: "torch.nn.Module | Mapping[str, torch.Tensor]"
) -> list[tuple[str, int]]:
    """Name and size of each parameter that the optimizer trains, in the optimizer's order: `layers` for an `Audit`."""
    tensors = _named_tensors(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    places = {_place(tensor): name for name, tensor in tensors.items()}  # a state_dict has other objects, same memory
    layers = []
    for p in optimizer.params:
        name = names.get(id(p), places.get(_place(p)))
        if name is None:
            raise ValueError(
                f"the model must hold every parameter of the optimizer, but none of its tensors is the one of shape "
                f"{tuple(p.shape)}: pass the model that make_private returned"
            )
        layers.append((name, p.numel()))
    return layers


def trained_parameters(
    optimizer: DPOptimizer, model: "torch.nn.Module | Mapping[str, torch.Tensor]"
) -> "dict[str, torch.Tensor]":
    """The parameters that the optimizer trains, by their names: `parameters` for an `Audit.for_model`.

    Under DDP and FSDP2, an audit of your own needs these. Under FSDP2 each is this rank's shard.
    """
    names = plain_names(name for name, _ in named_layers(optimizer, model))
    return dict(zip(names, (local(p.detach()) for p in optimizer.params), strict=True))


class _SeedSelection:
    """Each canary is in a step with a fixed probability, drawn from the audit's seed or from `rng`."""

    participants: int | None = None
    repeats: Sequence[Indices] = ()

    def __init__(self, audit: Audit, probability: float, rng: np.random.Generator | None) -> None:
        self._audit, self._probability, self._rng = audit, probability, rng
        self._drawn: dict[int, Indices] = {}  # for the next steps: drawn at once, they take a tenth of the time

    def canaries(self, _examples: int) -> Indices:
        if self._rng is None:
            number = self._audit.last_round + 1
            if number not in self._drawn:
                numbers = range(number, number + DRAWN_AHEAD)
                self._drawn = {n: self._audit.sampled_canaries(n, self._probability) for n in numbers}
            return self._drawn[number]
        is_present = self._rng.random(self._audit.settings.canaries) < self._probability
        return np.flatnonzero(is_present).astype(np.int32)


class _RowSelection:
    """Each canary is paired with one row of the data set: it is in a step whenever that row is.

    Of several ranks, each picks its own rows of the same data set, and a canary is in the step if any rank picks its row.
    `repeats` lists the canaries whose rows are in the step at least twice, three times and so on: they join as often.
    `participants` is the number of rows in the last step, as the accountant counts them: canaries do not count.
    """

    participants: int | None = None
    repeats: Sequence[Indices] = ()

    def __init__(self, audit: Audit, gradients: OneProcess, optimizer: DPOptimizer, loader: Any) -> None:
        self._audit, self._ranks = audit, gradients.ranks
        several, count = self._ranks.several, audit.settings.canaries
        self.rows = on_every_rank(
            self._ranks, lambda: PickedRows(loader, lambda: len(optimizer._step_skip_queue), every_rank=several)
        )
        counts = self._ranks.sum(own_slot(self._ranks, self.rows.count))
        if (counts != self.rows.count).any():
            raise ValueError(
                "data_loader must have the whole data set on every rank, but the ranks' data sets have "
                f"{', '.join(f'{count:.0f}' for count in counts)} rows"
            )
        self._canary_of_row = np.full(self.rows.count, -1, dtype=np.int32)
        self._canary_of_row[audit.schedule.rows(self.rows.count)] = np.arange(count)
        self.most_times, self.steps_with_repeats, self.last_has_repeats = 1, 0, False

    def canaries(self, examples: int) -> Indices:
        count, size = self._audit.settings.canaries, self._ranks.size

        def count_picks() -> Floats:
            """How often each canary's row was picked, the number of rows, and the picks of the most frequent row."""
            rows = self.rows.rows_in_step(examples)
            canaries = self._canary_of_row[rows]
            times = np.bincount(canaries[canaries >= 0], minlength=count)
            most = np.unique(rows, return_counts=True)[1].max(initial=1)
            return np.concatenate([times, own_slot(self._ranks, rows.size), own_slot(self._ranks, most)])

        total = self._ranks.sum_of(count + 2 * size, count_picks, number=self._audit.last_round + 1, arguments={})
        times, sizes, most = total[:count].astype(np.int64), total[count:-size], total[-size:]
        self.participants = int(sizes.sum())
        most_picks = int(max(most.max(), times.max(initial=1)))
        self.most_times = max(self.most_times, most_picks)
        self.last_has_repeats = most_picks > 1
        self.steps_with_repeats += self.last_has_repeats
        present = np.flatnonzero(times).astype(np.int32)
        self.repeats = [present[times[present] >= number] for number in range(2, int(times.max(initial=1)) + 1)]
        return present


class _ZeroGradients:
    """The parameters whose gradient was 0 in every step so far.

    On a GPU a step's check is read in the next one, so that nothing waits for the device.
    """

    def __init__(self, count: int) -> None:
        self._indices = list(range(count))
        # The norms of these gradients in the last step, and an event that tells when they are on the host.
        self._norms: torch.Tensor | None = None
        self._arrived: Any = None

    @property
    def remain(self) -> bool:
        """Whether there are any, as far as is known without waiting."""
        return bool(self._indices)

    def indices(self) -> list[int]:
        """Their places among the optimizer's parameters."""
        if self._norms is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self.keep([i for i, norm in zip(self._indices, self._norms.tolist(), strict=True) if norm == 0])
        return self._indices

    def keep(self, indices: list[int]) -> None:
        self._indices, self._norms = indices, None

    def check(self, gradients: Sequence[Any]) -> None:
        """Take the gradients of a step, one tensor for each parameter."""
        chosen = [gradients[i] for i in self.indices()]
        if not chosen:
            return
        norms = torch.stack(torch._foreach_norm(chosen, 1))  # an empty shard has norm 0, NaN is not 0
        if norms.device.type == "cuda":
            self._norms = torch.empty(norms.shape, dtype=norms.dtype, pin_memory=True)
            self._norms.copy_(norms, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()
        else:
            self._norms = norms


class _GhostNorms:
    """Notices whether the loss asks the model of ghost clipping for the norms of the gradients, which it must clip."""

    def __init__(self, model: Any) -> None:
        self._model, self._real, self._asked = model, model.get_norm_sample, False
        model.get_norm_sample = self._norms

    @classmethod
    def of(cls, optimizer: DPOptimizer, model: Any) -> "_GhostNorms | None":
        ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
        return cls(model) if ghost and isinstance(model, GradSampleHooksFastGradientClipping) else None

    @property
    def clip_norm(self) -> float:
        """The norm that the model clips at."""
        return float(self._model.max_grad_norm)

    def was_asked(self) -> bool:
        """Whether the loss has asked since the last call."""
        asked, self._asked = self._asked, False
        return asked

    def release(self) -> None:
        del self._model.get_norm_sample

    def _norms(self) -> Any:
        self._asked = True
        return self._real()


@dataclass
class _Faults:
    """Faults that the integration saw. The metrics of a run directory keep them for a restart."""

    dropped: int = 0  # batches left out in the middle of a pass
    repeated: int = 0  # steps in which a row occurred more than once
    unclipped: int = 0  # steps of ghost clipping that clipped nothing

    @classmethod
    def before(cls, audit: Audit) -> "_Faults":
        """Those of the steps before a restart."""
        lines = [] if audit.directory is None else audit.directory.read_metrics()
        counts = {part.name: sum(_count(line.get(part.name)) for line in lines) for part in fields(cls)}
        return cls(**counts)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


class _OptimizerAudit:
    """Puts canaries into an optimizer's steps, and observes the releases."""

    def __init__(
        self,
        optimizer: DPOptimizer,
        audit: Audit,
        gradients: OneProcess,
        sampling_probability: float,
        scale: float | None,
        selection: _SeedSelection | _RowSelection,
        *,
        clipping: AuditedItem,
        model: Any,
        planned: int | None,
    ) -> None:
        self.audit, self._planned = audit, planned
        self._optimizer, self._gradients, self._selection = optimizer, gradients, selection
        self._probability, self._scale = sampling_probability, scale
        self._examples = 0  # per-example gradients in the step so far
        self._clipping, self._model = clipping, model
        self._outside: tuple[str, ...] = self._parameters_outside()
        if self._has_final():
            audit.rewind_to(audit.last_round)  # resume a run that ended between its final model and its result
        self._initial = self._parameters() if audit.last_round == 0 else None
        self._present: Indices = np.zeros(0, dtype=np.int32)
        self._others: Any = None  # the clipped sum of the examples, in the form that the audit takes
        self._clipped: list[Any] | None = None  # of the physical batches so far, one tensor for each parameter
        self._step: _Step | None = None
        self._steps, self._steps_without_others = 0, 0
        self._zero_gradients = _ZeroGradients(len(optimizer.params))
        self._journal = Journal(audit, self._settings())
        self._original: dict[str, Any] = {}  # the optimizer's own attributes that the audit replaces
        self._real_add_noise = self._replace("add_noise", self._add_noise)
        completes = gradients.observed_after
        self._real_completion = self._replace(completes, self._complete) if completes is not None else None
        self._real_clip = self._replace("clip_and_accumulate", self._clip_and_accumulate) if scale is not None else None
        if isinstance(selection, _RowSelection):
            self._real_pre_step = self._replace("pre_step", self._pre_step)
            self._real_signal = self._replace("signal_skip_step", self._signal_skip_step)
        self._ghost_norms, self._faults = _GhostNorms.of(optimizer, model), _Faults.before(audit)
        loader = selection.rows.loader if isinstance(selection, _RowSelection) else None
        self._accounting = Accounting(optimizer, loader, sampling_probability, clip_norm=self._clip_norm())
        self._noise_multipliers = self._earlier_steps()
        if audit.claim is not None and audit.claim.bare:
            audit.watch.read_claim_as(audit.claim.read_as(self._accounted_claim(planned or 1)))
        self._real_hook = optimizer.step_hook
        optimizer.attach_step_hook(self._after_noise)
        self._saw_step = False
        self._guard = optimizer.original_optimizer.register_step_pre_hook(self._refuse_unseen_step)
        audit.finish_with(self._finish)

    def _earlier_steps(self) -> set[float]:
        """The noise multipliers of the steps before a restart, from the metrics."""
        lines = [] if self.audit.directory is None else self.audit.directory.read_metrics()
        for line in lines:
            self._accounting.see(_count(line.get("round")), line)
        noises = [line.get("gradient_noise_multiplier") for line in lines]
        return {float(noise) for noise in noises if isinstance(noise, int | float)}

    def _finish(
        self,
        *,
        claim: Any = None,
        accounted_epsilon: float | None = None,
        initial: Any = None,
        task: str | None = None,
        unit: str | None = None,
    ) -> AuditResult | ResultOnRank0:
        """Observe the final model and return the result (rank 0 only). A second call judges the same model again."""
        unit = self._row_holds(_checked_unit(unit))
        claim = number_of(claim, delta=self.audit.settings.delta)
        if accounted_epsilon is not None:
            accounted_epsilon = _checked_epsilon(accounted_epsilon)
        if not self._has_final():
            first = self._initial if initial is None else initial
            self.audit.observe_final(self._parameters(), initial=first)
        self._gather_from_ranks()
        if self._gradients.ranks.rank > 0:
            return ResultOnRank0(self._gradients.ranks.rank)
        smallest = min(self._noise_multipliers, default=0.0)
        noise = smallest if len(self._noise_multipliers) == 1 else None
        self._outside = tuple(dict.fromkeys([*self._outside, *self._parameters_outside()]))
        warnings = self._warnings()
        for text in warnings:
            warn(text, stacklevel=3)
        if accounted_epsilon is None:
            accounted_epsilon = self._accounting.epsilon(self.audit.settings.delta)
        steps = max(self.audit.last_round, self._accounting.steps or 0)
        accounted = self._accounted_claim(steps) if self.audit.last_round else None
        stated = Claim.of(claim) if self.audit.claim is None else self.audit.claim
        counts_all = stated is not None and stated.bare and accounted is not None and not accounted.amplified
        return self._journal.finish(
            claim,
            noise=noise,
            sampler_observed=isinstance(self._selection, _RowSelection),
            accounted_epsilon=accounted_epsilon,
            accounted=accounted,
            accounted_by=self._accounting.name,
            pipeline=self._pipeline(),
            task=task,
            audited=[*self._audited_items(), *([EVERY_STEP] if counts_all else [])],
            notes=[*self._notes(), _unit_note(unit)],
            warnings=warnings,
            noise_multiplier=smallest,
            privacy_unit=unit or ROW,
        )

    def _row_holds(self, unit: str | None) -> str | None:
        """What a row holds, from `finish` or from the claim."""
        claimed = None if self.audit.claim is None or self.audit.claim.unit in (None, UNIT) else self.audit.claim.unit
        if unit is not None and claimed not in (None, unit):
            raise ValueError(f"the claim is about one {claimed}, so finish(unit=) must not name another, got {unit!r}")
        return unit or claimed

    def _has_final(self) -> bool:
        """Whether the final model was observed; only rank 0 knows."""
        return bool(self._gradients.ranks.gather(lambda: self.audit.rank == 0 and self.audit.log.final is not None)[0])

    def _gather_from_ranks(self) -> None:
        """Keep only the parameters whose gradient was 0 on every rank, and count the faults of all ranks."""
        nonzero = np.ones(len(self._optimizer.params))
        nonzero[self._zero_gradients.indices()] = 0
        own = np.concatenate([nonzero, [self._faults.dropped, self._faults.unclipped]])
        *total, dropped, unclipped = self._gradients.ranks.sum(own).astype(np.int64).tolist()
        self._zero_gradients.keep([i for i, count in enumerate(total) if count == 0])
        self._faults = _Faults(dropped, self._faults.repeated, unclipped)  # repeats are those of all ranks already

    def _accounted_claim(self, steps: int) -> Claim:
        """The accounting of a bare claim over this many steps."""
        observed = isinstance(self._selection, _RowSelection)
        return self._accounting.claim(steps=steps, delta=self.audit.settings.delta, observed=observed)

    def detach(self) -> None:
        """Restore the optimizer's own methods and hook."""
        for name, original in self._original.items():
            delattr(self._optimizer, name)
            if original is not None:
                setattr(self._optimizer, name, original)
        if isinstance(self._selection, _RowSelection):
            self._selection.rows.release()
        if self._ghost_norms is not None:
            self._ghost_norms.release()
        self._optimizer.step_hook = self._real_hook
        self._guard.remove()

    def _refuse_unseen_step(self, *_: Any) -> None:
        """Stop a step of the optimizer inside, unless the audit observed its release."""
        seen, self._saw_step = self._saw_step, False
        if not seen:
            raise RuntimeError(UNSEEN_STEP)

    def _replace(self, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a method of the optimizer, and return the original."""
        real: Callable[..., Any] = getattr(self._optimizer, name)
        self._original[name] = vars(self._optimizer).get(name)
        setattr(self._optimizer, name, ours)
        return real

    def _pre_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count the examples of a step. A step that Opacus skips keeps its sum for the next one."""
        before = self._examples if self._optimizer._is_last_step_skipped else 0
        self._examples = before + self._gradients.examples()
        return self._real_pre_step(*args, **kwargs)

    def _signal_skip_step(self, do_skip: bool = True) -> None:
        """Pass on BatchMemoryManager's signal whether a batch ends a step."""
        assert isinstance(self._selection, _RowSelection)
        self._real_signal(do_skip)
        self._selection.rows.note_signal(ends_step=not do_skip)

    def _clip_and_accumulate(self) -> None:
        """Run the optimizer's own clip, with the canaries in the last physical batch of a step."""
        assert self._real_clip is not None
        assert self._scale is not None
        self._clipped = self._clipped_sum()
        if not self._optimizer._check_skip_next_step(pop_next=False):
            self._present = self._selection.canaries(self._examples)
            self._others, self._clipped = self._gradients.combined(self._clipped), None
            if self._present.size and self._gradients.joins:
                size = float(self._optimizer.max_grad_norm)
                entering = np.concatenate([*self._selection.repeats, self._present])
                rows = [self._gradients.updates(self.audit, [i], size, scale=self._scale) for i in entering]
                _append_rows(self._optimizer.params, [-torch.stack(parts) for parts in zip(*rows, strict=True)])
        self._real_clip()

    def _add_noise(self) -> None:
        """Add canaries to the complete clipped sum, then the noise. Opacus calls this once per step."""
        if self._optimizer.step_hook != self._after_noise:
            raise RuntimeError(HOOK_REPLACED)
        if self._scale is None:
            self._present = self._selection.canaries(self._examples)
            sums = self._gradients.sums()
            self._others = self._gradients.kept("others", sums)
            if self._gradients.joins:
                size = self._clip_norm() * self._gradients.clip_in_sum
                for canaries in [*self._selection.repeats, self._present]:
                    if canaries.size:
                        self._gradients.subtract(sums, self.audit, canaries, size)
        self._real_add_noise()

    def _after_noise(self, optimizer: DPOptimizer) -> None:
        if self._others is None:
            raise RuntimeError(METHOD_REPLACED)
        if self._real_hook is not None:
            self._real_hook(optimizer)
        divisor = self._gradients.divisor
        noise = update_noise_multiplier(optimizer)
        noise_std = noise * float(optimizer.max_grad_norm) / divisor
        self._step = _Step(divisor, self._clip_norm() / divisor, noise, noise_std)
        if self._real_completion is None:
            self._observe()

    def _complete(self) -> None:
        """Observe the release, which is complete once the gradients of all ranks are summed, after the step hook."""
        assert self._real_completion is not None
        with self._gradients.lost_ranks():
            self._real_completion()
        self._observe()

    def _observe(self) -> None:
        assert self._step is not None
        step, self._step = self._step, None
        self._noise_multipliers.add(step.noise)
        self._steps += 1
        if self._steps == 1:
            self._warn_if_accountant_is_behind()
        if self._steps == EARLY_STEPS + 1:
            self._warn_if_weights_are_frozen()
        seen, number = self._faults_of_step(), self.audit.last_round + 1
        settings = self._accounting.now(clip_norm=self._clip_norm())
        self._accounting.see(number, settings)
        others, self._others = self._others, None
        if self._zero_gradients.remain:
            self._zero_gradients.check(self._gradients.parts(others))
        if step.noise or self._present.size:  # the audit observes minus the gradient
            self._gradients.divide(others, -step.divisor * self._gradients.clip_in_sum)
        else:
            others = None
        self._steps_without_others += others is None
        release = self._gradients.kept("release", self._gradients.release())
        self._gradients.divide(release, -1.0)
        try:
            self.audit.observe_round(
                number,
                release,
                present=self._present,
                others=others,
                noise_std=step.noise_std,
                clip_norm=step.clip_norm,
                scale=1.0 if self._scale is None else self._scale,
                participants=self._selection.participants,
                copy=self._gradients.reuses_memory,
            )
        except NotFiniteError as error:
            raise NotFiniteError(
                f"the gradient of step {number}, or of the one before it, is NaN or infinite, so nothing can be released: "
                f"check the loss and the learning rate ({error})"
            ) from None
        self._journal.add_round(
            self.audit.last_round,
            canaries=int(self._present.size),
            examples=self._selection.participants,
            gradient_noise_multiplier=step.noise,
            **settings,
            **{name: count for name, count in vars(seen).items() if count},
        )
        self._saw_step = True

    def _faults_of_step(self) -> _Faults:
        """The faults since the last step, which are added to those of the run."""
        seen = _Faults()
        if isinstance(self._selection, _RowSelection):
            seen.dropped, self._selection.rows.dropped = self._selection.rows.dropped, 0
            seen.repeated = int(self._selection.last_has_repeats)
        if self._ghost_norms is not None and not self._ghost_norms.was_asked():
            seen.unclipped = 1
            if not self._faults.unclipped and self._gradients.ranks.rank == 0:
                warn(_why_not_clipped(1), RuntimeWarning, stacklevel=2)
        self._faults = _Faults(*(one + other for one, other in zip(astuple(self._faults), astuple(seen), strict=True)))
        return seen

    def _warn_if_weights_are_frozen(self) -> None:
        """Warn if no parameter has moved in the first steps. The training gauges say more at the end."""
        if self._initial is None:
            return
        now = self._gradients.combined(self._gradients.parameters())
        pairs = (
            zip(now.values(), self._initial.values(), strict=True) if isinstance(now, dict) else [(now, self._initial)]
        )
        moved = any(not torch.equal(one, other) for one, other in pairs)
        if not self._gradients.ranks.sum(np.array([float(moved)]))[0] and self._gradients.ranks.rank == 0:
            warn(
                f"after {EARLY_STEPS} steps no weight has moved: this training changes nothing. Check that the optimizer "
                "holds this model's parameters, and that the learning rate is above 0",
                RuntimeWarning,
                stacklevel=2,
            )

    def _audited_items(self) -> list[AuditedItem]:
        """The parts of the pipeline that only the integration knows about, checked or not."""
        if not self._steps:
            reason = "no step since the restart" if self.audit.last_round else "no step was observed"
            return [AuditedItem(name, "not checked", reason) for name in ("clipping", "sampler")]
        items = [
            self._clipping_item(),
            self._sampler_item(),
            AuditedItem("weights", "does not apply", "Opacus has no weights: every example counts once in the sum"),
        ]
        if self._steps_without_others:
            items.append(AuditedItem("others", "not checked", self._why_no_others()))
        else:
            source = "recomputed from the per-example gradients" if self._scale else "read from the optimizer"
            items.append(AuditedItem("others", "checked", f"the sum of the other examples was {source} in every step"))
        if not self.audit.settings.layers:
            remedy = "the audit has no layers: give Audit(…, layers=named_layers(optimizer, model))"
            items.append(AuditedItem("tensors", "not checked", remedy))
        return items

    def _sampler_item(self) -> AuditedItem:
        fault = self._sampler_fault()
        if fault:
            return AuditedItem("sampler", "failed", fault)
        if isinstance(self._selection, _RowSelection):
            reason = "each canary was in exactly the steps for which the data loader picked its row"
            return AuditedItem("sampler", "checked", reason)
        reason = "the audit drew its canaries itself, at the given probability; pass data_loader to observe its sampler"
        return AuditedItem("sampler", "not checked", reason)

    def _clipping_item(self) -> AuditedItem:
        fault = self._clipping_fault()
        return AuditedItem("clipping", "failed", fault) if fault else self._clipping

    def _sampler_fault(self) -> str | None:
        """Why the batches are not a Poisson sample; None if they may be."""
        steps, dropped = self._faults.repeated, self._faults.dropped
        if steps:
            return (
                f"a row was in a step more than once in {count_of(steps, 'step')}: it then adds as many clip norms, and no "
                "accountant allows for that"
            )
        if dropped:
            batches = "1 batch" if dropped == 1 else f"{dropped:,} batches"
            return (
                f"the loop fetched {batches} between audited steps and took no audited step for them: if it trained on "
                "them, it did so without privacy, and if it chose among batches, no accountant allows for that"
            )
        return None

    def _clipping_fault(self) -> str | None:
        """Proof that examples were not clipped; None if there is none."""
        if self._faults.unclipped:
            return _why_not_clipped(self._faults.unclipped)
        longest = self._longest_sum()
        if longest > 1 + ROUNDING:
            return (
                f"the sum of a step's examples was up to {longest:.3g} times as long as if each had been clipped to the "
                "clip norm"
            )
        return None

    def _longest_sum(self) -> float:
        """The longest sum of examples, over its largest possible length: the clip norm for each row."""
        if self.audit.settings.replicated or not self.audit.settings.layers:
            return 0.0  # then the norms by layer are upper limits, or unknown
        longest = 0.0
        for item in self.audit.log.rounds():
            if item.participants is not None and item.layer_others is not None:
                most = max(item.participants, 1) * item.clip_norm  # Opacus may fill an empty batch with a random row
                longest = max(longest, float(np.linalg.norm(item.layer_others)) / most)
        return longest

    def _clip_norm(self) -> float:
        """The most that an example adds to the sum. With ghost clipping the model clips, perhaps at another norm."""
        norm = float(self._optimizer.max_grad_norm)
        return norm if self._ghost_norms is None else max(norm, self._ghost_norms.clip_norm)

    def _parameters_outside(self) -> tuple[str, ...]:
        return () if self._model is None else tuple(_parameters_outside(self._optimizer, self._model))

    def _warn_if_accountant_is_behind(self) -> None:
        """Warn in the first step after a restart if the accountant does not know the steps before it."""
        counted, before = self._accounting.steps, self.audit.last_round
        if counted is None or not before or counted - 1 == before:
            return
        if isinstance(self._selection, _RowSelection) and self._gradients.ranks.rank == 0:
            warn(
                f"this run resumes an audit of {count_of(before, 'step')}, but the accountant has counted "
                f"{count_of(counted - 1, 'step')}: restore the accountant with the model, or choose another directory",
                RuntimeWarning,
                stacklevel=2,
            )

    def _why_no_others(self) -> str:
        return (
            f"known-others omits {self._steps_without_others} of {self._steps} steps: they had no noise and no canary, so "
            "nothing remains once the other examples are subtracted"
        )

    def _notes(self) -> list[str]:
        notes = [self._why_no_others()] if self._steps_without_others else []
        notes += self._accounting.notes
        if self._planned is not None and self.audit.last_round > self._planned:
            notes.append(
                f"{count_of(self.audit.last_round, 'step')} ran, and {self._planned} were planned: the claim is about all "
                "that ran"
            )
        if _has_guessable_seed(self._optimizer):
            notes.append(
                "the seed of the noise's generator is a small number or torch's default, so anyone can compute the noise: "
                "in production, do not seed torch, or call seed() on the noise_generator, or use secure_mode"
            )
        if not self.audit.last_round:
            notes.append("the audit observed no step of the optimizer")
        elif self._noise_multipliers == {0.0}:
            notes.append("the noise multiplier is 0, so the optimizer's settings promise no privacy")
        return notes

    def _warnings(self) -> list[str]:
        warnings = []
        if self._zero_gradients.remain and self._steps >= FEWEST_ROUNDS and any(self._noise_multipliers):
            names, indices = self._names(), self._zero_gradients.indices()
            zero = _join_names(names[i] for i in indices)
            warnings.append(
                f"these parameters received noise although their gradient was 0 in every step: {zero}; to keep them fixed, "
                "set requires_grad=False before make_private"
            )
        counted = self._accounting.steps
        if isinstance(self._selection, _RowSelection) and counted not in (None, self.audit.last_round):
            warnings.append(
                f"the accountant counted {count_of(counted, 'step')}, and the audit observed {self.audit.last_round}; "
                "restore the accountant with the model after a restart, and audit from the first step"
            )
        if isinstance(self._selection, _RowSelection) and self._selection.steps_with_repeats:
            warnings.append(
                f"the data loader picked a row more than once in {count_of(self._selection.steps_with_repeats, 'step')}, up "
                f"to {self._selection.most_times} times; one example then adds as many clip norms, which no accountant "
                "allows for"
            )
        if self._outside:
            warnings.append(
                f"these parameters require gradients but are not in the optimizer: {_join_names(self._outside)}; they are "
                "not audited, and if another optimizer trains them, it does so without privacy"
            )
        return warnings

    def _names(self) -> list[str]:
        params, layers = self._optimizer.params, self.audit.settings.layers
        if [size for _, size in layers] == [p.numel() for p in params]:
            return [name for name, _ in layers]
        return [f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(params)]

    def _clipped_sum(self) -> list[Any]:
        """The clipped sum of this step's examples so far, computed here because the optimizer's own clip is under test."""
        pairs = zip(self._optimizer.grad_samples, self._optimizer.params, strict=True)
        samples = [g.reshape(len(g), p.numel()) for g, p in pairs]  # a step may have no examples
        norms = torch.stack([g.norm(2, dim=1) for g in samples]).norm(2, dim=0)
        factors = (float(self._optimizer.max_grad_norm) / norms).clamp(max=1.0)  # norm 0 gives inf, clamped to 1
        current = [factors.to(g.dtype) @ g for g in samples]
        earlier = [p.summed_grad for p in self._optimizer.params]
        if self._clipped is not None:
            earlier = self._clipped  # not the optimizer's own sum of earlier physical batches
        return current if earlier[0] is None else [a + b.reshape(-1) for a, b in zip(current, earlier, strict=True)]

    def _settings(self) -> dict[str, Any]:
        optimizer = self._optimizer
        privacy = {
            "noise_multiplier": float(optimizer.noise_multiplier),
            "clip_norm": float(optimizer.max_grad_norm),
            "sampling_probability": self._probability,
            "delta": self.audit.settings.delta,
        }
        canaries = {"count": self.audit.settings.canaries, "through_clip": self._scale is not None}
        if isinstance(self._selection, _RowSelection):
            canaries["rows"] = self._selection.rows.count
        size = self._gradients.ranks.size
        return {"trainer": "opacus", "privacy": privacy, "canaries": canaries} | ({"ranks": size} if size > 1 else {})

    def _pipeline(self) -> dict[str, Any]:
        """Facts about the pipeline that the optimizer knows, besides its settings."""
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self._optimizer.params})
        secure = "a cryptographic generator (Opacus's secure mode)"
        plain = "a torch.Generator, which is not cryptographic (Opacus without secure mode)"
        if _has_guessable_seed(self._optimizer):
            plain += ", seeded with a number that can be guessed"
        return {
            "trust_model": "central",
            "precision": ", ".join(kinds),
            "generator": secure if self._optimizer.secure_mode else plain,
        }

    def _parameters(self) -> Any:
        return self._gradients.combined(self._gradients.parameters())


def _why_not_clipped(steps: int) -> str:
    return (
        f"in {count_of(steps, 'step')} the loss did not ask the model for the norms of its gradients, so nothing was "
        "clipped: ghost clipping needs the loss that make_private returned"
    )


def _unit_note(unit: str | None) -> str:
    """The note on the privacy unit of the claim."""
    row = f"one {unit} (a row of the data set)" if unit else "one row of the data set"
    return (
        f"privacy unit: {row}, added or removed; a person whose data are in several rows has a larger epsilon than the "
        "claimed one"
    )


def _has_guessable_seed(optimizer: DPOptimizer) -> bool:
    """Whether anyone can guess the seed of the noise: a small number, or the seed of every `torch.Generator()`."""
    if optimizer.secure_mode:
        return False
    if optimizer.generator is not None:
        seed = int(optimizer.generator.initial_seed())
        return seed < GUESSABLE or seed == torch.Generator().initial_seed()
    on_gpu = all(p.device.type == "cuda" for p in optimizer.params)
    return (torch.cuda.initial_seed() if on_gpu else torch.initial_seed()) < GUESSABLE


def _checked_epsilon(epsilon: Any) -> float:
    if isinstance(epsilon, float) and epsilon == math.inf:
        return epsilon
    number = one_number("accounted_epsilon", epsilon)
    if not number > 0:
        raise ValueError(f"accounted_epsilon must be above 0, got {number:g}")
    return number


def _checked_unit(unit: str | None) -> str | None:
    if unit is None:
        return None
    fits = isinstance(unit, str) and unit.strip() and unit.strip().isprintable() and len(unit.strip()) <= LONGEST_UNIT
    if not fits:
        raise ValueError(
            f"unit must name what one row of the data set holds, such as 'document', in at most {LONGEST_UNIT} printable "
            f"characters, got {short_repr(unit)}"
        )
    return unit.strip()


class _Step(NamedTuple):
    """The divisor of a step's sum, its noise multiplier, and in the units of the release its clip norm and noise."""

    divisor: float
    clip_norm: float
    noise: float
    noise_std: float


def _gradients(optimizer: DPOptimizer, model: Any, user_reduce: Any) -> OneProcess:
    """Access to the optimizer's gradients: in one process, replicated or sharded."""
    reduce = reduce_for(optimizer, user_reduce)
    if reduce is None:
        return OneProcess(optimizer)

    def make() -> OneProcess:
        names = None if model is None else plain_names(name for name, _ in named_layers(optimizer, model))
        kind = Replicated if isinstance(optimizer, REPLICATED) else Sharded
        return kind(optimizer, names, reduce, model)

    return on_every_rank(Ranks(reduce), make)


def _row_count(data_loader: "torch.utils.data.DataLoader[Any]") -> int:
    """Number of rows of a loader's data set; `check_loader` has ensured that it has a length."""
    return len(cast(Sized, data_loader.dataset))


def _loader_rate(loader: Any, sampling_probability: float | None, rng: Any, *, every_rank: bool) -> float:
    """The sampling rate that Opacus assumes for a loader, whatever its sampler."""
    if sampling_probability is not None or rng is not None:
        name = "rng" if sampling_probability is None else "sampling_probability"
        raise ValueError(f"data_loader decides which canaries are in a step, so omit {name}")
    check_loader(loader, every_rank=every_rank)
    return min(float(getattr(loader, "sample_rate", 1 / max(len(loader), 1))), 1.0)


def _checked_claim(
    optimizer: DPOptimizer, rate: float, steps: int | None, **settings: Unpack[AuditSettings]
) -> Claim | None:
    """The claim that `audited` was given; ValueError if it cannot be watched during training."""
    own = settings.get("audit")
    accountant = attached_accountant(optimizer)
    claim = Claim.of(number_of(settings.get("claim"), delta=settings.get("delta"), unknown=accountant))
    made = own.claim if isinstance(own, Audit) else claim
    planned = own.settings.rounds if isinstance(own, Audit) else None
    watched = own.watch.active if isinstance(own, Audit) else settings.get("on_violation") is not None
    if watched and made is not None and made.bare and rate < 1 and steps is None and planned is None:
        raise ValueError(
            "on_violation needs steps=, the number of planned steps, to tell during training what a claim that counts "
            "sampling allows"
        )
    return claim


def _checked_options(
    optimizer: DPOptimizer, canaries: int, sampling_probability: float, through_clip: bool | None, scale: float | None
) -> tuple[float, float | None, AuditedItem]:
    """Sampling probability, scale of the canaries (None after the clip), and whether the clip is checked."""
    probability = one_number("sampling_probability", sampling_probability)
    if not 0 < probability <= 1:
        raise ValueError(f"sampling_probability must lie in (0, 1], got {probability}")
    length = positive("scale", CLIP_SCALE if scale is None else scale)
    if length <= 1:
        raise ValueError(f"scale must be above 1, or the clip has nothing to clip, got {length}")
    obstacle = _obstacle(optimizer, canaries * probability)
    if through_clip or (through_clip is None and obstacle is None):
        reason = f"canaries entered the optimizer's clip {length:g} times longer than the clip norm"
        return probability, length, AuditedItem("clipping", "checked", reason)
    if scale is not None:
        raise ValueError("scale needs through_clip=True: after the clip, a canary is as long as the clip norm")
    why = f": {obstacle}" if obstacle else "; use through_clip=True"
    return probability, None, AuditedItem("clipping", "not checked", f"canaries entered after the clip{why}")


def _check_optimizer(optimizer: DPOptimizer, through_clip: bool | None) -> None:
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"optimizer must be the one that make_private returned, got {short_repr(optimizer)}")
    if not optimizer.params:
        raise ValueError("the optimizer must hold at least one parameter that requires gradients, got none")
    if isinstance(optimizer, DistributedPerLayerOptimizer):
        raise ValueError(
            "DistributedPerLayerOptimizer adds noise layer by layer while gradients are computed, so canaries cannot join "
            "its sum; use SimpleDistributedPerLayerOptimizer, which make_private chooses"
        )
    if isinstance(getattr(optimizer.add_noise, "__self__", None), _OptimizerAudit):
        raise ValueError("this optimizer is audited already: unaudited(optimizer) removes the first audit")
    if not isinstance(through_clip, bool | None):
        raise TypeError(f"through_clip must be True, False or None, got {short_repr(through_clip)}")
    if through_clip and not _has_example_gradients(optimizer):
        raise ValueError(
            f"through_clip needs per-example gradients and one clip norm, and {type(optimizer).__name__} lacks them; "
            "omit through_clip, and canaries enter after the clip"
        )


def _has_example_gradients(optimizer: DPOptimizer) -> bool:
    return not isinstance(optimizer, DPOptimizerFastGradientClipping | DPPerLayerOptimizer)


def _obstacle(optimizer: DPOptimizer, canaries_per_step: float) -> str | None:
    """Why canaries do not go through this optimizer's clip by default; None if they do."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        return "ghost mode has no per-example gradients; only hooks mode can send canaries through the clip"
    if not _has_example_gradients(optimizer):
        return "only a clip of the whole gradient can be checked, not one of each layer"
    if isinstance(optimizer, AdaClipDPOptimizer):
        return "an adaptive clip would count them as clipped examples; through_clip=True accepts that"
    dim = sum(p.numel() for p in optimizer.params)
    if canaries_per_step * dim > MOST_THROUGH_CLIP:
        return (
            f"about {math.ceil(canaries_per_step):,} canaries per step in {dim:,} parameters are expensive to send through "
            "it; use through_clip=True, or fewer canaries"
        )
    return None


def _named_tensors(model: Any) -> "dict[str, torch.Tensor]":
    """The model's parameters by their names, without the prefixes of GradSampleModule and torch.compile."""
    try:
        tensors = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else dict(model)
    except (TypeError, ValueError):
        tensors = {}
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TypeError(f"model must be a torch module or map parameter names to tensors, got {short_repr(model)}")
    plain = {_plain_name(str(name)): tensor for name, tensor in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


def _plain_name(name: str) -> str:
    while prefix := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _place(tensor: Any) -> tuple[Any, ...]:
    shard = local(tensor)
    return shard.device, shard.data_ptr(), tuple(shard.shape)


def _parameters_outside(optimizer: DPOptimizer, model: Any) -> list[str]:
    """Names of the parameters that require gradients and are not in the optimizer."""
    inside = {_place(p) for p in optimizer.params}
    return [name for name, p in _named_tensors(model).items() if p.requires_grad and _place(p) not in inside]


def _join_names(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def _append_rows(params: list[Any], rows: list[Any]) -> None:
    """Append rows, one array for each parameter, to the last batch as additional examples."""
    for p, part in zip(params, rows, strict=True):
        batches = p.grad_sample if isinstance(p.grad_sample, list) else [p.grad_sample]
        last = batches[-1]
        longer = torch.cat([last, part.to(last.dtype).view(-1, *last.shape[1:])])
        p.grad_sample = [*batches[:-1], longer] if isinstance(p.grad_sample, list) else longer
