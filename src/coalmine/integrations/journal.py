"""What an integration writes into the audit's run directory, as `coalmine run` does, so that report and compare read it."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

from coalmine.audit.audit import Audit
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.integrations.claims import most_presentations, usual_presentations


class Journal:
    """Config, a line of metrics a round, and the result; nothing at all for an audit without a directory."""

    def __init__(self, audit: Audit, config: Mapping[str, Any]) -> None:
        self._audit = audit
        self._trainer = str(config["trainer"])
        self._started = time.monotonic()
        if audit.directory is not None:
            audit.directory.write_config(config)
            audit.directory.rewind_metrics_to(audit.last_round)

    def add_round(self, round_number: int, **values: Any) -> None:
        """One line of metrics; what is None is left out."""
        if self._audit.directory is not None:
            told = {name: value for name, value in values.items() if value is not None}
            seconds = round(time.monotonic() - self._started, 3)
            self._audit.directory.append_metrics({"round": round_number, **told, "seconds": seconds})

    def finish(
        self,
        claim: Claim | float | None,
        *,
        noise: float | None = None,
        accounted: float | None = None,
        task: str | None = None,
        audited: Iterable[AuditedItem] = (),
        **more: Any,
    ) -> AuditResult:
        """The result, on disk too. `accounted` is the accountant's epsilon, judged as a claim amplified by sampling.

        `noise` is the noise multiplier, where all rounds had one and the same. It makes the analytical epsilon, for canaries
        shown as often as most were, as the estimates beside it are; that of the most often shown ones has an entry of its
        own. `task` is what was trained, as `coalmine compare` shows it: by default the trainer's name.
        """
        asked = Claim(epsilon=claim) if isinstance(claim, int | float) else claim
        usual, most = usual_presentations(self._audit), most_presentations(self._audit)
        shown: dict[str, Any] = {"presentations": usual, "most_presentations": most}
        analytical = None
        if noise:
            analytical, largest = (
                float(mechanism_epsilon(noise, delta=self._audit.settings.delta, participations=times))
                for times in (usual, most)
            )
            shown["most_exposed_epsilon"] = largest
        result = self._audit.result(claim=asked, analytical_epsilon=analytical, audited=audited)
        if accounted is not None:
            verdict = self._audit.result(
                claim=Claim(epsilon=accounted, accounting="amplified"), audited=audited
            ).verdict
            assert verdict is not None
            more["accounted_epsilon"] = accounted
            more["if_accounted_were_claimed"] = {"verdict": verdict.outcome, "reason": verdict.reason}
        if self._audit.directory is not None:
            named = {"trainer": self._trainer, "task": task or self._trainer}
            self._audit.directory.write_result(result, **named, **shown, **more)
        return result
