"""Faults of a run that only the integration can see: batches, clipping, and gradients that are always 0."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from warnings import warn

import numpy as np
import torch
from opacus.grad_sample import GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.integrations.opacus.selection import RowSelection, Selection
from coalmine.integrations.recorder import RunRecorder
from coalmine.measure.ranks import Ranks
from coalmine.verdict.coverage import AuditedItem

ROUNDING = 0.01  # relative error of a sum of clipped gradients, as half precision may have


@dataclass
class FaultCounts:
    """Counts of faults. The metrics of a run directory keep them for a restart."""

    dropped: int = 0  # batches left out in the middle of a pass
    repeated: int = 0  # steps in which a row occurred more than once
    unclipped: int = 0  # steps of ghost clipping that clipped nothing


class Faults:
    """The faults of all steps, those before a restart included."""

    def __init__(self, optimizer: DPOptimizer, model: Any, selection: Selection, recorder: RunRecorder) -> None:
        self._optimizer, self._selection = optimizer, selection
        self._ghost = GhostNorms.of(optimizer, model)
        self.zero_gradients = ZeroGradients(len(optimizer.params))
        self.counts = FaultCounts(**{each.name: recorder.earlier_count(each.name) for each in fields(FaultCounts)})

    @property
    def clip_norm(self) -> float:
        """The most that an example adds to the sum. With ghost clipping the model clips, perhaps at another norm."""
        norm = float(self._optimizer.max_grad_norm)
        return norm if self._ghost is None else max(norm, self._ghost.clip_norm)

    @property
    def asked_for_norms(self) -> bool:
        """Whether the loss has asked for the norms of ghost clipping since the last step."""
        return self._ghost is not None and self._ghost.asked

    @asked_for_norms.setter
    def asked_for_norms(self, asked: bool) -> None:
        if self._ghost is not None:
            self._ghost.asked = asked

    def note_step(self, *, warns: bool) -> dict[str, int]:
        """Add the faults since the last step to those of the run. Those of the step are returned."""
        seen = FaultCounts()
        if isinstance(self._selection, RowSelection):
            seen.dropped = self._selection.picked.take_dropped()
            seen.repeated = int(self._selection.last_has_repeats)
        if self._ghost is not None and not self._ghost.was_asked():
            seen.unclipped = 1
            if not self.counts.unclipped and warns:
                warn(_why_not_clipped(1), RuntimeWarning, stacklevel=2)
        found = {name: count for name, count in vars(seen).items() if count}
        for name, count in found.items():
            setattr(self.counts, name, getattr(self.counts, name) + count)
        return found

    def gather(self, ranks: Ranks, parameters: int) -> None:
        """Keep only the parameters whose gradient was 0 on every rank, and count the faults of all ranks."""
        nonzero = np.ones(parameters)
        nonzero[self.zero_gradients.indices()] = 0
        own = np.array([*nonzero, self.counts.dropped, self.counts.unclipped])
        # Repeats are those of all ranks already.
        *seen, self.counts.dropped, self.counts.unclipped = ranks.sum(own).astype(np.int64).tolist()
        self.zero_gradients.keep([i for i, count in enumerate(seen) if count == 0])

    def release(self) -> None:
        if self._ghost is not None:
            self._ghost.release()

    def sampler_fault(self) -> str | None:
        """Why the batches are not a Poisson sample; None if they may be."""
        if self.counts.repeated:
            return (
                f"a row was in a step more than once in {count_of(self.counts.repeated, 'step')}: it then adds as many clip "
                "norms, and no accountant allows for that"
            )
        if self.counts.dropped:
            batches = "1 batch" if self.counts.dropped == 1 else f"{self.counts.dropped:,} batches"
            return (
                f"the loop fetched {batches} between audited steps and took no audited step for them: if it trained on "
                "them, it did so without privacy, and if it chose among batches, no accountant allows for that"
            )
        return None

    def clipping_fault(self, audit: Audit) -> str | None:
        """Proof that examples were not clipped; None if there is none."""
        if self.counts.unclipped:
            return _why_not_clipped(self.counts.unclipped)
        longest = _longest_sum(audit)
        if longest > 1 + ROUNDING:
            return (
                f"the sum of a step's examples was up to {longest:.3g} times as long as if each had been clipped to the "
                "clip norm"
            )
        return None

    def sampler_item(self) -> AuditedItem:
        """Whether the loader's sampler was observed, and picked as the accountant assumes."""
        fault = self.sampler_fault()
        if fault:
            return AuditedItem("sampler", "failed", fault)
        if isinstance(self._selection, RowSelection):
            reason = "each canary was in exactly the steps for which the data loader picked its row"
            return AuditedItem("sampler", "checked", reason)
        reason = "the audit drew its canaries itself, at the given probability; pass data_loader to observe its sampler"
        return AuditedItem("sampler", "not checked", reason)


def _why_not_clipped(steps: int) -> str:
    return (
        f"in {count_of(steps, 'step')} the loss did not ask the model for the norms of its gradients, so nothing was "
        "clipped: ghost clipping needs the loss that make_private returned"
    )


def _longest_sum(audit: Audit) -> float:
    """The longest sum of examples, over its largest possible length: the clip norm for each row."""
    if audit.settings.replicated or not audit.settings.layers:
        return 0.0  # then the norms by layer are upper limits, or unknown
    longest = 0.0
    for item in audit.log.rounds_after(0):  # the result reads and checks them
        if item.participants is not None and item.layer_others is not None:
            most = max(item.participants, 1) * item.clip_norm  # Opacus may fill an empty batch with a random row
            longest = max(longest, float(np.linalg.norm(item.layer_others)) / most)
    return longest


class GhostNorms:
    """Notices whether the loss asks the model of ghost clipping for the norms of the gradients, which it must clip."""

    def __init__(self, model: Any) -> None:
        self._model, self._real, self.asked = model, model.get_norm_sample, False
        model.get_norm_sample = self._norms

    @classmethod
    def of(cls, optimizer: DPOptimizer, model: Any) -> "GhostNorms | None":
        ghost = isinstance(optimizer, DPOptimizerFastGradientClipping)
        return cls(model) if ghost and isinstance(model, GradSampleHooksFastGradientClipping) else None

    @property
    def clip_norm(self) -> float:
        return float(self._model.max_grad_norm)

    def was_asked(self) -> bool:
        """Whether the loss has asked since the last call."""
        asked, self.asked = self.asked, False
        return asked

    def release(self) -> None:
        del self._model.get_norm_sample

    def _norms(self) -> Any:
        self.asked = True
        return self._real()


class ZeroGradients:
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
