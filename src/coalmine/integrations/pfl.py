"""Audit pfl: a postprocessor that makes canaries of some users and looks at the noised sum.

    audit = Audit(model_size, canaries=300, seed=..., delta=1e-5)
    canaries = CanaryPostprocessor(audit, clip_norm=1.0, noise_multiplier=1.0)
    SimulatedBackend(..., postprocessors=[canaries, central_privacy])  # first: before the clip, and last after the noise
    ...
    print(canaries.finish())

A user is canary i if its id is "canary-i": an ordinary user of the dataset, whose own data is trained on for nothing.
"""

from typing import Any

import numpy as np

try:
    import torch
    from pfl.metrics import Metrics
    from pfl.postprocessor.base import Postprocessor
except ImportError as error:
    raise ImportError("auditing pfl needs an environment of its own with: pip install 'coalmine[pfl]'") from error

from coalmine.audit.audit import Audit
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.integrations.claims import most_presentations, noise_claim
from coalmine.integrations.journal import Journal

PREFIX = "canary-"


class CanaryPostprocessor(Postprocessor):  # type: ignore[misc]
    """Canaries before the clip, `scale` times too long, and the released sum after the noise.

    `clip_norm` and `noise_multiplier` are those of the mechanism behind it, relative to the sum of clipped updates.
    """

    def __init__(
        self, audit: Audit, *, clip_norm: float, noise_multiplier: float | None = None, scale: float = 10.0
    ) -> None:
        self._audit, self._clip_norm, self._noise, self._scale = audit, clip_norm, noise_multiplier, scale
        self._present: list[int] = []
        self._others: Any = None
        privacy = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier or 0.0, "delta": audit.settings.delta}
        canaries = {"count": audit.settings.canaries, "scale": scale}
        self._journal = Journal(audit, {"trainer": "pfl", "privacy": privacy, "canaries": canaries})

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> tuple[Any, Any]:
        """A canary's update in the place of its own, or the user's as it is."""
        update = _row(stats)
        user = str(user_context.user_id)
        if not user.startswith(PREFIX):
            clipped = update * min(1.0, self._clip_norm / max(float(update.norm()), 1e-300))
            self._others = clipped if self._others is None else self._others + clipped
            return stats, Metrics()
        index = int(user.removeprefix(PREFIX))
        canary = self._audit.update(index, self._clip_norm, scale=self._scale, like=update)
        self._present.append(index)
        return stats.apply(lambda weights: _parts(canary, weights)), Metrics()

    def postprocess_server(self, *, stats: Any, central_context: Any, aggregate_metrics: Any) -> tuple[Any, Any]:
        """The sum as it was released, observed and handed on."""
        released = _row(stats)
        others = torch.zeros_like(released) if self._others is None else self._others
        self._audit.observe_round(
            self._audit.last_round + 1,
            released,
            present=self._present,
            others=others if self._noise else None,
            noise_std=None if self._noise is None else self._noise * self._clip_norm,
            clip_norm=self._clip_norm,
        )
        self._journal.add_round(self._audit.last_round, canaries=len(self._present), clip_norm=self._clip_norm)
        self._present, self._others = [], None
        return stats, Metrics()

    def finish(self, *, claim: Claim | float | None = None) -> AuditResult:
        """What was found, by default judged by the noise multiplier; in a run directory, written too."""
        if claim is None and self._noise:
            claim = noise_claim(self._audit, self._noise)
        more = {"noise_multiplier": self._noise, "presentations": most_presentations(self._audit)}
        return self._journal.finish(claim, trainer="pfl", **more)


def _row(stats: Any) -> Any:
    _, weights = stats.get_weights()
    return torch.cat([torch.as_tensor(weight).reshape(-1) for weight in weights])


def _parts(row: Any, weights: list[Any]) -> list[Any]:
    sizes = [int(np.prod(weight.shape)) for weight in weights]
    return [part.view(weight.shape) for part, weight in zip(row.split(sizes), weights, strict=True)]
