"""The audit of a run: its settings, what it commits to before round 1, and its result with the trainer's section."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from coalmine.audit import Audit
from coalmine.log.commitment import Precommitment
from coalmine.log.files import json_ready
from coalmine.log.provenance import code_facts
from coalmine.log.result_file import PIPELINE_ITEMS
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import checked_settings
from coalmine.measure.vectors import model_sha256
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import TrainerSection
from coalmine.simulation.config import RunConfig
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.randomness import torch_stream
from coalmine.simulation.tasks import Task
from coalmine.verdict.coverage import AuditedItem


def audit_settings(config: RunConfig, task: Task) -> dict[str, Any]:
    """The settings of the run's audit."""
    canaries = config.canaries
    return {
        "canaries": canaries.count,
        "unobserved": canaries.unobserved,
        "delta": config.privacy.delta,
        "kind": canaries.kind,
        "rounds": config.rounds if canaries.pattern == "spread" else None,
        "presentations": canaries.presentations,
        "layers": task.model.sizes,
        "noise": config.noise_law(),
    }


def audit_of_run(planned: PlannedPrivacy, task: Task, home: RunDirectory | None) -> Audit:
    """The audit of the run, which commits to its plan if it has a directory."""
    config, settings = planned.config, audit_settings(planned.config, task)
    seed = config.canary_seed()
    if home is not None and not home.has_record:  # a resumed run keeps what it committed to, whatever is computed here
        statement = replace(statement_of(planned, task), code=code_facts())
        home.commit(seed, checked_settings(task.model.dim, momentum=0.0, **settings), statement)
    deferred = not task.model.layers  # small models finish before a thread would start
    return Audit(task.model.dim, seed=seed, directory=home, deferred=deferred, **settings)


def statement_of(planned: PlannedPrivacy, task: Task) -> Precommitment:
    """The statement that the run commits to before round 1: all that follows from its config."""
    initial = task.model.initial(torch_stream(planned.config.seed, "initial model"))
    return Precommitment(
        claim=None if planned.claim is None else json_ready(planned.claim.to_dict()),
        watched=planned.config.claim.stop_on_violation,
        initial_sha256=model_sha256(initial.cpu().numpy()),
        facts=json_ready(
            {"analytical_epsilon": float(planned.analytical), **planned.section(_title(task, planned.config)).to_dict()}
            | {PIPELINE_ITEMS: {item.name: item.to_dict() for item in planned.audited_items()}}
        ),
    )


def _section(training: Training) -> TrainerSection:
    """The trainer's section as it was known before round 1: what the audit committed to, if it did."""
    known = training.planned.section(_title(training.task, training.config)).to_dict()
    return TrainerSection.from_dict({**known, **{name: value for name, value in _committed(training) if name in known}})


def _committed(training: Training) -> Iterable[tuple[str, Any]]:
    return training.audit.statement.facts.items()


def _audited_items(training: Training) -> list[AuditedItem]:
    """The pipeline's own items: those that the audit committed to, if it did."""
    committed = training.audit.statement.facts.get(PIPELINE_ITEMS)
    if committed is None:
        return training.planned.audited_items()
    return [AuditedItem(name, **item) for name, item in committed.items()]


def _title(task: Task, config: RunConfig) -> str:
    """The name of the data in results."""
    return task.title or config.task.name


def result_of_run(training: Training, accuracy: float) -> AuditResult:
    """The result of a trained run, with the section of its trainer."""
    result = training.audit.result(
        claim=training.planned.claim,
        analytical_epsilon=float(training.planned.analytical),
        audited=_audited_items(training),
        watched=training.config.claim.stop_on_violation,
    )
    section = _section(training)
    notes = (*section.notes, training.steps.note) if training.steps.note else section.notes
    plain = training.accuracy_without_dp() if training.config.baseline else None
    section = replace(section, accuracy=accuracy, accuracy_without_dp=plain, engine=training.description, notes=notes)
    return replace(result, trainer=section)
