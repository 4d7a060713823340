"""The audit of an optimizer's steps, and what it knows of the pipeline when the run is over."""

import math
from collections.abc import Mapping
from typing import Any
from warnings import warn

import numpy as np
import torch
from opacus import PrivacyEngine
from opacus.accountants import IAccountant
from opacus.optimizers import DPOptimizer

from coalmine.argument_checks import count_of, one_number
from coalmine.audit import Audit
from coalmine.data_canaries import DataCanaries
from coalmine.evidence.gauges.training import FEWEST_ROUNDS
from coalmine.integrations.framework_audit import FrameworkAudit, tensors_item
from coalmine.integrations.opacus.accounting import StepAccounting, number_of
from coalmine.integrations.opacus.faults import Faults
from coalmine.integrations.opacus.gradients import OneProcess
from coalmine.integrations.opacus.options import CanaryOptions
from coalmine.integrations.opacus.parameters import join_names, parameters_outside
from coalmine.integrations.opacus.replay import Loss, Replays
from coalmine.integrations.opacus.selection import RowSelection, Selection
from coalmine.integrations.opacus.steps import AuditedSteps, Step
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.result.audit_result import AuditResult
from coalmine.result.other_rank import ResultOnRank0
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

GUESSABLE = 1 << 32  # seeds below this are found by trying them all
EARLY_STEPS = 10  # after this many steps, weights that have not moved give a warning
EVERY_STEP = AuditedItem(
    "participations", "checked", "a row is at most in every step, and the claim counts every step that ran"
)


