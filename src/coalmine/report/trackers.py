"""Log a run's numbers to TensorBoard and MLflow, if they are installed."""

import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

Scalar = tuple[str, float, int]  # name, value, round


class Tracker(Protocol):
    """Receives scalars while a run is in progress."""

    def send(self, scalars: Iterable[Scalar]) -> None:
        """Log the scalars that were not sent before."""


class TensorBoard:
    """Logs scalars to TensorBoard event files in `directory`."""

    def __init__(self, directory: Path | str) -> None:
        try:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard scalars need: pip install tensorboard torch") from error
        self._writer = writer(str(directory))
        self._sent: set[tuple[str, int]] = set()

    def send(self, scalars: Iterable[Scalar]) -> None:
        for name, value, number in _unsent(scalars, self._sent):
            self._writer.add_scalar(name, value, number)
        self._writer.flush()


class MLflow:
    """Logs scalars as metrics of the active MLflow run. MLflow starts a run if there is none."""

    def __init__(self) -> None:
        try:
            self._mlflow: Any = importlib.import_module("mlflow")
        except ImportError as error:
            raise ImportError("MLflow metrics need: pip install mlflow") from error
        self._sent: set[tuple[str, int]] = set()

    def send(self, scalars: Iterable[Scalar]) -> None:
        for name, value, number in _unsent(scalars, self._sent):
            self._mlflow.log_metric(name, value, step=number)


def _unsent(scalars: Iterable[Scalar], sent: set[tuple[str, int]]) -> Iterator[Scalar]:
    for name, value, number in scalars:
        if (name, number) not in sent:
            sent.add((name, number))
            yield name, value, number
