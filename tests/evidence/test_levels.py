"""The ledger of levels: every test that can refute a true claim is in it, and they add up to at most 1 % of runs."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from coalmine import Audit, FixedSize, Poisson, RandomAllocation, Shuffled
from coalmine.estimators import sampler_tests
from coalmine.estimators.sampler_tests import read_sampler
from coalmine.evidence import levels
from coalmine.evidence.gauges import gauge, gauge_reader
from coalmine.evidence.gauges.coordinates import Coordinates
from coalmine.evidence.gauges.gauge import all_statistics, gauge_of
from coalmine.evidence.gauges.gauge_reader import GaugeReader
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.gauges.subspace import Subspace
from coalmine.evidence.views import read_log
from coalmine.verdict import alarm, claim_context, level_ledger, rung_claim
from coalmine.verdict.findings.amplified import AccountantFacts
from coalmine.verdict.findings.checks import ClientTooLoud, ReplyMovesTooFar, SilentCoordinates
from coalmine.verdict.findings.finding import all_findings
from coalmine.verdict.findings.noise import LessThanStated, StatedTooLittle
from coalmine.verdict.findings.rows import RowAboveClaim
from coalmine.verdict.outcome import VIOLATION

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "verdicts.md"
REFUTING = {each: each.refutes for each in all_statistics().values() if each.refutes}
START, END = "<!-- levels -->\n", "<!-- end of levels -->"


def test_the_levels_of_a_verdict_add_up_to_at_most_one_percent():
    assert sum(entry.level for entry in level_ledger.LEDGER) <= levels.TOTAL * (1 + 1e-12) == pytest.approx(0.01)


def test_the_levels_of_the_alarm_add_up_to_at_most_a_quarter_percent():
    assert (
        sum(entry.level for entry in level_ledger.ALARM_LEDGER)
        <= levels.ALARM_TOTAL * (1 + 1e-12)
        == pytest.approx(0.0025)
    )


def test_the_tests_use_the_levels_of_the_ledger():
    """The sum above is of the numbers that the tests themselves compare p-values with."""
    by_code = {", ".join(entry.codes): entry.level for entry in level_ledger.LEDGER}
    assert by_code["mean, composed"] == pytest.approx(rung_claim.TEST_LEVEL * len(rung_claim.KNOWN))
    assert by_code["bound"] == pytest.approx(claim_context.BOUND_LEVEL)
    assert pytest.approx(1 - claim_context.BOUND_LEVEL / 5) == rung_claim.BOUND_CONFIDENCE
    assert by_code["round"] == pytest.approx(rung_claim.SCAN_LEVEL)
    assert by_code["gauge"] == pytest.approx(gauge.LEVEL * sum(REFUTING.values()))
    assert by_code["sampler"] == pytest.approx(sampler_tests.LEVEL * levels.SAMPLER_TESTS)
    assert (GaugeReader.results.__defaults__ or ())[0] == gauge.LEVEL == gauge_reader.LEVEL  # type: ignore[attr-defined]
    alarms = {", ".join(entry.codes): entry.level for entry in level_ledger.ALARM_LEDGER}
    assert alarms["evidence"] == alarm.EVIDENCE_LEVEL
    assert alarms["gauge, round"] == pytest.approx(
        alarm.GAUGE_LEVEL * (sum(share for one, share in REFUTING.items() if gauge_of(one) is not Coordinates) + 1)
    )
    assert alarms["sampler"] == pytest.approx(alarm.SAMPLER_LEVEL * levels.SAMPLER_TESTS)


def test_every_code_of_a_violation_is_in_the_ledger():
    """But for those in which no chance is involved, those that wrap another, and those of checks of a function."""
    moved = (RowAboveClaim, ReplyMovesTooFar)
    certain = (AccountantFacts, StatedTooLittle, LessThanStated, SilentCoordinates, ClientTooLoud, *moved)
    refuting = [each for each in all_findings() if each.outcome == VIOLATION]
    listed = {code for entry in (*level_ledger.LEDGER, *level_ledger.ALARM_LEDGER) for code in entry.codes}
    assert {each.code for each in refuting if not issubclass(each, certain)} == listed


def test_a_statistic_without_a_share_of_the_level_cannot_prove_missing_noise():
    """So the ledger, which adds the shares up, has every statistic that can be "low"."""
    bars = {each for each in all_statistics().values() if not each.refutes}
    assert {Gaussian.KURTOSIS, Gaussian.TAILS, Subspace.RANK} < bars
    for each in all_statistics().values():
        if each in bars:
            with pytest.raises(AssertionError):
                each.result(0.5, limits=(0.9, 1.1), noise_left=0.5)
        else:
            assert each.result(0.5, limits=(0.9, 1.1), noise_left=0.5).status == "low"


@pytest.mark.parametrize("scheme", [Poisson(0.2, 40), FixedSize(20, 100, 40), RandomAllocation(10, 4), Shuffled(10, 4)])
def test_no_scheme_has_more_tests_than_the_ledger_says(scheme):
    """A canary that is picked twice in a round is certain, so that test takes no level."""
    rng = np.random.default_rng(0)
    present = [np.flatnonzero(rng.random(100) < scheme.rate) for _ in range(40)]
    tests = read_sampler(present, range(1, 41), 100, scheme, [len(row) + 100 for row in present]).tests
    by_chance = [test for test in tests if test.name != "twice in a round"]
    assert len(by_chance) <= levels.SAMPLER_TESTS
    assert all(test.level == sampler_tests.LEVEL for test in by_chance)


@pytest.mark.full
def test_an_honest_gauge_proves_missing_noise_no_more_often_than_its_share():
    """Monte Carlo at a level of one half: 300 honest audits, four standard errors."""
    runs, level, low = 300, 0.5, Counter()
    rng = np.random.default_rng(0)
    for seed in range(runs):
        audit = Audit(
            200, canaries=10, unobserved=60, seed=seed.to_bytes(16, "big"), delta=1e-5, rounds=3,
            layers=[("a", 60), ("b", 60), ("c", 80)],
        )  # fmt: skip
        for number in range(1, 4):
            present, others = audit.canaries_in_round(number), 0.1 * rng.normal(size=200)
            total = others + audit.updates(present, 1.0) + rng.normal(size=200)
            audit.observe_round(number, total, present=present, others=others, noise_std=1.0, clip_norm=1.0)
        reader = GaugeReader(audit.settings, 3)
        read_log(audit.log, audit.settings, reader)
        low.update({each.statistic for each in reader.results(level) if each.status == "low"})
    assert len(low) >= 5
    for each, share in REFUTING.items():
        assert low[each] / runs <= share * level + 4 * np.sqrt(0.25 / runs), each.name


def table():
    """The table of the page, from the ledger."""
    head = ["| code | level over a run | where | how it is shared |", "|---|---|---|---|"]
    rows = [
        f"| {'alarm: ' * is_alarm}`{'`, `'.join(entry.codes)}` | {entry.level * 100:.4g} % | {entry.place} "
        f"| {entry.shared} |"
        for is_alarm, ledger in ((False, level_ledger.LEDGER), (True, level_ledger.ALARM_LEDGER))
        for entry in ledger
    ]
    return "\n".join([*head, *rows]) + "\n"


def test_the_page_has_the_ledger():
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(START)[1].split(END)[0] == table()
