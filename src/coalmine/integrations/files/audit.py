"""The audit of a pipeline that runs elsewhere: its releases, streamed from files into an `Audit`."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coalmine.audit import Audit
from coalmine.integrations.files.arrays import cut, read_arrays, subtracted
from coalmine.integrations.files.plan import (
    AuditPlan,
    PlannedRound,
    claim_of,
    file_of,
    read_plan,
    rounds_of,
    sampling_of,
)
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.log.seed_file import read_seed
from coalmine.measure.trees import Tree
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim

KEPT = 1 << 24  # most parameters of a model that the run directory keeps, for `coalmine verify`
SCRATCH = ".unpacked"  # folder of a run directory, for downloads and differences of one round


class FileAudit(FrameworkAudit):
    """The audit that audit.toml describes, in its run directory; made again, it resumes."""

    trainer = Trainer("files", "coalmine", "client")

    def __init__(self, plan: AuditPlan) -> None:
        self.plan, self.rounds, home = plan, rounds_of(plan), Path(plan.directory)
        seed = read_seed(plan.seed_file)
        self.scratch = home / SCRATCH
        with self._unpacked():
            model = self._read("the model", plan.model)
            self.tree = Tree(model)
            core = Audit.for_model(
                model,
                canaries=plan.canaries,
                unobserved=plan.unobserved,
                seed=seed,
                delta=plan.delta,
                rounds=plan.rounds if plan.scheduled and plan.sampling is None else None,
                presentations=plan.presentations,
                momentum=plan.momentum,
                sampling=sampling_of(plan),
                directory=home,
                claim=claim_of(plan),
                blocks=plan.blocks,
            )
            privacy = {"clip_norm": plan.clip_norm, "divisor": plan.divisor}
            if plan.noise_multiplier is not None:
                privacy["noise_multiplier"] = plan.noise_multiplier
            super().__init__(core, privacy=privacy, canaries={"scale": plan.scale}, rounds=plan.rounds)
            small = core.settings.dim <= KEPT
            self.commit(initial=model if small else None, planned=plan.rounds, save_model=small)
        self.recorder.unit = plan.unit

    def _read(self, what: str, name: str, part: str = "now") -> Any:
        folder = self.scratch / part
        folder.mkdir(parents=True, exist_ok=True)
        return cut(read_arrays(what, name, folder), self.plan.layers, what)

    @contextmanager
    def _unpacked(self) -> Iterator[None]:
        """Remove what was unpacked for a round, also by an earlier process that was killed."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def present(self, planned: PlannedRound) -> Any:
        """The canaries of a round: as stated, or by the audit's own schedule."""
        if planned.present is not None:
            return planned.present
        if not self.plan.scheduled:
            raise ValueError(
                f"[[round]] {planned.number} must list the canaries that were present, since scheduled is false, got none"
            )
        return self.core.canaries_in_round(planned.number)

    def observe_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Record every round that is not recorded yet, and then the final model."""
        before = self.plan.model
        for planned in self.rounds:
            if planned.number > self.last_round:
                with self._unpacked():
                    self._observe(planned, before)
            before = file_of(self.plan.releases, planned.number)
            if progress is not None:
                progress(planned.number, self.plan.rounds)
        final = self.plan.final or (before if self.plan.releases_are == "models" else None)
        if final is not None and self.core.log.final is None:
            with self._unpacked():
                initial = self._read("the model", self.plan.model, "then")
                self.core.observe_final(self._read("the final model", final), initial=initial)

    def _observe(self, planned: PlannedRound, before: str) -> None:
        """Record one round; `before` names the model that it started with."""
        number, plan = planned.number, self.plan
        name = file_of(plan.releases, number)
        release = self._read(f"the release of round {number}", name)
        if plan.releases_are == "models":
            release = subtracted(release, self._read(f"the model before round {number}", before, "then"), self.scratch)
        others = None
        if plan.others is not None:
            others = self._read(f"the other clients' sum of round {number}", file_of(plan.others, number), "others")
        present = self.present(planned)
        try:
            self.core.observe_round(number, release, present=present, others=others, scale=plan.scale, **planned.facts)
        except ValueError as error:
            raise ValueError(f"round {number}, {name}: {error}") from None
        self.recorder.add_round(number, canaries=len(present), clip_norm=planned.clip_norm)

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """The result of all rounds, which is also written to result.json."""
        noises = {planned.noise_multiplier for planned in self.rounds}
        run = FinishedRun(noise=noises.pop() if len(noises) == 1 else None, clients=self.plan.clients)
        return self.conclude(claim, run, task=task or self.plan.task)


def audit_files(path: Path | str, *, progress: Callable[[int, int], None] | None = None) -> AuditResult:
    """The result of the pipeline that an audit.toml describes, which is also written into its run directory.

    Rounds that an earlier call recorded are not read again. `progress` is called with the number of each recorded round and
    of all rounds. A file that is missing or damaged is a ValueError; what came before it stays recorded.
    """
    with FileAudit(read_plan(Path(path))) as audit:
        audit.observe_all(progress)
        return audit.finish()
