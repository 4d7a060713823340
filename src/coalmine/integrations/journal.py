"""The files that an integration writes into a run directory, and the claim that its result judges."""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import betaincinv

from coalmine.audit import Audit
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson
from coalmine.evidence.ladder import presented_times
from coalmine.integrations.setup import check_delta
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import TrainerSection
from coalmine.verdict.claim import TERMS, Claim
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.pipeline_record import PipelineRecord, accountant_version, of_library

LIBRARIES = {  # for each trainer: its distribution on PyPI, and its privacy unit
    "flower": ("flwr", "client"),
    "jax_privacy": ("jax-privacy", "example"),
    "nvflare": ("nvflare", "client"),
    "opacus": ("opacus", "example"),
    "pfl": ("pfl", "client"),
}
RATE_LEVEL = 1e-5  # probability that units are sampled more rarely than a bare claim is read
MADE_AFTERWARDS = (
    "the claim {:g} was made after training, so nobody can tell whether it was fitted to the result: pass claim= to "
    "audited()"
)


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
        claim: Claim | float | str | None,
        *,
        noise: float | None = None,
        weight: float = 1.0,
        sampler_observed: bool | None = None,
        accounted_epsilon: float | None = None,
        accounted: Claim | None = None,
        accounted_by: str | None = None,
        completed: Claim | None = None,
        pipeline: Mapping[str, Any] | None = None,
        task: str | None = None,
        audited: Iterable[AuditedItem] = (),
        notes: Iterable[str] = (),
        warnings: Iterable[str] = (),
        **more: Any,
    ) -> AuditResult:
        """Return the result, and write it if there is a directory.

        The claim is the one that the audit was made with, or else `claim`, which a note then says was made afterwards. A
        bare claim is read as `accounted`: the accounting that the pipeline's own accountant does, for the steps that ran.
        `completed` is the claim that was made, with the participations and the sensitivity that the pipeline saw. Without a
        claim nothing can pass. `accounted_epsilon` is the epsilon that the accountant quotes after training; it is reported,
        and judges nothing. `accounted_by` names the accountant of a bare claim.

        `noise` is the noise multiplier, if all rounds had the same one. It gives the analytical epsilon, for the number of
        presentations that most canaries had. The epsilon of the canaries presented most often is a separate entry. `weight`
        is the heaviest client's weight over a canary's: the claim is for that client. `sampler_observed` says whether the
        framework's own sampler picked the canaries. None leaves that to the claim.

        `pipeline` holds further facts of a `PipelineRecord`. `task` is the name that `coalmine compare` shows, by default
        the trainer's name. `audited` lists the parts of the pipeline that the integration covers or omits. `notes` and
        `warnings` are printed with the result; they stand apart from the notes that follow from the rounds. `more` are
        further entries of the `TrainerSection`.
        """
        analytical, counts = self._known_rounds(noise)
        stated, late = self._stated(claim)
        judged = None if stated is None else self._read(completed or stated, accounted, noise, weight, sampler_observed)
        note_lines = [*late, *self._accounted_notes(accounted_epsilon, accounted_by, judged), *notes]
        accountant = accounted_by if stated is not None and stated.bare and accounted is not None else None
        section = TrainerSection(
            name=self._trainer,
            task=task or self._trainer,
            notes=tuple(note_lines),
            warnings=tuple(warnings),
            pipeline=self._pipeline(accountant, pipeline),
            accounted_epsilon=accounted_epsilon,
            claimed_late=True if late else None,
        )
        result = self._audit.result(claim=judged, analytical_epsilon=analytical, audited=tuple(audited))
        return replace(result, trainer=section.with_entries(**counts, **more)).written_to(self._audit.directory)

    def _known_rounds(self, noise: float | None) -> tuple[float | None, dict[str, Any]]:
        """The analytical epsilon for known rounds, and the entries about presentations."""
        usual, most = usual_presentations(self._audit), most_presentations(self._audit)
        counts: dict[str, Any] = {"presentations": usual, "most_presentations": most}
        if not noise:
            return None, counts
        analytical, largest = (
            float(mechanism_epsilon(noise, delta=self._audit.settings.delta, participations=times))
            for times in (usual, most)
        )
        return analytical, counts | {"most_exposed_epsilon": largest}

    def _stated(self, given: Claim | float | str | None) -> tuple[Claim | None, list[str]]:
        """The claim to judge, and a note if it was made after training. It must not differ from one made before."""
        made, late = self._audit.claim, Claim.of(given)
        if made is None and late is None:
            return None, []
        claim = late if made is None else made
        assert claim is not None
        check_delta(claim, self._audit.settings.delta)
        if made is not None and late is not None and not _repeats(late, made):
            raise ValueError(
                f"this audit committed to the claim {made.epsilon:g} before round 1, so finish cannot judge another, got "
                f"{late.epsilon:g}: omit claim=, or ask audit.result(claim=…), which writes no file"
            )
        return claim, [MADE_AFTERWARDS.format(claim.epsilon)] if made is None else []

    def _read(
        self, claim: Claim, accounted: Claim | None, noise: float | None, weight: float, sampler_observed: bool | None
    ) -> Claim:
        """The claim with its accounting: a bare one has the pipeline's."""
        if claim.bare and accounted is not None:
            claim = replace(claim.read_as(accounted), counts_sampling=claim.counts_sampling)
        elif claim.amplified and sampler_observed is not None:
            return observed_claim(claim, sampler_observed=sampler_observed, noise=noise, weight=weight)
        return claim_for_weight(self._audit, claim, weight)

    def _accounted_notes(self, epsilon: float | None, accountant: str | None, judged: Claim | None) -> list[str]:
        """What the accountant says after training."""
        if epsilon is None:
            return []
        quoted = f"the accountant{f' ({accountant})' if accountant else ''} quotes epsilon {epsilon:.3g} after training"
        if epsilon == math.inf:
            return [f"{quoted}: it claims no privacy"]
        if judged is None:
            return [f"{quoted}, which nobody claimed"]
        more = f", more than the claimed {judged.epsilon:.3g}" if epsilon > ROUNDED * judged.epsilon else ""
        return [f"{quoted}{more}"]

    def _pipeline(self, accountant: str | None, more: Mapping[str, Any] | None) -> PipelineRecord:
        """The pipeline's facts."""
        library, unit = LIBRARIES[self._trainer]
        facts: dict[str, Any] = {"unit": unit, "clip_norm": self._clip_norm} | dict(more or {})
        if accountant is not None:
            facts |= {"accountant": accountant, "accountant_version": accountant_version(accountant)}
        return of_library(library, **facts)


