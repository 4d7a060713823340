"""Dense layers with ReLU between them."""

from itertools import pairwise

from torch import Tensor

from coalmine.simulation.models.base import Masks, Model, Parameters


def mlp(*widths: int) -> Model:
    """Dense layers of these widths with ReLU between them; widths 64, 128, 10 make 9,610 parameters."""
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        shapes += [(f"dense{number}.weight", (inputs, outputs)), (f"dense{number}.bias", (outputs,))]

    def logits(parameters: Parameters, inputs: Tensor, masks: Masks) -> Tensor:
        hidden = inputs.flatten(start_dim=1)
        for number in range(1, len(widths)):
            hidden = hidden @ parameters[f"dense{number}.weight"] + parameters[f"dense{number}.bias"]
            if number < len(widths) - 1:
                hidden = hidden.relu()
        return hidden

    return Model(f"mlp-{'-'.join(map(str, widths))}", tuple(shapes), logits, 3 * sum(widths), layers=widths)
