"""Audit NVFlare: a filter for canary sites, and one for the server that sees who came and what was aggregated.

    recipe = NumpyFedAvgRecipe(...)
    audit_recipe(recipe, sites, canary_sites, dim=..., clip_norm=1.0, delta=1e-5, directory=...)
    recipe.execute(...)

Sites must send differences (TransferType.DIFF). Filters travel as text in the job, so they take the seed's file, not the
seed. The result is in the directory when the job has ended.
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
from coalmine.audit.seeds import read_seed, write_seed
from coalmine.canaries import RotatedCanaries
from coalmine.integrations.checks import nonnegative, positive
from coalmine.integrations.claims import noise_claim
from coalmine.integrations.journal import Journal

CANARY = "coalmine-canary"


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
    """Make canaries of some of a new recipe's sites, and have its server audit every round of training.

    Call it before filters for privacy and encryption are added: canaries come first. `seed_file` has one path on the
    server and on canary sites; in a simulation leave it out, and one is made in the directory.
    """
    unknown = sorted(set(canary_sites) - set(sites))
    if unknown:
        raise ValueError(f"canary_sites must be among sites, got {', '.join(unknown)}")
    home = Path(directory).absolute()
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
    """On a canary site: its difference becomes the canary, `scale` times as long as the clip norm."""

    def __init__(self, canary: int, dim: int, clip_norm: float, seed_file: str, scale: float = 1.0) -> None:
        super().__init__(supported_data_kinds=[DataKind.WEIGHT_DIFF], data_kinds_to_filter=[DataKind.WEIGHT_DIFF])
        self.canary, self.dim, self.seed_file = canary, dim, seed_file
        self.clip_norm, self.scale = positive("clip_norm", clip_norm), positive("scale", scale)

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> Any:
        """The canary in the place of the site's own update, and which one it is beside it."""
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
    """On the server: notes the canaries among the replies, and observes every aggregate."""

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
        """A reply, handed on as it is."""
        self._replies += 1
        index = dxo.get_meta_prop(CANARY, None)
        if index is not None:
            self._present.append(int(index))
        return dxo

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Begin, observe, end."""
        if event_type == EventType.START_RUN:
            self._start()
        elif event_type == AppEventType.AFTER_AGGREGATION:
            self._observe(fl_ctx.get_prop(AppConstants.AGGREGATION_RESULT))
        elif event_type == EventType.END_RUN:
            self._finish()

    def _start(self) -> None:
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
        self._journal.finish(claim, noise=noise, task=self.task, noise_multiplier=noise)
