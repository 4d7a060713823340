"""The arguments of a new audit, all of them checked before its directory is created."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from coalmine.canaries.seeds import is_guessable
from coalmine.evidence.ladder import RUNGS
from coalmine.log.commitment import Precommitment
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.own_scores import Attack, OwnScores
from coalmine.measure.settings import Settings
from coalmine.verdict.amplified_claim import read_claim
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_watch import OnViolation, check_on_violation

Seed = SupportsIndex | bytes


@dataclass(frozen=True)
class AuditArguments:
    """The arguments of `Audit` and `Audit.for_model`, as `checked` returns them."""

    settings: Settings
    seed: Seed
    scores: OwnScores
    directory: RunDirectory | Path | str | None
    claim: Claim | None
    on_violation: OnViolation | None
    deferred: bool

    @classmethod
    def checked(
        cls,
        settings: Settings,
        seed: Seed,
        scores: Mapping[str, Attack] | None,
        directory: RunDirectory | Path | str | None,
        claim: Claim | float | None,
        on_violation: OnViolation | None,
        deferred: bool,
    ) -> "AuditArguments":
        """The arguments, rejected if the claim, the reaction to a violation or the scores cannot be those of an audit."""
        attacks = OwnScores(scores, reserved=RUNGS)
        check_on_violation(on_violation, claim)
        promised = Claim.of(claim)
        if promised is not None:
            read_claim(promised, settings, 1)  # its delta, and its adjacency under the audit's sampling
        return cls(settings, seed, attacks, directory, promised, on_violation, deferred)

    @property
    def stated_claim(self) -> dict[str, Any] | None:
        """The claim as the log has it."""
        return None if self.claim is None else self.claim.to_dict()

    @property
    def statement(self) -> Precommitment:
        """What the audit commits to besides its settings, unless its directory holds an earlier statement."""
        guessable = is_guessable(self.seed)
        return Precommitment(claim=self.stated_claim, demonstration=guessable, watched=self.on_violation is not None)
