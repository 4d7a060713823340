"""The files that an integration writes into a run directory, and the claim that its result judges."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from coalmine.audit.audit import Audit
from coalmine.audit.claim import Claim
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.ladder import presented_times
from coalmine.audit.pipeline_record import CLOSED_FORM, accountant_version, of_library
from coalmine.audit.result import AuditResult
from coalmine.estimators.mechanism import mechanism_epsilon

LIBRARIES = {  # for each trainer: its distribution on PyPI, and its privacy unit
    "flower": ("flwr", "client"),
    "jax_privacy": ("jax-privacy", "example"),
    "nvflare": ("nvflare", "client"),
    "opacus": ("opacus", "example"),
    "pfl": ("pfl", "client"),
}


class Journal:
    """Writes the config, one line of metrics for each round, and the result. Without a directory, it writes nothing.

    `coalmine report` and `coalmine compare` read these files.
    """

    def __init__(self, audit: Audit, config: Mapping[str, Any]) -> None:
        self._audit = audit
        self._trainer = str(config["trainer"])
        self._clip_norm = config["privacy"].get("clip_norm") or None
        self._started = time.monotonic()
        if audit.directory is not None:
            audit.directory.write_config(config)
            audit.directory.rewind_metrics_to(audit.last_round)

    def add_round(self, round_number: int, **values: Any) -> None:
        """Write one line of metrics. Values that are None are omitted."""
        if self._audit.directory is not None:
            known = {name: value for name, value in values.items() if value is not None}
            seconds = round(time.monotonic() - self._started, 3)
            self._audit.directory.append_metrics({"round": round_number, **known, "seconds": seconds})

    def finish(
        self,
        claim: Claim | float | None,
        *,
        noise: float | None = None,
        weight: float = 1.0,
        sampler_observed: bool | None = None,
        accounted_epsilon: float | None = None,
        accounted: Claim | None = None,
        accounted_by: str | None = None,
        claimed_by: str | None = None,
        pipeline: Mapping[str, Any] | None = None,
        task: str | None = None,
        audited: Iterable[AuditedItem] = (),
        notes: Iterable[str] = (),
        warnings: Iterable[str] = (),
        **more: Any,
    ) -> AuditResult:
        """Return the result, and write it if there is a directory.

        `noise` is the noise multiplier, if all rounds had the same one. It gives the default claim and the analytical
        epsilon, for the number of presentations that most canaries had. The epsilon of the canaries presented most often
        is a separate entry. `weight` is the heaviest client's weight over a canary's: the claim is for that client.
        `sampler_observed` says whether the framework's own sampler picked the canaries. None leaves that to the claim.

        `accounted_epsilon` is the accountant's epsilon, and `accounted` is that epsilon as a claim, amplified by sampling.
        If the canaries followed the pipeline's own sampler, `accounted` is judged by default, and the mechanism's claim
        gets a second verdict. Otherwise it is the other way round. `accounted_by` and `claimed_by` name the accountants of
        `accounted` and of `claim`.

        `pipeline` holds further facts of a `PipelineRecord`. `task` is the name that `coalmine compare` shows, by default
        the trainer's name. `audited` lists the parts of the pipeline that the integration covers or omits. `notes` and
        `warnings` are printed with the result. In result.json they have separate entries, because `coalmine verify`
        derives the entry `notes` from the rounds alone.
        """
        items, note_lines, warning_lines = tuple(audited), list(notes), list(warnings)
        claim = self._audit.claim if claim is None else claim
        usual, most = usual_presentations(self._audit), most_presentations(self._audit)
        counts: dict[str, Any] = {"presentations": usual, "most_presentations": most}
        analytical = None
        if noise:
            analytical, largest = (
                float(mechanism_epsilon(noise, delta=self._audit.settings.delta, participations=times))
                for times in (usual, most)
            )
            counts["most_exposed_epsilon"] = largest
        second_claim, accountant = accounted, claimed_by
        if claim is None and noise:
            accountant = CLOSED_FORM
            claim = claim_for_weight(self._audit, noise_claim(self._audit, noise), weight)
            if accounted is not None and accounted.sampler_observed:
                claim, second_claim, accountant = accounted, claim, accounted_by
        elif claim is not None:
            claim = claim_for_weight(self._audit, claim if isinstance(claim, Claim) else Claim(claim), weight)
            if claim.amplified and sampler_observed is not None:
                claim = observed_claim(claim, sampler_observed=sampler_observed, noise=noise, weight=weight)
        result = self._audit.result(claim=claim, analytical_epsilon=analytical, audited=items)
        if accounted_epsilon is not None:
            more["accounted_epsilon"] = accounted_epsilon
        if accounted_epsilon == math.inf:
            note_lines.insert(0, "accountant's epsilon inf (amplified by sampling): it claims no privacy")
        if second_claim is not None:
            verdict = self._audit.result(claim=second_claim, audited=items).verdict
            assert verdict is not None
            name = "accounted" if second_claim.amplified else "mechanism"
            more[f"if_{name}_were_claimed"] = {"verdict": verdict.outcome, "reason": verdict.reason}
            text = (
                "accountant's epsilon {:.3g} (amplified by sampling)"
                if second_claim.amplified
                else "mechanism's epsilon {:.3g}"
            )
            note_lines.insert(0, f"{text.format(second_claim.epsilon)}: {verdict.outcome}: {verdict.reason}")
        if self._audit.directory is not None:
            names = {"trainer": self._trainer, "task": task or self._trainer}
            added = {
                "trainer_notes": note_lines,
                "warnings": warning_lines,
                "pipeline": self._pipeline(accountant, pipeline),
            }
            self._audit.directory.write_result(result, **names, **counts, **added, **more)
        return replace(result, notes=(*result.notes, *note_lines, *(f"warning: {text}" for text in warning_lines)))

    def _pipeline(self, accountant: str | None, more: Mapping[str, Any] | None) -> dict[str, Any]:
        """The pipeline's facts for result.json."""
        library, unit = LIBRARIES[self._trainer]
        facts: dict[str, Any] = {"unit": unit, "clip_norm": self._clip_norm} | dict(more or {})
        if accountant is not None:
            facts |= {"accountant": accountant, "accountant_version": accountant_version(accountant)}
        return of_library(library, **facts).to_dict()


