"""An amplified epsilon with what it rests on, and the epsilon without amplification."""

import math
from typing import Any, Literal

from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling, largest_exposure

Kind = Literal["upper bound", "range", "estimate"]
PLD, ALLOCATION, RDP = "dp-accounting PLD", "PLD_accounting", "dp-accounting RDP"
UNAMPLIFIED = "Gaussian mechanism, no amplification"
RDP_IS_WORSE = (
    "Rényi accounting gives a larger epsilon than no amplification, so the unamplified epsilon is the upper end"
)
LARGEST_GRID = 1_000_000  # most points of the composed privacy loss
SMALLEST_PLD_DELTA = 1e-13  # below it, a privacy loss distribution is dominated by rounding error


class AmplifiedEpsilon(float):
    """An amplified epsilon with its accountant, adjacency and kind. Its value is the upper end of its range.

    `kind` is "upper bound" for a tight accountant, where `low` shows how tight. It is "range" where no tight accountant is
    known: epsilon then lies between `low` and `high`. It is "estimate" where the noise was measured.
    """

    low: float
    accountant: str
    adjacency: str
    kind: Kind
    note: str

    def __new__(
        cls, value: float, *, low: float | None = None, accountant: str, adjacency: str, kind: Kind, note: str = ""
    ) -> "AmplifiedEpsilon":
        epsilon = super().__new__(cls, value)
        epsilon.low = float(value) if low is None else min(float(low), float(value))
        epsilon.accountant, epsilon.adjacency, epsilon.kind, epsilon.note = accountant, adjacency, kind, note
        return epsilon

    @property
    def high(self) -> float:
        """The upper end: the value itself."""
        return float(self)

    def to_dict(self) -> dict[str, Any]:
        """The epsilon and its details, as stored in files."""
        return {"epsilon": float(self), **self._details()}

    def _details(self) -> dict[str, Any]:
        names = ("low", "accountant", "adjacency", "kind", "note")
        return {name: getattr(self, name) for name in names}

    def __getnewargs_ex__(self) -> tuple[tuple[float], dict[str, Any]]:
        return (float(self),), self._details()

    def __str__(self) -> str:
        return float.__repr__(self)

    def __repr__(self) -> str:
        details = ", ".join(f"{name}={value!r}" for name, value in self._details().items())
        return f"AmplifiedEpsilon({float.__repr__(self)}, {details})"


def unamplified_epsilon(noise: float, sampling: Sampling, delta: float) -> float:
    """Epsilon if the attacker knew the rounds, in the scheme's adjacency.

    Under Poisson and fixed-size sampling a client may take part in every round.
    """
    if isinstance(sampling, FixedSize):
        noise = noise / 2  # replacing one client moves the sum by two clip norms
    times = sampling.rounds if isinstance(sampling, Poisson | FixedSize) else sampling.epochs
    if sampling.strengths:
        return float(mechanism_epsilon(noise / math.sqrt(largest_exposure(sampling, times)), delta=delta))
    return float(mechanism_epsilon(noise, delta=delta, participations=times))


def not_amplified(unamplified: float, low: float, sampling: Sampling, note: str | None = None) -> AmplifiedEpsilon:
    """The unamplified epsilon as the upper end, above the lower end of an attack."""
    note = (
        note
        or "not amplified: the accountants cannot handle so little noise or so many rounds; the lower end is an attack"
    )
    return AmplifiedEpsilon(
        unamplified, low=low, accountant=UNAMPLIFIED, adjacency=sampling.adjacency, kind="range", note=note
    )
