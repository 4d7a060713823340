"""Engines train the clients of a round, either together or one by one.

`plain` is the readable reference; `fast` has hand-written versions for the paper's models.
"""

from coalmine.argument_checks import one_of
from coalmine.simulation.engines.fast.cnn_clients import CnnTogether
from coalmine.simulation.engines.fast.cnn_step import convolutional_step
from coalmine.simulation.engines.fast.dense_clients import DenseTogether
from coalmine.simulation.engines.fast.lstm_clients import LstmTogether
from coalmine.simulation.engines.plain.dp_sgd import PerExample
from coalmine.simulation.engines.plain.engine import ClientSettings, Engine, Examples
from coalmine.simulation.engines.plain.one_by_one import OneByOne, autograd_step
from coalmine.simulation.engines.plain.vectorized import VectorizedTogether
from coalmine.simulation.models import Convolutional, Model, Recurrent

__all__ = ["ClientSettings", "Engine", "Examples", "client_engine", "example_engine", "trains_one_by_one"]

ENGINES = ("auto", "together", "one-by-one")
PRECISIONS = ("auto", "fp32", "tf32")


def trains_one_by_one(name: str, model: Model, *, on_cpu: bool) -> bool:
    """Whether the engine of this name trains one client after another."""
    return name == "one-by-one" or (name == "auto" and on_cpu and not model.layers)


def client_engine(
    name: str,
    model: Model,
    examples: Examples,
    client: ClientSettings,
    *,
    memory_limit: float = 1.0,
    precision: str = "fp32",
) -> Engine:
    """The engine of this name; "auto" selects the faster one according to benchmarks/engine.py.

    On a GPU all models train together. On a CPU only dense models do; the others are faster one by one. `memory_limit` is
    in GiB.
    """
    one_of("engine", name, ENGINES)
    on_cpu = examples.inputs.device.type == "cpu"
    name = "one-by-one" if trains_one_by_one(name, model, on_cpu=on_cpu) else "together"
    if name == "together" and model.layers:
        return DenseTogether(model, examples, client, memory_limit=memory_limit)
    if name == "together" and isinstance(model.structure, Recurrent):
        return LstmTogether(model, examples, client, memory_limit=memory_limit, precision=precision)
    if name == "together" and isinstance(model.structure, Convolutional):
        return CnnTogether(model, examples, client, memory_limit=memory_limit, precision=precision)
    if name == "together":
        return VectorizedTogether(model, examples, client, memory_limit=memory_limit)
    step = convolutional_step if on_cpu and isinstance(model.structure, Convolutional) else autograd_step
    return OneByOne(model, examples, client, step=step)


def example_engine(model: Model, examples: Examples, *, memory_limit: float = 1.0) -> Engine:
    """The engine for DP-SGD."""
    return PerExample(model, examples, memory_limit=memory_limit)
