"""Every ε of a result, what was audited, and what is folded away."""

import dataclasses
import json

import pytest
from runs import make_run

from coalmine.evidence.gauges.gauge import GaugeResult, statistic_of
from coalmine.report import read_run
from coalmine.report.advice import gauge_steps
from coalmine.report.brief import brief
from coalmine.report.details import client_exposure, details, figures, folded_line, gauge_lines
from coalmine.report.markdown import markdown
from coalmine.report.page import run_page
from coalmine.report.sentences import QUESTIONS
from coalmine.report.table_rows import all_rows, rung_verdict, secondary_rows, table_rows, top_row
from coalmine.result.audit_result import AuditResult

GROUPS = {"canaries": 140, "presentations": (1, 2, 3, 4)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("summary") / "run", layers=[("dense", 1_500), ("bias", 500)]))


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("summary") / "grouped", **GROUPS))


def changed(result, **entries):
    """The same result with changed entries."""
    return AuditResult.from_dict(json.loads(json.dumps(result.to_dict() | entries)))


def numbers(result):
    """Each ε of the result by its name."""
    return {name: (value, detail) for name, value, detail in figures(result)}


def test_the_headline_is_the_number_behind_the_verdict(grouped):
    """The claim is about canaries with four presentations, although those with fewer come first in the result."""
    result = grouped.result
    assert result.headline.participations == 4
    value, detail = numbers(result)["measured ε"]
    assert result.epsilon == top_row(result).epsilon
    assert value == pytest.approx(result.epsilon, rel=0.1)  # with the digits that its interval carries
    assert detail == "by known-others 4×"
    assert numbers(result)["claimed ε"][0] == result.claim.epsilon


def test_a_clients_epsilon_is_shown_next_to_the_measured_one(run):
    entries = {"client_rounds": 50, "client_epsilon": 96.7, "client_exposure": "average", "presentations": 1}
    result = changed(run.result, **entries)
    assert numbers(result)["client's ε"] == (96.7, "analytical, for a client, in about 50 rounds")
    assert "client's ε" not in numbers(changed(result, client_epsilon=result.analytical_epsilon))
    assert client_exposure(changed(result, client_epsilon="much")) is None


def test_the_accountants_epsilon_is_shown(run):
    result = changed(run.result, accounted_epsilon=2.5)
    assert numbers(result)["accountant's ε"] == (2.5, "quoted by the trainer's accountant")
    assert "quoted by the trainer" in run_page(dataclasses.replace(run, result=result))


def test_every_view_shows_what_was_audited(run):
    assert [item.name for item in run.result.audited] == [name for name in QUESTIONS if name != "records"]
    text = details(run.result)
    assert "tensors: checked (each by itself: dense, bias)" in text
    assert "sampler: not checked (" in text
    assert "checked      noise in every layer, participation, others' sum" in brief(run.result)
    page, text = run_page(run), markdown([run])
    for item in run.result.audited:
        assert QUESTIONS[item.name] in page
        assert f"| {item.name} | {item.status} |" in text


def test_each_attacker_has_one_row_and_the_rest_is_folded_away(grouped):
    result = grouped.result
    assert len(all_rows(result)) > 5
    assert [row.rung for row in table_rows(result)] == list(result.adversaries)
    assert {row.presentations for row in table_rows(result) if row.rung.startswith("known")} == {4}
    assert len(table_rows(result)) + len(secondary_rows(result)) == len(all_rows(result))
    assert folded_line(result) == f"{len(secondary_rows(result))} more rows, one for each number of presentations"
    text = markdown([grouped])
    assert folded_line(result) in text
    assert sum(line.startswith("| known-others") for line in text.splitlines()) == 1
    page = run_page(grouped)
    before, after = page.split(f"<summary>{folded_line(result)}</summary>")
    assert "known-others 1×" not in before
    assert "known-others 1×" in after


def test_a_pooled_headline_replaces_its_rungs_row(grouped):
    pooled = {"rung": "known-others", "participations": 9, "epsilon": 7.25, "interval": [7.0, 8.0], "pooled": True}
    pooled |= {"lower_bound_gaussian": 7.1, "interval_gaussian": [7.05, 7.5], "gaussian_withheld": None}
    result = changed(grouped.result, headline=pooled)
    row = table_rows(result)[-1]
    assert (row.rung, row.presentations, row.epsilon, row.interval) == ("known-others", 9, 7.25, (7.0, 8.0))
    assert numbers(result)["measured ε"] == (7.2, "by known-others 9×, fitted to all canaries")
    assert numbers(result)["bound if Gaussian"][0] == row.lower_bound_gaussian == 7.1
    assert sum(each.rung == "known-others" for each in secondary_rows(result)) == 4
    text = markdown([dataclasses.replace(grouped, result=result)])
    assert "| known-others 9×, pooled |" in text
    assert "known-others 9×" in run_page(dataclasses.replace(grouped, result=result))


