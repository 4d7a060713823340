"""The claim that a finished run is judged by, read with what the framework counted."""

import math
from dataclasses import replace
from typing import Any

from scipy.special import betaincinv

from coalmine.audit import Audit
from coalmine.estimators.sampling import Poisson
from coalmine.evidence.ladder import most_presentations, presented_times
from coalmine.integrations.setup import check_delta
from coalmine.verdict.claim import TERMS, Claim

RATE_LEVEL = 1e-5  # probability that units are sampled more rarely than a bare claim is read
MADE_AFTERWARDS = (
    "the claim {:g} was made after training, so nobody can tell whether it was fitted to the result: pass claim= to "
    "audited()"
)


def stated_claim(audit: Audit, late: Claim | float | str | None) -> tuple[Claim | None, list[str]]:
    """The claim to judge, and a note if it was made after training. It must not differ from one made before."""
    made, given = audit.claim, Claim.of(late)
    if given is None:
        return made, []
    check_delta(given, audit.settings.delta)
    if made is None:
        return given, [MADE_AFTERWARDS.format(given.epsilon)]
    if not _repeats(given, made):
        raise ValueError(
            f"this audit committed to the claim {made.epsilon:g} before round 1, so finish cannot judge another, got "
            f"{given.epsilon:g}: omit claim=, or ask audit.result(claim=…), which writes no file"
        )
    return made, []


def _repeats(late: Claim, made: Claim) -> bool:
    """Whether a claim given after training is the one made before, perhaps with fewer words."""
    unstated = {name: getattr(made, name) for name in TERMS if getattr(late, name) is None}
    return replace(late, **unstated) in (made, Claim(made.epsilon, **{name: getattr(made, name) for name in TERMS}))


def claim_for_weight(audit: Audit, claim: Claim, weight: float) -> Claim:
    """The claim for a client that weighs `weight` times as much as a canary and is exposed more by that factor."""
    if weight <= 1 or claim.amplified or claim.sensitivity is not None:
        return claim
    times = claim.participations or most_presentations(audit.log, audit.settings)
    return replace(claim, sensitivity=weight * claim.moved * math.sqrt(times))


def observed_claim(claim: Claim, *, sampler_observed: bool, noise: float | None, weight: float) -> Claim:
    """An amplified claim, completed with whether the sampler was observed and with the heaviest client's noise."""
    stated = claim.noise_multiplier or noise
    return replace(
        claim,
        sampler_observed=sampler_observed,
        noise_multiplier=stated / max(weight, 1.0) if stated else None,
    )


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
