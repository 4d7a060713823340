import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("coalmine", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("coalmine")


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """Commands that a test calls in this process set how loud coalmine is; the next test is to hear it as usual."""
    logger = logging.getLogger("coalmine")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
