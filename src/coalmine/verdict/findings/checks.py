"""Findings of `coalmine.testing`, whose checks choose the updates of all clients and call a function many times."""

from dataclasses import dataclass

from coalmine.verdict.findings.finding import Doubt, Refutation, Significance


@dataclass(frozen=True, kw_only=True)
class SilentCoordinates(Significance, Refutation):
    """Coordinates to which no client contributes are released without noise (a check of a function)."""

    code = "silent"
    remedy = "add noise to every coordinate that is released"
    factor: float  # share of those coordinates

    def sentence(self) -> str:
        return (
            f"{self.factor:.0%} of the coordinates to which no client contributes are released without noise: any other "
            f"value there shows that a client contributed ({self.chance})"
        )


@dataclass(frozen=True, kw_only=True)
class ClientTooLoud(Significance, Refutation):
    """One client contributes more than the claim implies (a check of a function).

    Contributions are in standard deviations of the noise.
    """

    code = "client"
    remedy = "clip every client's whole update"
    score: float
    claimed_score: float
    claimed_noise: float
    measured_noise: float

    def sentence(self) -> str:
        return (
            f"one client contributes {self.score:.3g} standard deviations of the noise, more than the "
            f"{self.claimed_score:.3f} that the claim implies ({self.chance}, corrected for the number of clients)"
        )


@dataclass(frozen=True, kw_only=True)
class ReplyMovesTooFar(Refutation):
    """Without one client, and with the same random numbers, the release moves further than the claim implies (a check).

    Changes are in standard deviations of the noise. No chance is involved: there is no noise in the difference.
    """

    code = "row"
    remedy = "scale each client's whole update by its own norm alone, and add it once"
    updates: str  # the kind of updates
    score: float
    claimed_score: float

    def sentence(self) -> str:
        return (
            f"without one client, and with the same random numbers, the release of {self.updates} updates moves by "
            f"{self.score:.3g} standard deviations of the noise, more than the {self.claimed_score:.3f} that the claim "
            "implies"
        )


@dataclass(frozen=True, kw_only=True)
class NoiseFollowsData(Doubt):
    """The noise depends on the norms of the updates (a check of a function)."""

    code = "noise follows data"
    remedy = "size the noise by the clip norm alone"
    factor: float

    def sentence(self) -> str:
        return (
            f"the noise is {self.factor:.3g} times as large when the clients' updates have other norms: it depends on the "
            "data, and the accounting assumes that it does not"
        )


@dataclass(frozen=True, kw_only=True)
class CarriedOver(Doubt):
    """A call releases updates of the call before it too (a check of a function)."""

    code = "carried over"
    remedy = "clear every gradient and buffer before the next call"
    share: float  # of a client's contribution that is in the next release

    def sentence(self) -> str:
        return (
            f"{self.share:.2g} of a client's contribution is in the release of the next call too, so its effect is not that "
            "of one call: gradients or buffers are not cleared"
        )


@dataclass(frozen=True, kw_only=True)
class ShrunkByOthers(Doubt):
    """Long updates shrink those of other clients (a check of a function)."""

    code = "shrunk"
    remedy = "scale each update by its own norm"
    length: float  # that is left of an update within the clip norm

    def sentence(self) -> str:
        return (
            f"updates within the clip norm arrive at {self.length:.2g} of their norm when others are long: one client "
            "decides how much the others count, so one client's effect is not bounded by the clip norm"
        )
