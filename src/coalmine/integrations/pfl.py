"""Audit pfl: a postprocessor that turns some users into canaries and observes the noised sum.

    canaries = canary_postprocessor(network, privacy, canaries=300, seed=..., delta=1e-5)
    SimulatedBackend(..., postprocessors=[canaries, privacy])  # the audit comes first in the list
    ...
    print(canaries.finish())

A user is canary i if its id is "canary-i". It is an ordinary user of the dataset; its own update is thrown away.
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
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.integrations.checks import check_no_result, check_unfinished, positive
from coalmine.integrations.claims import noise_claim
from coalmine.integrations.journal import Journal

PREFIX = "canary-"
NO_NOISE = "no noise multiplier was given, and without noise there is nothing to compare with the other users' sum"


def canary_postprocessor(
    network: "torch.nn.Module",
    privacy: Any,
    *,
    canaries: int,
    seed: int | bytes,
    delta: float,
    directory: Path | str | None = None,
) -> "CanaryPostprocessor":
    """A postprocessor that audits this network under this central Gaussian mechanism.

    Clip norm and noise multiplier are read from the mechanism. Each parameter of the network has a noise gauge of its own.
    """
    mechanism = getattr(privacy, "underlying_mechanism", privacy)
    clip_norm = getattr(mechanism, "clipping_bound", None)
    noise_multiplier = getattr(mechanism, "relative_noise_stddev", None)
    if clip_norm is None or noise_multiplier is None:
        raise ValueError(
            f"privacy must clip and add Gaussian noise centrally, got {type(mechanism).__name__}; "
            "give CanaryPostprocessor clip_norm and noise_multiplier yourself"
        )
    if directory is not None:
        check_no_result(directory)
    # pfl's updates hold the parameters that require gradients, in this order (PyTorchModel.variable_map)
    layers = [(name, p.numel()) for name, p in network.named_parameters() if p.requires_grad]
    dim = sum(size for _, size in layers)
    audit = Audit(dim, canaries=canaries, seed=seed, delta=delta, layers=layers, directory=directory)
    return CanaryPostprocessor(audit, clip_norm=float(clip_norm), noise_multiplier=float(noise_multiplier))


class CanaryPostprocessor(Postprocessor):  # type: ignore[misc]
    """Sends canaries into the clip, `scale` times longer than the clip norm, and observes the sum after the noise.

    `clip_norm` and `noise_multiplier` are those of the mechanism that follows, relative to the sum of clipped updates.
    """

    def __init__(
        self, audit: Audit, *, clip_norm: float, noise_multiplier: float | None = None, scale: float = 10.0
    ) -> None:
        check_unfinished(audit)
        if audit.directory is not None:
            check_no_result(audit.directory.path)
        if positive("scale", scale) <= 1:
            raise ValueError(f"scale must be above 1, or the clip has nothing to clip, got {scale}")
        self._audit, self._clip_norm, self._noise, self._scale = audit, clip_norm, noise_multiplier, scale
        self._present: list[int] = []
        self._others: Any = None
        privacy = {"clip_norm": clip_norm, "noise_multiplier": noise_multiplier or 0.0, "delta": audit.settings.delta}
        canaries = {"count": audit.settings.canaries, "scale": scale}
        self._journal = Journal(audit, {"trainer": "pfl", "privacy": privacy, "canaries": canaries})

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> tuple[Any, Any]:
        """Replace the update of a canary; leave other users' updates as they are."""
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
        """Observe the released sum and pass it on unchanged."""
        released = _row(stats)
        others = torch.zeros_like(released) if self._others is None else self._others
        self._audit.observe_round(
            self._audit.last_round + 1,
            released,
            present=self._present,
            others=others if self._noise else None,
            noise_std=None if self._noise is None else self._noise * self._clip_norm,
            clip_norm=self._clip_norm,
            scale=self._scale,
        )
        self._journal.add_round(self._audit.last_round, canaries=len(self._present), clip_norm=self._clip_norm)
        self._present, self._others = [], None
        return stats, Metrics()

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """Return the result; the default claim is that of the noise multiplier. With a run directory, write it there."""
        if claim is None and self._noise:
            claim = noise_claim(self._audit, self._noise)
        notes = [] if self._noise else [f"known-others is left out: {NO_NOISE}"]
        if claim is None:
            notes.append("no verdict: no noise multiplier was given, so there is no claim to judge")
        return self._journal.finish(
            claim,
            noise=self._noise,
            task=task,
            audited=self._audited_items(),
            notes=notes,
            noise_multiplier=self._noise,
        )

    def _audited_items(self) -> list[AuditedItem]:
        """What this audit checked of the pipeline, as far as only the integration knows it."""
        entered = f"canaries entered the mechanism's clip {self._scale:g} times longer than the clip norm"
        drawn = "canaries are drawn like every user of the dataset, but not compared with a sampling rate"
        items = [
            AuditedItem("clipping", "checked", entered),
            AuditedItem("sampler", "not checked", drawn),
            AuditedItem("weights", "not checked", "the weights of the users' updates were not read"),
        ]
        if self._noise:
            summed = "the other users' clipped updates were summed in every round"
            items.append(AuditedItem("others", "checked", summed))
        else:
            items.append(AuditedItem("others", "not checked", NO_NOISE))
        if not self._audit.settings.layers:
            items.append(AuditedItem("tensors", "not checked", "the audit has no layers: use canary_postprocessor"))
        return items


def _row(stats: Any) -> Any:
    _, weights = stats.get_weights()
    return torch.cat([torch.as_tensor(weight).reshape(-1) for weight in weights])


def _parts(row: Any, weights: list[Any]) -> list[Any]:
    sizes = [int(np.prod(weight.shape)) for weight in weights]
    return [part.view(weight.shape) for part, weight in zip(row.split(sizes), weights, strict=True)]
