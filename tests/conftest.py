import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("coalmine", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("coalmine")
collect_ignore = ["audit/jax_eight_devices.py", "simulation/command_runner.py"]  # scripts that tests run


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    """Undo the log level and handlers that a command called in this process sets."""
    logger = logging.getLogger("coalmine")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
