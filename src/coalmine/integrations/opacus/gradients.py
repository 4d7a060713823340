"""The gradients of an Opacus step, and the form in which the audit takes them."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from opacus.optimizers import DPOptimizer

from coalmine.audit import Audit
from coalmine.integrations.opacus.accounting import ADJACENCY, UNIT
from coalmine.integrations.setup import AuditSettings, set_up_audit
from coalmine.measure.ranks import Ranks

# Up to this many parameters, vectors of all of them are kept on a GPU between steps: 128 MB each in single precision.
MOST_KEPT = 1 << 25
TERMS = {"usual_unit": UNIT, "adjacency": ADJACENCY}  # of a claim that states none


class OneProcess:
    """The gradients of one process. The audit takes them as one vector."""

    sharded = False  # whether each process holds a part of every parameter
    joins = True  # whether canaries join the sum of this process
    # The optimizer's method that completes the release after its step hook, if there is one.
    observed_after: ClassVar[str | None] = None

    def __init__(self, optimizer: DPOptimizer, names: Sequence[str] | None = None) -> None:
        self._optimizer, self._names = optimizer, names
        self.ranks = Ranks(None)
        self.clips_later = False  # whether the audit may take a function for the clipped sum of the examples
        self.reuses_memory = False  # whether `kept` overwrites what it returned before
        self._kept: dict[str, _Flat] = {}

    @property
    def most_canaries(self) -> int:
        """Number of canaries that the model has room for, in addition to the unobserved ones."""
        return sum(p.numel() for p in self._optimizer.params) // 2

    @property
    def clip_in_sum(self) -> float:
        """Length of a clipped example in `sums`, in clip norms."""
        return 1.0

    @property
    def divisor(self) -> float:
        """The clip norm over the length of a clipped example in the release."""
        if self._optimizer.loss_reduction != "mean":
            return 1.0
        return float(self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations)

    def set_up_audit(self, layers: Any, **settings: Unpack[AuditSettings]) -> Audit:
        """The user's own audit, or a new one, which is deferred unless `deferred` says otherwise."""
        on_gpu = all(p.device.type == "cuda" for p in self._optimizer.params)
        if settings.get("audit") is None and settings.get("deferred") is None:
            settings["deferred"] = True
        audit = set_up_audit(layers, **TERMS, **settings)
        # An attack of the user's own may keep a round's vector.
        self.reuses_memory = on_gpu and audit.settings.dim <= MOST_KEPT and not audit.scores
        self.clips_later = audit.deferred and all(p.device.type == "cpu" for p in self._optimizer.params)
        return audit

    def sums(self) -> list[Any]:
        """The clipped sum of the examples, without noise: one tensor for each parameter, not copied."""
        return [p.summed_grad for p in self._optimizer.params]

    def release(self) -> list[Any]:
        """The noised gradient, one tensor for each parameter."""
        return [p.grad for p in self._optimizer.params]

    def parameters(self) -> list[Any]:
        """The parameters, not copied."""
        return [p.detach() for p in self._optimizer.params]

    def examples(self) -> int:
        """Number of per-example gradients in the current batch, or in all batches that a step accumulates."""
        for p in self._optimizer.params:
            for name in ("grad_sample", "_norm_sample"):  # ghost mode has the second
                rows = getattr(p, name, None)
                if rows is not None:
                    return sum(map(len, rows)) if isinstance(rows, list) else len(rows)
        return 0

    def lost_ranks(self) -> Any:
        """A context for a collective of the training; in one process it does nothing."""
        return nullcontext()

    def combined(self, parts: Sequence[Any]) -> Any:
        """A copy of all parts in the form that the audit takes, here one vector."""
        return torch.cat([part.reshape(-1) for part in parts])

    def kept(self, name: str, parts: Sequence[Any]) -> Any:
        """As `combined`, for parts in the shapes of the parameters. If it `reuses_memory`, each name has one vector."""
        if not self.reuses_memory or len(parts) != len(self._flat(name).views):
            return self.combined(parts)
        flat = self._flat(name)
        torch._foreach_copy_(flat.views, list(parts))
        return flat.vector

    def subtract(self, sums: Sequence[Any], audit: Audit, present: Any, clip_norm: float) -> None:
        """Subtract the sum of these canaries from `sums`, in place."""
        if not self.reuses_memory:
            pairs = zip(sums, self.updates(audit, present, clip_norm), strict=True)
            torch._foreach_sub_(list(sums), [update.view_as(part) for part, update in pairs])
            return
        flat = self._flat("canaries")
        flat.vector.copy_(audit.measurer.sum_of_rows(present.tolist(), clip_norm, flat.vector))
        torch._foreach_sub_(list(sums), flat.views)

    def divide(self, combined: Any, divisor: float) -> None:
        """Divide what `combined` or `kept` returned, in place."""
        combined.div_(divisor)

    def parts(self, combined: Any) -> Sequence[Any]:
        """The parts of what `combined` or `kept` returned, one flat tensor for each parameter, not copied."""
        parts: Sequence[Any] = combined.split([p.numel() for p in self._optimizer.params])
        return parts

    def updates(self, audit: Audit, present: Any, clip_norm: float, *, scale: float = 1.0) -> list[Any]:
        """The sum of these canaries, one flat tensor for each parameter."""
        total = audit.measurer.sum_of_rows(present.tolist(), scale * clip_norm, self._like)
        return list(self.parts(total))

    def rows(self, audit: Audit, canaries: list[int], size: float) -> Sequence[Any]:
        """These canaries, each of norm `size`, as the rows of one matrix for each parameter."""
        rows = audit.measurer.rows_of(canaries, size, self._like)
        return torch.split(rows, [p.numel() for p in self._optimizer.params], dim=1)

    def _flat(self, name: str) -> "_Flat":
        if name not in self._kept:
            self._kept[name] = _Flat(self._optimizer.params, self._dtype)
        return self._kept[name]

    @cached_property
    def _like(self) -> torch.Tensor:
        """A tensor of the precision and on the device of the parameters."""
        return torch.empty(0, dtype=self._dtype, device=self._optimizer.params[0].device)

    @cached_property
    def _dtype(self) -> torch.dtype:
        """The precision of a vector of all parameters."""
        return functools.reduce(torch.promote_types, {p.dtype for p in self._optimizer.params})


class _Flat:
    """A vector with room for all parameters, and its views in their shapes: made once, as views take longer than copies."""

    def __init__(self, params: Sequence[Any], dtype: torch.dtype) -> None:
        sizes = [p.numel() for p in params]
        self.vector = torch.empty(sum(sizes), dtype=dtype, device=params[0].device)
        parts = torch.split(self.vector, sizes)
        self.views = [part.view(p.shape) for part, p in zip(parts, params, strict=True)]
