"""Test an Opacus optimizer: its clipping and its noise, on per-example gradients that are canaries.

    release = optimizer_release(optimizer)
    assert_private(release, epsilon=3.0, delta=1e-5, dim=dim, aggregate="sum")

`dim` is the number of the optimizer's parameters.
"""

import math
from typing import Any

import numpy as np

try:
    import torch
    from opacus.optimizers import (
        DistributedDPOptimizer,
        DPOptimizer,
        DPOptimizerFastGradientClipping,
        DPPerLayerOptimizer,
    )
except ImportError as error:
    raise ImportError("testing an Opacus optimizer needs: pip install 'coalmine[opacus]'") from error

from coalmine.argument_checks import Floats, short_repr
from coalmine.testing.client_rows import Release, client_rows

__all__ = ["optimizer_release"]
LEAST_ALIGNED = 0.95  # share of a canary's norm that per-layer clipping must leave
# Attributes of the optimizer that a step changes; the last two exist if clipping is adaptive.
STATE = ("step_hook", "max_grad_norm", "sample_size", "unclipped_num")
GRADIENTS = ("grad", "grad_sample", "summed_grad")  # of each parameter


def optimizer_release(optimizer: DPOptimizer) -> Release:
    """A function from per-example gradients, one row each, to their noised sum: the gradient that the optimizer releases.

    The rows become `grad_sample`, and `optimizer.pre_step()` clips them, adds noise and scales. A mean is multiplied by the
    expected batch size, which may differ from the number of rows. Parameters do not move, the accountant counts nothing,
    and the optimizer's state is restored: an adaptive clip norm starts every call from the same value.

    The optimizer must clip per-example gradients: flat, adaptive or per layer, `grad_sample_mode="hooks"`. Per-layer
    clipping changes a canary's direction unless each layer's norm is in proportion to the square root of its size. If less
    than 95 % of the sensitivity is left, a ValueError says so, since the test would measure less than leaks.
    """
    _check(optimizer)
    dim = sum(p.numel() for p in optimizer.params)

    def release(updates: Any) -> Floats:
        rows = client_rows(updates, dim=dim, clip_norm=float(optimizer.max_grad_norm))
        state = {name: getattr(optimizer, name) for name in STATE if hasattr(optimizer, name)}
        gradients = [{name: getattr(p, name, None) for name in GRADIENTS} for p in optimizer.params]
        try:
            return _released(optimizer, rows)
        finally:
            for name, value in state.items():
                setattr(optimizer, name, value)
            for p, own in zip(optimizer.params, gradients, strict=True):
                for name, value in own.items():
                    setattr(p, name, value)

    return release


def _released(optimizer: DPOptimizer, rows: Floats) -> Floats:
    optimizer.step_hook = None  # the accountant's hook
    start = 0
    for p in optimizer.params:
        part = rows[:, start : start + p.numel()].reshape(len(rows), *p.shape)
        p.grad_sample, p.summed_grad = torch.as_tensor(part, dtype=p.dtype, device=p.device), None
        start += p.numel()
    if not optimizer.pre_step():
        raise ValueError("the optimizer must not skip this step: test it outside of BatchMemoryManager")
    gradient = np.concatenate([p.grad.detach().double().cpu().numpy().reshape(-1) for p in optimizer.params])
    return gradient * optimizer.expected_batch_size if optimizer.loss_reduction == "mean" else gradient


def _check(optimizer: DPOptimizer) -> None:
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"optimizer must be the one that make_private returned, got {short_repr(optimizer)}")
    if hasattr(optimizer, "audit"):
        raise ValueError("this optimizer is audited: unaudited(optimizer) removes the audit")
    if isinstance(optimizer, DistributedDPOptimizer):
        raise ValueError(f"{type(optimizer).__name__} sums over processes; test the optimizer of one process")
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        raise ValueError(
            f"{type(optimizer).__name__} clips without per-example gradients, so canaries cannot go through it; test the "
            'optimizer that make_private(grad_sample_mode="hooks") returns'
        )
    if isinstance(optimizer, DPPerLayerOptimizer):
        aligned = _aligned([p.numel() for p in optimizer.params], [float(norm) for norm in optimizer.max_grad_norms])
        if aligned < LEAST_ALIGNED:
            raise ValueError(
                f"per-layer clipping leaves {aligned:.0%} of a canary's length, so the test would measure less than leaks; "
                "for the test, set max_grad_norm in proportion to the square root of each parameter's size"
            )


def _aligned(sizes: list[int], norms: list[float]) -> float:
    """The inner product of a canary with itself after per-layer clipping, divided by the sensitivity."""
    dim, whole = sum(sizes), math.hypot(*norms)
    return sum(norm * math.sqrt(size / dim) for size, norm in zip(sizes, norms, strict=True)) / whole
