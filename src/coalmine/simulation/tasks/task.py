"""What a task is."""

from dataclasses import dataclass, replace

from coalmine.simulation.engines.base import Examples
from coalmine.simulation.models import Model
from coalmine.simulation.population import Population


@dataclass(frozen=True)
class Task:
    """Examples to learn from and to be tested on, who has which, and the model."""

    name: str
    model: Model
    train: Examples
    test: Examples
    population: Population

    def with_population(self, population: Population) -> "Task":
        return replace(self, population=population)

    def to(self, device: str) -> "Task":
        return replace(self, train=self.train.to(device), test=self.test.to(device))
