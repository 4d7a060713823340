"""Audit NVFlare: one filter for canary sites, and one for the server that observes every aggregate.

    recipe = NumpyFedAvgRecipe(...)
    audit_recipe(recipe, sites, canary_sites, dim=..., clip_norm=1.0, delta=1e-5, directory=...)
    recipe.execute(...)

Sites must send differences (TransferType.DIFF). The job holds its filters as text, so they take the path of the seed file,
not the seed. The result is in the directory when the job has ended.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

try:
    from nvflare.apis.dxo import DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.event_type import EventType
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.app_event_type import AppEventType
except ImportError as error:
    raise ImportError("auditing NVFlare needs: pip install 'coalmine[nvflare]'") from error

from coalmine.audit.audit import Audit
from coalmine.audit.coverage import AuditedItem
from coalmine.canaries import RotatedCanaries
from coalmine.integrations.checks import check_no_result, nonnegative, positive
from coalmine.integrations.claims import noise_claim
from coalmine.integrations.journal import Journal
from coalmine.storage.seed_file import read_seed, write_seed

CANARY = "coalmine-canary"
AUDITED = (
    AuditedItem("clipping", "not checked", "canaries are sent at the clip norm, so a clip leaves them as they are"),
    AuditedItem(
        "weights", "not checked", "every site is assumed to weigh the same; the aggregator's weights are not read"
    ),
    AuditedItem(
        "tensors", "not checked", "a noise gauge for each tensor needs the other sites' sum, which is not read"
    ),
    AuditedItem("sampler", "not checked", "the audit notes which canary sites replied, not how the server chose them"),
    AuditedItem("others", "not checked", "the audit does not read the other sites' updates"),
)
NO_OTHERS = "known-others is left out: the audit does not read the other sites' updates"


def audit_recipe(
    recipe: Any,
    sites: Sequence[str],
    canary_sites: Sequence[str],
    *,
    dim: int,
    clip_norm: float,
    delta: float,
    directory: Path | str,
    noise_multiplier: float | None = None,
    seed_file: Path | str | None = None,
    task: str | None = None,
) -> None:
    """Turn some sites of a new recipe into canaries, and let its server audit every round of training.

    Call it before you add filters for privacy and encryption: canaries come first. `seed_file` must have the same path on
    the server and on canary sites. In a simulation leave it out, and a seed file is made in the directory. A directory that
    holds a result is refused.
    """
    unknown = sorted(set(canary_sites) - set(sites))
    if unknown:
        raise ValueError(f"canary_sites must be among sites, got {', '.join(unknown)}")
    home = Path(directory).absolute()
    check_no_result(home)
    seed = home / "seed" if seed_file is None else Path(seed_file)
    if seed_file is None and not seed.exists():
        home.mkdir(parents=True, exist_ok=True)
        write_seed(seed)
    recipe.set_per_site_config({name: {} for name in sites})
    for index, name in enumerate(canary_sites):
        canary = CanaryFilter(index, dim, clip_norm, str(seed))
        recipe.add_client_output_filter(canary, tasks=["train"], clients=[name])
    audit = AuditFilter(dim, len(canary_sites), delta, str(seed), str(home), clip_norm, noise_multiplier, task)
    recipe.add_server_input_filter(audit, tasks=["train"])


class CanaryFilter(DXOFilter):  # type: ignore[misc]
    """On a canary site: replaces its difference by the canary, `scale` times as long as the clip norm."""

    def __init__(self, canary: int, dim: int, clip_norm: float, seed_file: str, scale: float = 1.0) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        self.canary, self.dim, self.seed_file = canary, dim, seed_file
        self.clip_norm, self.scale = positive("clip_norm", clip_norm), positive("scale", scale)

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        """Replace the site's update by its canary, and say in the reply which canary it is."""
        canaries = RotatedCanaries(self.canary + 1, self.dim, seed=read_seed(Path(self.seed_file)))
        row = canaries.canary(self.canary) * (self.clip_norm * self.scale)
        place = 0
        for name, values in dxo.data.items():
            size = int(np.size(values))
            part = row[place : place + size].reshape(np.shape(values))
            dxo.data[name] = np.asarray(part, dtype=np.asarray(values).dtype)
            place += size
        if place != self.dim:
            raise ValueError(f"the audit is of {self.dim} numbers, but this site sends {place}")
        dxo.set_meta_prop(CANARY, self.canary)
        return dxo


class AuditFilter(DXOFilter):  # type: ignore[misc]
    """On the server: notes which canaries replied, and observes every aggregate."""

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
    ) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        self.dim, self.canaries, self.delta = dim, canaries, delta
        self.seed_file, self.directory = seed_file, directory
        self.clip_norm, self.task = positive("clip_norm", clip_norm), task
        self.noise_multiplier = None if noise_multiplier is None else nonnegative("noise_multiplier", noise_multiplier)
        self._audit: Audit | None = None
        self._journal: Journal | None = None
        self._present: list[int] = []
        self._replies = 0

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        """Note whether a reply is a canary's, and pass it on unchanged."""
        self._replies += 1
        index = dxo.get_meta_prop(CANARY, None)
        if index is not None:
            self._present.append(int(index))
        return dxo

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Start the audit, observe an aggregate, or write the result."""
        if event_type == EventType.START_RUN:
            self._start()
        elif event_type == AppEventType.AFTER_AGGREGATION:
            self._observe(fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT))
        elif event_type == EventType.END_RUN:
            self._finish()

    def _start(self) -> None:
        check_no_result(self.directory)
        seed = read_seed(Path(self.seed_file))
        self._audit = Audit(self.dim, canaries=self.canaries, seed=seed, delta=self.delta, directory=self.directory)
        privacy = {"clip_norm": self.clip_norm, "noise_multiplier": self.noise_multiplier or 0.0, "delta": self.delta}
        config = {"trainer": "nvflare", "privacy": privacy, "canaries": {"count": self.canaries}}
        self._journal = Journal(self._audit, config)

    def _observe(self, result: Any) -> None:
        assert self._audit is not None
        assert self._journal is not None
        row = np.concatenate([np.asarray(values, dtype=np.float64).reshape(-1) for values in result.params.values()])
        size = self.clip_norm / max(self._replies, 1)
        noise = None if self.noise_multiplier is None else self.noise_multiplier * size
        number = self._audit.last_round + 1
        self._audit.observe_round(number, row, present=self._present, noise_std=noise, clip_norm=size)
        self._journal.add_round(number, canaries=len(self._present), clients=self._replies - len(self._present))
        self._present, self._replies = [], 0

    def _finish(self) -> None:
        if self._audit is None or self._journal is None or not self._audit.last_round:
            return
        claim = noise_claim(self._audit, self.noise_multiplier) if self.noise_multiplier else None
        noise = self.noise_multiplier
        notes = [NO_OTHERS]
        if claim is None:
            notes.append("no verdict: no noise multiplier was given, so there is no claim to judge")
        self._journal.finish(claim, noise=noise, task=self.task, audited=AUDITED, notes=notes, noise_multiplier=noise)
