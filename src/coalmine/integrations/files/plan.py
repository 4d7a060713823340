"""audit.toml: what a pipeline that runs elsewhere did, and where its files are."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from coalmine.argument_checks import neighbour, nonnegative, positive, short_repr, whole_number
from coalmine.estimators.sampling import Sampling, sampling_from_dict
from coalmine.log.files import read_toml
from coalmine.measure.settings import MOST_ROUNDS
from coalmine.verdict.claim import Claim

LARGEST = 1 << 28  # bytes: canaries of a million rounds
RELATIVE = ("seed_file", "model", "releases", "others", "final", "directory")


class RoundEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One `[[round]]`: what differs in it from the entries at the top."""

    number: int
    present: list[int] | None = None
    participants: int | None = None
    clip_norm: float | None = None
    noise_multiplier: float | None = None
    divisor: float | None = None
    skipped: bool = False


class AuditPlan(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The entries of audit.toml. `clip_norm` is a client's; the release is the noised sum over `divisor`.

    File names are relative to the file's own folder, or URLs; those of rounds contain {round}. If the canaries do not follow
    the audit's schedule (`scheduled`), every round lists those that were `present`.
    """

    seed_file: str
    model: str
    releases: str
    rounds: int
    canaries: int
    delta: float
    clip_norm: float
    noise_multiplier: float | None = None
    divisor: float = 1.0
    scale: float = 1.0
    participants: int | None = None
    releases_are: Literal["deltas", "models"] = "deltas"
    others: str | None = None
    final: str | None = None
    directory: str = "audit"
    unobserved: int | None = None
    presentations: int | list[int] = 1
    momentum: float = 0.0
    blocks: list[int] | None = None
    layers: dict[str, int] = {}
    scheduled: bool = True
    sampling: dict[str, Any] | None = None
    clients: int | None = None
    claim: float | str | dict[str, Any] | None = None
    unit: str | None = None
    task: str | None = None
    round: list[RoundEntry] = []


@dataclass(frozen=True)
class PlannedRound:
    """A round as the pipeline states it: `present` is None if the audit's own schedule was followed."""

    number: int
    present: list[int] | None
    participants: int | None
    clip_norm: float
    noise_multiplier: float | None
    divisor: float

    @property
    def facts(self) -> dict[str, Any]:
        """The stated fields of the round, in the units of the release."""
        noise = None if self.noise_multiplier is None else self.noise_multiplier * self.clip_norm / self.divisor
        return {
            "noise_std": noise,
            "clip_norm": self.clip_norm / self.divisor,
            "participants": self.participants,
        }


def read_plan(path: Path) -> AuditPlan:
    """The entries of audit.toml, with absolute names of files; ValueError for an entry that it cannot have."""
    values = read_toml(path, most=LARGEST)
    known = AuditPlan.__struct_fields__
    if unknown := sorted(values.keys() - set(known)):
        meant = neighbour(unknown[0], known)
        hint = f"here it is {meant}" if meant else f"the entries are {', '.join(known)}"
        raise ValueError(f"{path} has an unknown entry {short_repr(unknown[0])}: {hint}")
    try:
        plan = msgspec.convert(values, AuditPlan)
        for name in RELATIVE:
            if (given := getattr(plan, name)) is not None and "://" not in given:
                setattr(plan, name, str(path.absolute().parent / given))
        _check(plan)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    return plan


def _check(plan: AuditPlan) -> None:
    if whole_number("rounds", plan.rounds, minimum=1) > MOST_ROUNDS:
        raise ValueError(f"rounds must be at most {MOST_ROUNDS}, got {short_repr(plan.rounds)}")
    if Path(plan.directory).exists() and not Path(plan.directory).is_dir():
        raise ValueError(f"directory must be a folder, got the file {plan.directory}")
    for name in ("releases", "others"):
        if (pattern := getattr(plan, name)) is not None and file_of(pattern, 1) == file_of(pattern, 2):
            raise ValueError(f"{name} must name a file for each round, with {{round}} in it, got {short_repr(pattern)}")
    if "://" in plan.directory:
        raise ValueError(f"directory must be a folder of this machine, got {plan.directory}")
    numbers = [entry.number for entry in plan.round]
    if twice := [number for number, count in Counter(numbers).items() if count > 1]:
        raise ValueError(f"each [[round]] must have a number of its own, got {twice[0]} twice")
    if outside := [number for number in numbers if not 1 <= number <= plan.rounds]:
        raise ValueError(f"the number of a [[round]] must lie in 1..{plan.rounds}, the rounds, got {outside[0]}")
    claim_of(plan), sampling_of(plan)
    for planned in rounds_of(plan):
        positive("clip_norm", planned.clip_norm)
        positive("divisor", planned.divisor)
        if planned.noise_multiplier is not None:
            nonnegative("noise_multiplier", planned.noise_multiplier)


def file_of(pattern: str, number: int) -> str:
    """The name of a round's file."""
    try:
        return pattern.format(round=number)
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ValueError(f"a file name may contain {{round}} or {{round:04}}, got {short_repr(pattern)}") from None


def rounds_of(plan: AuditPlan) -> list[PlannedRound]:
    """The rounds that released something, in their order."""
    entries = {entry.number: entry for entry in plan.round}
    planned = []
    for number in range(1, plan.rounds + 1):
        entry = entries.get(number) or RoundEntry(number=number)
        if entry.skipped:
            continue
        stated = {
            name: getattr(plan, name) if getattr(entry, name) is None else getattr(entry, name)
            for name in ("participants", "clip_norm", "noise_multiplier", "divisor")
        }
        planned.append(PlannedRound(number=number, present=entry.present, **stated))
    return planned


def sampling_of(plan: AuditPlan) -> Sampling | None:
    """The scheme by which clients were sampled; None if none was declared."""
    return None if plan.sampling is None else sampling_from_dict(plan.sampling)


def claim_of(plan: AuditPlan) -> Claim | None:
    """The claim: a number, a text such as "mechanism:3", or a table of the fields of a `Claim`."""
    return Claim.from_dict(plan.claim) if isinstance(plan.claim, dict) else Claim.of(plan.claim)
