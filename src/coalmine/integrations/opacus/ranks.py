"""The gradients of an Opacus step in several processes: replicated on every rank (DDP), or in shards (FSDP2).

Under DDP each rank clips and sums its own examples, rank 0 adds the noise, and `reduce_gradients` then sums over the ranks.
So canaries join rank 0's sum, and the release is observed after `reduce_gradients`. Under FSDP2 the clipped sums arrive
reduced and in shards, each rank adds noise to its own shard, and the step hook already sees the release.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, Unpack

import numpy as np
import torch
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer, FSDPOptimizerFastGradientClipping
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import DistributedDPOptimizerFastGradientClipping
from torch.distributed.tensor import DTensor

from coalmine.argument_checks import Floats, short_repr
from coalmine.audit import Audit
from coalmine.integrations.opacus.gradients import TERMS, OneProcess
from coalmine.integrations.opacus.parameters import local, named_layers, plain_names
from coalmine.integrations.setup import AuditSettings, new_audit_settings, own_audit, refuse_finished
from coalmine.integrations.torch_distributed import GroupSum, reduce_over
from coalmine.measure.ranks import Ranks, Reduce
from coalmine.measure.settings import BLOCK_EACH

REPLICATED = (DistributedDPOptimizer, DistributedDPOptimizerFastGradientClipping)
SHARDED = FSDPOptimizerFastGradientClipping
Result = TypeVar("Result")


def gradients_of(optimizer: DPOptimizer, model: Any, reduce: Reduce | None) -> OneProcess:
    """Access to the optimizer's gradients: in one process, replicated or sharded.

    `reduce` is the user's. By default it is the sum over all ranks.
    """
    if not isinstance(optimizer, (*REPLICATED, SHARDED)):
        if reduce is not None:
            raise ValueError(f"reduce is for several processes, and {type(optimizer).__name__} is for one: omit it")
        return OneProcess(optimizer)
    over = reduce_over() if reduce is None else reduce

    def make() -> OneProcess:
        names = None if model is None else plain_names(name for name, _ in named_layers(optimizer, model))
        kind = Replicated if isinstance(optimizer, REPLICATED) else Sharded
        return kind(optimizer, names, over, model)

    return on_every_rank(Ranks(over), make)


class Replicated(OneProcess):
    """The gradients of one of several processes that all hold the whole model (DDP)."""

    observed_after: ClassVar[str | None] = "reduce_gradients"
    _replicated = True

    def __init__(self, optimizer: DPOptimizer, names: Sequence[str] | None, reduce: Reduce, _model: Any) -> None:
        super().__init__(optimizer, names)
        self._reduce, self.ranks = reduce, Ranks(reduce)
        self.joins = optimizer.rank == 0
        _check_ranks(optimizer, self.ranks)

    @property
    def divisor(self) -> float:
        """As for one process, but a mean over the examples is followed by a mean over the ranks."""
        return super().divisor * (self.ranks.size if self._optimizer.loss_reduction == "mean" else 1)

    def set_up_audit(self, layers: Any, **settings: Unpack[AuditSettings]) -> Audit:
        """The user's own audit, or a new one for all ranks."""
        own = settings.get("audit")
        if own is None:
            keywords = on_every_rank(self.ranks, lambda: new_audit_settings(layers is not None, **TERMS, **settings))
            tree = self._tree(self.parameters())
            return Audit.for_model(tree, reduce=self._reduce, replicated=self._replicated, **keywords)
        return on_every_rank(self.ranks, lambda: self._checked_audit(layers, **settings))

    def _checked_audit(self, layers: Any, **settings: Unpack[AuditSettings]) -> Audit:
        audit = own_audit(**settings)
        if layers is None:
            raise TypeError(
                "audited() needs the model too: in several processes, an audit identifies parameters by name"
            )
        made_for = (audit.settings.processes, [name for name, _ in audit.settings.layers], audit.settings.replicated)
        several = self.ranks.several
        if made_for != (self.ranks.size, list(self._tree_names()), self._replicated and several):
            how = ", replicated=True" if self._replicated else ""
            raise ValueError(
                f"the audit must be made for the optimizer's {self.ranks.size} processes: make it on every rank by "
                f"Audit.for_model(trained_parameters(optimizer, model), ..., reduce=reduce_over(){how})"
            )
        if self.ranks.rank == 0:
            refuse_finished(audit)
        return audit

    @contextmanager
    def lost_ranks(self) -> Iterator[None]:
        """A context for a collective of the training: if another rank is lost, the error says so."""
        try:
            yield
        except RuntimeError as error:
            missing = self._reduce.missing_ranks() if isinstance(self._reduce, GroupSum) else []
            if missing == []:
                raise  # all ranks are alive: the error comes from the training
            assert isinstance(self._reduce, GroupSum)
            raise self._reduce.lost_rank(missing) from error

    def combined(self, parts: Sequence[Any]) -> Any:
        """A dict of copies by the names of the parameters."""
        return self._tree([part.clone() for part in parts])

    def divide(self, combined: Any, divisor: float) -> None:
        torch._foreach_div_(list(combined.values()), divisor)

    def parts(self, combined: Any) -> Sequence[Any]:
        return list(combined.values())

    def updates(self, audit: Audit, present: Any, clip_norm: float, *, scale: float = 1.0) -> list[Any]:
        """The sum of these canaries, one tensor for each parameter."""
        sums = audit.updates(present, clip_norm, scale=scale)
        return [sums[name] for name in self._tree_names()]

    def rows(self, audit: Audit, canaries: list[int], size: float) -> Sequence[Any]:
        sign = math.copysign(1.0, size)
        each = [self.updates(audit, [canary], abs(size)) for canary in canaries]
        return [torch.stack([row.reshape(-1) for row in rows]) * sign for rows in zip(*each, strict=True)]

    def _tree(self, parts: Sequence[Any]) -> dict[str, Any]:
        pairs = zip(self._optimizer.params, parts, strict=True)
        return dict(zip(self._tree_names(), (part.reshape(local(p).shape) for p, part in pairs), strict=True))

    def _tree_names(self) -> Sequence[str]:
        return self._names or [str(i) for i in range(len(self._optimizer.params))]


