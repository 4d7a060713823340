"""Records that a fair coin each put into the training data or left out: what a model's outputs tell of the coins."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from coalmine.argument_checks import count_of
from coalmine.estimators.bounds import FEWEST
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.estimators.literature import mahloujifar, steinke
from coalmine.estimators.literature.guesses import Games, coin_games
from coalmine.evidence.levels import RECORDS_LEVEL
from coalmine.verdict.claim import REPLACE, Claim
from coalmine.verdict.claim_context import ROUNDED
from coalmine.verdict.findings.records import OutputsAlone, OutputsNotJudged, RecordsAboveClaim
from coalmine.verdict.outcome import VIOLATION
from coalmine.verdict.verdict import Verdict

BLACK_BOX, ITERATES = "black-box", "black-box-iterates"
CONFIDENCE = 0.95
SEES = {BLACK_BOX: "the final model", ITERATES: "the checkpoints"}
ROWS = "row"


@dataclass(frozen=True, kw_only=True)
class RecordRung:
    """One attacker who sees outputs: guesses about the coins, mistakes among them, and the area under the ROC curve.

    The bounds are those of all games in `guesses` together, and scores may depend on each other in any way. `lower_bound`
    holds for every mechanism: in each game the larger of Steinke's and of Mahloujifar's for (ε, δ). `lower_bound_gaussian`
    is Mahloujifar's for a Gaussian trade-off function.
    `epsilon` is an estimate: that of normal scores of equal spread with this area, as if canaries were independent.
    """

    name: str
    observed: int
    unobserved: int
    guesses: tuple[int, ...]
    mistakes: tuple[int, ...]
    area: float
    delta: float

    @classmethod
    def of(cls, name: str, observed: npt.ArrayLike, unobserved: npt.ArrayLike, delta: float) -> "RecordRung":
        """The rung from the scores of the canaries that were in, and of those that were out."""
        games = coin_games(observed, unobserved)
        inside, outside = (
            np.ravel(np.asarray(observed, np.float64)),
            np.sort(np.ravel(np.asarray(unobserved, np.float64))),
        )
        below, up_to = (np.searchsorted(outside, inside, side=side) for side in ("left", "right"))
        return cls(
            name=name,
            observed=inside.size,
            unobserved=outside.size,
            guesses=tuple(games.guesses.tolist()),
            mistakes=tuple(games.mistakes.tolist()),
            area=float((below + up_to).mean() / (2 * outside.size)),
            delta=delta,
        )

    def __post_init__(self) -> None:
        sizes_fit = len(self.guesses) == len(self.mistakes) > 0 and min(self.observed, self.unobserved) >= 1
        if not sizes_fit or not all(0 <= m <= g <= self.total for g, m in self._pairs) or not 0 <= self.area <= 1:
            raise ValueError(f"the counts of {self.name} are not those of guesses about {self.total} canaries")

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.guesses, self.mistakes, strict=True))

    @property
    def total(self) -> int:
        return self.observed + self.unobserved

    @property
    def games(self) -> Games:
        return Games(np.array(self.guesses), np.array(self.mistakes), self.total)

    def bound(self, confidence: float, *, delta: float | None = None) -> float:
        """The lower bound that holds for dependent scores."""
        delta = self.delta if delta is None else delta
        levels = {"delta": delta, "confidence": confidence}
        # both fall with the mistakes of a game, so in each game the larger one is as valid as each of them
        return max(mahloujifar.any_law_epsilon(self.games, **levels), steinke.METHOD.best(self.games, **levels))

    @cached_property
    def lower_bound(self) -> float:
        return self.bound(CONFIDENCE)

    @cached_property
    def lower_bound_gaussian(self) -> float:
        bound = mahloujifar.METHOD.best(self.games, delta=self.delta, confidence=CONFIDENCE)
        return max(float(bound), self.lower_bound)

    @property
    def epsilon(self) -> float:
        return self._epsilon(self.area)

    @property
    def floor(self) -> float:
        """The estimate that 5 % of runs exceed in which nothing leaks."""
        spread = math.sqrt((self.total + 1) / (12 * self.observed * self.unobserved))
        return self._epsilon(0.5 + 1.645 * spread)

    def _epsilon(self, area: float) -> float:
        least = 0.5 / (self.observed * self.unobserved)
        mu = math.sqrt(2) * float(ndtri(min(max(area, 0.5), 1 - least)))
        return float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(mu, 1.0), delta=self.delta))

    def to_dict(self) -> dict[str, Any]:
        """The counts, and the numbers that follow from them."""
        counts = ("name", "observed", "unobserved", "guesses", "mistakes", "area", "delta")
        derived = ("epsilon", "floor", "lower_bound", "lower_bound_gaussian")
        values = {name: getattr(self, name) for name in (*counts, *derived)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """How much of planted secrets the model gives away: exposure in bits, and how many greedy decoding returns.

    The exposure of a secret is log2 of the number of possible ones over its rank, estimated by `alternatives` random ones.
    The numbers without a name are of secrets that were in, and `chance` of those that were left out.
    """

    inserted: int
    alternatives: int
    median_exposure: float
    largest_exposure: float
    extracted: int
    chance: float

    def __str__(self) -> str:
        return (
            f"of {count_of(self.inserted, 'planted secret')} greedy decoding returns {self.extracted}; exposure "
            f"{self.median_exposure:.1f} bits (median), at most {self.largest_exposure:.1f} (left out: {self.chance:.1f})"
        )


@dataclass(frozen=True, kw_only=True)
class ScoredRecords:
    """What a model's outputs tell of the records: their kind, their score, and a rung for each attacker.

    `copies` is the number of protected units that one canary adds: above 1 the bound is about a group. `commitment` is the
    digest that was published before training.
    """

    kind: str
    score: str
    rungs: tuple[RecordRung, ...]
    copies: int = 1
    commitment: str = ""
    extraction: Extraction | None = None
    unit: str = ROWS

    def __post_init__(self) -> None:
        if not self.rungs or self.copies < 1:
            raise ValueError("scored records have at least one rung, and at least one copy")

    @property
    def headline(self) -> RecordRung:
        """The rung of the final model, named in advance: the larger of two bounds would be above ε too often."""
        return self.rungs[0]

    def __getitem__(self, name: str) -> RecordRung:
        found = next((rung for rung in self.rungs if rung.name == name), None)
        if found is None:
            raise KeyError(f"{name!r} is not among {', '.join(rung.name for rung in self.rungs)}")
        return found

    def to_dict(self) -> dict[str, Any]:
        extraction = None if self.extraction is None else vars(self.extraction)
        return vars(self) | {"rungs": [rung.to_dict() for rung in self.rungs], "extraction": extraction}

    def sentence(self) -> str:
        """What was inserted, and what the outputs certify."""
        first = self.rungs[0]
        group = f", {self.copies} times each" if self.copies > 1 else ""
        text = f"{first.observed:,} of {first.total:,} {self.kind} were inserted{group}; by {self.score}"
        for rung in self.rungs:
            bound = f"ε ≥ {rung.lower_bound:.3g}" if rung.lower_bound > 0 else "no ε above 0"
            text += f", outputs of {SEES[rung.name]} certify {bound}"
            if rung.lower_bound_gaussian > rung.lower_bound:
                text += f" ({rung.lower_bound_gaussian:.3g} if the mechanism is Gaussian)"
        text += " (95 %, however scores depend on each other)"
        if self.copies > 1:
            text += f"; this is about a group of {self.copies} {self.unit}s"
        return text if self.extraction is None else f"{text}; {self.extraction}"

    def brief(self) -> str:
        """What the outputs certify, in the words of the first lines that a person reads."""
        best = self.headline
        bound = f"ε ≥ {math.floor(best.lower_bound * 100) / 100:g}" if best.lower_bound >= 0.01 else "no ε above 0"
        measured = f"estimate {best.epsilon:.2g}" if best.epsilon > best.floor else "nothing found"
        return f"{bound} (95 %; {measured}), from answers of {SEES[best.name]} about {best.total:,} records"

    def judged(self, claim: Claim, rounds: int | None = None) -> Verdict:
        """The verdict of the outputs on a claim: they can refute it, and confirm nothing."""
        why = _not_judged(claim, rounds)
        if why is not None:
            return Verdict(finding=OutputsNotJudged(why=why))
        level = RECORDS_LEVEL / len(self.rungs)
        for rung in self.rungs:
            claimed, delta = group_privacy(claim.epsilon, rung.delta, self.copies)
            bound = 0.0 if delta >= 1 else rung.bound(1 - level, delta=delta)
            if bound > ROUNDED * claimed:
                found = RecordsAboveClaim(
                    sees=SEES[rung.name],
                    canaries=rung.total,
                    copies=self.copies,
                    epsilon=bound,
                    claimed_epsilon=claimed,
                    confidence=1 - level,
                )
                return Verdict(finding=found, rung=rung.name)
        ceiling = highest_bound(self.rungs[0].total, self.rungs[0].delta, 1 - level)
        return Verdict(finding=OutputsAlone(canaries=self.rungs[0].total, ceiling=ceiling))


def group_privacy(epsilon: float, delta: float, copies: int) -> tuple[float, float]:
    """Epsilon and delta of a group of that many units, if one unit has these."""
    if copies == 1:
        return epsilon, delta
    exponents = epsilon * np.arange(copies)
    total = float(np.exp(np.minimum(exponents, 700.0)).sum()) * delta
    return copies * epsilon, min(total, 1.0)


def highest_bound(total: int, delta: float, confidence: float) -> float:
    """The bound if every guess about that many canaries were right."""
    sides = max(total // 2, FEWEST)
    return RecordRung.of(BLACK_BOX, np.ones(sides) + np.arange(sides), -np.arange(sides), delta).bound(confidence)


def _not_judged(claim: Claim, rounds: int | None) -> str | None:
    """Why outputs say nothing of a claim; None if they do."""
    if claim.adjacency == REPLACE:
        return "the claim is about replacing one row, and a coin adds or removes one"
    times = claim.participations
    if not claim.amplified and times is not None and (rounds is None or times < rounds):
        return f"the claim is about {count_of(times, 'known round')}, and a record may be in more"
    return None


def judge_records(verdict: Verdict, scored: ScoredRecords, claim: Claim, rounds: int) -> Verdict:
    """The verdict with what outputs show: they may refute the claim."""
    found = scored.judged(claim, rounds)
    if found.outcome != VIOLATION:
        return verdict
    if verdict.outcome == VIOLATION:
        names = dict.fromkeys([*verdict.evidence, *([found.rung] if found.rung else [])])
        return Verdict(finding=verdict.finding, rung=verdict.rung, part=verdict.part, evidence=tuple(names))
    return found


@dataclass(frozen=True, kw_only=True)
class RecordsResult:
    """The result of data canaries alone: what `DataCanaries.result` returns."""

    scored: ScoredRecords
    claim: Claim | None = None
    verdict: Verdict | None = None

    @classmethod
    def of(cls, scored: ScoredRecords, claim: Claim | None) -> "RecordsResult":
        """The result, with the verdict if there is a claim."""
        return cls(scored=scored, claim=claim, verdict=None if claim is None else scored.judged(claim))

    @property
    def lower_bound(self) -> float:
        """The valid lower bound on epsilon at 95 %, from the final model."""
        return self.scored.headline.lower_bound

    @property
    def epsilon(self) -> float:
        """The estimate from the final model."""
        return self.scored.headline.epsilon

    def __getitem__(self, name: str) -> RecordRung:
        return self.scored[name]

    def to_dict(self) -> dict[str, Any]:
        judged: dict[str, Any] = {} if self.verdict is None else self.verdict.to_dict()
        claimed = None if self.claim is None else self.claim.epsilon
        return self.scored.to_dict() | {"claimed_epsilon": claimed} | judged

    def __str__(self) -> str:
        lines = [self.scored.sentence()]
        for rung in self.scored.rungs:
            detected = "" if rung.epsilon > rung.floor else f" (nothing found: chance alone reaches {rung.floor:.2g})"
            lines.append(
                f"{rung.name}: estimate {rung.epsilon:.3g}{detected}, area under the ROC curve {rung.area:.3f}"
            )
        if self.verdict is not None:
            lines.append(f"{self.verdict.outcome}: {self.verdict.reason}")
        return "\n".join(lines)
