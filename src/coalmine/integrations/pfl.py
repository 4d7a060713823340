"""Audit pfl: some users become canaries, and the audit observes the noised sum of every round.

    privacy = CentrallyAppliedPrivacyMechanism(GaussianMechanism(...))
    privacy = audited(privacy, network, claim=13.0, canaries=300, seed=..., delta=1e-5)
    SimulatedBackend(..., postprocessors=[privacy])
    ...
    print(privacy.audit.finish())

A user is canary i if its id is "canary-i". It is an ordinary user of the dataset, but its own update is discarded.
"""

from typing import Any, Unpack

import numpy as np

try:
    import torch
    from pfl.metrics import Metrics
    from pfl.postprocessor.base import Postprocessor
except ImportError as error:
    raise ImportError("auditing pfl needs an environment of its own with: pip install 'coalmine[pfl]'") from error

from coalmine.argument_checks import nonnegative, positive, short_repr
from coalmine.audit import Audit
from coalmine.integrations.claims import seen_accounting
from coalmine.integrations.framework_audit import FrameworkAudit, tensors_item
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.integrations.setup import (
    CLIP_SCALE,
    AuditSettings,
    followed,
    set_up_audit,
    watch_noise,
)
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

__all__ = ["AuditedMechanism", "audited"]
PREFIX = "canary-"
UNIT, ADJACENCY = "user", "add or remove one"  # of a claim that states none
NO_NOISE = "no noise multiplier was given, and without noise there is nothing to compare with the other users' sum"


def audited(
    privacy: Postprocessor,
    model: "torch.nn.Module | None" = None,
    *,
    scale: float | None = None,
    clip_norm: float | None = None,
    noise_multiplier: float | None = None,
    **settings: Unpack[AuditSettings],
) -> "AuditedMechanism":
    """A postprocessor that replaces the privacy mechanism; its audit is `.audit`.

    `model` is the network that is trained. Each of its parameters gets its own noise gauge. `settings` are `canaries`,
    `unobserved`, `delta`, `directory`, `claim` and `on_violation` as in `Audit`, and either `seed` or `seed_file`. Without
    a claim, `on_violation` watches the noise multiplier. `unit` names what is protected ("user" by default). An `audit` of
    your own replaces all of these settings. `scale` (10) is the length of a canary in clip norms before the clip.
    `clip_norm` and `noise_multiplier`, relative to the sum of clipped updates, are read from a mechanism that clips and
    adds Gaussian noise centrally. For another mechanism, give them yourself.

    `claim` is the epsilon to judge, and is committed to before round 1. A number is for one user over the whole run. If
    every user takes part in every round, it is the mechanism's, composed. If pfl samples users, the audit cannot know how
    the number counts that, so it can be refuted but not confirmed: claim with `sampling`, which is judged with the cohorts
    that pfl sampled. `privacy.audit.finish` takes a `claim` for a run that began without one, and `task`, the name of the
    training task.
    """
    if not isinstance(privacy, Postprocessor):
        raise TypeError(f"privacy must be a postprocessor of pfl, got {short_repr(privacy)}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch module, got {short_repr(model)}")
    mechanism = getattr(privacy, "underlying_mechanism", privacy)
    if clip_norm is None:
        clip_norm = getattr(mechanism, "clipping_bound", None)
        if noise_multiplier is None:
            noise_multiplier = getattr(mechanism, "relative_noise_stddev", None)
        if clip_norm is None or noise_multiplier is None:
            raise ValueError(
                f"privacy must clip and add Gaussian noise centrally, got {type(mechanism).__name__}; "
                "give clip_norm and noise_multiplier yourself"
            )
    size = positive("clip_norm", clip_norm)
    noise = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
    length = positive("scale", CLIP_SCALE if scale is None else scale)
    if length <= 1:
        raise ValueError(f"scale must be above 1, or the clip has nothing to clip, got {length}")
    # pfl's updates hold the parameters that require gradients, in this order (PyTorchModel.variable_map)
    trained = () if model is None else model.named_parameters()
    layers = [(name, p.numel()) for name, p in trained if p.requires_grad]
    core = set_up_audit(None if model is None else layers, usual_unit=UNIT, adjacency=ADJACENCY, **settings)
    watch_noise(core, settings.get("on_violation"), noise)
    audit = MechanismAudit(core, clip_norm=size, noise=noise, scale=length)
    audit.follow(core.settings.rounds, **followed(settings))
    return AuditedMechanism(privacy, audit)


