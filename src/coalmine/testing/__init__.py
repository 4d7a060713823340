"""A unit test for privacy: check that a function that aggregates clients' updates has the epsilon that it claims.

    from coalmine.testing import assert_private

    def test_my_aggregate_is_private():
        assert_private(my_aggregate, dim=5_000, epsilon=3.0, delta=1e-5)

docs/how-to/testing.md says what the check detects and what it misses.
"""

from coalmine.replay.outcome import Replay
from coalmine.replay.step import replay
from coalmine.testing.assertion import PrivacyNote, assert_private
from coalmine.testing.mechanism_check import check_private

__all__ = ["PrivacyNote", "Replay", "assert_private", "check_private", "replay"]