class OpacusAudit(FrameworkAudit):
    """The audit of an optimizer of Opacus: `optimizer.audit`."""

    trainer = Trainer("opacus", "opacus", "example")

    def __init__(
        self,
        core: Audit,
        optimizer: DPOptimizer,
        gradients: OneProcess,
        selection: Selection,
        options: CanaryOptions,
        *,
        model: Any,
        planned: int | None,
        replay: bool | Loss = True,
        save_model: bool = True,
        data_canaries: DataCanaries | None = None,
    ) -> None:
        self._optimizer, self._gradients, self._selection = optimizer, gradients, selection
        self._options, self._model, self._planned = options, model, planned
        self._outside = dict.fromkeys(self._parameters_outside())
        self._ranks = gradients.ranks
        super().__init__(
            core, data_canaries=data_canaries, **_settings(optimizer, options, selection, self._ranks.size)
        )
        if self._has_final():
            core.rewind_to(core.last_round)  # resume a run that ended between its final model and its result
        self._initial = self._parameters() if core.last_round == 0 else None
        self.commit(initial=self._initial, planned=planned, save_model=save_model)
        self._faults = Faults(optimizer, model, selection, self.recorder)
        loader = selection.picked.loader if isinstance(selection, RowSelection) else None
        self._accounting = StepAccounting(
            optimizer,
            loader,
            options.probability,
            clip_norm=self._faults.clip_norm,
            earlier=self.recorder.earlier_lines,
        )
        self._noise_multipliers = self._earlier_steps()
        self.read_claim_as(self._accounted_claim(planned or 1))
        self.replays = Replays(
            optimizer,
            model,
            gradients,
            selection,
            self._faults,
            key=core.schedule.key,
            planned=planned,
            replay=replay,
            names=self._names,
            earlier=self.recorder.earlier_lines,
        )
        self._steps = AuditedSteps(
            optimizer,
            core,
            gradients,
            selection,
            self._faults,
            self.recorder,
            self.replays,
            scale=options.scale,
            through_clip=options.through_clip,
            note=self._note_step,
        )
        self.replays.prepare(self.last_round + 1)

    def detach(self) -> None:
        """Restore the optimizer's own methods and hook."""
        super().detach()
        self._steps.detach()

    def finish(
        self,
        *,
        claim: Claim | float | str | IAccountant | PrivacyEngine | None = None,
        accounted_epsilon: float | None = None,
        initial: "torch.Tensor | Mapping[str, torch.Tensor] | None" = None,
        task: str | None = None,
    ) -> AuditResult | ResultOnRank0:
        """Observe the final model and return the result (rank 0 only). A second call judges the same model again.

        All keywords are optional:

        - `claim`: a claim for a run that began without one. It is judged, and the result says that it was made afterwards.
        - `accounted_epsilon`: the epsilon to report as the accountant's; by default the attached accountant is asked.
        - `initial`: the model before training, which `final-update` needs after a restart.
        - `task`: the name of the training task.
        """
        delta = self.core.settings.delta
        late = Claim.of(number_of(claim, delta=delta))
        if accounted_epsilon is not None:
            accounted_epsilon = _checked_epsilon(accounted_epsilon)
        if not self._has_final():
            self.core.observe_final(self._parameters(), initial=self._initial if initial is None else initial)
        self._faults.gather(self._ranks, len(self._optimizer.params))
        rows = self.replays.item(self._ranks)
        if self._ranks.rank > 0:
            return ResultOnRank0(self._ranks.rank)
        self._outside |= dict.fromkeys(self._parameters_outside())
        warnings = self._warnings()
        for text in warnings:
            warn(text, stacklevel=2)
        smallest = min(self._noise_multipliers, default=0.0)
        steps = max(self.last_round, self._accounting.steps or 0)
        accounted = self._accounted_claim(steps) if self.last_round else None
        stated = late if self.claim is None else self.claim
        counts_all = stated is not None and stated.bare and accounted is not None and not accounted.amplified
        run = FinishedRun(
            noise=smallest if len(self._noise_multipliers) == 1 else None,
            sampler_observed=isinstance(self._selection, RowSelection),
            accounted_epsilon=self._accounting.epsilon(delta) if accounted_epsilon is None else accounted_epsilon,
            accounted=accounted,
            accounted_by=self._accounting.name,
            pipeline=_pipeline(self._optimizer),
            items=[*self._items(), rows, *([EVERY_STEP] if counts_all else [])],
            notes=[*self._notes(), _unit_note(self.recorder.named_unit(stated))],
            warnings=warnings,
            entries={"noise_multiplier": smallest},
        )
        return self.conclude(late, run, task=task)

    def _has_final(self) -> bool:
        """Whether the final model was observed; only rank 0 knows."""
        return bool(self._ranks.gather(lambda: self.core.rank == 0 and self.core.log.final is not None)[0])

    def _earlier_steps(self) -> set[float]:
        """The noise multipliers of the steps before a restart, from the metrics."""
        noises = [line.get("gradient_noise_multiplier") for line in self.recorder.earlier_lines]
        return {float(noise) for noise in noises if isinstance(noise, int | float)}

    def _accounted_claim(self, steps: int) -> Claim:
        """The accounting of a bare claim over this many steps."""
        observed = isinstance(self._selection, RowSelection)
        return self._accounting.claim(steps=steps, delta=self.core.settings.delta, observed=observed)

    def _note_step(self, step: Step) -> dict[str, Any]:
        """Count a step that is about to be observed, and return values for its line of metrics."""
        self._noise_multipliers.add(step.noise)
        if self._steps.count == 1:
            self._compare_with_accountant()
        if self._steps.count == EARLY_STEPS + 1:
            self._warn_if_weights_are_frozen()
        faults = self._faults.note_step(warns=self._ranks.rank == 0)
        return self._accounting.note_step(self.last_round + 1, clip_norm=self._faults.clip_norm) | faults

    def _compare_with_accountant(self) -> None:
        """Refuse a log that lacks steps of the accountant, after a restart; warn if the accountant lacks some of the log."""
        counted, before = self._accounting.steps, self.last_round
        if counted is None or not before or counted - 1 == before:
            return
        if counted - 1 > before and self.core.directory is not None:
            raise RuntimeError(
                f"the accountant has counted {count_of(counted - 1, 'step')} before this one, but the log ends with step "
                f"{before}: restart from a checkpoint of step {before} or earlier, or audit a new run in another directory"
            )
        if isinstance(self._selection, RowSelection) and self._ranks.rank == 0:
            warn(
                f"this run resumes an audit of {count_of(before, 'step')}, but the accountant has counted "
                f"{count_of(counted - 1, 'step')}: restore the accountant with the model, or choose another directory",
                RuntimeWarning,
                stacklevel=2,
            )

    def _warn_if_weights_are_frozen(self) -> None:
        """Warn if no parameter has moved in the first steps. The training gauges say more at the end."""
        if self._initial is None:
            return
        pairs = zip(self._gradients.parts(self._parameters()), self._gradients.parts(self._initial), strict=True)
        moved = any(not torch.equal(now, before) for now, before in pairs)
        if not self._ranks.sum(np.array([float(moved)]))[0] and self._ranks.rank == 0:
            warn(
                f"after {EARLY_STEPS} steps no weight has moved: this training changes nothing. Check that the optimizer "
                "holds this model's parameters, and that the learning rate is above 0",
                RuntimeWarning,
                stacklevel=2,
            )

    def _items(self) -> list[AuditedItem]:
        """The parts of the pipeline that only the integration knows about, checked or not."""
        if not self._steps.count:
            reason = "no step since the restart" if self.last_round else "no step was observed"
            return [AuditedItem(name, "not checked", reason) for name in ("clipping", "sampler")]
        fault = self._faults.clipping_fault(self.core)
        return [
            AuditedItem("clipping", "failed", fault) if fault else self._options.clipping,
            self._faults.sampler_item(),
            AuditedItem("weights", "does not apply", "Opacus has no weights: every example counts once in the sum"),
            self._others_item(),
            *tensors_item(self.core, "give Audit(…, layers=named_layers(optimizer, model))"),
        ]

    def _others_item(self) -> AuditedItem:
        if self._steps.without_others:
            return AuditedItem("others", "not checked", self._why_no_others())
        source = (
            "read from the optimizer" if self._options.scale is None else "recomputed from the per-example gradients"
        )
        return AuditedItem("others", "checked", f"the sum of the other examples was {source} in every step")

    def _why_no_others(self) -> str:
        return (
            f"known-others omits {self._steps.without_others} of {self._steps.count} steps: they had no noise and no "
            "canary, so nothing remains once the other examples are subtracted"
        )

    def _notes(self) -> list[str]:
        notes = [self._why_no_others()] if self._steps.without_others else []
        notes += self._accounting.notes
        if self._planned is not None and self.last_round > self._planned:
            notes.append(
                f"{count_of(self.last_round, 'step')} ran, and {self._planned} were planned: the claim is about all that ran"
            )
        if _has_guessable_seed(self._optimizer):
            notes.append(
                "the seed of the noise's generator is a small number or torch's default, so anyone can compute the noise: "
                "in production, do not seed torch, or call seed() on the noise_generator, or use secure_mode"
            )
        if not self.last_round:
            notes.append("the audit observed no step of the optimizer")
        elif self._noise_multipliers == {0.0}:
            notes.append("the noise multiplier is 0, so the optimizer's settings promise no privacy")
        return notes

    def _warnings(self) -> list[str]:
        warnings = []
        zero = self._faults.zero_gradients
        if zero.remain and self._steps.count >= FEWEST_ROUNDS and any(self._noise_multipliers):
            names = self._names()
            warnings.append(
                "these parameters received noise although their gradient was 0 in every step: "
                f"{join_names(names[i] for i in zero.indices())}; to keep them fixed, set requires_grad=False before "
                "make_private"
            )
        if isinstance(self._selection, RowSelection):
            warnings += self._loader_warnings(self._selection)
        if self._outside:
            warnings.append(
                f"these parameters require gradients but are not in the optimizer: {join_names(self._outside)}; they are "
                "not audited, and if another optimizer trains them, it does so without privacy"
            )
        return warnings

    def _loader_warnings(self, selection: RowSelection) -> list[str]:
        warnings, counted = [], self._accounting.steps
        if counted not in (None, self.last_round):
            warnings.append(
                f"the accountant counted {count_of(counted, 'step')}, and the audit observed {self.last_round}; "
                "restore the accountant with the model after a restart, and audit from the first step"
            )
        if selection.steps_with_repeats:
            warnings.append(
                f"the data loader picked a row more than once in {count_of(selection.steps_with_repeats, 'step')}, up to "
                f"{selection.most_times} times; one example then adds as many clip norms, which no accountant allows for"
            )
        return warnings

    def _names(self) -> list[str]:
        params, layers = self._optimizer.params, self.settings.layers
        if [size for _, size in layers] == [p.numel() for p in params]:
            return [name for name, _ in layers]
        return [f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(params)]

    def _parameters(self) -> Any:
        return self._gradients.combined(self._gradients.parameters())

    def _parameters_outside(self) -> list[str]:
        return [] if self._model is None else parameters_outside(self._optimizer, self._model)


