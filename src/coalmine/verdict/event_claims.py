"""Claims from the events of dp-accounting: the epsilon that an accountant composes, with its adjacency.

    claim = Claim.from_event(event, 1e-5, dp_accounting.NeighboringRelation.REPLACE_SPECIAL)

An event has no epsilon without δ and without the relation of neighbouring data sets. Noise multipliers are over one clip
norm, the most that one example adds to the sum, as dp-accounting's PLD and jax_privacy's events have them. The exception
is dp-accounting's event of batches of a fixed size: its noise multiplier is over two clip norms, by which replacing one
example moves the sum.
"""

import math
from typing import Any, NamedTuple

from scipy.optimize import brentq

from coalmine.argument_checks import delta_array, one_number, short_repr
from coalmine.estimators.amplification import amplified_epsilon
from coalmine.estimators.sampling import FixedSize, Poisson, Sampling
from coalmine.verdict.claim import REPLACE, Claim

ADJACENCY = {
    "ADD_OR_REMOVE_ONE": "add or remove one",
    "REPLACE_SPECIAL": "zero out one",
    "REPLACE_ONE": "replace one",
}
SAME_EPSILON = 0.005  # relative: printed epsilons are rounded
SPELLINGS = "state the epsilon instead, claim=3.0, or for known rounds claim=Claim.mechanism(10.0)"


class EventPart(NamedTuple):
    """Equal rounds of an event. `sample` is None without sampling, a rate, or size and population of fixed batches."""

    noise_multiplier: float
    sample: float | tuple[int, int] | None
    rounds: int


def claim_of_event(
    event: Any,
    delta: float,
    neighboring_relation: Any,
    *,
    unit: str | None = None,
    sampler_observed: bool = False,
) -> Claim:
    """The claim that an accountant's event makes at `delta` under a `NeighboringRelation` of dp-accounting.

    The event composes Gaussian events, with or without Poisson sampling, or batches of a fixed size. All rounds must be
    sampled alike. Their noise may differ: then the claim states no noise multiplier, and each round is judged by its own.
    Epsilon is that of dp-accounting's PLD accountant, for batches of a fixed size of its RDP accountant.
    """
    delta = float(delta_array(one_number("delta", delta)))
    adjacency = adjacency_of(neighboring_relation)
    parts = parts_of(event)
    sample, rounds = parts[0].sample, sum(part.rounds for part in parts)
    if any(part.sample != sample for part in parts):
        raise ValueError(f"the rounds of an event must be sampled alike, got {short_repr(event)}: {SPELLINGS}")
    noises = {part.noise_multiplier for part in parts}
    noise = noises.pop() if len(noises) == 1 else None
    epsilon = _epsilon(event, delta, neighboring_relation, fixed=isinstance(sample, tuple))
    if not 0 < epsilon < math.inf:
        raise ValueError(
            f"an event must have an epsilon above 0 and below infinity, got {epsilon:g}: {short_repr(event)}"
        )
    terms: dict[str, Any] = {"delta": delta, "unit": unit, "adjacency": adjacency}
    if sample is None:
        # Replacing one example moves each sum by two clip norms.
        exposure: dict[str, Any] = (
            {"sensitivity": 2 * math.sqrt(rounds)} if adjacency == REPLACE else {"participations": rounds}
        )
        return Claim(epsilon, counts_sampling=False, **exposure, **terms)
    sampling: Sampling = FixedSize(*sample, rounds) if isinstance(sample, tuple) else Poisson(sample, rounds)
    if noise is not None and isinstance(sample, tuple):
        noise = 2 * noise
    return Claim(epsilon, sampling=sampling, noise_multiplier=noise, sampler_observed=sampler_observed, **terms)


def adjacency_of(neighboring_relation: Any) -> str:
    """The name that a claim has for a `NeighboringRelation`."""
    name = getattr(neighboring_relation, "name", neighboring_relation)
    if name not in ADJACENCY:
        names = ", ".join(f"NeighboringRelation.{known}" for known in ADJACENCY)
        raise ValueError(f"neighboring_relation must be one of {names}, got {short_repr(neighboring_relation)}")
    return ADJACENCY[name]


