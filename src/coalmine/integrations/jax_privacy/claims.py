"""How a claim on a run of jax_privacy is read: as the accountant's event has it, whose epsilon is the default claim."""

import inspect
import math
from dataclasses import dataclass, field, replace
from typing import Any

import dp_accounting
from jax_privacy.experimental.execution_plan import DPExecutionPlan

from coalmine.argument_checks import delta_array, one_number, short_repr
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.estimators.sampling import Poisson
from coalmine.integrations.jax_privacy.noise import NoiseMechanism, banded_noise
from coalmine.integrations.setup import full_claim
from coalmine.verdict.claim import NOISES, REPLACE, Claim
from coalmine.verdict.event_claims import ADJACENCY, adjacency_of, claim_of_event, parts_of

UNIT = "row"
PLAN_RELATION = dp_accounting.NeighboringRelation.REPLACE_SPECIAL  # of a plan's accountant by default
EVENT_RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE  # of dp-accounting's accountants by default


@dataclass(frozen=True)
class EventAccounting:
    """The accounting of a run: the accountant's event and relation, the stated noise, and who picks the batches.

    `probability` is the one with which canaries are drawn if the batch selection is not observed. `unit` is what one row
    holds.
    """

    event: Any
    relation: Any
    mechanism: NoiseMechanism
    observed: bool
    probability: float | None
    unit: str = UNIT
    _claims: dict[float, Claim | None] = field(default_factory=dict)

    def event_claim(self, delta: float) -> Claim | None:
        """The claim of the event; None without an event, or if it has no epsilon that can be read."""
        if delta not in self._claims:
            self._claims[delta] = None if self.event is None else self._read_event(delta)
        return self._claims[delta]

    def _read_event(self, delta: float) -> Claim | None:
        try:
            return claim_of_event(self.event, delta, self.relation, unit=self.unit, sampler_observed=self.observed)
        except ValueError:
            return None

    def made(self, claim: Any, delta: Any) -> Claim | None:
        """The claim to commit to before step 1: the given one, or the event's. ValueError if a number cannot be read."""
        delta = float(delta_array(one_number("delta", delta)))
        if isinstance(claim, dp_accounting.DpEvent | DPExecutionPlan):
            raise TypeError(
                "claim must be a number or a Claim: an event goes to dp_event=, a plan is the first argument of audited()"
            )
        given = Claim.of(claim)
        if given is None:
            event = None if self.mechanism.law is not None else self.event_claim(delta)
            if event is None or not event.amplified:
                return event
            return Claim(event.epsilon, delta=delta, unit=self.unit, adjacency=event.adjacency, counts_sampling=True)
        if not given.bare:
            return full_claim(
                given, delta=delta, usual_unit=self.unit, adjacency=given.adjacency or self._known_adjacency(given)
            )
        self.check_readable(given, delta)
        return full_claim(given, delta=delta, usual_unit=self.unit, adjacency=adjacency_of(self.relation))

    def _known_adjacency(self, claim: Claim) -> str:
        """The adjacency of a claim with an accounting of its own: coalmine's schemes have theirs."""
        return ADJACENCY["ADD_OR_REMOVE_ONE"] if claim.sampling is None else claim.sampling.adjacency

    def check_readable(self, claim: Claim, delta: float) -> None:
        """ValueError if the accounting of a bare claim is not known, or cannot be judged."""
        known = f"Claim.mechanism({claim.epsilon:g}, participations=…) is an epsilon for known steps"
        if self.mechanism.law is not None:
            raise ValueError(
                f"claim={claim.epsilon:g} counts sampling, and no attack on sampled batches with correlated noise is known, "
                "so it can be neither confirmed nor refuted: pass claim=known_steps_claim(plan, delta), or "
                f"Claim.mechanism({claim.epsilon:g}, sensitivity=…) for known steps"
            )
        if self.event is None and self.probability is None:
            raise ValueError(
                f"claim={claim.epsilon:g} is read as the accountant's epsilon, and the accountant's event is not known: "
                f"pass dp_event=; {known}"
            )
        if self.event is not None and self.event_claim(delta) is None:
            raise ValueError(
                f"claim={claim.epsilon:g} is read as the accountant's epsilon, but its event is not one of Gaussian noise "
                f"with the same sampling in every step, got {short_repr(self.event)}: {known}"
            )

    def accounted(self, steps: int, delta: float) -> Claim | None:
        """The accounting of a bare claim over the steps that ran; its epsilon is the event's, or nobody's."""
        event = self.event_claim(delta)
        steps = max(steps, 1)
        if event is not None:
            if event.sampling is None:
                return event
            return replace(event, sampling=replace(event.sampling, rounds=steps))
        if self.probability is None or self.event is not None:
            return None
        noise = None if self.mechanism.scheduled else self.mechanism.noise_multiplier
        return Claim(
            1.0,
            sampling=Poisson(self.probability, steps),
            noise_multiplier=noise if noise and NOISES[0] <= noise <= NOISES[1] else None,
            delta=delta,
            unit=self.unit,
            adjacency=adjacency_of(self.relation),
        )

    @property
    def planned(self) -> int | None:
        """The number of steps that the event composes; None if it is not read, or if noise is correlated."""
        try:
            return None if self.event is None else sum(part.rounds for part in parts_of(self.event))
        except ValueError:
            return None


