"""What `RunRecorder` was called: goes with the last integration that uses it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from coalmine.audit import Audit
from coalmine.integrations.claims import most_presentations, seen_accounting
from coalmine.integrations.recorder import FinishedRun, RunRecorder, Trainer
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.claim import Claim

__all__ = ["Journal", "most_presentations", "seen_accounting"]
TRAINERS = {
    "flower": Trainer("flower", "flwr", "client"),
    "jax_privacy": Trainer("jax_privacy", "jax-privacy", "example"),
    "nvflare": Trainer("nvflare", "nvflare", "client"),
    "opacus": Trainer("opacus", "opacus", "example"),
    "pfl": Trainer("pfl", "pfl", "client"),
}


class Journal:
    """A `RunRecorder` with keywords."""

    def __init__(self, audit: Audit, config: Mapping[str, Any]) -> None:
        more = dict(config)
        self._recorder = RunRecorder(audit, TRAINERS[more.pop("trainer")], **more)
        self.add_round = self._recorder.add_round

    def finish(
        self, claim: Claim | float | str | None, *, audited: Any = (), task: str | None = None, **facts: Any
    ) -> AuditResult:
        """As `RunRecorder.finish`."""
        known = {each.name for each in fields(FinishedRun)}
        given = {name: value for name, value in facts.items() if name in known and value is not None}
        entries = {name: value for name, value in facts.items() if name not in known}
        run = FinishedRun(items=tuple(audited), entries=entries, **given)
        return self._recorder.finish(claim, run, task=task)
