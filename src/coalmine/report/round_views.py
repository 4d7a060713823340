"""The views of all rounds for one picture, taken in the same pass over the log as everything else."""

from dataclasses import replace

from coalmine.audit.views import Look, View
from coalmine.storage.record import Settings

MOST_SCORES = 5_000_000  # of all rounds together; beyond it fewer unobserved canaries are kept
FEWEST_UNOBSERVED = 256


class ViewsReader:
    """Takes one round after another, and keeps its view, without everybody else's part if that is known."""

    def __init__(self, settings: Settings, rounds: int) -> None:
        self._unobserved = max(MOST_SCORES // max(rounds, 1) - settings.canaries, FEWEST_UNOBSERVED)
        self.views: list[View] = []
        self.residual = False

    def add(self, look: Look) -> None:
        """Take the next round."""
        if (
            look.residual is not None and not self.residual
        ):  # what was released is not comparable with what is left of it
            self.views, self.residual = [], True
        view = look.residual if self.residual else look.plain
        if view is not None:
            few = view.unobserved[: self._unobserved].copy()  # a slice alone would keep all of them in memory
            self.views.append(replace(view, observed=view.observed.copy(), unobserved=few))
