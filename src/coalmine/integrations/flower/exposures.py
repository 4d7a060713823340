"""What the server saw of each client: the rounds in which its node took part, and how much it contributed to them.

The noise protects a client by its contribution, not by a canary's: a node with ten times the weight contributes ten times as
much. For a client with contributions c_t to rounds with noise of std σ_t, the rounds compose to μ² = Σ (c_t/σ_t)².
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.ladder import most_presentations
from coalmine.integrations.flower.weights import Averaged
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

UNIT = "client"  # of a claim that does not state one
SAME = 1e-6  # relative difference that is due to rounding


@dataclass
class Tally:
    """For each client: in how many rounds it took part, the sum of its squared contributions, and its largest part."""

    times: dict[int, int] = field(default_factory=dict)
    squares: dict[int, float] = field(default_factory=dict)
    parts: dict[int, float] = field(default_factory=dict)  # the largest part of one round, over an equal part

    def add(self, contributions: Mapping[int, float], parts: Mapping[int, float]) -> None:
        """Add a round: its clients' contributions, and their parts of the average over an equal part."""
        for client, contribution in contributions.items():
            self.times[client] = self.times.get(client, 0) + 1
            self.squares[client] = self.squares.get(client, 0.0) + contribution**2
            self.parts[client] = max(self.parts.get(client, 0.0), parts[client])

    @property
    def most(self) -> int:
        """Largest number of rounds in which one client took part."""
        return max(self.times.values(), default=0)

    @property
    def largest(self) -> float:
        """The total contribution of the client that contributed most."""
        return math.sqrt(max(self.squares.values(), default=0.0))

    def to_array(self) -> Any:
        """One row per client, for a checkpoint."""
        rows = [(client, self.times[client], self.squares[client], self.parts[client]) for client in self.times]
        columns = [("client", np.uint64), ("times", np.int64), ("square", np.float64), ("part", np.float64)]
        return np.array(rows, dtype=columns)

    @classmethod
    def from_array(cls, rows: Any) -> "Tally":
        """The inverse of `to_array`."""
        clients = [int(client) for client in rows["client"]]
        times, squares, parts = (
            dict(zip(clients, rows[name].tolist(), strict=True)) for name in ("times", "square", "part")
        )
        return cls(times, squares, parts)


