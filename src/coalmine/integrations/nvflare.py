"""Audit NVFlare: one filter on canary sites, and one on the server that observes every aggregate.

    recipe = NumpyFedAvgRecipe(...)
    recipe = audited(recipe, model, sites=..., canaries=..., seed_file=..., clip_norm=1.0, delta=1e-5, directory=...)
    recipe.execute(...)
    print(recipe.audit.finish())

Sites must send differences (TransferType.DIFF). NVFlare stores a job's filters as text, so they take the path of the seed
file, not the seed. The audit runs in the server's process, which writes the result into the directory when the job ends.
`recipe.audit` represents the audit in that process: its `finish` computes the result again from the directory.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

try:
    from nvflare.apis.dxo import DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.event_type import EventType
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.app_event_type import AppEventType
    from nvflare.recipe.spec import Recipe
except ImportError as error:
    raise ImportError("auditing NVFlare needs: pip install 'coalmine[nvflare]'") from error

from coalmine.argument_checks import nonnegative, positive, short_repr
from coalmine.audit import Audit, Seed
from coalmine.canaries import RotatedCanaries
from coalmine.integrations.claims import seen_accounting
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.integrations.setup import check_unit, checked_unit, full_claim, refuse_result, watch_noise
from coalmine.log.seed_file import read_seed
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.alarm import ViolationError
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

__all__ = ["AuditFilter", "CanaryFilter", "audited"]
CANARY = "coalmine-canary"
UNIT, ADJACENCY = "site", "add or remove one"  # of a claim that states none
AUDITED = (
    AuditedItem(
        "weights", "not checked", "every site is assumed to weigh the same; the aggregator's weights are not read"
    ),
    AuditedItem(
        "tensors", "not checked", "a noise gauge for each tensor needs the other sites' sum, which is not read"
    ),
    AuditedItem(
        "sampler",
        "not checked",
        "the audit records which canary sites replied; a claim with sampling=… tests the sampler",
    ),
    AuditedItem("others", "not checked", "the audit does not read the other sites' updates"),
)
NO_OTHERS = "known-others is left out: the audit does not read the other sites' updates"
ERRORS = (ValueError, TypeError, OSError, RuntimeError)
AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def audited(
    recipe: AnyRecipe,
    model: Any,
    *,
    sites: Sequence[str],
    canaries: Sequence[str],
    clip_norm: float,
    delta: float,
    directory: Path | str,
    noise_multiplier: float | None = None,
    unobserved: int | None = None,
    seed: Seed | None = None,
    seed_file: Path | str | None = None,
    scale: float | None = None,
    task: str | None = None,
    claim: float | None = None,
    on_violation: Literal["warn", "raise"] | None = None,
    unit: str | None = None,
) -> AnyRecipe:
    """The same recipe with canaries on some of its sites, and a server that audits every round of training.

    `model` is the model that training starts from: an array, or arrays by name. `canaries` names the canary sites, which
    must be in `sites`. Call this before you add filters for privacy and encryption: canaries come first. `scale` is the
    length of a canary in clip norms when it is sent: 1 by default; give more if your filters clip.

    Give either `seed` or `seed_file`. A seed file must have the same path on the server and on canary sites. A `seed` is
    written to a file in the directory, so use it only in simulations. `unobserved`, `delta` and `directory` are those of
    `Audit`. A directory that holds a result is rejected. The server makes the audit, so you cannot pass your own. `claim` is
    the epsilon of one site over the whole run, which is committed to before round 1; without one nothing can pass. If every
    canary site replies in every round, it is the mechanism's, composed. If sites are sampled, it can be refuted but not
    confirmed. `on_violation` is "warn", or "raise" to end the job in the round that refutes the claim. Without a claim, it
    watches the noise multiplier.

    `unit` names what is protected ("site" by default). The server judges the claim and stores the name of the `task`.
    `recipe.audit.finish` takes a `claim` for a job that began without one, and a `task`. It reads the server's directory,
    so on another machine it raises a ValueError. A claim with `sampling` is judged with the sites that the server chose.
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe must be a recipe of NVFlare, got {short_repr(recipe)}")
    if isinstance(canaries, str) or not all(isinstance(name, str) for name in canaries):
        raise TypeError(f"canaries must list the names of sites, got {short_repr(canaries)}")
    unknown = sorted(set(canaries) - set(sites))
    if unknown:
        raise ValueError(f"canaries must be in sites, got {', '.join(unknown)}")
    dim = sum(np.asarray(values).size for values in (model.values() if isinstance(model, Mapping) else [model]))
    # Rejects bad settings now, before the job starts.
    Audit(dim, canaries=len(canaries), unobserved=unobserved, seed=0, delta=delta)
    home = Path(directory).absolute()
    refuse_result(home)
    path = home / "seed" if seed_file is None else Path(seed_file).absolute()
    length = 1.0 if scale is None else scale
    audit = AuditFilter(
        dim, len(canaries), delta, str(path), str(home), clip_norm, noise_multiplier, task, unobserved, length,
        claim, on_violation, unit,
    )  # fmt: skip
    filters = [CanaryFilter(index, dim, clip_norm, str(path), length) for index in range(len(canaries))]
    if (seed is None) == (seed_file is None):
        raise ValueError(
            f"exactly one of seed and seed_file must be given, got {'neither' if seed is None else 'both'}"
        )
    if seed is not None:
        _write_seed(path, seed)
    recipe.set_per_site_config({name: {} for name in sites})
    for name, canary in zip(canaries, filters, strict=True):
        recipe.add_client_output_filter(canary, tasks=["train"], clients=[name])
    recipe.add_server_input_filter(audit, tasks=["train"])
    recipe.audit = audit
    return recipe


