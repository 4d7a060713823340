"""The ledger of levels: every test that can refute a true claim, and the probability that it does so in a run.

All of them together refute a true claim in at most `TOTAL` of runs, whatever rungs and gauges a run has; the alarm during
training has its own `ALARM_TOTAL`. A new test takes its level from what is left: none is added on top.
"""

from dataclasses import dataclass

from coalmine.estimators.sampler_tests import LEVEL as SAMPLER_LEVEL

TOTAL = 0.01  # of the verdict
TEST_LEVEL = 0.002  # of the mean score, on each of two rungs
BOUND_LEVEL = 0.001  # of the lower bounds of all rungs together
SCAN_LEVEL = 0.001  # of single rounds, all together
GAUGE_LEVEL = 1e-4  # of each gauge

ALARM_TOTAL = 0.0025
EVIDENCE_LEVEL = 0.002  # of the scores, at any time
ALARM_GAUGE_LEVEL = 3.5e-5  # of each gauge that can prove a violation, and of single rounds, over all looks
ALARM_SAMPLER_LEVEL = 4e-5 / 16  # of each test of the sampler, over all looks

# Gauges that can prove too little noise, and the share of a gauge's level that this takes: half if it is two-sided.
PROOFS = {
    "noise": 1.0,
    "difference": 1.0,
    "residual": 0.5,
    "pooled residual": 0.5,
    "layers": 0.5,  # all of them together
    "parts of blocks": 0.5,
    "repeat": 1.0,
    "repeat of any": 1.0,
    "grid": 1.0,
    "spectrum": 1.0,
    "neighbours": 1.0,
    "shared draws": 1.0,
    "repeated values": 1.0,
    "shared blocks": 1.0,
    "coordinates": 0.25,  # and weak coordinates: both together
}
NOT_IN_ALARM = ("coordinates",)
SAMPLER_TESTS = 10  # most tests of one scheme that an honest sampler can fail


@dataclass(frozen=True, kw_only=True)
class Level:
    """A kind of test: the code of its verdict, its level over a run, the tests' place, and how the level is shared."""

    code: str
    level: float
    place: str
    shared: str


LEDGER = (
    Level(
        code="mean, composed",
        level=2 * TEST_LEVEL,
        place="`known-round`, `known-others`",
        shared="half for each of the two; where rounds state different noise, equally by their groups",
    ),
    Level(
        code="bound",
        level=BOUND_LEVEL,
        place="every rung",
        shared="equally by the rungs, at least five, and by a rung's numbers of presentations",
    ),
    Level(
        code="round",
        level=SCAN_LEVEL,
        place="`known-others`",
        shared="equally by all single rounds",
    ),
    Level(
        code="gauge",
        level=GAUGE_LEVEL * sum(PROOFS.values()),
        place="the residual, or the round without `others`",
        shared=f"{GAUGE_LEVEL:.2%} for each of {len(PROOFS)} gauges, half of it if more noise than stated fails it too",
    ),
    Level(
        code="sampler",
        level=SAMPLER_LEVEL * SAMPLER_TESTS,
        place="the sampling leg of an amplified claim",
        shared=f"{SAMPLER_LEVEL:.2%} for each of at most {SAMPLER_TESTS} tests",
    ),
)
ALARM_LEDGER = (
    Level(
        code="evidence",
        level=EVIDENCE_LEVEL,
        place="`known-others`, or `known-round`",
        shared="valid after every round",
    ),
    Level(
        code="gauge, round",
        level=ALARM_GAUGE_LEVEL * (sum(share for name, share in PROOFS.items() if name not in NOT_IN_ALARM) + 1),
        place="the residual",
        shared=f"{ALARM_GAUGE_LEVEL:.2g} for each gauge and for single rounds, spent over the looks",
    ),
    Level(
        code="sampler",
        level=ALARM_SAMPLER_LEVEL * SAMPLER_TESTS,
        place="the sampling leg of an amplified claim",
        shared=f"{ALARM_SAMPLER_LEVEL:.2g} for each test, spent over the looks",
    ),
)
