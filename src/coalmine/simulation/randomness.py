"""Every random number of a run is a function of the run's seed, a purpose, and numbers such as the round.

No generator state is carried from round to round, so a resumed run draws the same numbers as a run that was never stopped.
"""

import zlib

import numpy as np
import torch


def numpy_stream(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """The generator for (seed, purpose, numbers): for instance, for the batches of round 3."""
    return np.random.Generator(np.random.Philox(_seed_sequence(seed, purpose, numbers)))


def torch_stream(seed: int, purpose: str, *numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator for tensors on a device. CPUs and GPUs give different numbers."""
    generator = torch.Generator(device)
    words = _seed_sequence(seed, purpose, numbers).generate_state(2, np.uint32)
    return generator.manual_seed(int(words[0]) | int(words[1]) << 32)


def _seed_sequence(seed: int, purpose: str, numbers: tuple[int, ...]) -> np.random.SeedSequence:
    return np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), *numbers))
