"""The result of one published estimator, and its assumptions."""

import math
from dataclasses import dataclass

from coalmine.argument_checks import one_of, unit_interval

KINDS = ("estimate", "heuristic", "valid bound")
THRESHOLDS = (
    "none",
    "fixed in advance",
    "chosen on the same data, corrected",
    "chosen on the same data, not corrected",
)


@dataclass(frozen=True, kw_only=True)
class LiteratureRow:
    """One estimator's value, with what its auditor controls and receives (Table 1).

    If the estimator does not apply, `value` is None and `needs` states the missing input.
    """

    name: str
    reference: str
    value: float | None
    kind: (
        str  # one of KINDS: a "valid bound" exceeds epsilon in at most 1 - confidence of runs, if its assumptions hold
    )
    confidence: float | None
    assumptions: str
    controls: str = "train data"
    receives: str = "final model"
    threshold: str  # one of THRESHOLDS: how the threshold between "observed" and "unobserved" was chosen
    needs: str | None = None

    def __post_init__(self) -> None:
        for field in ("name", "reference", "controls", "receives", "assumptions"):
            if not getattr(self, field):
                raise ValueError(f"{field} must not be empty")
        one_of("kind", self.kind, KINDS)
        if self.threshold not in THRESHOLDS:
            raise ValueError(f"threshold must be one of {'; '.join(THRESHOLDS)}, got {self.threshold!r}")
        self._check_value()

    def _check_value(self) -> None:
        if self.confidence is not None:
            unit_interval("confidence", self.confidence)
        elif self.kind == "valid bound":
            raise ValueError("a valid bound must have a confidence, got None")
        if (self.value is None) != (self.needs is not None):
            raise ValueError(
                f"a row must have either a value or needs, got value {self.value} and needs {self.needs!r}"
            )
        if self.needs is not None and not self.needs.startswith("needs "):
            raise ValueError(f"needs must read 'needs ...', got {self.needs!r}")
        if self.value is not None and (math.isnan(self.value) or self.value < 0):
            raise ValueError(f"value must be at least 0, got {self.value}")
