"""The pytest plugin of coalmine: the fixture `assert_private` and the marker `privacy`.

pytest loads this module in every run of an environment that has coalmine, so it imports nothing of coalmine by itself: the
fixture does, in the tests that use it.
"""

from collections.abc import Callable
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, for `pytest -m privacy`."""
    config.addinivalue_line("markers", "privacy: a test that a mechanism keeps its claimed epsilon (coalmine)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that uses the fixture has the marker."""
    for item in items:
        if "assert_private" in getattr(item, "fixturenames", ()):
            item.add_marker("privacy")


@pytest.fixture
def assert_private(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`coalmine.testing.assert_private`; verdict and epsilon go into the properties of a JUnit report."""
    from coalmine.testing.assertion import name_of, properties, raise_unless_private
    from coalmine.testing.mechanism_check import check_private

    def check(release: Callable[..., Any], **claim: Any) -> Any:
        __tracebackhide__ = True
        result = check_private(release, **claim)
        name = name_of(release)
        for key, value in properties(result).items():
            # as record_property does, which warns under the default family of JUnit reports
            request.node.user_properties.append((f"coalmine.{name}.{key}", value))
        raise_unless_private(result, name)
        return result

    return check
