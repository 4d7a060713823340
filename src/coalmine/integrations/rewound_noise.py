"""Noise that comes again after a restart: rounds after a checkpoint were released, are forgotten, and are released again.

If the noise's key is restored with the checkpoint and the batches are not, two releases differ by their clipped sums alone.
"""

import math
from typing import NamedTuple

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.audit import Audit
from coalmine.measure.round import Round
from coalmine.verdict.coverage import AuditedItem

MOST_KEPT = 4_096  # unobserved canaries along which a round is kept
FEWEST_KEPT = 50  # fewest of them that can be compared
SAME = 0.5  # correlation from which on two residuals hold the same noise
FRESH_STDS = 6.0  # standard deviations of the correlation of fresh noise
EQUAL = 1e-3  # relative difference up to which two releases are the same release
METRIC = "noise_again"  # in a line of metrics: the number of such rounds so far


class _Release(NamedTuple):
    """A round's release and residual along unobserved canaries."""

    release: Floats
    residual: Floats

    @classmethod
    def of(cls, item: Round, first: int) -> "_Release | None":
        if item.residual_cosines is None or item.residual_norm is None:
            return None
        part = slice(first, first + MOST_KEPT)
        release = np.asarray(item.cosines[part], np.float64) * item.norm
        return cls(release, np.asarray(item.residual_cosines[part], np.float64) * item.residual_norm)

    def has_noise_of(self, other: "_Release") -> bool:
        """Whether the two have the same noise, and are not the same release."""
        size = self.residual.size
        if size < FEWEST_KEPT:
            return False
        lengths = float(np.linalg.norm(self.residual) * np.linalg.norm(other.residual))
        correlation = float(self.residual @ other.residual) / max(lengths, 1e-300)
        apart = float(np.linalg.norm(self.release - other.release))
        same = correlation > max(SAME, FRESH_STDS / math.sqrt(size))
        return same and apart > EQUAL * float(np.linalg.norm(self.residual))


class RewoundNoise:
    """Compares rounds after a restart with the forgotten rounds of the same numbers."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self._kept: dict[int, _Release] = {}
        self._compared = 0  # the last round that was compared
        lines = [] if audit.directory is None else audit.directory.read_metrics()
        counts = [line.get(METRIC) for line in lines]
        self.rounds = max((count for count in counts if type(count) is int), default=0)

    def rewind_to(self, number: int) -> None:
        """Forget the audit's rounds after `number`, but remember their noise."""
        self.compare()
        first = self._audit.settings.canaries
        for item in self._audit.log.rounds_after(number):
            release = _Release.of(item, first)
            if release is not None:
                self._kept[item.number] = release
        self._audit.rewind_to(number)
        if self._audit.directory is not None:
            self._audit.directory.rewind_metrics_to(number)
        self._compared = number

    def compare(self) -> None:
        """Compare the rounds that the audit has recorded since the last call. Waits for a round only if it is compared."""
        if not self._kept:
            return
        first = self._audit.settings.canaries
        for item in self._audit.log.rounds_after(self._compared):
            self._compared = item.number
            before, now = self._kept.pop(item.number, None), _Release.of(item, first)
            if before is not None and now is not None and now.has_noise_of(before):
                self.rounds += 1

    @property
    def fault(self) -> AuditedItem | None:
        """The item that bars a PASS if noise came again."""
        if not self.rounds:
            return None
        steps = "1 step" if self.rounds == 1 else f"{self.rounds:,} steps"
        return AuditedItem(
            "noise law",
            "failed",
            f"the noise of {steps} came again after a restart, with other batches: whoever has both releases subtracts one "
            "from the other, and no noise is left. Restart with a new noise key, or with the batches of the first time",
        )
