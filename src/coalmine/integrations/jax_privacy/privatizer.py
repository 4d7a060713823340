"""The audited privatizer: an optax transformation with an audit, and what its user calls between two steps."""

from collections.abc import Callable
from typing import Any

import optax

from coalmine.integrations.jax_privacy.privatizer_audit import PrivatizerAudit
from coalmine.integrations.jax_privacy.selection import Watched
from coalmine.integrations.jax_privacy.state import AuditState
from coalmine.measure.schedule import Indices


class AuditedPrivatizer(optax.GradientTransformation):  # type: ignore[misc]
    """A privatizer with its audit: an optax transformation, which also works under jit."""

    audit: PrivatizerAudit

    def watched(self, strategy: Any) -> Any:
        """The same batch selection strategy, but the audit sees each batch: `next_step` then needs no indices."""
        return Watched(strategy, self.audit)

    def next_step(self, noise_state: AuditState, indices: Any = None) -> AuditState:
        """The state for the next step: records the last step, and inserts the canaries of the next one.

        Call it on the host, before each step. `indices` are the examples of the step's batch, as the batch selection
        returns them; negative ones are padding. Omit them if the batch comes from a `watched` strategy, or if you gave
        `audited` a `sampling_probability`.
        """
        return self.audit.next_step(noise_state, indices)

    def record(self, noise_state: AuditState) -> None:
        """Record the step that a state comes from. If the audit has a directory, sync it to disk.

        `next_step` and `finish` record the step too. Call this before you write a checkpoint of the state.
        """
        self.audit.record(noise_state)

    @property
    def canaries_in_step(self) -> Indices:
        """Numbers of the canaries in the step that `next_step` prepared, repeated if their example is repeated."""
        return self.audit.in_step

    def canary_loss(self, loss: Callable[..., Any], *, l2_clip_norm: float | None = None) -> Callable[..., Any]:
        """The loss with one more batch argument, the last: a canary's number, or -1 for an example.

        For `through_clip`: pass the returned function to `clipped_grad` instead of the loss. Add a row to the batch for each
        of `canaries_in_step`, with any data. The gradient of a canary's row is that canary, ten times longer than
        `l2_clip_norm`, by default the `clip_norm` of `audited`.
        """
        return self.audit.canary_loss(loss, l2_clip_norm)
