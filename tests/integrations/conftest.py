import logging

import pytest

# Test helpers that import optional frameworks; pytest collects doctests from every other module.
collect_ignore = [
    "flower_processes.py",
    "flower_training.py",
    "hostile_clients.py",
    "jax_training.py",
    "lora_training.py",
    "opacus_ranks.py",
    "opacus_training.py",
    "reduce_ranks.py",
    "torch_ranks.py",
    "secagg_app.py",
]


@pytest.fixture
def quiet_flower(caplog):
    """Keep errors of Flower, which logs every round, and warnings of coalmine."""
    caplog.set_level(logging.ERROR, logger="flwr")
    caplog.set_level(logging.WARNING, logger="flwr.coalmine")
