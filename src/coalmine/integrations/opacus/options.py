"""What `audited` is asked for: how often canaries take part, whether they go through the clip, and the claim."""

import math
from collections.abc import Sized
from typing import Any, Literal, NamedTuple, Unpack, cast

import torch
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer

from coalmine.argument_checks import positive, short_repr
from coalmine.audit import Audit
from coalmine.integrations.opacus.accounting import attached_accountant, number_of
from coalmine.integrations.opacus.picked_rows import check_loader
from coalmine.integrations.row_pairing import checked_probability
from coalmine.integrations.setup import CLIP_SCALE, AuditSettings
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

# By default, canaries go through the clip if those of one step hold at most this many numbers: 64 MB in single precision,
# and 0.2 to 0.5 seconds per step on one core (a transform takes 8 to 33 ns per number).
MOST_THROUGH_CLIP = 1 << 24


FEW = 4  # canaries of a step that go through the clip, unless all do: each is a row that the optimizer has to clip
ThroughClip = bool | Literal["all"] | None


class CanaryOptions(NamedTuple):
    """The canaries' sampling probability, their scale (None after the clip), and whether the clip is checked.

    `through_clip` is the number of a step's canaries that go through the clip, None for all.
    """

    probability: float
    scale: float | None
    clipping: AuditedItem
    through_clip: int | None

    @classmethod
    def checked(
        cls, optimizer: DPOptimizer, canaries: int, probability: float, through_clip: ThroughClip, scale: float | None
    ) -> "CanaryOptions":
        """The options for an optimizer and a number of canaries, defaults filled in."""
        rate = checked_probability(probability)
        length = positive("scale", CLIP_SCALE if scale is None else scale)
        if length <= 1:
            raise ValueError(f"scale must be above 1, or the clip has nothing to clip, got {length}")
        obstacle = _obstacle(optimizer, canaries * rate)
        if through_clip or (through_clip is None and obstacle is None):
            rows = None if through_clip == "all" else FEW
            which = "canaries" if rows is None else f"{rows} canaries of each step"
            reason = f"{which} entered the optimizer's clip {length:g} times longer than the clip norm"
            return cls(rate, length, AuditedItem("clipping", "checked", reason), rows)
        if scale is not None:
            raise ValueError("scale needs through_clip=True: after the clip, a canary is as long as the clip norm")
        why = f": {obstacle}" if obstacle else "; use through_clip=True"
        return cls(rate, None, AuditedItem("clipping", "not checked", f"canaries entered after the clip{why}"), 0)


def check_optimizer(optimizer: DPOptimizer, through_clip: ThroughClip) -> None:
    """Reject an optimizer that cannot be audited, or not in this way."""
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"optimizer must be the one that make_private returned, got {short_repr(optimizer)}")
    if not optimizer.params:
        raise ValueError("the optimizer must hold at least one parameter that requires gradients, got none")
    if isinstance(optimizer, DistributedPerLayerOptimizer):
        raise ValueError(
            "DistributedPerLayerOptimizer adds noise layer by layer while gradients are computed, so canaries cannot join "
            "its sum; use SimpleDistributedPerLayerOptimizer, which make_private chooses"
        )
    if not isinstance(through_clip, bool | None) and through_clip != "all":
        raise TypeError(f'through_clip must be True, False, "all" or None, got {short_repr(through_clip)}')
    if through_clip and not _has_example_gradients(optimizer):
        raise ValueError(
            f"through_clip needs per-example gradients and one clip norm, and {type(optimizer).__name__} lacks them; "
            "omit through_clip, and canaries enter after the clip"
        )


def row_count(data_loader: "torch.utils.data.DataLoader[Any]") -> int:
    """Number of rows of a loader's data set; `check_loader` has ensured that it has a length."""
    return len(cast(Sized, data_loader.dataset))


def loader_rate(loader: Any, sampling_probability: float | None, rng: Any, *, every_rank: bool) -> float:
    """The sampling rate that Opacus assumes for a loader, whatever its sampler."""
    if sampling_probability is not None or rng is not None:
        name = "rng" if sampling_probability is None else "sampling_probability"
        raise ValueError(f"data_loader decides which canaries are in a step, so omit {name}")
    check_loader(loader, every_rank=every_rank)
    return min(float(getattr(loader, "sample_rate", 1 / max(len(loader), 1))), 1.0)


def checked_claim(
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