def noise_claim(audit: Audit, noise_multiplier: float) -> Claim:
    """The claim that every round had this noise: the mechanism's epsilon for the canaries presented most often.

    Canaries presented less often are judged with the same noise and their own number of presentations.
    """
    times = most_presentations(audit)
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta, participations=times))
    return Claim(epsilon=epsilon, participations=times)


def claim_for_weight(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim for a client that weighs `weight` times as much as a canary and is exposed more by that factor."""
    if weight <= 1 or claim.amplified or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit)
    return replace(claim, sensitivity=weight * math.sqrt(times))


def observed_claim(claim: Claim, *, sampler_observed: bool, noise: float | None, weight: float) -> Claim:
    """An amplified claim, completed with whether the sampler was observed and with the heaviest client's noise."""
    stated = claim.noise_multiplier or noise
    return replace(
        claim,
        sampler_observed=sampler_observed,
        noise_multiplier=stated / max(weight, 1.0) if stated else None,
    )


def most_presentations(audit: Audit) -> int:
    """Largest number of presentations of one canary; 1 before the first round."""
    return max(int(presented_times(audit.log, audit.settings).max()), 1)


def usual_presentations(audit: Audit) -> int:
    """Most frequent number of presentations, the larger one in a tie; 1 before the first round.

    The first row of known-others and the analytical epsilon of `coalmine run` are for this number.
    """
    counts = np.bincount(presented_times(audit.log, audit.settings))
    counts[0] = 0
    return max(int(len(counts) - 1 - np.argmax(counts[::-1])) if counts.any() else 1, 1)
