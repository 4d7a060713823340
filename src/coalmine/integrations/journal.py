"""The files that an integration writes into a run directory. `coalmine report` and `coalmine compare` read them."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from coalmine.audit.audit import Audit
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.result import AuditResult
from coalmine.audit.verdict import Claim
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.integrations.claims import most_presentations, usual_presentations


class Journal:
    """Config, one line of metrics for each round, and the result. Without a directory, nothing is written."""

    def __init__(self, audit: Audit, config: Mapping[str, Any]) -> None:
        self._audit = audit
        self._trainer = str(config["trainer"])
        self._started = time.monotonic()
        if audit.directory is not None:
            audit.directory.write_config(config)
            audit.directory.rewind_metrics_to(audit.last_round)

    def add_round(self, round_number: int, **values: Any) -> None:
        """Write one line of metrics; values that are None are left out."""
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
        notes: Iterable[str] = (),
        warnings: Iterable[str] = (),
        **more: Any,
    ) -> AuditResult:
        """Return the result, and write it where there is a directory.

        `noise` is the noise multiplier, if all rounds had the same. It gives the analytical epsilon, for the number of
        presentations that most canaries had. The epsilon of the most often shown canaries is a separate entry. `accounted`
        is the accountant's epsilon, judged as a claim amplified by sampling. `task` is the name of what was trained, as
        `coalmine compare` shows it; the default is the trainer's name. `audited` says what the integration covers of the
        pipeline and what it leaves out. `notes` and `warnings` are printed with the result. In result.json both have entries
        of their own, because `coalmine verify` derives the entry `notes` from the rounds alone.
        """
        items, remarks, cautions = tuple(audited), list(notes), list(warnings)
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
        result = self._audit.result(claim=asked, analytical_epsilon=analytical, audited=items)
        if accounted is not None:
            more["accounted_epsilon"] = accounted
            told = f"accountant's epsilon {accounted:.3g} (amplified by sampling)"
            if accounted == math.inf:
                remarks.insert(0, f"{told}: it claims no privacy")
            else:
                amplified = Claim(epsilon=accounted, accounting="amplified")
                verdict = self._audit.result(claim=amplified, audited=items).verdict
                assert verdict is not None
                more["if_accounted_were_claimed"] = {"verdict": verdict.outcome, "reason": verdict.reason}
                remarks.insert(0, f"{told}: {verdict.outcome}: {verdict.reason}")
        if self._audit.directory is not None:
            named = {"trainer": self._trainer, "task": task or self._trainer}
            added = {"trainer_notes": remarks, "warnings": cautions}
            self._audit.directory.write_result(result, **named, **shown, **added, **more)
        return replace(result, notes=(*result.notes, *remarks, *(f"warning: {text}" for text in cautions)))