def relation_of(plan: Any, given: Any) -> Any:
    """The relation of neighbouring data sets: the given one, that of a plan's accountant, or dp-accounting's default."""
    if given is not None:
        adjacency_of(given)  # checks it
        return given
    if plan is None:
        return EVENT_RELATION
    closure = inspect.getclosurevars(plan.clipped_grad).nonlocals
    accountant = getattr(closure.get("self"), "accountant", None)
    return getattr(accountant, "neighboring_relation", PLAN_RELATION)


def plan_noise(plan: Any) -> dict[str, Any]:
    """Settings of a plan's privatizer: its stddev and its noising matrix, as far as they can be read."""
    closure = inspect.getclosurevars(plan.noise_addition_transform.update).nonlocals
    return {name: closure.get(name) for name in ("stddev", "noising_matrix")}


def known_steps_claim(plan: Any, delta: float, *, neighboring_relation: Any = None) -> Claim:
    """The claim of a `DPExecutionPlan` or an event for an attacker who knows an example's steps: sampling is not counted.

    It is the one that can be judged under correlated noise. An example is in as many steps as the event composes.
    """
    is_plan = isinstance(plan, DPExecutionPlan)
    event = plan.dp_event if is_plan else plan
    relation = relation_of(plan if is_plan else None, neighboring_relation)
    parts = parts_of(event)
    if any(isinstance(part.sample, tuple) for part in parts):
        raise ValueError(f"batches of a fixed size have no claim for known steps, got {short_repr(event)}")
    exposure = math.sqrt(sum(part.rounds / part.noise_multiplier**2 for part in parts))
    adjacency, rounds = adjacency_of(relation), sum(part.rounds for part in parts)
    correlated = False
    if is_plan and (matrix := plan_noise(plan)["noising_matrix"]) is not None:
        steps = getattr(plan.batch_selection_strategy, "iterations", None)
        correlated = banded_noise(matrix, steps)[0] is not None
    moved = 2.0 if adjacency == REPLACE else 1.0  # clip norms by which one example moves a sum
    epsilon = float(mechanism_epsilon(1 / (moved * exposure), delta=delta))
    terms: dict[str, Any] = {"delta": delta, "adjacency": adjacency}
    if correlated or moved > 1:
        return Claim.mechanism(epsilon, sensitivity=moved * math.sqrt(rounds), **terms)
    return Claim.mechanism(epsilon, participations=rounds, **terms)
