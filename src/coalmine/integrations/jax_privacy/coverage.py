"""What the audit of a run with jax_privacy covers, and what the run showed about the accountant's event."""

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.estimators.correlated import BandedNoise
from coalmine.evidence.dilution import CanaryShare, DilutionReader
from coalmine.evidence.views import read_log
from coalmine.integrations.jax_privacy.claims import EventAccounting
from coalmine.integrations.jax_privacy.noise import SAME
from coalmine.integrations.jax_privacy.selection import ExampleSelection, Selection
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.replayed_rows import UNTESTED

UNSURE = 0.5  # standard reach of the canaries' share above which present and absent canaries look alike
WEIGHTS = AuditedItem("weights", "does not apply", "jax_privacy has no weights: every example counts once in the sum")
OTHERS = AuditedItem(
    "others", "checked", "the sum of the other examples was read from the privatizer's input in every step"
)
ROWS = AuditedItem(
    "rows", "not checked", f"jax compiles the step, so no batch is seen: call audit.replay(step, batch); {UNTESTED}"
)


def sampler_item(selection: Selection, *, correlated: bool) -> AuditedItem:
    """Whether canaries were in the steps that the batch selection chose."""
    if not selection.observed:
        reason = "the audit drew its canaries itself, at the given probability; pass num_examples and each batch"
    elif correlated:
        reason = "the claim is for known steps; the batch selection was not compared with the accountant's event"
    else:
        reason = "each canary was in exactly the steps whose batch held its example"
        return AuditedItem("sampler", "checked", reason)
    return AuditedItem("sampler", "not checked", reason)


def clipping_item(audit: Audit, scale: float | None) -> AuditedItem:
    """Whether canaries went through the clip, and left it at the clip norm."""
    if scale is None:
        return AuditedItem("clipping", "not checked", "canaries joined the sum after clipped_grad, at the clip norm")
    shares = DilutionReader(audit.settings)
    read_log(audit.log, audit.settings, shares)
    fault = _why_not_in_sum([share for share in (shares.first, shares.repeated) if share is not None])
    if fault is not None:
        return AuditedItem("clipping", "failed", fault)
    reason = f"canaries entered clipped_grad {scale:g} times longer than the clip norm, and left it at that norm"
    return AuditedItem("clipping", "checked", reason)


def _why_not_in_sum(shares: list[CanaryShare]) -> str | None:
    """Why the canaries were not in the privatizer's input as expected, or may not have been; None if they were."""
    off = [share for share in shares if share.is_off()]
    if off:
        worst = max(off, key=lambda share: abs(share.share - 1))
        if worst.share < 1:
            return (
                f"the privatizer's input holds {max(worst.share, 0):.0%} of the canaries that the steps should hold: give "
                "each of canaries_in_step a row of the batch that is neither padding nor weighted, and canary_loss the "
                "l2_clip_norm of clipped_grad"
            )
        return (
            f"canaries are {worst.share:.3g} clip norms long in the privatizer's input: clipped_grad does not clip at the "
            "clip norm, or a canary has several rows"
        )
    if not shares or min(share.limit() for share in shares) > UNSURE:
        return (
            "the other rows' gradients are so long that canaries cannot be seen in the privatizer's input, so nothing shows "
            "that they were rows of the batches: use more canaries, or omit through_clip"
        )
    return None


def notes(audit: Audit, accounting: EventAccounting) -> list[str]:
    """How the claim was judged, if that is not plain."""
    if accounting.event is None:
        return []
    delta = audit.settings.delta
    if accounting.mechanism.law is not None:
        return ["amplification by sampling is not judged under correlated noise: only a claim for known steps is"]
    if accounting.event_claim(delta) is not None:
        return []
    return [
        "the accountant's epsilon has no verdict: its event does not compose Gaussian noise with the same sampling in "
        "every step, or has no epsilon under this neighboring_relation"
    ]


def warnings(audit: Audit, accounting: EventAccounting, selection: Selection) -> list[str]:
    """What the run did that the accountant's event does not allow for."""
    found = []
    planned, law = accounting.planned, accounting.mechanism.law
    if planned is not None and law is None and planned != audit.last_round:
        found.append(f"the accountant counts {count_of(planned, 'step')}, and the audit observed {audit.last_round}")
    if planned is not None and law is not None and selection.observed:
        largest = _largest_strength(audit, law)
        if largest > planned * (1 + SAME):
            found.append(
                f"the batches expose an example more than the accountant allows for: ‖Cu‖² is {largest:.3g}, and the "
                f"event composes {planned} steps; keep an example's steps at least {law.bands} apart"
            )
    if isinstance(selection, ExampleSelection) and selection.most_times > 1:
        found.append(
            f"a batch held the same example up to {selection.most_times} times; it then adds as many clip norms, "
            "which no accountant allows for"
        )
    return found


def _largest_strength(audit: Audit, law: BandedNoise) -> float:
    """The largest ‖Cu‖² of a canary, where u is 1 in its steps and 0 elsewhere."""
    steps_of: list[list[int]] = [[] for _ in range(audit.settings.canaries)]
    for entry in audit.log.observed:
        for canary in entry.present.tolist():
            steps_of[canary].append(entry.number)
    return max((law.strength(steps) for steps in steps_of if steps), default=1.0)
