"""The state of an audited privatizer: the canaries of a step, and what came of them. All of it is traceable."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class AuditState(NamedTuple):
    """The state of an audited privatizer. All trees have the structure of the model.

    `inner` is the privatizer's own state and `step` the number of steps so far. `canaries` is the sum of canaries that the
    next step subtracts from the gradients. `others` and `model_delta` are minus the clipped and minus the noised sum of the
    last step.
    """

    inner: Any
    step: Any
    canaries: Any
    others: Any
    model_delta: Any


def init_and_update(privatizer: Any, *, through_clip: bool) -> tuple[Any, Any]:
    """`init` and `update` with canaries, both traceable. With `through_clip` the sum already holds the canaries."""

    def init(params: Any) -> AuditState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return AuditState(privatizer.init(params), jnp.zeros((), jnp.int32), zeros, zeros, zeros)

    def update(sum_of_clipped_grads: Any, noise_state: AuditState, params: Any = None) -> tuple[Any, AuditState]:
        grads, canaries = sum_of_clipped_grads, noise_state.canaries
        if through_clip:
            joined, others = grads, jax.tree.map(lambda grad, canary: grad + canary.astype(grad.dtype), grads, canaries)
        else:
            joined, others = jax.tree.map(lambda grad, canary: grad - canary.astype(grad.dtype), grads, canaries), grads
        arguments = () if params is None else (params,)
        noised, inner = privatizer.update(joined, noise_state.inner, *arguments)
        return noised, AuditState(
            inner,
            noise_state.step + 1,
            jax.tree.map(jnp.zeros_like, canaries),  # so that no canary joins twice
            jax.tree.map(jnp.negative, others),
            jax.tree.map(jnp.negative, noised),
        )

    return init, update
