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

LIBRARIES = {  # of each trainer: the distribution that holds it, and what one clip bounds
    "flower": ("flwr", "client"),
    "jax_privacy": ("jax-privacy", "example"),
    "nvflare": ("nvflare", "client"),
    "opacus": ("opacus", "example"),
    "pfl": ("pfl", "client"),
}


class Journal:
    """Config, one line of metrics for each round, and the result. Without a directory, nothing is written.

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
        """Write one line of metrics; values that are None are left out."""
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
        """Return the result, and write it where there is a directory.

        `noise` is the noise multiplier, if all rounds had the same. It makes the default claim and the analytical epsilon,
        for the number of presentations that most canaries had. The epsilon of the canaries presented most often is a
        separate entry. `weight` is that of the heaviest client over that of a canary: the claim is for that client.
        `sampler_observed` says whether the framework's own sampler picked the canaries; None leaves that to the claim.
        `accounted_epsilon` is the accountant's, and `accounted` the claim of it, amplified by sampling. If the canaries
        followed the pipeline's own sampler, that claim is judged by default, and the mechanism's is an entry beside it;
        otherwise the other way round. `accounted_by` and `claimed_by` name the accountants of `accounted` and of `claim`.
        `pipeline` are further facts of a `PipelineRecord`. `task` is the name of what was trained, as `coalmine compare`
        shows it; the default is the trainer's name. `audited` says what the integration
        covers of the pipeline and what it leaves out. `notes` and `warnings` are printed with the result. In result.json
        both have entries of their own, because `coalmine verify` derives the entry `notes` from the rounds alone.
        """
        items, remarks, cautions = tuple(audited), list(notes), list(warnings)
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
        beside, accountant = accounted, claimed_by
        if claim is None and noise:
            accountant = CLOSED_FORM
            claim = claim_for_weight(self._audit, noise_claim(self._audit, noise), weight)
            if accounted is not None and accounted.sampler_observed:
                claim, beside, accountant = accounted, claim, accounted_by
        elif claim is not None:
            claim = claim_for_weight(self._audit, claim if isinstance(claim, Claim) else Claim(claim), weight)
            if claim.amplified and sampler_observed is not None:
                claim = observed_claim(claim, sampler_observed=sampler_observed, noise=noise, weight=weight)
        result = self._audit.result(claim=claim, analytical_epsilon=analytical, audited=items)
        if accounted_epsilon is not None:
            more["accounted_epsilon"] = accounted_epsilon
        if accounted_epsilon == math.inf:
            remarks.insert(0, "accountant's epsilon inf (amplified by sampling): it claims no privacy")
        if beside is not None:
            verdict = self._audit.result(claim=beside, audited=items).verdict
            assert verdict is not None
            name = "accounted" if beside.amplified else "mechanism"
            more[f"if_{name}_were_claimed"] = {"verdict": verdict.outcome, "reason": verdict.reason}
            text = (
                "accountant's epsilon {:.3g} (amplified by sampling)"
                if beside.amplified
                else "mechanism's epsilon {:.3g}"
            )
            remarks.insert(0, f"{text.format(beside.epsilon)}: {verdict.outcome}: {verdict.reason}")
        if self._audit.directory is not None:
            names = {"trainer": self._trainer, "task": task or self._trainer}
            added = {"trainer_notes": remarks, "warnings": cautions, "pipeline": self._pipeline(accountant, pipeline)}
            self._audit.directory.write_result(result, **names, **counts, **added, **more)
        return replace(result, notes=(*result.notes, *remarks, *(f"warning: {text}" for text in cautions)))

    def _pipeline(self, accountant: str | None, more: Mapping[str, Any] | None) -> dict[str, Any]:
        """What the trainer knows of its pipeline, for result.json."""
        library, unit = LIBRARIES[self._trainer]
        facts: dict[str, Any] = {"unit": unit, "clip_norm": self._clip_norm} | dict(more or {})
        if accountant is not None:
            facts |= {"accountant": accountant, "accountant_version": accountant_version(accountant)}
        return of_library(library, **facts).to_dict()


def noise_claim(audit: Audit, noise_multiplier: float) -> Claim:
    """The claim that every round had this noise: the mechanism's epsilon for the canaries presented most often.

    Canaries presented less often are judged by the same noise, at their own number of presentations.
    """
    times = most_presentations(audit)
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta, participations=times))
    return Claim(epsilon=epsilon, participations=times)


def claim_for_weight(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim for a client that weighs `weight` times as much as a canary, and so is that much more exposed."""
    if weight <= 1 or claim.amplified or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit)
    return replace(claim, sensitivity=weight * math.sqrt(times))


def observed_claim(claim: Claim, *, sampler_observed: bool, noise: float | None, weight: float) -> Claim:
    """An amplified claim with what the integration knows: who picked the canaries, and the heaviest client's noise."""
    stated = claim.noise_multiplier or noise
    return replace(
        claim,
        sampler_observed=sampler_observed,
        noise_multiplier=stated / max(weight, 1.0) if stated else None,
    )


def most_presentations(audit: Audit) -> int:
    """Largest number of rounds that one canary took part in; 1 before the first round."""
    return max(int(presented_times(audit.log, audit.settings).max()), 1)


def usual_presentations(audit: Audit) -> int:
    """Number of rounds that most canaries took part in, the larger one in a tie; 1 before the first round.

    The first row of known-others and the analytical epsilon of `coalmine run` are for this number.
    """
    counts = np.bincount(presented_times(audit.log, audit.settings))
    counts[0] = 0
    return max(int(len(counts) - 1 - np.argmax(counts[::-1])) if counts.any() else 1, 1)
