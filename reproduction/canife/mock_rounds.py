"""CANIFE's audit of a round: mock rounds with and without the canary, at a frozen model."""

import torch
from torch import Tensor

from coalmine.simulation.clipping import clip_factors
from coalmine.simulation.engines.plain.engine import Examples
from reproduction.canife.crafting import CanifeSettings, CraftedCanaries
from reproduction.canife.gradients import Gradients, SampleGradients


def noisy_sums(batch: Gradients, settings: CanifeSettings, generator: torch.Generator) -> Tensor:
    """The sum of a batch's clipped gradients plus the round's noise: models × dim."""
    total = batch.weighted_sum(clip_factors(batch.norms(), settings.clip_norm))
    noise = torch.randn(total.shape, generator=generator, device=total.device)
    return total + settings.noise_std * noise


def mock_scores(
    gradients: SampleGradients,
    vectors: Tensor,
    canaries: CraftedCanaries,
    examples: Examples,
    settings: CanifeSettings,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Attack scores of mock rounds with and without the canary: two tables, models × scores.

    A score is ⟨u, ρ⟩/C², where u is the canary's clipped gradient and ρ is the round's noisy sum. For a canary at the clip
    norm without interference, scores are N(1, z²) or N(0, z²), as in the Gaussian mechanism with noise multiplier z. Every
    round samples its batch with replacement from `examples`, which have soft labels.
    """
    tables = []
    for present in (True, False):
        table = torch.empty(len(vectors), settings.scores, device=vectors.device)
        for number in range(settings.scores):
            batch = sample_batch(examples, (len(vectors), settings.batch_size), generator)
            total = noisy_sums(gradients(vectors, *batch), settings, generator)
            if present:
                total += canaries.update
            table[:, number] = (canaries.update * total).sum(dim=1) / settings.clip_norm**2
        tables.append(table)
    return tables[0], tables[1]


def sample_batch(examples: Examples, shape: tuple[int, int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and soft labels of examples sampled with replacement; `shape` is models × samples."""
    index = torch.randint(len(examples), shape, generator=generator, device=generator.device)
    return examples.inputs[index], examples.labels[index]


def softened(examples: Examples, classes: int) -> Examples:
    """The examples with one-hot labels."""
    labels = torch.nn.functional.one_hot(examples.labels.long(), classes)
    return Examples(examples.inputs, labels.to(examples.inputs.dtype))