class MechanismAudit(FrameworkAudit):
    """The audit of the sums that a mechanism releases. `noise` is the noise multiplier, None if nobody stated one."""

    trainer = Trainer("pfl", "pfl", "client")

    def __init__(self, core: Audit, *, clip_norm: float, noise: float | None, scale: float) -> None:
        self.clip_norm, self._noise, self.scale = clip_norm, noise, scale
        privacy = {"clip_norm": clip_norm, "noise_multiplier": noise or 0.0}
        super().__init__(core, privacy=privacy, canaries={"scale": scale})
        self.commit(planned=core.settings.rounds)

    def observe(self, released: Any, present: list[int], others: Any, users: int) -> None:
        """Record the released sum of a round; `others` is the real users' clipped sum."""
        self.core.observe_round(
            self.last_round + 1,
            released,
            present=present,
            others=others if self._noise else None,
            noise_std=None if self._noise is None else self._noise * self.clip_norm,
            clip_norm=self.clip_norm,
            scale=self.scale,
            participants=users,
        )
        self.recorder.add_round(self.last_round, canaries=len(present), clip_norm=self.clip_norm)

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """The result, which is also written to the directory if there is one.

        `task` is the name of the training task. Give a `claim` only if the audit was made without one.
        """
        run = FinishedRun(
            noise=self._noise,
            sampler_observed=True,
            accounted=seen_accounting(self.core, unit=UNIT, adjacency=ADJACENCY),
            items=self._items(),
            notes=[] if self._noise else [f"known-others is left out: {NO_NOISE}"],
            entries={"noise_multiplier": self._noise},
        )
        return self.conclude(claim, run, task=task)

    def _items(self) -> list[AuditedItem]:
        """The parts of the pipeline that only the integration knows about, checked or not."""
        clipping = f"canaries entered the mechanism's clip {self.scale:g} times longer than the clip norm"
        sampler = "canaries are sampled like every user of the dataset; a claim with sampling=… tests the sampler"
        others = "the other users' clipped updates were summed in every round"
        return [
            AuditedItem("clipping", "checked", clipping),
            AuditedItem("sampler", "not checked", sampler),
            AuditedItem("weights", "not checked", "the weights of the users' updates were not read"),
            AuditedItem("others", "checked", others) if self._noise else AuditedItem("others", "not checked", NO_NOISE),
            *tensors_item(self.core, "give Audit(…, layers=…)"),
        ]


class AuditedMechanism(Postprocessor):  # type: ignore[misc]
    """A privacy mechanism with canaries before its clip, and an audit that observes the sum after its noise."""

    def __init__(self, privacy: Postprocessor, audit: MechanismAudit) -> None:
        self.privacy, self.audit = privacy, audit
        self._present: list[int] = []
        self._users = 0  # in this round
        self._others: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "privacy":  # not set yet, for example while unpickling
            raise AttributeError(name)
        return getattr(self.privacy, name)

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> tuple[Any, Any]:
        """Replace a canary user's update by the canary, and let the mechanism clip it like any update."""
        update = _flat_vector(stats)
        self._users += 1
        user = str(user_context.user_id)
        if user.startswith(PREFIX):
            index = int(user.removeprefix(PREFIX))
            canary = self.audit.core.update(index, self.audit.clip_norm, scale=self.audit.scale, like=update)
            self._present.append(index)
            stats = stats.apply(lambda weights: _split_like(canary, weights))
        else:
            clipped = update * min(1.0, self.audit.clip_norm / max(float(update.norm()), 1e-300))
            self._others = clipped if self._others is None else self._others + clipped
        return self.privacy.postprocess_one_user(stats=stats, user_context=user_context)

    def postprocess_server(self, **kwargs: Any) -> tuple[Any, Any]:
        """Let the mechanism add its noise, observe the released sum, and pass it on unchanged."""
        return self._observe(*self.privacy.postprocess_server(**kwargs))

    def postprocess_server_live(self, **kwargs: Any) -> tuple[Any, Any]:
        """Like `postprocess_server`, for live training, where clients may add the noise."""
        return self._observe(*self.privacy.postprocess_server_live(**kwargs))

    def postprocess_one_user_metrics(self, **kwargs: Any) -> Metrics:
        """The mechanism's own metrics."""
        return self.privacy.postprocess_one_user_metrics(**kwargs)

    def postprocess_server_metrics(self, **kwargs: Any) -> Metrics:
        """The mechanism's own metrics."""
        return self.privacy.postprocess_server_metrics(**kwargs)

    def _observe(self, stats: Any, metrics: Any) -> tuple[Any, Any]:
        released = _flat_vector(stats)
        others = torch.zeros_like(released) if self._others is None else self._others
        self.audit.observe(released, self._present, others, self._users)
        self._present, self._users, self._others = [], 0, None
        return stats, metrics


def _flat_vector(stats: Any) -> Any:
    _, weights = stats.get_weights()
    return torch.cat([torch.as_tensor(weight).reshape(-1) for weight in weights])


def _split_like(vector: Any, weights: list[Any]) -> list[Any]:
    sizes = [int(np.prod(weight.shape)) for weight in weights]
    return [part.view(weight.shape) for part, weight in zip(vector.split(sizes), weights, strict=True)]