def _settings(optimizer: DPOptimizer, options: CanaryOptions, selection: Selection, ranks: int) -> dict[str, Any]:
    """The settings for config.toml."""
    canaries: dict[str, Any] = {"through_clip": "all" if options.through_clip is None else options.through_clip}
    if isinstance(selection, RowSelection):
        canaries["rows"] = selection.picked.count
    privacy = {
        "noise_multiplier": float(optimizer.noise_multiplier),
        "clip_norm": float(optimizer.max_grad_norm),
        "sampling_probability": options.probability,
    }
    config = {"privacy": privacy, "canaries": canaries, "optimizer": _optimizer_facts(optimizer)}
    return config | ({"ranks": ranks} if ranks > 1 else {})


def _optimizer_facts(optimizer: DPOptimizer) -> dict[str, Any]:
    """The kind of the optimizer, its momentum, and whether its steps add up to a multiple of the released gradients."""
    inner, groups = optimizer.original_optimizer, optimizer.original_optimizer.param_groups
    plain = not any(group.get(name) for group in groups for name in ("dampening", "weight_decay", "nesterov"))
    same = len({(group["lr"], group.get("momentum")) for group in groups}) == 1
    linear = type(inner) is torch.optim.SGD and plain and same
    momentum = {"momentum": float(groups[0]["momentum"])} if linear else {}
    return {"name": type(inner).__name__, "linear": linear} | momentum


def _pipeline(optimizer: DPOptimizer) -> dict[str, Any]:
    """Facts about the pipeline that the optimizer knows, besides its settings."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in optimizer.params})
    secure = "a cryptographic generator (Opacus's secure mode)"
    plain = "a torch.Generator, which is not cryptographic (Opacus without secure mode)"
    if _has_guessable_seed(optimizer):
        plain += ", seeded with a number that can be guessed"
    return {
        "trust_model": "central",
        "precision": ", ".join(kinds),
        "generator": secure if optimizer.secure_mode else plain,
    }


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
