"""The coverage of a Flower audit: the items that only the integration knows about, each with its reason."""

import math

from coalmine.audit import Audit
from coalmine.integrations.flower.wrapped import Wrapped
from coalmine.verdict.coverage import AuditedItem

SAMPLER = AuditedItem(
    "sampler", "not checked", "the audit records who took part in each round; a claim with sampling=… tests the sampler"
)
UNKNOWN_TO_OBSERVER = "the observer sees models only, not the clients' updates"


def adaptive_clip_warning(audit: Audit, wrapped: Wrapped) -> str | None:
    """How much canaries moved an adaptive clip norm, the one part of the training that they change; None if it is fixed."""
    rate = getattr(wrapped.private, "clip_norm_lr", None)
    if rate is None:
        return None
    share = max((item.present.size / (item.participants or math.inf) for item in audit.log.rounds()), default=0.0)
    if not share:
        return None
    return (
        f"canaries count as clipped updates, up to {share:.0%} of a round's replies, so the adaptive clip norm is lower "
        f"than without them, by at most {-math.expm1(-rate * share):.0%} more in each round"
    )


def clipping_item(mode: str, wrapped: Wrapped | None, scale: float) -> AuditedItem:
    """Whether canaries longer than the clip norm went through a clip, and through which one."""
    if wrapped is not None and wrapped.clips_on_clients and mode != "client":
        reason = f"mode {mode!r} makes canaries on the server, so they bypass the clients' clip: use mode 'client'"
        return AuditedItem("clipping", "cannot be checked", reason)
    if scale <= 1:
        reason = (
            "canaries were no longer than the clip norm, so a missing clip would not show: if you clip, give scale=10"
        )
        return AuditedItem("clipping", "not checked", reason)
    if wrapped is not None and wrapped.clips_on_server:
        clip = f"the server's clip in {type(wrapped.private).__name__}"
    else:
        clip = "the clients' clip" if mode == "client" else "the strategy's own clip"
    return AuditedItem("clipping", "checked", f"canaries of {scale:g} times the clip norm went through {clip}")


def others_item(left_out: str | None) -> AuditedItem:
    """Whether the real clients' updates are known, and if not, why."""
    if left_out is not None:
        return AuditedItem("others", "not checked", left_out)
    return AuditedItem("others", "checked", "the server added up the real clients' updates, clipped by the audit")


def tensors_item(layers: int, others_left_out: str | None) -> AuditedItem | None:
    """Why there is no gauge for each array; None if there is one, which has its own item."""
    if layers == 0:
        reason = (
            "the audit was made without layers: audited() gives each array a noise gauge, or give Audit(layers=...)"
        )
        return AuditedItem("tensors", "not checked", reason)
    if others_left_out is not None:
        return AuditedItem("tensors", "not checked", f"a gauge for each array needs the others: {others_left_out}")
    return None


def observer_items(scale: float) -> list[AuditedItem]:
    """The items of an audit that sees models only."""
    return [
        clipping_item("client", None, scale),
        AuditedItem("weights", "cannot be checked", "the observer sees models only, not the clients' weights"),
        AuditedItem("others", "not checked", UNKNOWN_TO_OBSERVER),
        AuditedItem("tensors", "not checked", f"a gauge for each array needs the others: {UNKNOWN_TO_OBSERVER}"),
        SAMPLER,
    ]
