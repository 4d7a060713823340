"""The key figures, what was audited, and what is folded away."""

import dataclasses
import json

import pytest
from runs import make_run

from coalmine.evidence.gauges.gauge import GaugeResult, statistic_of
from coalmine.report import read_run
from coalmine.report.advice import gauge_steps
from coalmine.report.markdown import markdown
from coalmine.report.page import run_page
from coalmine.report.sentences import QUESTIONS, format_number
from coalmine.report.summary import coverage_lines, folded_line, gauge_lines, key_figures
from coalmine.report.table_rows import all_rows, folded_rows, rung_verdict, shown_rows, top_row
from coalmine.report.trainer_entries import client_exposure, note_lines
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


def figures(result):
    return {figure.label: figure for figure in key_figures(result)}


def test_the_headline_is_the_number_behind_the_verdict(grouped):
    """The claim is about canaries with four presentations, although those with fewer come first in the result."""
    result = grouped.result
    assert result.headline.participations == 4
    top = figures(result)["measured ε"]
    assert top.value == result.epsilon == top_row(result).epsilon
    low, high = result.interval
    assert f"95 % interval {format_number(low)} … {format_number(high)}" in top.detail
    assert "took part in 4 rounds" in top.detail
    assert figures(result)["claimed ε"].value == result.claim.epsilon


def test_a_clients_epsilon_is_shown_next_to_the_measured_one(run):
    entries = {"client_rounds": 50, "client_epsilon": 96.7, "client_exposure": "average", "presentations": 1}
    result = changed(run.result, **entries)
    assert [figure.label for figure in key_figures(result)][:2] == ["measured ε", "client's ε"]
    client = figures(result)["client's ε"]
    assert client.value == 96.7
    assert client.detail == "analytical: a client takes part in about 50 rounds of this run, a canary in 1"
    assert "client's ε" not in figures(changed(result, client_epsilon=result.analytical_epsilon))
    assert client_exposure(changed(result, client_epsilon="much")) is None


def test_the_accountants_epsilon_is_shown_with_its_verdict(run):
    judged = {"verdict": "UNDERPOWERED", "reason": "it cannot be confirmed"}
    result = changed(run.result, accounted_epsilon=2.5, if_accounted_were_claimed=judged)
    figure = figures(result)["accountant's ε"]
    assert (figure.value, figure.verdict) == (2.5, "UNDERPOWERED")
    assert "amplified by sampling; judged as a claim: UNDERPOWERED" in figure.detail
    page = run_page(dataclasses.replace(run, result=result))
    assert "judged as a claim: UNDERPOWERED" in page
    assert "if_accounted" not in page


def test_every_view_shows_what_was_audited(run):
    assert [item.name for item in run.result.audited] == list(QUESTIONS)
    lines = coverage_lines(run.result)
    assert lines[0].startswith("checked: noise level, noise law")
    assert "tensors (dense, bias)" in lines[0]
    assert any(line.startswith("not checked: sampler (") for line in lines)
    page, text = run_page(run), markdown([run])
    for item in run.result.audited:
        assert QUESTIONS[item.name] in page
        assert f"| {item.name} | {item.status} |" in text


def test_each_attacker_has_one_row_and_the_rest_is_folded_away(grouped):
    result = grouped.result
    assert len(all_rows(result)) > 5
    assert [row.rung for row in shown_rows(result)] == list(result.adversaries)
    assert {row.presentations for row in shown_rows(result) if row.rung.startswith("known")} == {4}
    assert len(shown_rows(result)) + len(folded_rows(result)) == len(all_rows(result))
    assert folded_line(result) == f"{len(folded_rows(result))} more rows, one for each number of presentations"
    text = markdown([grouped])
    assert folded_line(result) in text
    assert sum(line.startswith("| known-others") for line in text.splitlines()) == 1
    page = run_page(grouped)
    before, after = page.split(f"<summary>{folded_line(result)}</summary>")
    assert "known-others 1×" not in before
    assert "known-others 1×" in after


def test_a_pooled_headline_replaces_its_rungs_row(grouped):
    pooled = {"rung": "known-others", "participations": 9, "epsilon": 7.25, "interval": [7.0, 8.0], "pooled": True}
    result = changed(grouped.result, headline=pooled)
    row = shown_rows(result)[-1]
    assert (row.rung, row.presentations, row.epsilon, row.interval) == ("known-others", 9, 7.25, (7.0, 8.0))
    assert "for somebody who takes part in 9 rounds; fitted to all canaries" in figures(result)["measured ε"].detail
    assert sum(each.rung == "known-others" for each in folded_rows(result)) == 4
    text = markdown([dataclasses.replace(grouped, result=result)])
    assert "| known-others 9×, pooled |" in text
    assert "known-others 9×" in run_page(dataclasses.replace(grouped, result=result))


def test_a_deciding_rung_is_shown_even_without_its_own_row(grouped):
    """Too few canaries for each number of presentations, but enough in total."""
    others = {name: entry for name, entry in grouped.result.to_dict()["adversaries"].items() if name != "known-others"}
    pooled = {"rung": "known-others", "participations": 4, "epsilon": 7.25, "interval": None, "pooled": True}
    result = changed(grouped.result, headline=pooled, adversaries=others)
    assert shown_rows(result)[-1].rung == "known-others"
    assert rung_verdict(result, "known-others") == result.verdict.outcome
    page = run_page(dataclasses.replace(grouped, result=result))
    assert "known-others 4×" in page
    assert "7.25" in page


def test_a_fitted_standard_deviation_is_mentioned_with_the_estimate(run):
    adversaries = json.loads(json.dumps(run.result.to_dict()["adversaries"]))
    warning = "the standard deviation was fitted to the 12 scores, as they spread 1.4 times as much as the null: …"
    for row in (adversaries["known-others"], adversaries["known-others"]["groups"][0]):
        row["warnings"] = [warning]
    result = changed(run.result, adversaries=adversaries)
    assert "the standard deviation was fitted" in figures(result)["measured ε"].detail
    few = dataclasses.replace(run, result=result)
    for text in (run_page(few), markdown([few])):
        assert "(std fitted)" in text
        assert warning in text


def test_trainer_notes_are_shown_and_small_groups_share_one_line(run):
    small = [f"known-others: 3 canaries were presented {times} times, too few to say anything" for times in range(20)]
    entries = {"notes": ["an own note", *small], "trainer_notes": ["Opacus says so"], "warnings": ["no canary came"]}
    result = changed(run.result, **entries)
    assert note_lines(result) == [
        "warning: no canary came",
        "an own note",
        "Opacus says so",
        "20 groups of canaries are too small for a row of their own",
    ]
    page = run_page(dataclasses.replace(run, result=result))
    assert "warning: no canary came" in page
    assert "trainer_notes" not in page
    assert "presented 7 times" not in page


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
        (("others",), "warning", "`others` is not what the round summed"),
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
    lines = gauge_lines(result)
    assert lines[0] == "gauges: 0 of 1 are within their limits"
    assert lines[1].startswith(f"gauge {names[0]} is {status}: 0.5 … 0.6, limits 0.9 … 1.1 in 2 rounds")
    assert ("at most 0.55 of the stated noise is left" in lines[1]) == (status == "low")


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
    assert len(text.splitlines()) < 80
    assert "block11.weight and 189 more)" in coverage_lines(result)[0]
