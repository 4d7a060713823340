"""The files that an integration writes into a run directory: settings, one line of metrics for each round, the result."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coalmine.audit import Audit
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.ladder import most_presentations, usual_presentations
from coalmine.integrations.claims import (
    claim_for_weight,
    observed_claim,
    stated_claim,
)
from coalmine.integrations.follower import Follower
from coalmine.integrations.setup import check_unit
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import TrainerSection
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.pipeline_record import PipelineRecord, accountant_version, of_library

USUAL_UNITS = ("row", "example", "client")  # of a claim that says no more than its framework


@dataclass(frozen=True)
class Trainer:
    """A framework: its name in config.json, its distribution on PyPI, and what one clip bounds."""

    name: str
    distribution: str
    unit: str


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """What an integration knows about a finished run, besides the rounds.

    `noise` is the noise multiplier, if all rounds had the same one. It gives the analytical epsilon, for the number of
    presentations that most canaries had. `weight` is the heaviest client's weight over a canary's: the claim is for that
    client. `sampler_observed` says whether the framework's own sampler picked the canaries. None leaves that to the claim.

    A bare claim is read as `accounted`: the accounting that the pipeline's own accountant does, for the steps that ran.
    `accounted_by` names that accountant. `accounted_epsilon` is the epsilon that it quotes after training; it is reported,
    and judges nothing. `completed` is the claim that was made, with the participations and the sensitivity that the
    pipeline saw.

    `pipeline` holds further facts of a `PipelineRecord`. `items` lists the parts of the pipeline that the integration covers
    or omits. `notes` and `warnings` are printed with the result; they stand apart from the notes that follow from
    the rounds. `clients` is the largest number of real clients in a round. `entries` are further entries of the
    `TrainerSection`.
    """

    noise: float | None = None
    weight: float = 1.0
    sampler_observed: bool | None = None
    accounted: Claim | None = None
    accounted_by: str | None = None
    accounted_epsilon: float | None = None
    completed: Claim | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    items: Sequence[AuditedItem] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    clients: int | None = None
    entries: Mapping[str, Any] = field(default_factory=dict)


class RunRecorder:
    """Writes the config, one line of metrics for each round, and the result. Without a directory, it writes nothing.

    `coalmine report` and `coalmine compare` read these files.
    """

    def __init__(
        self, audit: Audit, trainer: Trainer, *, privacy: Mapping[str, Any], canaries: Mapping[str, Any], **more: Any
    ) -> None:
        self._audit, self._trainer = audit, trainer
        self._clip_norm = privacy.get("clip_norm") or None
        self._started = time.monotonic()
        self.earlier_lines: list[dict[str, Any]] = []  # of the rounds before a restart
        self.follower: Follower | None = None
        self.after_round: Callable[[int], None] | None = None
        self.unit: str | None = None  # what is protected, if the user named it
        if audit.directory is not None:
            config = {"trainer": trainer.name, "privacy": privacy, "canaries": canaries, **more}
            audit.directory.write_config(config)
            audit.directory.rewind_metrics_to(audit.last_round)
            self.earlier_lines = audit.directory.read_metrics()

    def add_round(self, round_number: int, **values: Any) -> None:
        """Write one line of metrics. Values that are None are omitted."""
        known = {name: value for name, value in values.items() if value is not None}
        if self.after_round is not None:
            self.after_round(round_number)
        if self.follower is not None:
            self.follower.round_done(round_number, known)
        if self._audit.directory is not None:
            seconds = round(time.monotonic() - self._started, 3)
            self._audit.directory.append_metrics({"round": round_number, **known, "seconds": seconds})

    def earlier_count(self, name: str) -> int:
        """The sum of a count over the rounds before a restart."""
        counts = (line.get(name) for line in self.earlier_lines)
        return sum(count for count in counts if type(count) is int and count > 0)

    def finish(self, claim: Claim | float | str | None, run: FinishedRun, *, task: str | None = None) -> AuditResult:
        """Return the result, and write it if there is a directory.

        The claim is the one that the audit was made with, or else `claim`, which a note then says was made afterwards.
        Without a claim nothing can pass. `task` is the name that `coalmine compare` shows, by default the trainer's name.
        """
        stated, late = stated_claim(self._audit, claim)
        check_unit(stated, self.unit)
        judged = None if stated is None else self._read(run.completed or stated, run)
        if judged is not None and self.unit is not None:
            judged = replace(judged, unit=self.unit)
        notes = [*late, *_accounted_notes(run, judged), *run.notes]
        told = self._audit.log, self._audit.settings
        usual, most = usual_presentations(*told), most_presentations(*told)
        section = TrainerSection(
            name=self._trainer.name,
            task=task or self._trainer.name,
            presentations=usual,
            most_presentations=most,
            most_exposed_epsilon=self._epsilon(run.noise, most),
            accounted_epsilon=run.accounted_epsilon,
            claimed_late=True if late else None,
            privacy_unit=self.named_unit(stated),
            notes=tuple(notes),
            warnings=tuple(run.warnings),
            pipeline=self._pipeline(run, stated),
        )
        analytical = self._epsilon(run.noise, usual)
        result = self._audit.result(claim=judged, analytical_epsilon=analytical, clients=run.clients, audited=run.items)
        result = replace(result, trainer=section.with_entries(**run.entries)).written_to(self._audit.directory)
        if self.follower is not None:
            self.follower.finished(result)
        return result

    def named_unit(self, stated: Claim | None = None) -> str | None:
        """What is protected, in the words of the user or of the claim; None if neither says more than the framework."""
        claimed = None if stated is None or stated.unit in USUAL_UNITS else stated.unit
        return self.unit or claimed

    def _epsilon(self, noise: float | None, participations: int) -> float | None:
        """The analytical epsilon for known rounds."""
        if not noise:
            return None
        return float(mechanism_epsilon(noise, delta=self._audit.settings.delta, participations=participations))

    def _read(self, claim: Claim, run: FinishedRun) -> Claim:
        """The claim with its accounting: a bare one has the pipeline's."""
        if claim.bare and run.accounted is not None:
            claim = replace(claim.read_as(run.accounted), counts_sampling=claim.counts_sampling)
        elif claim.amplified and run.sampler_observed is not None:
            return observed_claim(claim, sampler_observed=run.sampler_observed, noise=run.noise, weight=run.weight)
        return claim_for_weight(self._audit, claim, run.weight)

    def _pipeline(self, run: FinishedRun, stated: Claim | None) -> PipelineRecord:
        """The pipeline's facts."""
        facts: dict[str, Any] = {"unit": self._trainer.unit, "clip_norm": self._clip_norm} | dict(run.pipeline)
        if run.accounted_by is not None and run.accounted is not None and stated is not None and stated.bare:
            facts |= {"accountant": run.accounted_by, "accountant_version": accountant_version(run.accounted_by)}
        return of_library(self._trainer.distribution, **facts)


def _accounted_notes(run: FinishedRun, judged: Claim | None) -> list[str]:
    """What the accountant says after training."""
    epsilon = run.accounted_epsilon
    if epsilon is None:
        return []
    name = f" ({run.accounted_by})" if run.accounted_by else ""
    quoted = f"the accountant{name} quotes epsilon {epsilon:.3g} after training"
    if epsilon == math.inf:
        return [f"{quoted}: it claims no privacy"]
    if judged is None:
        return [f"{quoted}, which nobody claimed"]
    more = f", more than the claimed {judged.epsilon:.3g}" if epsilon > ROUNDED * judged.epsilon else ""
    return [f"{quoted}{more}"]