def test_a_deciding_rung_is_shown_even_without_its_own_row(grouped):
    """Too few canaries for each number of presentations, but enough in total."""
    others = {name: entry for name, entry in grouped.result.to_dict()["adversaries"].items() if name != "known-others"}
    pooled = {"rung": "known-others", "participations": 4, "epsilon": 7.25, "interval": None, "pooled": True}
    pooled |= {"lower_bound_gaussian": None, "interval_gaussian": None, "gaussian_withheld": "a reason"}
    result = changed(grouped.result, headline=pooled, adversaries=others)
    assert table_rows(result)[-1].rung == "known-others"
    assert rung_verdict(result, "known-others") == result.verdict.outcome
    page = run_page(dataclasses.replace(grouped, result=result))
    assert "known-others 4×" in page
    assert "7.25" in page


def test_a_fitted_standard_deviation_is_mentioned_with_the_estimate(run):
    adversaries = json.loads(json.dumps(run.result.to_dict()["adversaries"]))
    for row in (adversaries["known-others"], adversaries["known-others"]["groups"][0]):
        row["variance"] = {"used": "fitted", "reason": "the scores spread more than the null"}
    few = dataclasses.replace(run, result=changed(run.result, adversaries=adversaries))
    for text in (run_page(few), markdown([few])):
        assert "(std fitted)" in text


def test_trainer_notes_are_shown_and_small_groups_share_one_line(run):
    small = [{"adversary": "known-others", "presentations": times, "canaries": 3} for times in range(20)]
    entries = {"notes": ["an own note"], "trainer_notes": ["Opacus says so"], "warnings": ["no canary came"]}
    result = changed(run.result, **entries, small_groups=small)
    assert result.notes == ("an own note", "Opacus says so", "warning: no canary came")
    assert "20 groups of canaries with too few for an estimate" in details(result)
    page = run_page(dataclasses.replace(run, result=result))
    assert "warning: no canary came" in page
    assert "trainer_notes" not in page


def gauge(name, status):
    statistic, part = statistic_of(name)
    return GaugeResult(
        statistic=statistic, part=part, smallest=0.5, largest=0.6, limits=(0.9, 1.1), flagged=(3, 4),
        status=status, noise_left=0.55 if status == "low" else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "status", "words"),
    [
        (("shape", "distribution", "tails"), "warning", "The noise is not Gaussian"),
        (("noise follows others", "noise follows canaries"), "warning", "larger where updates are larger"),
        (("spectrum", "neighbours", "shared draws", "repeated values"), "low", "PRNG key"),
        (("rank",), "warning", "subspace"),
        (("grid",), "low", "takes few values"),
        (("bare coordinates",), "warning", "next to no noise"),
        (("others",), "warning", "`others` is not the sum that entered the round"),
        (("residual", "pooled residual"), "warning", "`others` is incomplete, or there is more noise than stated"),
        (("residual", "pooled residual"), "low", "less noise than stated"),
        (("repeat", "repeat of any"), "low", "seeded again in every round"),
        (("layer a", "layer b"), "low", "The noise is missing or too small there"),
    ],
)
def test_a_gauge_outside_its_limits_has_advice(run, names, status, words):
    result = dataclasses.replace(run.result, gauges=tuple(gauge(name, status) for name in names))
    [step] = gauge_steps(result)
    assert words in step
    assert all(name.removeprefix("layer ") in step for name in names)
    assert "rivacy does not suffer" not in step
    line = next(gauge_lines(result))
    assert f"{names[0]} 0.5 … 0.6, outside 0.9 … 1.1 in 2 rounds ({status})" in line
    assert ("at most 0.55 of the stated noise is left" in line) == (status == "low")


def test_tensors_within_their_limits_are_folded_away(run):
    many = tuple(gauge(f"layer block{number}.weight", "ok") for number in range(200))
    result = dataclasses.replace(run.result, gauges=(*many, gauge("layer head.bias", "low"), gauge("noise", "ok")))
    shown_run = dataclasses.replace(run, result=result)
    page = run_page(shown_run)
    before, after = page.split("<summary>200 tensors are within their limits</summary>")
    assert "layer head.bias" in before
    assert "<summary>All 201 tensors</summary>" in before
    assert "layer block7.weight" not in before
    assert "layer block7.weight" in after
    text = markdown([shown_run])
    assert "| layer head.bias |" in text
    assert "200 of 201 tensors are within their limits: block0.weight, block1.weight" in text
    assert len(text.splitlines()) < 100
    assert "200 layers, all within their limits: 0.5 … 0.6" in details(result)
