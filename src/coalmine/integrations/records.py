"""Data canaries beside an audit: their scores before training, at checkpoints and at the end."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats, short_repr
from coalmine.audit import Audit
from coalmine.data_canaries import DataCanaries
from coalmine.log.files import parse_json, read_regular, write_atomically
from coalmine.verdict.coverage import AuditedItem

FILE = "data-canaries.json"  # in the run's directory: the scores so far
LARGEST = 1 << 30  # bytes


class WatchedRecords:
    """The data canaries of a run. Their score is that of the trained model less what the model before step 1 predicts.

    `model` returns the model as it is now. Scores are kept in the run's directory, so a run that resumes has them.
    """

    def __init__(self, canaries: DataCanaries, core: Audit, model: Callable[[], Any]) -> None:
        self._canaries, self._core, self._model = canaries, core, model
        self._file = None if core.directory is None else Path(core.directory.path) / FILE
        self._before: Floats | None = None
        self._checkpoints: dict[int, Floats] = {}
        if core.last_round == 0:
            self._before = canaries.score(model())
        elif self._file is not None and self._file.exists():
            self._read(self._file)
        self._write()

    def after_round(self, number: int) -> None:
        """Score the model if this round ends in a checkpoint."""
        if self._canaries.every is not None and number % self._canaries.every == 0:
            self._checkpoints[number] = self._scores()
            self._write()

    def item(self) -> AuditedItem:
        """The audited item "records": what the final model, and its checkpoints, tell."""
        last, delta = self._core.last_round, self._core.settings.delta
        seen = {number: scores for number, scores in self._checkpoints.items() if number < last}
        return AuditedItem.of_records(self._canaries.scored(self._scores(), delta=delta, checkpoints=seen))

    def _scores(self) -> Floats:
        return self._canaries.score(self._model(), reference=self._before)

    def _read(self, file: Path) -> None:
        stored = parse_json(read_regular(file, most=LARGEST))
        before = stored.get("before")  # config.toml has refused other canaries
        self._before = None if before is None else np.array(before, dtype=np.float64)
        self._checkpoints = {
            int(number): np.array(scores, dtype=np.float64)
            for number, scores in stored.get("checkpoints", {}).items()
            if int(number) <= self._core.last_round
        }

    def _write(self) -> None:
        if self._file is None:
            return
        values = {
            "before": None if self._before is None else self._before.tolist(),
            "checkpoints": {str(number): scores.tolist() for number, scores in self._checkpoints.items()},
        }
        write_atomically(self._file, json.dumps(values).encode())


def checked_canaries(canaries: Any) -> DataCanaries | None:
    """The data canaries that `audited` was given, rejected unless they are in a data set already."""
    if canaries is None:
        return None
    if not isinstance(canaries, DataCanaries):
        raise TypeError(f"data_canaries must be made by coalmine.data_canaries, got {short_repr(canaries)}")
    if not canaries.was_inserted:
        raise ValueError(
            "data_canaries must be in the data before training: train on canaries.insert(train_set), and make the loader "
            "from that"
        )
    return canaries
