import pytest
import torch

from coalmine.simulation.server_optimizer import ServerSettings, server_step


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        (ServerSettings(learning_rate=0.7), lambda p: torch.optim.SGD(p, lr=0.7)),
        (ServerSettings(learning_rate=0.7, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9)),
        (
            ServerSettings(optimizer="adam", learning_rate=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-3),
        ),
    ],
    ids=["sgd", "momentum", "adam"],
)
def test_server_steps_equal_torchs_on_minus_the_delta(settings, optimizer):
    deltas = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    model, state = torch.zeros(20), settings.initial_state(20, "cpu")
    parameter = torch.nn.Parameter(torch.zeros(20))
    theirs = optimizer([parameter])
    for number, delta in enumerate(deltas, start=1):
        model += server_step(delta, state, number, settings)
        parameter.grad = -delta
        theirs.step()
    torch.testing.assert_close(model, parameter.data)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "lamb"}, "server.optimizer must be one of sgd, adam, got 'lamb'"),
        ({"learning_rate": 0.0}, "server.learning_rate must be above 0"),
        ({"momentum": 1.0}, r"server.momentum must lie in \[0, 1\), got 1.0"),
        ({"optimizer": "adam", "momentum": 0.5}, "server.momentum must be 0"),
    ],
)
def test_invalid_settings_are_rejected(values, message):
    with pytest.raises(ValueError, match=message):
        ServerSettings(**values)
