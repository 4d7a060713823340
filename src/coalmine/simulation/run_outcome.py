"""The outcome of a training run: the audit's result, the trainer's own numbers, and sentences about both."""

from dataclasses import dataclass
from typing import Any

from coalmine.result.audit_result import AuditResult
from coalmine.simulation.config import RunConfig
from coalmine.verdict.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The outcome of a run.

    `analytical` is the epsilon for `presentations` rounds, the most common number of rounds of a canary. Under correlated
    noise it is for `sensitivity`, the root mean square over the canaries with that number of rounds.

    `client_epsilon` is the epsilon of a client who takes part in `client_rounds` rounds, the average. With `exact_client`
    (correlated noise, or rounds from a file) both belong to the most exposed client of this run.

    An adaptive clip's count is a second release. `update_epsilon` and `count_epsilon` are the two parts of `analytical`;
    `count_epsilon` is None without a count. `if_claimed` is the verdict that a claim of the analytical epsilon would get.
    `entries` are the trainer's entries of result.json that were known before round 1.
    """

    config: RunConfig
    title: str  # name of the data in results
    result: AuditResult
    accuracy: float
    engine: str
    analytical: float
    presentations: int
    sensitivity: float  # in clip norms; fresh noise: √presentations
    update_noise_multiplier: float
    update_epsilon: float
    count_noise_multiplier: float | None
    count_epsilon: float | None
    population: int  # clients or examples, including those that canaries replace
    client_rounds: int
    client_epsilon: float
    exact_client: bool
    if_claimed: Verdict | None
    entries: dict[str, Any]

    def extra(self) -> dict[str, Any]:
        """The fields that this trainer adds to the audit's in result.json."""
        return self.entries | {
            "accuracy": self.accuracy,
            "engine": self.engine,
            "if_analytical_were_claimed": None
            if self.if_claimed is None
            else {"verdict": self.if_claimed.outcome, "reason": self.if_claimed.reason},
        }

    def heading(self) -> str:
        """A one-line summary of the run."""
        config = self.config
        groups = config.canaries.presentations if config.canaries.pattern == "spread" else ()
        times = ", ".join(f"{number}×" for number in (groups if len(groups) > 1 else (self.presentations,)))
        return (
            f"{self.title}: {self._rounds}, noise multiplier {config.privacy.noise_multiplier:g}, delta "
            f"{config.privacy.delta:.3g}, {config.canaries.count:,} canaries shown {times}; "
            f"accuracy {self.accuracy:.1%}; engine: {self.engine}"
        )

    @property
    def _rounds(self) -> str:
        """The number of rounds, and the number planned if the alarm stopped the run early."""
        planned, completed = self.config.rounds, self.result.rounds + self.result.skipped
        return f"{planned} rounds" if completed >= planned else f"{completed} of {planned} rounds"

    def notes(self) -> list[str]:
        """Caveats and context for a reader of the result, one sentence each."""
        config, notes = self.config, []
        if config.canaries.pattern == "replace":
            notes.append(f"{config.canaries.count:,} of the {self.population:,} {config.task.level}s are canaries")
        if config.claim_counts_sampling and config.canaries.pattern == "spread":
            notes.append(
                f"the canaries' rounds are planned, so the sampler of the {config.task.level}s is not observed; --pattern "
                "clients or --pattern replace lets it pick the canaries"
            )
        if self.count_noise_multiplier and self.count_epsilon is not None:
            notes.append(
                f"adaptive clipping spends ε {self.count_epsilon:.4g} on its count (noise multiplier "
                f"{self.count_noise_multiplier:.4g}), so the updates have noise multiplier "
                f"{self.update_noise_multiplier:.4g} and known-others is compared with ε {self.update_epsilon:.4g}"
            )
        if self.if_claimed is not None:
            notes.append(
                f"if ε {self.analytical:.3g} were claimed (--claim analytical): {self.if_claimed.outcome}, "
                f"{self.if_claimed.reason}"
            )
        if config.canaries.seed_file is None:
            notes.append("the canaries use the public demo seed; give --seed-file for an audit that others can trust")
        return notes
