"""Canaries: random unit vectors, their sums and their cosines with a vector (Section 3)."""

from coalmine.canaries.blocked import BlockedCanaries
from coalmine.canaries.rotation import RotatedCanaries
from coalmine.canaries.sphere import SphereCanaries

__all__ = ["BlockedCanaries", "RotatedCanaries", "SphereCanaries"]
