"""The report's sentences: epsilon in plain words, the verdict, and what to do next."""

import dataclasses
import json
import math

import pytest
from example_findings import example
from runs import HOSTILE, make_run

from coalmine.report import read_run
from coalmine.report.advice import next_steps
from coalmine.report.brief import brief
from coalmine.report.markdown import as_dict, markdown
from coalmine.report.page import run_page
from coalmine.report.sentences import meaning, percent, posterior, run_sentence, scope_sentence
from coalmine.report.table_rows import strongest_row
from coalmine.result.words import format_number
from coalmine.verdict.findings.canaries import Undetected
from coalmine.verdict.findings.gauges import OutsideLimits
from coalmine.verdict.findings.noise import MeanTooHigh, WeakRounds
from coalmine.verdict.verdict import Verdict


@pytest.mark.parametrize(
    ("prior", "epsilon", "expected"),
    [
        (0.1, 1, "23 %"),
        (0.1, 5, "94 %"),
        (0.1, 10, "more than 99.9 %"),
        (0.5, 0, "50 %"),
        (0.1, 800, "more than 99.9 %"),
        (0.1, math.inf, "100 %"),
    ],
)
def test_posterior_follows_bayes_rule(prior, epsilon, expected):
    """For example, 0.1·e⁵/(0.9 + 0.1·e⁵) = 0.9428."""
    odds = prior / (1 - prior) * math.exp(min(epsilon, 700))  # only an infinite epsilon makes an attacker certain
    assert posterior(prior, epsilon) == pytest.approx(odds / (1 + odds))
    assert percent(posterior(prior, epsilon)) == expected


def test_epsilon_is_explained_in_a_sentence():
    assert "10 % probability that somebody took part can end up with 94 %" in meaning(5.0, 1e-6)
    assert "certain" in meaning(math.inf, 1e-6)
    assert "No ε" in meaning(math.nan, 1e-6)
    assert format_number(math.nan) == format_number(None) == "–"


@pytest.mark.parametrize(
    ("config", "expected"),
    [("[task]\nname = 'digits'\n", "coalmine run --resume"), ("trainer = 'opacus'\n", "its own trainer")],
)
def test_an_unfinished_run_names_the_command_that_resumes_it(tmp_path, config, expected):
    """`coalmine run --resume` only resumes runs of coalmine's own training."""
    path = make_run(tmp_path / "run")
    (path / "result.json").unlink()
    (path / "config.toml").write_text("schema_version = 1\n" + config)
    run = read_run(path)
    assert expected in next_steps(run)[0]
    assert "not finished" in run_sentence(run)


def test_a_damaged_result_is_not_an_unfinished_run(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "result.json").write_text("{")
    run = read_run(path)
    assert "result.json cannot be read" in run_sentence(run)
    assert "restore it from a copy" in next_steps(run)[0]


def test_undetected_canaries_are_mentioned_before_more_canaries(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    silent = judged(run, Verdict(finding=Undetected(score=0.001, claimed_score=1.0, stds=0.1)))
    assert "Check the seed" in next_steps(silent)[0]
    assert "the canaries were not found" in brief(silent.result)


def judged(run, verdict):
    """The same run with a different verdict."""
    return dataclasses.replace(run, result=dataclasses.replace(run.result, verdict=verdict))


@pytest.mark.parametrize(
    ("kind", "words"), [(OutsideLimits, "not independent Gaussian noise"), (WeakRounds, "less noise than they state")]
)
def test_underpowered_names_what_is_missing(tmp_path, kind, words):
    run = read_run(make_run(tmp_path / "run"))
    assert words in " ".join(brief(judged(run, Verdict(finding=example(kind))).result).split())


def test_a_violation_names_rung_gauge_and_where_to_look(tmp_path):
    run = read_run(make_run(tmp_path / "half", noise=lambda t, rng, dim: rng.normal(size=dim) / 2))
    assert run_sentence(run) == "VIOLATION: the run gives away more than the claimed ε = 4.887 at δ 1e-6 for one client"
    steps = " ".join(next_steps(run))
    assert "known-others" in steps
    assert "residual" in steps
    assert "Likely:" in steps


def test_underpowered_names_the_number_of_canaries_that_would_decide(tmp_path):
    run = read_run(make_run(tmp_path / "weak", noise_multiplier=4.0, canaries=20))
    assert run.result.verdict.outcome == "UNDERPOWERED"
    assert "nothing confirms it either" in run_sentence(run)
    needed = next(step for step in next_steps(run) if "Audit again with" in step)
    assert "(this run had 20)" in needed
    assert needed.split()[3] == f"{run.result.verdict.finding.canaries_needed:,}"


def test_below_the_floor_nothing_was_detected(tmp_path):
    run = read_run(make_run(tmp_path / "quiet", noise_multiplier=100.0, claim=False, canaries=50))
    strongest = strongest_row(run.result)
    assert strongest.epsilon <= strongest.floor
    assert f"the attack finds no canary, and chance alone reaches ε {format_number(strongest.floor, 2)}" in brief(
        run.result
    )
    assert any("known-others detected nothing: 50 canaries" in step for step in next_steps(run))


def test_without_a_claim_there_is_no_verdict(tmp_path):
    run = read_run(make_run(tmp_path / "free", claim=False))
    assert run_sentence(run) == "NO VERDICT: nothing was claimed for the run"
    assert "State the ε before training" in next_steps(run)[0]


def test_markdown_and_json_have_the_same_content(tmp_path):
    runs = [read_run(make_run(tmp_path / name, more=HOSTILE)) for name in ("a|b <i>", "c")]
    text = markdown(runs, ["no <b>run</b>"])
    assert "## a\\|b &lt;i&gt;" in text
    assert "<i>" not in text.replace("`<i>`", "")
    assert "&lt;b&gt;" in text
    rows = [line for line in text.splitlines() if line.startswith("| known-others")]
    assert len(rows) == 2
    assert format_number(strongest_row(runs[0].result).epsilon) in rows[0]
    again = json.loads(json.dumps(as_dict(runs)))
    assert again["runs"][0]["result"]["verdict"] == "PASS"
    assert again["runs"][0]["sentence"] == run_sentence(runs[0])


def test_a_pass_names_what_was_and_was_not_checked(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    sentence = scope_sentence(run.result)
    assert sentence.startswith("This PASS covers: noise level, noise law, ")
    covered, rest = sentence.split(" It does not cover: ")
    assert rest == "clipping, weights, tensors, sampler, rows. How real rows enter the sum was not tested."
    assert {item.name for item in run.result.audited if item.status == "checked"} == set(
        covered.removeprefix("This PASS covers: ").removesuffix(".").split(", ")
    )
    for text in (run_page(run), markdown([run]), json.dumps(as_dict([run]))):
        assert sentence in text
        assert "speaks of" not in text
    assert scope_sentence(dataclasses.replace(run.result, verdict=Verdict(finding=example(MeanTooHigh)))) == ""


def test_the_path_of_the_seed_is_not_shown(tmp_path):
    config = {"canaries": {"seed_file": "/home/whoever/secrets/seed.txt"}}
    page = run_page(read_run(make_run(tmp_path / "run", config=config)))
    assert "seed.txt" in page
    assert "whoever" not in page
