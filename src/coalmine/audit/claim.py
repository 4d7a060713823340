"""A claimed epsilon, and its assumptions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from coalmine.argument_checks import one_number, shown, whole_number
from coalmine.estimators.sampling import Sampling, checked_sampling, sampling_from_dict, sampling_to_dict

LARGEST_CLAIM = 1e100  # twice this does not overflow
NOISES = (1e-6, 1e6)  # smallest and largest noise multiplier passed to an accountant


@dataclass(frozen=True)
class Claim:
    """A claimed epsilon.

    Without `sampling` it is a mechanism ε: that of a client who took part `participations` times in known rounds. The
    number may be omitted if the audit's own schedule was followed and every round was observed: then it is the
    schedule's. `sensitivity` is that of the accounting, in clip norms (default: √participations; under correlated noise
    that of the most exposed canary).

    With `sampling` it is an amplified ε: the attacker does not know in which rounds a client took part.
    `noise_multiplier` is that of the accounting (default: the one that gives the claimed epsilon). With
    `sampler_observed`, the canaries took part exactly when the pipeline's own sampler picked them.
    """

    epsilon: float
    participations: int | None = None
    sensitivity: float | None = None
    sampling: Sampling | None = None
    noise_multiplier: float | None = None
    sampler_observed: bool = False

    @classmethod
    def of(cls, claim: "Claim | float | None") -> "Claim | None":
        """A claim from a Claim or a number, which is the epsilon of the mechanism."""
        return claim if claim is None or isinstance(claim, Claim) else cls(epsilon=claim)

    def __post_init__(self) -> None:
        epsilon = one_number("claim", self.epsilon)
        if epsilon <= 0:
            raise ValueError(f"claim must be above 0, got {epsilon}")
        if epsilon > LARGEST_CLAIM:
            raise ValueError(f"claim must be at most {LARGEST_CLAIM:g}, got {epsilon:g}")
        object.__setattr__(self, "epsilon", epsilon)  # a Python float, whatever type was given
        if self.participations is not None:
            object.__setattr__(self, "participations", whole_number("participations", self.participations, minimum=1))
        for name in ("sensitivity", "noise_multiplier"):
            value = getattr(self, name)
            if value is not None:
                number = one_number(name, value)
                if number <= 0:
                    raise ValueError(f"{name} must be above 0, got {number}")
                object.__setattr__(self, name, number)
        if self.noise_multiplier is not None and not NOISES[0] <= self.noise_multiplier <= NOISES[1]:
            raise ValueError(
                f"noise_multiplier must lie between {NOISES[0]:g} and {NOISES[1]:g}, got {self.noise_multiplier:g}"
            )
        if not isinstance(self.sampler_observed, bool):
            raise TypeError(f"sampler_observed must be True or False, got {shown(self.sampler_observed)}")
        if self.sampling is None:
            for name in ("noise_multiplier", "sampler_observed"):
                if getattr(self, name):
                    raise ValueError(f"{name} belongs to a claim amplified by sampling: pass its sampling=… too")
            return
        checked_sampling(self.sampling)
        for name in ("participations", "sensitivity"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} belongs to a claim about known rounds, sampling=… to one about hidden rounds: pass one of them"
                )

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
        return values | {"sampling": None if self.sampling is None else sampling_to_dict(self.sampling)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Claim":
        """The inverse of `to_dict`; ValueError for anything else."""
        given, names = dict(values), [part.name for part in fields(cls)]
        if "epsilon" not in given or not set(given) <= set(names):
            raise ValueError(
                f"a claim must have epsilon and no fields other than {', '.join(names)}, got {shown(given)}"
            )
        try:
            if given.get("sampling") is not None:
                given["sampling"] = sampling_from_dict(given["sampling"])
            return cls(**given)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the claim's fields are not those of a claim ({error})") from None
