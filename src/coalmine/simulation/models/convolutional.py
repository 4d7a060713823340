"""The two CNNs for 28 by 28 characters."""

from torch import Tensor
from torch.nn import functional

from coalmine.simulation.models.base import Convolutional, Dropout, Masks, Model, Parameters


def cnn_dropout(classes: int = 10) -> Model:
    """The paper's CNN for 28 by 28 characters (`cnn_dropout`): 1,199,882 parameters with 10 classes, 1,206,590 with 62."""
    shapes = (
        ("conv1.weight", (32, 1, 3, 3)),
        ("conv1.bias", (32,)),
        ("conv2.weight", (64, 32, 3, 3)),
        ("conv2.bias", (64,)),
        ("dense1.weight", (128, 9216)),
        ("dense1.bias", (128,)),
        ("dense2.weight", (classes, 128)),
        ("dense2.bias", (classes,)),
    )

    def logits(parameters: Parameters, images: Tensor, masks: Masks) -> Tensor:
        maps = functional.conv2d(images, parameters["conv1.weight"], parameters["conv1.bias"]).relu()
        maps = functional.conv2d(maps, parameters["conv2.weight"], parameters["conv2.bias"]).relu()
        flat = functional.max_pool2d(maps, 2).flatten(start_dim=1)
        flat = flat * masks[0] if masks else flat
        hidden = functional.linear(flat, parameters["dense1.weight"], parameters["dense1.bias"]).relu()
        hidden = hidden * masks[1] if masks else hidden
        return functional.linear(hidden, parameters["dense2.weight"], parameters["dense2.bias"])

    activations = 784 + 3 * (32 * 26 * 26 + 64 * 24 * 24) + 5 * 9216
    return Model(
        f"cnn-dropout-{classes}",
        shapes,
        logits,
        activations,
        dropouts=(Dropout((9216,), 0.25), Dropout((128,), 0.5)),
        structure=Convolutional(side=28, channels=(32, 64), hidden=128, classes=classes),
    )


def cnn_fedavg(classes: int = 10) -> Model:
    """The CNN of the FedAvg paper (McMahan et al. 2017): 1,663,370 parameters with 10 classes, 1,690,046 with 62."""
    shapes = (
        ("conv1.weight", (32, 1, 5, 5)),
        ("conv1.bias", (32,)),
        ("conv2.weight", (64, 32, 5, 5)),
        ("conv2.bias", (64,)),
        ("dense1.weight", (512, 3136)),
        ("dense1.bias", (512,)),
        ("dense2.weight", (classes, 512)),
        ("dense2.bias", (classes,)),
    )

    def logits(parameters: Parameters, images: Tensor, masks: Masks) -> Tensor:
        maps = functional.conv2d(images, parameters["conv1.weight"], parameters["conv1.bias"], padding=2).relu()
        maps = functional.max_pool2d(maps, 2)
        maps = functional.conv2d(maps, parameters["conv2.weight"], parameters["conv2.bias"], padding=2).relu()
        flat = functional.max_pool2d(maps, 2).flatten(start_dim=1)
        hidden = functional.linear(flat, parameters["dense1.weight"], parameters["dense1.bias"]).relu()
        return functional.linear(hidden, parameters["dense2.weight"], parameters["dense2.bias"])

    activations = 784 + 3 * (32 * 28 * 28 + 64 * 14 * 14) + 5 * 3136
    return Model(f"cnn-fedavg-{classes}", shapes, logits, activations)