@dataclass
class Exposures:
    """The real nodes, by id, and the canaries, in the rounds that were released.

    Contributions are in units of the noise's std if `in_noise`, otherwise in those of a canary's contribution. `heaviest` is
    the largest contribution to one round.
    """

    in_noise: bool
    rounds: int = 0
    heaviest: float = 0.0
    nodes: Tally = field(default_factory=Tally)
    canaries: Tally = field(default_factory=Tally)

    def add(self, nodes: Mapping[int, float], canaries: Mapping[int, float], unit: float) -> None:
        """Add a released round: the parts of its real nodes and of its canaries in the average, over an equal part.

        A part of 1 contributes `unit`.
        """
        self.rounds += 1
        for tally, parts in ((self.nodes, nodes), (self.canaries, canaries)):
            contributions = {client: part * unit for client, part in parts.items()}
            tally.add(contributions, parts)
            self.heaviest = max(self.heaviest, *contributions.values(), 0.0)

    def add_replies(self, averaged: Averaged, unit: float) -> None:
        """Add a released round: each reply's part of the weighted average, in this unit; 0 is no noise at all."""
        count, total = len(averaged.replies), sum(averaged.weights)
        nodes: dict[int, float] = {}
        canaries: dict[int, float] = {}
        for reply, weight in zip(averaged.replies, averaged.weights, strict=True):
            index = averaged.index_of.get(id(reply))
            if index is None:
                nodes[reply.metadata.src_node_id] = weight * count / total
            else:
                canaries[index] = weight * count / total
        self.add(nodes, canaries, 1 / count / unit if unit and count else math.inf)

    @property
    def largest(self) -> float:
        """The total contribution of the node or canary that contributed most."""
        return max(self.nodes.largest, self.canaries.largest)

    def participations(self, audit: Audit) -> int:
        """Largest number of rounds in which one client took part: a real node, or a canary if that is more."""
        return max(self.nodes.most, most_presentations(audit.log, audit.settings))

    def epsilon(
        self, audit: Audit, noise: float | None, *, equal_weights: bool, total: float | None = None
    ) -> float | None:
        """The epsilon of the client that contributed most, or `total`, under the stated noise; None if it is unknown."""
        total = self.largest if total is None else total
        if not noise or not total or not (self.in_noise or equal_weights):
            return None
        if math.isinf(total):  # a round without any noise
            return math.inf
        multiplier = (1.0 if self.in_noise else noise) / total
        return float(mechanism_epsilon(multiplier, delta=audit.settings.delta))

    def heaviest_weight(self, noise: float | None) -> float:
        """The largest contribution to one round, over the one that the noise is sized for, or over a canary's."""
        weight = self.heaviest * ((noise or 0.0) if self.in_noise else 1.0)
        return weight if weight > 1 + SAME else 1.0

    def described(self, audit: Audit, noise: float | None, *, equal_weights: bool) -> tuple[list[str], dict[str, Any]]:
        """What the server saw of real clients, as notes and entries of the result; nothing without real clients."""
        most = self.nodes.most
        if not most:
            return [], {}
        entries: dict[str, Any] = {"client_participations": most}
        note = f"a node took part in up to {most} of {count_of(self.rounds, 'round')}"
        epsilon = self.epsilon(audit, noise, equal_weights=equal_weights)
        if epsilon is not None:
            entries["client_epsilon"] = epsilon
            note += f": epsilon {epsilon:.3g} for the client that contributed most, under the stated noise"
        return [note], entries

    def to_arrays(self) -> dict[str, Any]:
        """Arrays for a checkpoint."""
        totals = np.array([float(self.in_noise), float(self.rounds), self.heaviest])
        return {"totals": totals, "nodes": self.nodes.to_array(), "canaries": self.canaries.to_array()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> "Exposures":
        """The inverse of `to_arrays`."""
        in_noise, rounds, heaviest = arrays["totals"].tolist()
        tallies = (Tally.from_array(arrays[name]) for name in ("nodes", "canaries"))
        return cls(bool(in_noise), int(rounds), heaviest, *tallies)


def whole_run_claim(claim: Claim | None, audit: Audit, seen: Exposures) -> Claim | None:
    """A claim that does not state participations, completed with those that the server saw.

    A bare epsilon is that of one client over the whole run. If weights differ, it is for the client that contributed most:
    the claim then has its `sensitivity`, in contributions of a canary. So has a claim about fewer or more rounds than the
    server saw, for a client with the largest weight in all of them.
    """
    if claim is not None and claim.bare:
        claim = replace(claim, unit=claim.unit or UNIT)
    if claim is None or claim.amplified or claim.sensitivity is not None or not seen.rounds or audit.settings.noise:
        return claim
    most = seen.participations(audit)
    times = claim.participations or most
    total = seen.largest if times == most else seen.heaviest * math.sqrt(times)
    sensitivity = total * (_weakest_noise(audit, times) if seen.in_noise else 1.0)
    if math.isinf(sensitivity) or math.isclose(sensitivity, math.sqrt(times), rel_tol=SAME):
        if (
            claim.participations is None
            and audit.settings.rounds is not None
            and times == most_presentations(audit.log, audit.settings)
        ):
            return claim  # the audit's own schedule has the same number
        return replace(claim, participations=times)
    return replace(claim, participations=times if seen.in_noise else None, sensitivity=claim.moved * sensitivity)


def watch_one_round(audit: Audit) -> None:
    """Check rounds against the claim for a client in one round, unless it or the audit's own schedule says how many.

    Sampling is not counted, so a claim that does not hold for one round holds for no client.
    """
    claim, settings = audit.claim, audit.settings
    if claim is None or claim.amplified or claim.participations or claim.sensitivity:
        return
    if settings.rounds is None and settings.sampling is None and settings.noise is None:
        audit.watch.read_claim_as(replace(claim, participations=1))


def _weakest_noise(audit: Audit, times: int) -> float:
    """The noise over a canary's contribution, composed over the `times` rounds with the least noise, as verdicts do it."""
    multipliers = [(item.noise_std or 0.0) / item.clip_norm for item in audit.log.rounds()]
    least = np.sort([multiplier for multiplier in multipliers if multiplier > 0])[:times]
    return 1 / math.sqrt(float(np.mean(least**-2.0))) if least.size else 1.0


def participations_item(claim: Claim | None, seen: Exposures, *, rewound: int = 0) -> AuditedItem | None:
    """Whether the claim is for as many rounds as a node took part in, by what the server saw; None without any.

    `rewound` rounds were released before a restart and trained again after it, so they are not among those seen.
    """
    if not seen.nodes.most:
        return None
    if rewound:
        verb, them = ("was", "it is") if rewound == 1 else ("were", "they are")
        text = f"{count_of(rewound, 'round')} {verb} released before a restart and trained again: {them} not counted"
        return AuditedItem("participations", "not checked", text)
    text = f"by node id, a real node took part in up to {seen.nodes.most} of {count_of(seen.rounds, 'released round')}"
    claimed = None if claim is None else claim.participations
    if claimed is not None and claimed < seen.nodes.most:
        return AuditedItem("participations", "not checked", f"the claim is for {claimed}, but {text}")
    return AuditedItem("participations", "checked", f"{text}; one that returns under another id counts as another")