def _repeats(late: Claim, made: Claim) -> bool:
    """Whether a claim given after training is the one made before, perhaps with fewer words."""
    unstated = {name: getattr(made, name) for name in TERMS if getattr(late, name) is None}
    return replace(late, **unstated) in (made, Claim(made.epsilon, **{name: getattr(made, name) for name in TERMS}))


def claim_for_weight(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim for a client that weighs `weight` times as much as a canary and is exposed more by that factor."""
    if weight <= 1 or claim.amplified or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit)
    return replace(claim, sensitivity=weight * math.sqrt(times))


def seen_accounting(audit: Audit, **terms: Any) -> Claim:
    """The accounting of a bare claim where nobody states how units are sampled; its epsilon is no number of anybody's.

    If every canary took part in every round, it is the mechanism's, composed over the rounds. Otherwise sampling is counted,
    at a rate that is certainly not above the true one, by a sampler that nobody observed: so nothing is confirmed, and
    nothing is refuted because of the rate.
    """
    times, rounds = presented_times(audit.log, audit.settings), max(len(audit.log.observed), 1)
    if times.min() >= rounds:
        return Claim(1.0, participations=rounds, **terms)
    seen = max(int(times.sum()), 1)
    rate = float(betaincinv(seen, times.size * rounds - seen + 1, RATE_LEVEL))
    return Claim(1.0, sampling=Poisson(rate, rounds=rounds), **terms)


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
