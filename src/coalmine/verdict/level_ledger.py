"""The ledger of levels: every test that can refute a true claim, with its finding and its level over a run."""

from dataclasses import dataclass

from coalmine.estimators.sampler_tests import LEVEL as SAMPLER_LEVEL
from coalmine.evidence import levels
from coalmine.evidence.gauges.gauge import all_statistics, gauge_of
from coalmine.verdict.findings.amplified import SamplerAboveClaim
from coalmine.verdict.findings.finding import Finding
from coalmine.verdict.findings.gauges import NoiseRemovable
from coalmine.verdict.findings.noise import (
    BoundAboveClaim,
    ComposedAboveClaim,
    EvidenceOfLess,
    MeanTooHigh,
    RoundAboveClaim,
)
from coalmine.verdict.findings.records import RecordsAboveClaim


@dataclass(frozen=True, kw_only=True)
class Level:
    """A kind of test: the findings that it leads to, its level over a run, its place, and how the level is shared."""

    findings: tuple[type[Finding], ...]
    level: float
    place: str
    shared: str

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of its findings."""
        return tuple(finding.code for finding in self.findings)


# The statistics of gauges that can prove too little noise, and the share of a gauge's level that this takes.
REFUTING = {each: each.refutes for each in all_statistics().values() if each.refutes}
REFUTING_IN_ALARM = {each: share for each, share in REFUTING.items() if gauge_of(each).in_alarm}

LEDGER = (
    Level(
        findings=(MeanTooHigh, ComposedAboveClaim),
        level=2 * levels.TEST_LEVEL,
        place="`known-round`, `known-others`",
        shared="half for each of the two; where rounds state different noise, equally by their groups",
    ),
    Level(
        findings=(BoundAboveClaim,),
        level=levels.BOUND_LEVEL,
        place="every rung",
        shared="equally by the rungs, at least five, and by a rung's numbers of presentations",
    ),
    Level(
        findings=(RoundAboveClaim,),
        level=levels.SCAN_LEVEL,
        place="`known-others`",
        shared="equally by all single rounds",
    ),
    Level(
        findings=(RecordsAboveClaim,),
        level=levels.RECORDS_LEVEL,
        place="`black-box`, `black-box-iterates`",
        shared="equally by the two if both are scored",
    ),
    Level(
        findings=(NoiseRemovable,),
        level=levels.GAUGE_LEVEL * sum(REFUTING.values()),
        place="the residual, or the round without `others`",
        shared=f"{levels.GAUGE_LEVEL:.2%} for each of {len(REFUTING)} statistics of the gauges, or the share of it that "
        "their tests of too little noise have",
    ),
    Level(
        findings=(SamplerAboveClaim,),
        level=SAMPLER_LEVEL * levels.SAMPLER_TESTS,
        place="the sampling leg of an amplified claim",
        shared=f"{SAMPLER_LEVEL:.2%} for each of at most {levels.SAMPLER_TESTS} tests",
    ),
)
ALARM_LEDGER = (
    Level(
        findings=(EvidenceOfLess,),
        level=levels.EVIDENCE_LEVEL,
        place="`known-others`, or `known-round`",
        shared="valid after every round",
    ),
    Level(
        findings=(NoiseRemovable, RoundAboveClaim),
        level=levels.ALARM_GAUGE_LEVEL * (sum(REFUTING_IN_ALARM.values()) + 1),
        place="the residual",
        shared=f"{levels.ALARM_GAUGE_LEVEL:.2g} for each of {len(REFUTING_IN_ALARM)} statistics and for single rounds, "
        "spent over the looks",
    ),
    Level(
        findings=(SamplerAboveClaim,),
        level=levels.ALARM_SAMPLER_LEVEL * levels.SAMPLER_TESTS,
        place="the sampling leg of an amplified claim",
        shared=f"{levels.ALARM_SAMPLER_LEVEL:.2g} for each test, spent over the looks",
    ),
)
