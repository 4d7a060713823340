"""Audit jax_privacy: canaries join the clipped sum in every step, and the audit observes every noised sum.

    privatizer = audited(privatizer, params, stddev=…, clip_norm=1.0, num_examples=n, dp_event=event, seed=…, delta=1e-5)
    noise_state = privatizer.init(params)
    for indices in privatizer.watched(strategy).batch_iterator(n):
        noise_state = privatizer.next_step(noise_state)
        ...  # the step as before, under jit or not
    print(privatizer.audit.finish(noise_state=noise_state, params=params))

Each canary is paired with one example, and is in a step exactly when the batch selection picks that example. So the audit
checks the batch selection too, and judges the accountant's epsilon. A step moves the model against its gradient, so canaries
are subtracted from the sum of gradients, and the audit observes minus the noised sum.

The state of an audited privatizer is a pytree: the privatizer's own state, the canaries of the next step, and the clipped
and the noised sum of the last one. `next_step` runs on the host between two steps: it takes the last step's sums and inserts
the canaries of the next one. So jit traces only two sums for the audit. On a CPU, a thread measures them with numpy during
the next step. On another device jax measures them, and only scores reach the host.
"""

try:
    import jax_privacy  # noqa: F401
    import optax  # noqa: F401
except ImportError as error:
    raise ImportError("auditing jax_privacy needs: pip install 'coalmine[jax]'") from error

from coalmine.integrations.jax_privacy.claims import known_steps_claim
from coalmine.integrations.jax_privacy.model_tree import named_leaves
from coalmine.integrations.jax_privacy.noise import banded_noise
from coalmine.integrations.jax_privacy.privatizer import AuditedPrivatizer
from coalmine.integrations.jax_privacy.setup import audited
from coalmine.integrations.jax_privacy.state import AuditState

__all__ = ["AuditState", "AuditedPrivatizer", "audited", "banded_noise", "known_steps_claim", "named_leaves"]