def parts_of(event: Any) -> list[EventPart]:
    """The rounds of an event, equal ones together; ValueError for an event that is not read."""
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        return [part._replace(rounds=part.rounds * int(event.count)) for part in parts_of(event.event) if event.count]
    if isinstance(event, dp.ComposedDpEvent):
        rounds: dict[EventPart, int] = {}
        for part in (part for inner in event.events for part in parts_of(inner)):
            kind = part._replace(rounds=0)
            rounds[kind] = rounds.get(kind, 0) + part.rounds
        if rounds:
            return [kind._replace(rounds=count) for kind, count in rounds.items()]
    gaussian: Any = event
    sample: float | tuple[int, int] | None = None
    if isinstance(event, dp.PoissonSampledDpEvent):
        gaussian, sample = event.event, float(event.sampling_probability)
    elif isinstance(event, dp.SampledWithoutReplacementDpEvent):
        gaussian, sample = event.event, (int(event.sample_size), int(event.source_dataset_size))
    if isinstance(gaussian, dp.GaussianDpEvent) and gaussian.noise_multiplier > 0 and sample != 0:
        return [EventPart(float(gaussian.noise_multiplier), sample, 1)]
    raise ValueError(
        "an event must compose Gaussian events with noise, as they are, Poisson-sampled, or in batches of a fixed size "
        f"without replacement, got {short_repr(event)}: {SPELLINGS}"
    )


def _epsilon(event: Any, delta: float, relation: Any, *, fixed: bool) -> float:
    import dp_accounting as dp

    relation = dp.NeighboringRelation[getattr(relation, "name", relation)]
    if not fixed:
        return float(dp.pld.PLDAccountant(relation).compose(event).get_epsilon(delta))
    if relation is not dp.NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            "an event of batches of a fixed size has an epsilon under NeighboringRelation.REPLACE_ONE only, got "
            f"{short_repr(relation)}"
        )
    return float(dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event).get_epsilon(delta))


def replace_one_epsilon(noise_multiplier: float, sampling: Poisson, delta: float) -> float:
    """Epsilon of Poisson-sampled rounds if one example is replaced: dp-accounting's PLD; noise over one clip norm."""
    import dp_accounting as dp

    sampled = dp.PoissonSampledDpEvent(sampling.probability, dp.GaussianDpEvent(noise_multiplier))
    event = dp.SelfComposedDpEvent(sampled, sampling.rounds)
    return float(dp.pld.PLDAccountant(dp.NeighboringRelation.REPLACE_ONE).compose(event).get_epsilon(delta))


def as_add_or_remove(claim: Claim, delta: float) -> Claim:
    """The claim for adding or removing one example that needs the same noise as a Poisson-sampled replace-one claim.

    A canary that is in the sum or not is the attack under add or remove. It measures the noise, which the replace-one
    epsilon follows from. Other claims are returned as they are.
    """
    if claim.adjacency != REPLACE or not isinstance(claim.sampling, Poisson):
        return claim
    needed = _noise_for(claim, claim.sampling, delta)
    return Claim(
        float(amplified_epsilon(needed, claim.sampling, delta)),
        sampling=claim.sampling,
        noise_multiplier=claim.noise_multiplier,
        sampler_observed=claim.sampler_observed,
        delta=claim.delta,
        unit=claim.unit,
        adjacency="add or remove one",
    )


def _noise_for(claim: Claim, sampling: Poisson, delta: float) -> float:
    """The noise multiplier at which the replace-one epsilon is the claimed one."""

    def excess(log_noise: float) -> float:
        return math.log(max(replace_one_epsilon(math.exp(log_noise), sampling, delta), 1e-12) / claim.epsilon)

    stated = claim.noise_multiplier
    if stated is not None and abs(excess(math.log(stated))) <= SAME_EPSILON:
        return stated
    low = high = math.log(stated or 1.0)
    while excess(low) < 0:
        low -= math.log(2)
    while excess(high) > 0:
        high += math.log(2)
    return math.exp(float(brentq(excess, low, high, xtol=1e-4)))
