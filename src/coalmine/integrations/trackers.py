"""Log a run's numbers to TensorBoard, MLflow or Weights & Biases, if they are installed."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from coalmine.argument_checks import short_repr

Scalar = tuple[str, float, int]  # name, value, round
DASHBOARDS = ("tensorboard", "mlflow", "wandb")


class Tracker:
    """Receives scalars while a run is in progress, and logs each once."""

    def __init__(self, log: Callable[[str, float, int], object], flush: Callable[[], object] = lambda: None) -> None:
        self._log, self._flush = log, flush
        self._sent: set[tuple[str, int]] = set()

    def send(self, scalars: Iterable[Scalar]) -> None:
        """Log the scalars that were not sent before."""
        for name, value, number in scalars:
            if (name, number) not in self._sent:
                self._sent.add((name, number))
                self._log(name, value, number)
        self._flush()


def tensorboard(directory: Path | str | None) -> Tracker:
    """Logs to TensorBoard event files in `directory`, by default in TensorBoard's own choice of one below `runs`."""
    writer = _module("torch.utils.tensorboard", "TensorBoard scalars need: pip install tensorboard torch").SummaryWriter
    opened = writer(None if directory is None else str(directory))
    return Tracker(opened.add_scalar, opened.flush)


def mlflow() -> Tracker:
    """Logs metrics of the active MLflow run. MLflow starts a run if there is none."""
    module = _module("mlflow", "MLflow metrics need: pip install mlflow")
    return Tracker(lambda name, value, number: module.log_metric(name, value, step=number))


def wandb() -> Tracker:
    """Logs to the active run of Weights & Biases, against a step of its own. It starts a run if there is none."""
    module = _module("wandb", "Weights & Biases needs: pip install wandb")
    run = module.run or module.init(project="coalmine")
    run.define_metric("coalmine/round")
    run.define_metric("coalmine/*", step_metric="coalmine/round")
    return Tracker(lambda name, value, number: run.log({name: value, "coalmine/round": number}))


def trackers(names: str | Sequence[str] | None, directory: Path | None = None) -> list[Tracker]:
    """The dashboards of those names. TensorBoard writes into a folder of the run directory, if there is one."""
    makers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: tensorboard(None if directory is None else directory / "tensorboard"),
        "mlflow": mlflow,
        "wandb": wandb,
    }
    wanted = [names] if isinstance(names, str) else list(names or ())
    for name in wanted:
        if name not in makers:
            raise ValueError(f"log_to must be one or more of {', '.join(DASHBOARDS)}, got {short_repr(name)}")
    return [makers[name]() for name in wanted]


def _module(name: str, need: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(need) from error
