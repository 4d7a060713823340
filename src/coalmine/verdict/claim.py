"""A claimed epsilon, and its assumptions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from coalmine.argument_checks import WrongTypeError, count_of, names_neighbours, one_number, short_repr, whole_number
from coalmine.estimators.sampling import (
    Poisson,
    RandomAllocation,
    Sampling,
    checked_sampling,
    sampling_from_dict,
    sampling_to_dict,
)

LARGEST_CLAIM = 1e99  # twice this is still an epsilon of a mechanism
TERMS = ("delta", "unit", "adjacency")  # stated with a number, whatever its accounting
NOISES = (1e-6, 1e6)  # smallest and largest noise multiplier passed to an accountant


ADD_OR_REMOVE, ZERO_OUT, REPLACE = ADJACENCIES = ("add or remove one", "zero out one", "replace one")
LONGEST_UNIT = 60  # characters
MECHANISM = "mechanism:"  # before a number in text: the epsilon of the mechanism, without amplification


@names_neighbours
@dataclass(frozen=True)
class Claim:
    """A claimed epsilon.

    A bare number, `Claim(3.0)`, is the ε that the pipeline's own accountant quotes for one `unit` over the whole run. If
    the audit knows the sampling scheme, sampling is counted. Otherwise it is the composed ε of a client who took part as
    often as the schedule says. Scheme and rounds are those of the run.

    `Claim.mechanism(10.0)` is the ε of a client who took part `participations` times in rounds that the attacker knows.
    The number may be omitted if the audit's own schedule was followed and every round was observed: then it is the
    schedule's. `sensitivity` is that of the accounting, in clip norms (default: √participations, twice as much if one unit
    is replaced; under correlated noise that of the most exposed canary).

    With `sampling` it is an amplified ε: the attacker does not know in which rounds a client took part.
    `noise_multiplier` is that of the accounting (default: the one that gives the claimed epsilon). With
    `sampler_observed`, the canaries took part exactly when the pipeline's own sampler picked them.

    `delta`, `unit` (row, document, client, …) and `adjacency` are stated with the number where they are known. The
    adjacency is "add or remove one", "zero out one" or "replace one"; with `sampling`, one that its accountant knows.
    `counts_sampling` says whether the number counts amplification by sampling; None leaves it to the pipeline.
    """

    epsilon: float
    participations: int | None = None
    sensitivity: float | None = None
    sampling: Sampling | None = None
    noise_multiplier: float | None = None
    sampler_observed: bool = False
    delta: float | None = None
    unit: str | None = None
    adjacency: str | None = None
    counts_sampling: bool | None = None

    @classmethod
    def of(cls, claim: "Claim | float | str | None") -> "Claim | None":
        """A claim from a Claim, a number, or text: "3" is a bare number, "mechanism:10" the mechanism's epsilon."""
        if claim is None or isinstance(claim, Claim):
            return claim
        if isinstance(claim, str):
            return cls.parse(claim)
        try:
            return cls(epsilon=claim)
        except WrongTypeError:
            raise WrongTypeError(
                f"claim must be a number such as 3.0, or a Claim, got {short_repr(claim)}{_hint(claim)}"
            ) from None

    @classmethod
    def mechanism(cls, epsilon: float, participations: int | None = None, **terms: Any) -> "Claim":
        """The epsilon of the mechanism for known rounds, whatever the pipeline's sampling."""
        return cls(epsilon, participations=participations, counts_sampling=False, **terms)

    @classmethod
    def parse(cls, text: str) -> "Claim":
        """A claim from a command line: "3", or "mechanism:10"."""
        number = text.strip().removeprefix(MECHANISM)
        try:
            epsilon = float(number)
        except ValueError:
            raise ValueError(
                "claim must be a number such as 3, or mechanism:3 for the epsilon without amplification, got "
                f"{short_repr(text)}"
            ) from None
        return cls(epsilon) if number == text.strip() else cls.mechanism(epsilon)

    @classmethod
    def from_event(cls, event: Any, delta: float, neighboring_relation: Any, **terms: Any) -> "Claim":
        """The claim of a dp-accounting event at `delta` under a `NeighboringRelation`; `terms` as in `claim_of_event`."""
        from coalmine.verdict.event_claims import claim_of_event  # which imports this module

        return claim_of_event(event, delta, neighboring_relation, **terms)

    @classmethod
    def from_curve(cls, delta: float, **curve: Any) -> "Claim":
        """The claim of a μ, of ρ-zCDP (`zcdp`) or of `points` (ε, δ) about known rounds, judged where it is weakest."""
        from coalmine.verdict.curve_claims import claim_of_curve  # which imports this module

        return claim_of_curve(delta, **curve)

    @classmethod
    def classic_gaussian(cls, epsilon: float, delta: float, **terms: Any) -> "Claim":
        """The claim of noise √(2 ln(1.25/δ))/ε; above ε = 1, where that proves nothing, the ε that this noise has."""
        from coalmine.verdict.curve_claims import claim_of_classic_gaussian  # which imports this module

        return claim_of_classic_gaussian(epsilon, delta, **terms)

    def __post_init__(self) -> None:
        epsilon = one_number("claim", self.epsilon)
        if epsilon <= 0:
            raise ValueError(f"claim must be above 0, got {epsilon}")
        if epsilon > LARGEST_CLAIM:
            raise ValueError(f"claim must be at most {LARGEST_CLAIM:g}, got {epsilon:g}")
        object.__setattr__(self, "epsilon", epsilon)  # a Python float, whatever type was given
        if self.participations is not None:
            object.__setattr__(self, "participations", whole_number("participations", self.participations, minimum=1))
        self._set_numbers("sensitivity", "noise_multiplier", "delta")
        if self.noise_multiplier is not None and not NOISES[0] <= self.noise_multiplier <= NOISES[1]:
            raise ValueError(
                f"noise_multiplier must lie between {NOISES[0]:g} and {NOISES[1]:g}, got {self.noise_multiplier:g}"
            )
        if not isinstance(self.sampler_observed, bool):
            raise TypeError(f"sampler_observed must be True or False, got {short_repr(self.sampler_observed)}")
        self._check_terms()
        self._check_sampling()

    def _set_numbers(self, *names: str) -> None:
        """Check these numbers, and store them as Python floats."""
        for name in names:
            value = getattr(self, name)
            if value is not None:
                number = one_number(name, value)
                if number <= 0:
                    raise ValueError(f"{name} must be above 0, got {number}")
                object.__setattr__(self, name, number)

    def _check_sampling(self) -> None:
        if self.sampling is None:
            for name in ("noise_multiplier", "sampler_observed"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to a claim amplified by sampling: pass its sampling=… too")
            return
        known = known_adjacencies(checked_sampling(self.sampling))
        if self.adjacency is not None and self.adjacency not in known:
            raise ValueError(
                f"adjacency must be {' or '.join(map(repr, known))} for {self.sampling.title}, whose accountant knows no "
                f"other, got {self.adjacency!r}"
            )
        for name in ("participations", "sensitivity"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} belongs to a claim about known rounds, sampling=… to one about hidden rounds: pass one of them"
                )

    def _check_terms(self) -> None:
        if self.delta is not None and self.delta >= 1:
            raise ValueError(f"delta must lie in (0, 1), got {self.delta:g}")
        if self.unit is not None and not is_word(self.unit):
            raise WrongTypeError(
                f"unit must be a word such as row, document or client, of at most {LONGEST_UNIT} printable characters, got "
                f"{short_repr(self.unit)}"
            )
        if self.adjacency is not None and self.adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency must be one of {', '.join(ADJACENCIES)}, got {short_repr(self.adjacency)}")
        if not (self.counts_sampling is None or isinstance(self.counts_sampling, bool)):
            raise WrongTypeError(f"counts_sampling must be True, False or None, got {short_repr(self.counts_sampling)}")
        if self.counts_sampling is False and self.sampling is not None:
            raise ValueError("a claim with sampling=… counts it: omit counts_sampling=False, or the sampling")

    @property
    def moved(self) -> float:
        """The clip norms by which one unit moves the sum of a round that it is in, unless the claim states a sensitivity."""
        known_rounds = self.sampling is None and self.sensitivity is None
        return 2.0 if known_rounds and self.adjacency == REPLACE else 1.0

    @property
    def stated_adjacency(self) -> str | None:
        """The adjacency of the claim, or else of its sampling scheme's accountant."""
        return self.adjacency or (None if self.sampling is None else self.sampling.adjacency)

    @property
    def bare(self) -> bool:
        """Whether the number was given without its accounting, which is then the pipeline's own."""
        known_rounds = self.participations is not None or self.sensitivity is not None
        return self.sampling is None and not known_rounds and self.counts_sampling is not False

    def check_delta(self, delta: float) -> None:
        """Reject a claim that states another delta than the audit's: epsilon depends on it."""
        if self.delta is not None and not math.isclose(self.delta, delta, rel_tol=1e-9):
            raise ValueError(
                f"the claim's delta must be the audit's, {delta:g}, got {self.delta:g}: make the audit with delta="
                f"{self.delta:g}"
            )

    def read_as(self, accounted: "Claim") -> "Claim":
        """This number in the accounting of `accounted`, which the pipeline gives; what was stated with it stays."""
        stated = {name: getattr(self, name) for name in TERMS if getattr(self, name) is not None}
        return replace(accounted, epsilon=self.epsilon, **stated)

    def sentence(self, delta: float) -> str:
        """How the number was read, in one line."""
        unit = self.unit or "client"
        if self.sampling is not None:
            terms = f"whole training, sampling counted ({self.sampling}, {self.stated_adjacency})"
        elif self.bare:
            terms = "whole training, no sampling counted"
        else:
            times = "" if self.participations is None else f" in {count_of(self.participations, 'known round')}"
            terms = f"the mechanism's epsilon{times}, no sampling counted"
        if self.adjacency is not None and self.sampling is None:
            terms += f", {self.adjacency}"
        return f"claimed epsilon {self.epsilon:.4g} at delta {delta:.3g}: one {unit}, {terms}"

    @property
    def amplified(self) -> bool:
        """Whether the claim is about an attacker who does not know the rounds."""
        return self.sampling is not None

    @property
    def accounting(self) -> str:
        """The kind of the claim: "mechanism" or "amplified"."""
        return "amplified" if self.amplified else "mechanism"

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in (*TERMS, "counts_sampling"):
            if values[name] is None:
                del values[name]
        return values | {"sampling": None if self.sampling is None else sampling_to_dict(self.sampling)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Claim":
        """The inverse of `to_dict`; ValueError for anything else."""
        given, names = dict(values), [part.name for part in fields(cls)]
        if "epsilon" not in given or not set(given) <= set(names):
            raise ValueError(
                f"a claim must have epsilon and no fields other than {', '.join(names)}, got {short_repr(given)}"
            )
        try:
            if given.get("sampling") is not None:
                given["sampling"] = sampling_from_dict(given["sampling"])
            return cls(**given)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the claim's fields are not those of a claim ({error})") from None


def known_adjacencies(sampling: Sampling) -> tuple[str, ...]:
    """The adjacencies under which the epsilon of a scheme is known."""
    if isinstance(sampling, Poisson):
        return ADJACENCIES
    return (ADD_OR_REMOVE, ZERO_OUT) if isinstance(sampling, RandomAllocation) else (sampling.adjacency,)


def is_word(unit: Any) -> bool:
    """Whether a unit can stand in a sentence."""
    return isinstance(unit, str) and bool(unit.strip()) and unit.isprintable() and len(unit) <= LONGEST_UNIT


def _hint(claim: Any) -> str:
    """How to write what is no number, but has an epsilon."""
    if type(claim).__name__.endswith("DpEvent"):
        return ": Claim.from_event(event, delta, neighboring_relation) reads an event"
    return ": pass its epsilon" if hasattr(claim, "get_epsilon") else ""
