"""The rounds of a run, for drawing."""

from coalmine.storage.mapped_rounds import Rounds, map_rounds

__all__ = ["Rounds", "map_rounds"]