class Sharded(Replicated):
    """The gradients of one of several processes that each hold a shard of every parameter (FSDP2)."""

    observed_after = None
    _replicated, sharded = False, True

    def __init__(self, optimizer: DPOptimizer, names: Sequence[str] | None, reduce: Reduce, model: Any) -> None:
        super().__init__(optimizer, names, reduce, model)
        self.joins = True
        self._model = model
        for p in optimizer.params:
            _check_shard(p, self.ranks)

    @property
    def most_canaries(self) -> int:
        """Every rank has at least one block of its own, so the rank with the fewest parameters sets the limit."""
        sizes = self.ranks.gather(lambda: sum(local(p).numel() for p in self._optimizer.params))
        return min(sizes) // BLOCK_EACH if self.ranks.several else super().most_canaries

    @property
    def clip_in_sum(self) -> float:
        """Length of a clipped example in `sums`, in clip norms: FSDP2 takes the mean over ranks when it reduces."""
        return 1 / self.ranks.size if self._optimizer.loss_reduction == "mean" else 1.0

    def sums(self) -> list[Any]:
        """This rank's shard of the clipped sum."""
        return [local(self._optimizer.grad_state[p]["summed_grad"]) for p in self._optimizer.params]

    def release(self) -> list[Any]:
        """This rank's shard of the noised gradient."""
        return [local(p.grad) for p in self._optimizer.params]

    def parameters(self) -> list[Any]:
        """This rank's shard of each parameter."""
        return [local(p.detach()) for p in self._optimizer.params]

    def examples(self) -> int:
        """Number of per-example gradients: FSDP2 keeps their norms in the model, not in its parameters."""
        norms = getattr(self._model, "per_sample_gradient_norms", None)
        if norms is None:
            raise TypeError(
                "with data_loader, model must be the one that make_private returned: it counts the examples of a step; "
                f"got {short_repr(self._model)}"
            )
        return len(norms)


def on_every_rank(ranks: Ranks, action: Callable[[], Result]) -> Result:
    """Call `action` on every rank and return this rank's result. If it fails on one rank, every rank raises an error."""
    results: list[Result] = []
    ranks.gather(lambda: results.append(action()))
    return results[0]


def own_slot(ranks: Ranks, value: float) -> Floats:
    """Zeros except in this rank's slot. The sum over the ranks holds every rank's value."""
    slots = np.zeros(ranks.size)
    slots[ranks.rank] = value
    return slots


def _check_ranks(optimizer: Any, ranks: Ranks) -> None:
    if (ranks.rank, ranks.size) != (optimizer.rank, optimizer.world_size):
        raise ValueError(
            f"reduce must be over the optimizer's {optimizer.world_size} ranks, and this is rank {optimizer.rank}, got rank "
            f"{ranks.rank} of {ranks.size}; Opacus sums over all ranks of the job"
        )


def _check_shard(p: Any, ranks: Ranks) -> None:
    if not isinstance(p, DTensor):
        raise ValueError(
            f"every parameter must be sharded, but the one of shape {tuple(p.shape)} is a plain tensor: use FSDP2Wrapper"
        )
    mesh, placements = p.device_mesh, p.placements
    if mesh.ndim != 1 or mesh.size() != ranks.size or not placements[0].is_shard():
        raise ValueError(
            f"every parameter must be sharded over all {ranks.size} ranks, but the one of shape {tuple(p.shape)} has "
            f"{placements} on a mesh of shape {tuple(mesh.shape)}; FSDP2Wrapper without a mesh does that"
        )
