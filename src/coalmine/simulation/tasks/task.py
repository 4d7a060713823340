"""A task: a data set that is split over clients, and its model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import Model
from coalmine.simulation.population import Population


@dataclass(frozen=True)
class Task:
    """Training and test examples, the clients who own them, and the model.

    Text examples are rows of 16-bit symbols. Accuracy ignores `unscored_labels`. `title` is the name of the data in results.
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
    """An error that names the missing files of a task and says how to get them."""
    missing = ", ".join(name for name in names if not (folder / name).is_file())
    return FileNotFoundError(
        f"{folder} does not contain {missing}: run `coalmine data {dataset}`, or give its parent folder with --data-dir "
        "(docs/how-to/data.md)"
    )
