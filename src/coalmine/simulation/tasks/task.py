"""What a task is."""

from dataclasses import dataclass, replace

from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import Model
from coalmine.simulation.population import Population


@dataclass(frozen=True)
class Task:
    """Examples to learn from and to be tested on, who has which, and the model.

    Examples of text are rows of symbols in 16 bits. `unscored_labels` are those that accuracy leaves out; `title` is what
    results call the data, which says where it stands in for something else.
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
