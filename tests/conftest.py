import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# Before numpy and torch are imported, and for the processes that tests start: the tests run in one process per core, where
# the threads of one would wait for those of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("coalmine", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("coalmine")
collect_ignore = ["measure/jax_eight_devices.py", "simulation/command_runner.py"]  # scripts that tests run


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in a browser is not one of the quick ones."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("full")


@pytest.fixture(autouse=True)
def _restore_logger() -> Iterator[None]:
    """Undo the log level and handlers that a command called in this process sets."""
    logger = logging.getLogger("coalmine")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
