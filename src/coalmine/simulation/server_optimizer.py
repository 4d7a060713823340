"""The server's optimiser: SGD with momentum, or Adam. Its state is a few tensors that a checkpoint can save."""

from dataclasses import dataclass

import torch
from torch import Tensor

from coalmine.argument_checks import one_number, one_of

OPTIMIZERS = ("sgd", "adam")
State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The server's optimiser: θ ← θ + η ρ̄ in Algorithm 3, with momentum or as Adam."""

    optimizer: str = "sgd"
    learning_rate: float = 1.0
    momentum: float = 0.0  # for SGD; Adam's β₁ is `beta1`
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        one_of("server.optimizer", self.optimizer, OPTIMIZERS)
        if not one_number("server.learning_rate", self.learning_rate) > 0:
            raise ValueError(f"server.learning_rate must be above 0, got {self.learning_rate}")
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= one_number(f"server.{name}", getattr(self, name)) < 1:
                raise ValueError(f"server.{name} must lie in [0, 1), got {getattr(self, name)}")
        if not one_number("server.epsilon", self.epsilon) > 0:
            raise ValueError(f"server.epsilon must be above 0, got {self.epsilon}")
        if self.optimizer == "adam" and self.momentum:
            raise ValueError(f"Adam's momentum is server.beta1, so server.momentum must be 0, got {self.momentum}")

    def initial_state(self, dim: int, device: str | torch.device) -> State:
        """The optimiser's tensors, all zero."""
        names = ("mean", "square") if self.optimizer == "adam" else ("velocity",) if self.momentum else ()
        return {name: torch.zeros(dim, device=device) for name in names}


def server_step(model_delta: Tensor, state: State, round_number: int, settings: ServerSettings) -> Tensor:
    """The step to add to the model in this round; updates `state` in place."""
    if settings.optimizer == "adam":
        mean = state["mean"].lerp_(model_delta, 1 - settings.beta1)
        square = state["square"].lerp_(model_delta.square(), 1 - settings.beta2)
        bias1, bias2 = 1 - settings.beta1**round_number, 1 - settings.beta2**round_number
        return settings.learning_rate * (mean / bias1) / ((square / bias2).sqrt_() + settings.epsilon)
    if settings.momentum:
        return settings.learning_rate * state["velocity"].mul_(settings.momentum).add_(model_delta)
    return settings.learning_rate * model_delta
