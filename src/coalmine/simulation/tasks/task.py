"""A task: a data set split over clients, and its model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import Model
from coalmine.simulation.population import Population


@dataclass(frozen=True)
class Task:
    """Training and test examples, the clients who own them, and the model.

    Text examples are rows of 16-bit symbols. Accuracy leaves out `unscored_labels`; `title` is what results call the data.
    """

    name: str
    model: Model
    train: Examples
    test: Examples
    population: Population
    unscored_labels: tuple[int, ...] = ()
    title: str = ""

    def with_population(self, population: Population) -> "Task":
        return replace(self, population=population)

    def to(self, device: str) -> "Task":
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def missing_files(folder: Path, names: Sequence[str], dataset: str) -> FileNotFoundError:
    """The error that says which files of a task are missing, and how to get them."""
    missing = ", ".join(name for name in names if not (folder / name).is_file())
    return FileNotFoundError(
        f"{folder} does not hold {missing}: `coalmine data get {dataset}`, or name the folder above by --data-dir "
        "(docs/how-to/data.md)"
    )
