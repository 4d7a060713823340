"""What every integration does: it holds an audit, records the run, reads the claim, and finishes the audit."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self

from coalmine.argument_checks import short_repr
from coalmine.audit import Audit
from coalmine.data_canaries import DataCanaries
from coalmine.integrations.follower import Dashboards, Follower, Progress
from coalmine.integrations.recorder import FinishedRun, RunRecorder, Trainer
from coalmine.integrations.records import WatchedRecords
from coalmine.integrations.setup import checked_unit
from coalmine.log.rounds_file import RoundLog
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.settings import Settings
from coalmine.replay.outcome import Replay
from coalmine.replay.step import replay
from coalmine.replay.witness import witness
from coalmine.result.audit_result import AuditResult
from coalmine.result.other_rank import ResultOnRank0
from coalmine.result.words import IN_STEPS, STEP, Words
from coalmine.verdict.alarm import Alarm
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.replayed_rows import ReplayedRows, ReplayedStep


class FrameworkAudit(ABC):
    """The audit of a run in a framework: `thing.audit`, where `thing` is what `audited` returned.

    `core` is the `Audit` that it holds. Its members that a user of a framework needs are here too. A subclass puts canaries
    into the framework's rounds, calls `core.observe_round` and `recorder.add_round` after each, and has a `finish` whose
    keywords are those that its framework needs. That `finish` passes a `FinishedRun` to `conclude`.
    """

    trainer: ClassVar[Trainer]

    def __init__(
        self,
        core: Audit,
        *,
        privacy: Mapping[str, Any],
        canaries: Mapping[str, Any] | None = None,
        data_canaries: DataCanaries | None = None,
        **config: Any,
    ) -> None:
        """`privacy`, `canaries` and `config` go into config.toml; the audit's delta and number of canaries are added.

        So does the plan of data canaries, which `watch_records` scores.
        """
        self.core = core
        self._replayed: list[ReplayedStep] = []
        self._data_canaries = data_canaries
        self._records: WatchedRecords | None = None
        if data_canaries is not None:
            config["data_canaries"] = data_canaries.plan | {"commitment": data_canaries.commitment}
        core.finishes_in = self.trainer.name
        settings = core.settings
        self.recorder = RunRecorder(
            core,
            self.trainer,
            privacy={**privacy, "delta": settings.delta},
            canaries={"count": settings.canaries, **(canaries or {})},
            **config,
        )

    @abstractmethod
    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult | ResultOnRank0:
        """The result of the run, which is also written to result.json if there is a directory."""

    def conclude(self, claim: Claim | float | str | None, run: FinishedRun, *, task: str | None = None) -> AuditResult:
        """Judge the claim, and return and write the result: what `RunRecorder.finish` says."""
        if self._replayed:
            rows = AuditedItem.of_rows(ReplayedRows(steps=tuple(self._replayed)))
            run = replace(run, items=[*(item for item in run.items if item.name != "rows"), rows])
        if self._records is not None:
            run = replace(run, items=[*run.items, self._records.item()])
        return self.recorder.finish(claim, run, task=task)

    def replay(self, step: Callable[..., Any], batch: Any, **options: Any) -> Replay:
        """Run a step of this training again without single rows or replies, and let the result cover what that shows.

        `step` is a function of a batch that returns the clipped sum, and `options` are those of `coalmine.testing.replay`.
        A client's neighbour sends zeros with the same weight unless `adjacency` says otherwise. The replay belongs to the
        step that comes next.
        """
        if self.trainer.unit != "example":
            options = {"adjacency": "zero-out"} | options
        outcome = replay(step, batch, **options)
        self._replayed.append(witness(self.last_round + 1, outcome))
        return outcome

    def watch_records(self, model: Callable[[], Any]) -> None:
        """Score data canaries before training, at their checkpoints and at the end; `model` returns the current model."""
        if self._data_canaries is not None:
            self._records = WatchedRecords(self._data_canaries, self.core, model)
            self.recorder.after_round = self._records.after_round

    def note_replayed(self, steps: Sequence[ReplayedStep]) -> None:
        """Let the result cover steps that the integration replayed by itself, besides those that were replayed by hand."""
        known = {id(step) for step in self._replayed}
        self._replayed += [step for step in steps if id(step) not in known]

    def read_claim_as(self, accounted: Claim | None) -> None:
        """Let `on_violation` read a claim that is a bare number as this accounting."""
        if accounted is not None and self.core.claim is not None and self.core.claim.bare:
            self.core.watch.read_claim_as(self.core.claim.read_as(accounted))

    def commit(self, *, initial: Any = None, planned: int | None = None, save_model: Any = True) -> None:
        """Commit to the config, the model before training and the planned rounds, on every rank: `Audit.commit_to`."""
        if not isinstance(save_model, bool):
            raise TypeError(f"save_model must be True or False, got {short_repr(save_model)}")
        self.core.commit_to(initial=initial, rounds=planned, save_model=save_model)

    def follow(
        self,
        planned: int | None = None,
        *,
        progress: Progress = None,
        log_to: Dashboards = None,
        unit: str | None = None,
    ) -> None:
        """Say in one line what is audited; then show a bar of steps, and log to dashboards. See `Follower`.

        `unit` names what is protected, if the user did.
        """
        self.recorder.unit = checked_unit(unit)
        words = Words(self._unit_word, "step" if self.trainer.name in IN_STEPS else STEP)
        self.recorder.follower = Follower(self.core, words, planned=planned, progress=progress, log_to=log_to)

    @property
    def _unit_word(self) -> str:
        """What the claim is about; without one, what one clip of this framework bounds."""
        claimed = None if self.claim is None else self.claim.unit
        return self.recorder.unit or claimed or ("row" if self.trainer.unit == "example" else self.trainer.unit)

    def detach(self) -> None:
        """Give the audit back to its owner, who may then finish it without the framework."""
        self.core.finishes_in = None

    # Members of the audit itself

    @property
    def settings(self) -> Settings:
        return self.core.settings

    @property
    def claim(self) -> Claim | None:
        """The claim that the audit was made with, and committed to."""
        return self.core.claim

    @property
    def directory(self) -> RunDirectory | None:
        return self.core.directory

    @property
    def last_round(self) -> int:
        """Number of the last observed round, 0 before the first."""
        return self.core.last_round

    @property
    def log(self) -> RoundLog:
        """Everything observed so far; on rank 0 only."""
        return self.core.log

    def alarm(self, claim: Claim | float | None = None, *, wait: bool = True) -> Alarm | None:
        """The first round after which the claim was refuted, as `Audit.alarm` returns it."""
        return self.core.alarm(claim, wait=wait)

    def result(self, *, claim: Claim | float | None = None) -> AuditResult:
        """The result so far, without what the framework knows of its pipeline; writes nothing."""
        return self.core.result(claim=claim)

    def flush(self, *, sync: bool = False) -> None:
        """Record the round that is still being measured; with `sync`, write every round to disk."""
        self.core.flush(sync=sync)

    def rewind_to(self, round_number: int) -> None:
        """Remove every round after `round_number`: for a run that resumes from a checkpoint."""
        self.core.rewind_to(round_number)

    def close(self) -> None:
        """Record a round that is still being measured, and unlock the directory."""
        if self.recorder.follower is not None:
            self.recorder.follower.close()
        self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tensors_item(audit: Audit, remedy: str) -> Sequence[AuditedItem]:
    """The item "tensors" of an audit without layers; with layers, the audit itself says what it checked."""
    if audit.settings.layers:
        return ()
    return (AuditedItem("tensors", "not checked", f"the audit has no layers: {remedy}"),)
