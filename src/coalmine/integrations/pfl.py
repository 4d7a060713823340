"""Audit pfl: a postprocessor that makes canaries of some users and looks at the noised sum.

    canaries = canary_postprocessor(network, privacy, canaries=300, seed=..., delta=1e-5)
    SimulatedBackend(..., postprocessors=[canaries, privacy])  # first: before the clip, and last after the noise
    ...
    print(canaries.finish())

A user is canary i if its id is "canary-i": an ordinary user of the dataset, whose own data is trained on for nothing.
"""

from pathlib import Path
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
from coalmine.integrations.claims import noise_claim
from coalmine.integrations.journal import Journal

PREFIX = "canary-"


def canary_postprocessor(
    network: "torch.nn.Module",
    privacy: Any,
    *,
    canaries: int,
    seed: int | bytes,
    delta: float,
    directory: Path | str | None = None,
) -> "CanaryPostprocessor":
    """An audit of this network's updates under this central Gaussian mechanism, whose clip and noise it reads."""
    mechanism = getattr(privacy, "underlying_mechanism", privacy)
    clip_norm = getattr(mechanism, "clipping_bound", None)
    noise_multiplier = getattr(mechanism, "relative_noise_stddev", None)
    if clip_norm is None or noise_multiplier is None:
        raise ValueError(
            f"privacy must clip and add Gaussian noise centrally, got {type(mechanism).__name__}; "
            "give CanaryPostprocessor clip_norm and noise_multiplier yourself"
        )
    dim = sum(parameter.numel() for parameter in network.parameters())
    audit = Audit(dim, canaries=canaries, seed=seed, delta=delta, directory=directory)
    return CanaryPostprocessor(audit, clip_norm=float(clip_norm), noise_multiplier=float(noise_multiplier))


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

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """What was found, by default judged by the noise multiplier; in a run directory, written under the task's name."""
        if claim is None and self._noise:
            claim = noise_claim(self._audit, self._noise)
        return self._journal.finish(claim, noise=self._noise, task=task, noise_multiplier=self._noise)


def _row(stats: Any) -> Any:
    _, weights = stats.get_weights()
    return torch.cat([torch.as_tensor(weight).reshape(-1) for weight in weights])


def _parts(row: Any, weights: list[Any]) -> list[Any]:
    sizes = [int(np.prod(weight.shape)) for weight in weights]
    return [part.view(weight.shape) for part, weight in zip(row.split(sizes), weights, strict=True)]
