"""An alarm during training: it may be checked after every round without erring more often.

The evidence from scores is valid at any time (`coalmine.estimators.sequential`). Gauges, single rounds and the sampler are
tested at looks that grow further apart, and each look spends a part of their level. In total, a true claim raises the alarm
in at most 0.25 % of runs; the verdict at the end has its own 1 %.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from coalmine.estimators.amplification import amplified_noise
from coalmine.estimators.sequential import RunningEvidence, spent_level
from coalmine.evidence import levels
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.noise_schedule import EQUAL, counted_strengths
from coalmine.evidence.noise_signal import NoiseSignal
from coalmine.evidence.stated_noise import StatedReader
from coalmine.evidence.views import RoundViewBuilder, RoundViews, View
from coalmine.log.rounds_file import Entry
from coalmine.measure.round import Round
from coalmine.measure.settings import Settings, presentation_counts
from coalmine.verdict.amplified_claim import SAMPLING, SampledClaim, read_claim
from coalmine.verdict.claim import LARGEST_CLAIM, Claim
from coalmine.verdict.claim_context import ROUNDED, ClaimContext, RunFacts, context_of
from coalmine.verdict.findings.amplified import SamplerAboveClaim
from coalmine.verdict.findings.noise import EvidenceOfLess, RoundAboveClaim
from coalmine.verdict.gauge_proofs import proof, proves
from coalmine.verdict.outcome import VIOLATION
from coalmine.verdict.round_limits import lower_limit
from coalmine.verdict.rung_claim import stated_too_little
from coalmine.verdict.verdict import Verdict

EVIDENCE_LEVEL = levels.EVIDENCE_LEVEL
GAUGE_LEVEL = levels.ALARM_GAUGE_LEVEL  # of each statistic that can prove a violation, and of the test of single rounds
SAMPLER_LEVEL = levels.ALARM_SAMPLER_LEVEL  # level of each test of the sampler
APART = 1.25  # the next look at the gauges comes at this multiple of the rounds at the last one
MANY_ROUNDS = 4096  # fewest rounds to plan for: short sketches are enough, since every look compares them


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """The claim was refuted after `round`. `verdict` holds the facts; `reason` is the sentence made of them.

    `evidence` is the likelihood ratio of the scores so far: less noise than claimed, averaged over how much less, against
    the claim.
    """

    round: int
    evidence: float
    verdict: Verdict

    @property
    def reason(self) -> str:
        """The verdict's reason, in one sentence."""
        return self.verdict.reason

    def __str__(self) -> str:
        return f"alarm in round {self.round}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Round, evidence, and the verdict's facts, for JSON."""
        return {"round": self.round, "evidence": self.evidence, **self.verdict.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Alarm":
        """The inverse of `to_dict`."""
        return cls(round=values["round"], evidence=values["evidence"], verdict=Verdict.from_dict(values))


class ViolationError(RuntimeError):
    """Raised to stop training once its claim is refuted; `alarm` has the reason."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(f"{alarm}. Training was stopped, as on_violation requests")
        self.alarm = alarm


class AlarmReader:
    """Takes one round after another; `alarm` keeps the first alarm.

    The number of participations comes from the claim or from the audit's own schedule. Otherwise it is taken as 1, the
    smallest that the claim can mean. Under correlated noise, a sensitivity that is not claimed is taken as 1 too.
    """

    def __init__(self, settings: Settings, claim: Claim) -> None:
        last = 0 if settings.sampling is None else settings.sampling.total_rounds
        claim = read_claim(claim, settings, last) or claim
        self._settings, self._claim = settings, claim
        self._sampled: SampledClaim | None = None
        if claim.amplified:
            self._sampled = SampledClaim.of(claim, delta=settings.delta, rounds=settings.rounds or 0)
        scheduled = settings.rounds is not None and settings.sampling is None
        self._expected = presentation_counts(settings.canaries, settings.presentations) if scheduled else None
        self._times = np.zeros(settings.canaries, dtype=np.int64)
        self._in_plain = np.zeros(settings.canaries, dtype=bool)  # canaries that known-round has scored
        self._looker: RoundViewBuilder | None = None
        self._states_noise = True
        self._follows_schedule = True
        self._gauges = GaugeReader(settings, max(settings.rounds or 0, MANY_ROUNDS), proofs_only=True)
        self._stated = StatedReader(settings)
        self._entries: list[Entry] = []
        loosely = replace(claim, epsilon=min(ROUNDED * claim.epsilon, LARGEST_CLAIM))  # printed claims are rounded
        self._needed_noise = self._context(loosely).noise  # in every round, if all have equal noise
        self._evidence = RunningEvidence(self._needed_noise)
        self._multipliers: list[float] = []  # stated, round by round
        self._slack, self._slack_at = 1.0, 0  # claimed noise over stated noise, and the rounds at which it was computed
        self.claimed_noise = self._context(claim).noise  # the noise multiplier that the claim needs
        self._looks, self._next_look = 0, 1
        self.alarm: Alarm | None = None
        self.last_round = 0
        if self._sampled is not None and self._sampled.accounting.outcome == VIOLATION:
            self._raise(self._sampled.accounting)

    @property
    def evidence(self) -> float:
        """The likelihood ratio of the scores so far, less noise against the claim; the alarm is raised at `needed`."""
        return math.exp(min(self._evidence.log, 700.0))

    @property
    def needed(self) -> float:
        """The evidence at which the alarm is raised: a true claim reaches it in at most 1 of this many runs."""
        return 1 / EVIDENCE_LEVEL

    @property
    def measured_noise(self) -> float | None:
        """The noise multiplier measured from the scores so far; None if there are none, or if their mean is not positive."""
        return 1 / self._evidence.mean if self._evidence.mean > 0 else None

    def add(self, look: RoundViews) -> None:
        """Take the next round, from a pass over a log."""
        self.see(look.item)

    def see(self, item: Round) -> None:
        """Take the next round that released something."""
        if self._looker is None:
            self._states_noise = item.noise_std is not None
            self._looker = RoundViewBuilder(self._settings, claimed=self._states_noise)
        if item.noise_std and item.clip_declared:
            self._multipliers.append(item.noise_std / item.clip_norm)
        self.last_round = item.number
        self._times[item.present] += 1
        self._entries.append(Entry.of(item))
        if self._settings.noise is not None and self._states_noise and item.noise_std is None:
            return  # correlated noise of unknown std: its rounds can no longer be separated
        look = self._looker.look(item)
        self._gauges.add(look)
        self._stated.add(look)
        if self._settings.noise is None:
            look = self._weighted(look)
        if self._expected is not None and self._claim.participations is None and self._sampled is None:
            self._follows_schedule &= bool((self._times <= self._expected).all())
        if self._follows_schedule:
            self._add_scores(look)
        if len(self._entries) >= self._next_look:
            self._look_at_gauges()

    def _weighted(self, look: RoundViews) -> RoundViews:
        """The round with weights by which the claim's own noise gives every presentation the same expected score.

        The claim allows `slack` times the stated noise, or all of it if that already exceeds the claim. Without stated
        noise it allows equal noise in all rounds.
        """
        scores = self._stated.round_scores()
        stated = len(self._multipliers) == len(self._entries) and bool(self._multipliers)
        if not stated or scores is None or not scores.credible:
            return look
        count = len(self._multipliers)
        if min(self._multipliers) * (1 + EQUAL) >= max(self._multipliers):
            self._slack = min(self._needed_noise / self._multipliers[0], 1.0)
        elif count & (count - 1) == 0 or self._slack_at * 2 <= count:
            self._slack, self._slack_at = min(self._slack_of(np.array(self._multipliers)), 1.0), count
        weight = self._needed_noise / (self._slack * self._multipliers[-1])
        if math.isclose(weight, 1.0, rel_tol=EQUAL):
            return look
        views = {name: getattr(look, name) for name in ("plain", "white_residual")}
        changed = {name: replace(view, weights=weight) for name, view in views.items() if view is not None}
        return replace(look, **changed)

    def _slack_of(self, multipliers: npt.NDArray[np.float64]) -> float:
        """The factor on the stated noise at which the whole run uses up the claim, if it goes on as it went so far."""
        reference = float(np.median(multipliers))
        if self._sampled is None:
            times = self._claim.participations or self._planned or 1
            strongest = np.sort(1 / multipliers)[::-1][:times]
            return self._needed_noise * math.sqrt(float(np.mean(strongest**2)))
        scheme = self._sampled.sampling
        share = scheme.total_rounds / multipliers.size
        strengths = tuple(
            (strength, max(round(count * share), 1)) for strength, count in counted_strengths(reference / multipliers)
        )
        return (
            amplified_noise(self._claim.epsilon, replace(scheme, strengths=strengths), self._settings.delta) / reference
        )

    @property
    def _planned(self) -> int | None:
        return None if self._expected is None else int(self._expected.max())

    def _add_scores(self, look: RoundViews) -> None:
        view, members = look.white_residual, np.ones(0, dtype=bool)
        if view is not None:
            members = np.ones(view.present.size, dtype=bool)
        elif look.plain is not None and self._settings.noise is None:
            # real updates are similar from round to round, so a canary's second score is not independent of its first
            view = look.plain
            members = ~self._in_plain[view.present]
            self._in_plain[view.present] = True
        if view is None or not members.any():
            return
        presentations, score = _round_score(view, members)
        standard = self._evidence.add(score, presentations, view.dof)
        p_value = float(ndtr(-standard))
        level = spent_level(GAUGE_LEVEL, len(self._entries))
        if self.alarm is not None:
            return
        if self._evidence.log >= -math.log(EVIDENCE_LEVEL):
            rung = "known-others" if look.white_residual is not None else "known-round"
            self._raise(Verdict(finding=self._evidence_of_less(), rung=rung))
        elif p_value < level:
            self._raise_round(view, members, level, p_value)

    def _raise_round(self, view: View, members: npt.NDArray[np.bool_], level: float, p_value: float) -> None:
        """Raise the alarm if one round by itself has less noise than the whole claim allows."""
        scores = view.observed[view.present[members]]
        signal = NoiseSignal(float(scores.mean()), float(scores.size), view.dof, view.dof, 0.0)
        context = self._context(self._claim)
        epsilon = context.composed(np.array([lower_limit(signal, level)])) if not context.run.correlated else math.inf
        if not context.exceeded(epsilon):
            return
        weight = float(np.mean(view.weights))
        found = RoundAboveClaim(
            score=signal.beta,
            claimed_score=weight / self._needed_noise,
            p_value=p_value,
            level=level,
            rounds=1,
            first_round=view.number,
        )
        self._raise(Verdict(finding=found))

    def _evidence_of_less(self) -> EvidenceOfLess:
        return EvidenceOfLess(
            score=self._evidence.mean,
            claimed_score=1 / self.claimed_noise,
            claimed_noise=self.claimed_noise,
            measured_noise=self.measured_noise,
            level=EVIDENCE_LEVEL,
            odds=self.evidence,
        )

    def _look_at_gauges(self) -> None:
        """Test gauges, stated noise and sampler, at this look's share of the level."""
        count = len(self._entries)
        self._looks, self._next_look = self._looks + 1, max(count + 1, math.ceil(APART * count))
        if self.alarm is not None or not self._follows_schedule:
            return
        gauges = self._gauges.results(spent_level(GAUGE_LEVEL, self._looks))
        context = self._context(self._claim, gauges=gauges)
        proofs = [gauge for gauge in gauges if proves(gauge, context)]
        if proofs:
            also = tuple(f"the {gauge.name} gauge" for gauge in proofs[1:])
            self._raise(Verdict(finding=proof(proofs[0], context), evidence=also))
            return
        enough = min(self._multipliers, default=0.0) >= self.claimed_noise
        stated = None if enough else stated_too_little(context)
        if stated is not None:
            self._raise(Verdict(finding=stated))
        else:
            self._look_at_sampler()

    def _look_at_sampler(self) -> None:
        """Raise the alarm if the sampler refutes the claim, at this look's share of the level."""
        if self._sampled is None or not self._claim.sampler_observed:
            return
        found = self._sampled.sampler_finding(self._entries, self._settings, self._stated.clip_norms)
        if isinstance(found, SamplerAboveClaim) and found.p_value < spent_level(SAMPLER_LEVEL, self._looks):
            self._raise(Verdict(finding=found, part=SAMPLING))

    def _context(self, claim: Claim, gauges: list[GaugeResult] | None = None) -> ClaimContext:
        settings, sampled = self._settings, self._sampled
        run = RunFacts(
            delta=settings.delta,
            planned=self._planned,
            presentations=int(self._times.max()),
            rounds=self._stated.round_scores(),
            stated=self._stated.stated_noise(),
            correlated=settings.noise is not None,
        )
        needs = None if sampled is None else (sampled.required_noise, sampled.sampling)
        return context_of(claim, [], gauges or [], run, needs)

    def _raise(self, verdict: Verdict) -> None:
        if self.alarm is None:
            self.alarm = Alarm(round=self.last_round, evidence=self.evidence, verdict=verdict)


def _round_score(view: View, members: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Presentations in a round and √n times their mean score; whitened rounds hold a share of each canary."""
    weights = np.broadcast_to(view.weights, view.present.shape)[members]
    count = float(weights @ weights)
    return count, float(weights @ view.observed[view.present[members]]) / math.sqrt(count)
