"""The state of every random generator that a step may draw from, so that the step can be run again."""

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from coalmine.argument_checks import WrongTypeError, short_repr


def is_generator(thing: Any) -> bool:
    """Whether this is a random generator whose state can be restored."""
    if isinstance(thing, np.random.Generator | np.random.RandomState | random.Random):
        return not isinstance(thing, random.SystemRandom)
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Generator)


class Randomness:
    """The states of all global generators at one moment: torch on CPU and CUDA, numpy's, Python's, and those given."""

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self._restores = [_python(), _numpy(), *_torch(), *map(_given, generators)]

    def restore(self) -> None:
        """Put every generator back into its state of that moment."""
        for restore in self._restores:
            restore()


class Draws:
    """Whether anything was drawn from torch's, numpy's or Python's global generator since this was made."""

    def __init__(self) -> None:
        self._before = _fingerprint()

    def happened(self) -> bool:
        return _fingerprint() != self._before


def _fingerprint() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    states: list[Any] = [random.getstate(), (kind, np.asarray(keys).tobytes(), tuple(rest))]
    if (torch := sys.modules.get("torch")) is not None:
        states.append(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            states += [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return tuple(states)


def _python() -> Callable[[], None]:
    state = random.getstate()
    return lambda: random.setstate(state)


def _numpy() -> Callable[[], None]:
    state = np.random.get_state()  # noqa: NPY002
    return lambda: np.random.set_state(state)  # noqa: NPY002


def _torch() -> list[Callable[[], None]]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    state = torch.get_rng_state()
    restores = [lambda: torch.set_rng_state(state)]
    if torch.cuda.is_initialized():
        on_gpus = torch.cuda.get_rng_state_all()
        restores.append(lambda: torch.cuda.set_rng_state_all(on_gpus))
    return restores


def _given(generator: Any) -> Callable[[], None]:
    """A function that restores one generator of torch, numpy or Python."""
    if isinstance(generator, np.random.Generator):
        bits, state = generator.bit_generator, generator.bit_generator.state
        return lambda: setattr(bits, "state", state)
    for read, write in (("get_state", "set_state"), ("getstate", "setstate")):
        if hasattr(generator, read) and hasattr(generator, write):
            saved = getattr(generator, read)()
            return lambda: getattr(generator, write)(saved)
    raise WrongTypeError(f"generators must be random generators of torch, numpy or Python, got {short_repr(generator)}")
