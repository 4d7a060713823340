"""What a trainer adds to the result of an audit: its task, its accuracy, its accounting, its notes."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_type_hints

from msgspec import ValidationError, convert

from coalmine.argument_checks import one_line
from coalmine.verdict.claim import LONGEST_UNIT
from coalmine.verdict.pipeline_record import PipelineRecord

STORED_AS = {"name": "trainer", "notes": "trainer_notes"}  # fields whose entry in result.json has another name


@dataclass(frozen=True, kw_only=True)
class FunctionCheck:
    """The circumstances of a check of one function by `coalmine.testing`."""

    adjacency: str
    clients: int
    clip_norm: float
    calls: int
    decided_by: str
    likely_fault: str | None = None
    warning: str | None = None


@dataclass(frozen=True, kw_only=True)
class SeenNode:
    """What a server saw of one node: its released rounds, their ε under the stated noise, its largest part in one round.

    `weight` is relative to an equal part. `dropped`, `failed` and `silent` count replies that were dropped, errors and
    rounds without an answer.
    """

    node: int
    rounds: int = 0
    epsilon: float | None = None
    weight: float = 1.0
    dropped: int = 0
    failed: int = 0
    silent: int = 0


@dataclass(frozen=True, kw_only=True)
class SeenView:
    """The audit of what somebody else than the public sees: its name, what they see, claim, measured ε and verdict."""

    name: str
    sees: str
    outcome: str | None = None
    reason: str | None = None
    claimed: float | None = None
    measured: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainerSection:
    """The trainer's own part of a result; None where it says nothing. Its entries are on the top level of result.json.

    Attributes:
        name: The integration that wrote it; None for `coalmine run` and for a loop of one's own.
        task, title, level, engine: The task, the name of its data, its unit (client or example), the engine.
        accuracy: The accuracy of the final model on examples that took no part in training.
        accuracy_without_dp: That of the same model if it is trained without DP and without canaries.
        noise, noise_multiplier: The scheme of the noise, and its standard deviation over the clip norm.
        update_noise_multiplier, update_epsilon: The part of an adaptive clip's noise that the updates get, and its ε.
        count_noise_multiplier, count_epsilon: The same for its count.
        presentations, most_presentations: The most common, and the largest, number of presentations of a canary.
        most_exposed_epsilon: The analytical ε for the canaries with the most presentations.
        sensitivity: The root mean square, in clip norms, of what a canary contributes over all rounds.
        population, client_rounds, client_epsilon: The number of clients, the rounds of one of them, and its analytical ε.
        client_exposure: Whether these belong to an average client or to the most exposed one.
        client_participations: The largest number of rounds in which a client was seen.
        nodes: What the server saw of its nodes, the most exposed first.
        views: The audits of what others than the public see.
        secret_seed: Whether the canaries' seed is secret.
        accounted_epsilon: The ε that the trainer's accountant quotes after training.
        claimed_late: Whether the claim was made after training.
        privacy_unit: What is protected, in the words of the user: the content of one row, or what one client is.
        missed: The number of times that an integration missed something, by what.
        pipeline: The facts from which a privacy statement is filled in.
        warnings, notes: Sentences for the reader of the result.
        check: The circumstances of a check of one function.
        other: Entries of one's own, by name.
    """

    name: str | None = None
    task: str | None = None
    title: str | None = None
    level: str | None = None
    engine: str | None = None
    accuracy: float | None = None
    accuracy_without_dp: float | None = None
    noise: str | None = None
    noise_multiplier: float | None = None
    update_noise_multiplier: float | None = None
    update_epsilon: float | None = None
    count_noise_multiplier: float | None = None
    count_epsilon: float | None = None
    presentations: int | None = None
    most_presentations: int | None = None
    most_exposed_epsilon: float | None = None
    sensitivity: float | None = None
    population: int | None = None
    client_rounds: int | None = None
    client_epsilon: float | None = None
    client_exposure: Literal["average", "most exposed"] | None = None
    client_participations: int | None = None
    nodes: tuple[SeenNode, ...] = ()
    views: tuple[SeenView, ...] = ()
    secret_seed: bool | None = None
    accounted_epsilon: float | None = None
    claimed_late: bool | None = None
    privacy_unit: str | None = None
    missed: Mapping[str, int] | None = None
    pipeline: PipelineRecord = field(default_factory=PipelineRecord)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    check: FunctionCheck | None = None
    other: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unit(self) -> str | None:
        """What one clip bounds: client or example; None if nobody says."""
        return self.pipeline.unit or (self.level if self.level in ("client", "example") else None)

    @property
    def named_unit(self) -> str | None:
        """What is protected, if the trainer was told."""
        name = self.privacy_unit
        if name is None or not 0 < len(name.strip()) <= LONGEST_UNIT:
            return None
        return one_line(name.strip())

    def with_entries(self, **entries: Any) -> "TrainerSection":
        """The section with further entries, by their names in result.json. Those that it does not know become `other`."""
        fields_of = {STORED_AS.get(name, name): name for name in KINDS}
        known = {fields_of[name]: value for name, value in entries.items() if name in fields_of}
        other = {name: value for name, value in entries.items() if name not in fields_of}
        return replace(self, **known, other={**self.other, **other})

    def to_dict(self) -> dict[str, Any]:
        """The entries of result.json, without those that are None or empty."""
        values = {name: _plain(getattr(self, name)) for name in KINDS}
        entries = {STORED_AS.get(name, name): value for name, value in values.items() if value not in (None, [], {})}
        return {**self.other, **entries}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainerSection":
        """The inverse of `to_dict`. An entry of the wrong type is left out."""
        known: dict[str, Any] = {"pipeline": PipelineRecord.read(values.get("pipeline"))}
        for name, kind in KINDS.items():
            stored = values.get(STORED_AS.get(name, name))
            if name != "pipeline" and stored is not None:
                known |= _converted(name, stored, kind)
        names = {STORED_AS.get(name, name) for name in KINDS}
        return cls(**known, other={name: value for name, value in values.items() if name not in names})


KINDS: dict[str, Any] = {
    each.name: get_type_hints(TrainerSection)[each.name] for each in fields(TrainerSection) if each.name != "other"
}


def _converted(name: str, stored: Any, kind: Any) -> dict[str, Any]:
    """One field by its name; empty if the value has the wrong type."""
    number = float(stored) if stored in ("inf", "-inf") else stored
    try:
        value = convert(number, kind)
    except (ValidationError, OverflowError, RecursionError):
        return {}
    return {} if isinstance(value, float) and math.isnan(value) else {name: value}


def _plain(value: Any) -> Any:
    if isinstance(value, FunctionCheck | SeenNode | SeenView):
        return vars(value)
    if isinstance(value, PipelineRecord):
        return value.to_dict()
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        return [_plain(each) for each in value]
    return value
