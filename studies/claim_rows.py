"""The rows of studies/claims.py: a case, its runs, and the bars that these must meet."""

import importlib.util
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coalmine import AuditResult
from studies.results import Record, most_errors

SEEDS, FEWER_SEEDS = 100, 20


@dataclass(frozen=True)
class Bar:
    """At least this share of a row's runs must be right; with `chance`, errors that chance explains are allowed."""

    name: str
    right: Callable[[Record], bool]
    share: float
    chance: bool = False

    def counts(self, records: Sequence[Record]) -> tuple[int, int]:
        """The number of right runs, and of those that must be."""
        errors = most_errors(len(records), 1 - self.share) if self.chance else int((1 - self.share) * len(records))
        return sum(map(self.right, records)), len(records) - errors


NOT_REFUTED = Bar("no VIOLATION", lambda run: run["outcome"] != "VIOLATION", 0.99, chance=True)
NO_ALARM = Bar("no alarm", lambda run: not run["alarm"], 0.998, chance=True)
COVERS = Bar("interval covers ε", lambda run: bool(run["covers"]), 0.95, chance=True)
PASSES = Bar("PASS", lambda run: run["outcome"] == "PASS", 0.95, chance=True)
REFUTED = Bar("VIOLATION", lambda run: run["outcome"] == "VIOLATION", 0.95)
STATED = Bar("VIOLATION by the stated noise", lambda run: (run["outcome"], run["code"]) == ("VIOLATION", "stated"), 1.0)
NO_PASS = Bar("no PASS", lambda run: run["outcome"] != "PASS", 0.95)
NEVER_PASSES = Bar("no PASS", lambda run: run["outcome"] != "PASS", 1.0)
NEVER_REFUTED = Bar("no VIOLATION", lambda run: run["outcome"] != "VIOLATION", 1.0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case: the table that it belongs to, one run as a function of its seed, and the bars of its runs."""

    name: str
    table: str
    run: Callable[[int], AuditResult]
    bars: tuple[Bar, ...]
    seeds: int = SEEDS
    needs: str | None = None  # package without which the row is left out

    def record(self, seed: int) -> Record:
        """One run, as a line of the results."""
        result = self.run(zlib.crc32(self.name.encode()) + seed)  # rows that share seeds would share their errors
        assert result.verdict is not None
        return {
            "row": self.name,
            "seed": seed,
            "outcome": str(result.verdict.outcome),
            "code": result.verdict.facts.get("gauge") or result.verdict.code,
            "alarm": result.alarm is not None,
            "covers": _covers(result),
        }

    @property
    def installed(self) -> bool:
        """Whether the package of this row can be imported."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def _covers(result: AuditResult) -> bool | None:
    """Whether the interval for unknown rounds contains the claimed epsilon; None without such an interval."""
    unknown = result.adversaries.get("unknown-round")
    if unknown is None or unknown.interval is None or result.claim is None:
        return None
    low, high = unknown.interval
    return bool(low <= result.claim.epsilon <= high)