def _write_seed(path: Path, seed: Seed) -> None:
    """Write a seed to a file that only its owner may read. A file with another seed is rejected."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.touch(mode=0o600)
        path.write_bytes(seed if isinstance(seed, bytes) else str(int(seed)).encode())
    if read_seed(path) != seed:
        raise ValueError(f"{path} holds another seed, or cannot hold this one: give seed_file, or another directory")


class CanaryFilter(DXOFilter):  # type: ignore[misc]
    """On a canary site: replaces the site's difference by the canary, `scale` times as long as the clip norm."""

    def __init__(self, canary: int, dim: int, clip_norm: float, seed_file: str, scale: float = 1.0) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        self.canary, self.dim, self.seed_file = canary, dim, seed_file
        self.clip_norm, self.scale = positive("clip_norm", clip_norm), positive("scale", scale)

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        """Replace the site's update by its canary, and put the canary's number into the reply."""
        canaries = RotatedCanaries(self.canary + 1, self.dim, seed=read_seed(Path(self.seed_file)))
        update = canaries.canary(self.canary) * (self.clip_norm * self.scale)
        start = 0
        for name, values in dxo.data.items():
            size = int(np.size(values))
            part = update[start : start + size].reshape(np.shape(values))
            dxo.data[name] = np.asarray(part, dtype=np.asarray(values).dtype)
            start += size
        if start != self.dim:
            raise ValueError(f"the audit is for {self.dim} numbers, but this site sends {start}")
        dxo.set_meta_prop(CANARY, self.canary)
        return dxo


class AggregateAudit(FrameworkAudit):
    """The audit of the server's aggregates, in the server's process. `noise` is the noise multiplier."""

    trainer = Trainer("nvflare", "nvflare", "client")

    def __init__(self, core: Audit, *, clip_norm: float, noise: float | None, scale: float, task: str | None) -> None:
        self._clip_norm, self._noise, self._scale, self._task = clip_norm, noise, scale, task
        privacy = {"clip_norm": clip_norm, "noise_multiplier": noise or 0.0}
        super().__init__(core, privacy=privacy, canaries={"scale": scale})
        self.commit(planned=core.settings.rounds)

    def observe(self, aggregate: Mapping[str, Any], present: Sequence[int], replies: int) -> None:
        """Record an aggregate, the average of `replies` replies."""
        arrays = [np.asarray(values, dtype=np.float64).reshape(-1) for values in aggregate.values()]
        clip_norm, number = self._clip_norm / max(replies, 1), self.last_round + 1
        self.core.observe_round(
            number,
            np.concatenate(arrays),
            present=present,
            noise_std=None if self._noise is None else self._noise * clip_norm,
            clip_norm=clip_norm,
            scale=self._scale,
            participants=replies,
        )
        self.recorder.add_round(number, canaries=len(present), clients=replies - len(present))

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """The result, which is also written to the directory."""
        clipping = AuditedItem(
            "clipping", "not checked", "canaries are sent at the clip norm, so a clip leaves them as they are"
        )
        if self._scale > 1:
            reason = f"canaries are sent {self._scale:g} times longer than the clip norm, before the sites' own filters"
            clipping = AuditedItem("clipping", "checked", reason)
        run = FinishedRun(
            noise=self._noise,
            sampler_observed=True,
            accounted=seen_accounting(self.core, unit=UNIT, adjacency=ADJACENCY),
            items=(clipping, *AUDITED),
            notes=[NO_OTHERS],
            entries={"noise_multiplier": self._noise},
        )
        return self.conclude(claim, run, task=task or self._task)


