"""The models between which a run trains: what an audit commits to of them, and what it keeps of them in its directory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from coalmine.log.files import json_ready
from coalmine.log.model_file import FINAL, INITIAL, model_digest, read_initial
from coalmine.log.provenance import code_facts
from coalmine.log.shared_log import OpenedRun
from coalmine.measure.measurer import Measurer
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Final
from coalmine.measure.settings import Settings
from coalmine.measure.vectors import model_sha256


class KeptModels:
    """The initial and the final model of a run, as digests and, unless they are too large, as files."""

    def __init__(self, run: OpenedRun, measurer: Measurer[Any], settings: Settings, ranks: Ranks) -> None:
        self._run, self._measurer, self._settings, self._ranks = run, measurer, settings, ranks
        self._saves = True

    def commit_to(self, *, initial: Any, rounds: int | None, facts: Mapping[str, Any] | None, save_model: bool) -> None:
        """Commit to these too; after the first round, nothing changes."""
        self._saves, stated = save_model, self._run.statement
        if self._run.log.last_number == 0:
            self._run.amend(
                initial_sha256=stated.initial_sha256 if initial is None else self._digest(INITIAL, initial),
                rounds=stated.rounds if rounds is None else rounds,
                facts=json_ready({**stated.facts, **(facts or {})}),
                code=code_facts() if self._ranks.rank == 0 else None,
            )

    def final(self, model: Any, initial: Any) -> Final:
        """The record of the final model. After a restart, the initial one is read from the directory, by one process."""
        home = None if self._ranks.several else self._run.directory
        if initial is None and home is not None and self._run.statement.initial_sha256 is not None:
            row = read_initial(home.path / INITIAL, self._settings.dim)
            kept = row is not None and model_sha256(row) == self._run.statement.initial_sha256
            initial = self._measurer.from_row(row) if kept else None
        record = self._measurer.final(model, initial)
        return replace(record, sha256=self._digest(FINAL, model))

    def _digest(self, name: str, model: Any) -> str:
        """The digest of a model, which is also written into the directory, if there is one."""
        home = self._run.directory
        path = home.path / name if home is not None and self._saves else None
        pieces = self._measurer.pieces(name.removesuffix(".npy"), model)
        sharded = bool(self._settings.shards)
        return model_digest(pieces, self._ranks, sharded=sharded, dim=self._settings.dim, path=path)
