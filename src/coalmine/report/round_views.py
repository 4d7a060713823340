"""The views of all rounds for one picture, read in the same pass over the log as everything else."""

from dataclasses import replace

from coalmine.evidence.views import RoundViews, View
from coalmine.measure.settings import Settings

MOST_SCORES = 5_000_000  # over all rounds; beyond that, fewer unobserved canaries are kept
FEWEST_UNOBSERVED = 256


class ViewsReader:
    """Reads the rounds in order and keeps the view of each: of the residual where `others` is known, else of the release."""

    def __init__(self, settings: Settings, rounds: int) -> None:
        self._unobserved = max(MOST_SCORES // max(rounds, 1) - settings.canaries, FEWEST_UNOBSERVED)
        self.views: list[View] = []
        self.residual = False

    def add(self, look: RoundViews) -> None:
        """Read the next round."""
        if look.residual is not None and not self.residual:
            self.views, self.residual = [], True  # a release and a residual are not comparable
        view = look.residual if self.residual else look.plain
        if view is not None:
            few = view.unobserved[: self._unobserved].copy()  # a slice would keep the whole array in memory
            self.views.append(replace(view, observed=view.observed.copy(), unobserved=few))