class AuditFilter(DXOFilter):  # type: ignore[misc]
    """On the server: records which canaries replied, observes every aggregate, and writes the result."""

    def __init__(
        self,
        dim: int,
        canaries: int,
        delta: float,
        seed_file: str,
        directory: str,
        clip_norm: float,
        noise_multiplier: float | None = None,
        task: str | None = None,
        unobserved: int | None = None,
        scale: float = 1.0,
        claim: float | None = None,
        on_violation: Literal["warn", "raise"] | None = None,
        unit: str | None = None,
    ) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        if on_violation not in (None, "warn", "raise"):
            raise ValueError(
                f"on_violation must be 'warn' or 'raise', as it is sent to the server, got {on_violation!r}"
            )
        if on_violation is not None and claim is None and not noise_multiplier:
            raise ValueError(
                "on_violation needs a claim or a noise_multiplier to test the rounds against: give one of them"
            )
        self.claim, self.on_violation, self.unit = claim, on_violation, checked_unit(unit)
        check_unit(Claim.of(claim), self.unit)
        self.dim, self.canaries, self.unobserved, self.delta = dim, canaries, unobserved, delta
        self.seed_file, self.directory, self.task = seed_file, directory, task
        self.clip_norm, self.scale = positive("clip_norm", clip_norm), positive("scale", scale)
        self.noise_multiplier = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._audit: AggregateAudit | None = None
        self._present: list[int] = []
        self._replies = 0

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        """Record whether a reply is a canary's, and pass it on unchanged. A number that no canary has is not believed."""
        self._replies += 1
        index = dxo.get_meta_prop(CANARY, None)
        if isinstance(index, int) and 0 <= index < self.canaries and index not in self._present:
            self._present.append(index)
        return dxo

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Start the audit, observe an aggregate, or write the result.

        NVFlare logs an exception of an event handler and continues, which would leave rounds out unseen. So the job stops.
        """
        if event_type == EventType.START_RUN:
            try:
                refuse_result(self.directory)
                self._audit = self._open()
            except ERRORS as error:
                self.system_panic(f"the audit cannot start, so the job stops: {error}", fl_ctx)
        elif event_type == AppEventType.AFTER_AGGREGATION and self._audit is not None:
            aggregate, present, replies = fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT), self._present, self._replies
            self._present, self._replies = [], 0
            try:
                self._audit.observe(aggregate.params, present, replies)
            except ViolationError as error:
                self.system_panic(str(error), fl_ctx)
            except ERRORS as error:
                number = self._audit.last_round + 1
                self.system_panic(f"the audit of round {number} failed, so the job stops: {error}", fl_ctx)
        elif event_type == EventType.END_RUN and self._audit is not None:
            with self._audit as audit:
                if audit.last_round:
                    audit.finish()
            self._audit = None

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """The result of a finished job, from the rounds in its directory. It is also written there."""
        if not (Path(self.directory) / "audit" / "rounds.log").exists():
            raise ValueError(f"{self.directory} holds no rounds: run the job, and finish where its server ran")
        with self._open() as audit:
            return audit.finish(claim=claim, task=task)

    def _open(self) -> AggregateAudit:
        claim = Claim.of(self.claim)
        if claim is not None:
            claim = full_claim(claim, delta=self.delta, unit=self.unit, usual_unit=UNIT, adjacency=ADJACENCY)
        core = Audit(
            self.dim,
            canaries=self.canaries,
            unobserved=self.unobserved,
            seed=read_seed(self.seed_file),
            delta=self.delta,
            directory=self.directory,
            claim=claim,
        )
        if self.on_violation is not None and claim is not None:
            core.watch.start(self.on_violation)
        watch_noise(core, self.on_violation, self.noise_multiplier)
        audit = AggregateAudit(
            core, clip_norm=self.clip_norm, noise=self.noise_multiplier, scale=self.scale, task=self.task
        )
        audit.recorder.unit = self.unit
        return audit
