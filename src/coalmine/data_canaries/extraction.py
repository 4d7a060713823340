"""What a security team asks for beside epsilon: the exposure of planted secrets, and how many the model completes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats
from coalmine.data_canaries.scoring import evaluated


def exposures(scores: Floats, others: Floats, *, own: bool = False) -> Floats:
    """log2 of the number of possible secrets over the rank of each among `others`, which were not inserted.

    With `own` the scores are those of `others` themselves, and none is compared with itself.
    """
    ranks = 1 + others.size - np.searchsorted(np.sort(others), scores, side="left") - own
    return np.asarray(np.log2(others.size + 1 - own) - np.log2(np.maximum(ranks, 1)))


def completed(
    model: Any, inputs: npt.NDArray[Any], starts: npt.NDArray[Any], length: int, batch_size: int
) -> npt.NDArray[np.bool_]:
    """For each record, whether greedy decoding after its prompt returns the secret.

    It does exactly if each token of the secret is the likeliest one after those before it: one pass tells.
    """
    parts = []
    with evaluated(model) as forward:
        for start in range(0, len(inputs), batch_size):
            rows = inputs[start : start + batch_size]
            likeliest = forward(rows).argmax(-1)
            likeliest = np.asarray(likeliest.cpu() if hasattr(likeliest, "cpu") else likeliest)
            places = starts[start : start + batch_size, None] + np.arange(length)
            guessed = np.take_along_axis(likeliest, places - 1, axis=1)
            parts.append((guessed == np.take_along_axis(rows, places, axis=1)).all(axis=1))
    return np.concatenate(parts)
