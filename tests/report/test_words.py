"""What the report says: epsilon in plain words, the verdict, and what to do next."""

import dataclasses
import json
import math
import sys
import types
from pathlib import Path

import pytest

from coalmine.report import read_run
from coalmine.report.page import run_page
from coalmine.report.text import as_dict, markdown
from coalmine.report.words import likely_faults, meaning, next_steps, percent, shown, suspicion, verdict_sentence

sys.path.insert(0, str(Path(__file__).parent))
from runs import HOSTILE, make_run


@pytest.mark.parametrize(
    ("prior", "epsilon", "said"),
    [(0.1, 1, "23 %"), (0.1, 5, "94 %"), (0.1, 10, "more than 99.9 %"), (0.5, 0, "50 %"), (0.1, 800, "100 %")],
)
def test_what_a_suspicion_becomes(prior, epsilon, said):
    """Bayes' rule on the odds: 0.1·e⁵/(0.9 + 0.1·e⁵) = 0.9428."""
    odds = prior / (1 - prior) * math.exp(min(epsilon, 700))
    assert suspicion(prior, epsilon) == pytest.approx(odds / (1 + odds))
    assert percent(suspicion(prior, epsilon)) == said


def test_epsilon_in_a_sentence():
    assert "10 % that somebody took part can end up with 94 %" in meaning(5.0, 1e-6)
    assert "certain" in meaning(math.inf, 1e-6)
    assert "No ε" in meaning(math.nan, 1e-6)
    assert shown(math.nan) == shown(None) == "–"


@pytest.mark.parametrize(
    ("config", "said"), [("[task]\nname = 'digits'\n", "coalmine resume"), ("trainer = 'opacus'\n", "its own trainer")]
)
def test_who_goes_on_with_an_unfinished_run(tmp_path, config, said):
    """`coalmine resume` goes on with runs of coalmine's own alone."""
    path = make_run(tmp_path / "run")
    (path / "result.json").unlink()
    (path / "config.toml").write_text("schema_version = 1\n" + config)
    run = read_run(path)
    assert said in next_steps(run)[0]
    assert "not finished" in verdict_sentence(run)


def test_a_damaged_result_is_no_unfinished_run(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "result.json").write_text("{")
    run = read_run(path)
    assert "result.json cannot be read" in verdict_sentence(run)
    assert "restore it from a copy" in next_steps(run)[0]


def test_canaries_that_are_not_heard_are_to_be_looked_for(tmp_path):
    run = read_run(make_run(tmp_path / "run"))
    reason = "the mean score 0.001 a presentation is no more than chance, where the claim's is 1: either …"
    silent = dataclasses.replace(run, findings=dataclasses.replace(run.findings, verdict="UNDERPOWERED", reason=reason))
    assert "why the canaries are not heard" in next_steps(silent)[0]


def test_a_violation_names_rung_gauge_and_what_to_look_at(tmp_path):
    run = read_run(make_run(tmp_path / "half", noise=lambda t, rng, dim: rng.normal(size=dim) / 2))
    assert verdict_sentence(run).startswith("VIOLATION: this training gives away more than the claimed ε = 4.89")
    steps = " ".join(next_steps(run))
    assert "known-others" in steps
    assert "residual" in steps
    assert "Likely:" in steps


def test_signatures_of_faults_are_used_where_there_are_any(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "coalmine.audit.signatures", raising=False)
    module = types.ModuleType("coalmine.audit.signatures")
    fault = types.SimpleNamespace(title="half the noise", meaning="There is too little.", mend="Add more.")
    module.likely_faults = lambda result: [fault] if result["verdict"] == "VIOLATION" else []
    monkeypatch.setitem(sys.modules, "coalmine.audit.signatures", module)
    run = read_run(make_run(tmp_path / "half", noise=lambda t, rng, dim: rng.normal(size=dim) / 2))
    assert "Likely: half the noise. There is too little. Add more." in next_steps(run)
    monkeypatch.setitem(sys.modules, "coalmine.audit.signatures", None)  # not installed
    assert likely_faults(run.findings.raw) == []


def test_underpowered_names_the_number_of_canaries_that_would_decide(tmp_path):
    run = read_run(make_run(tmp_path / "weak", noise_multiplier=4.0, canaries=20))
    assert run.findings.verdict == "UNDERPOWERED"
    assert "too weak to confirm" in verdict_sentence(run)
    needed = next(step for step in next_steps(run) if "Audit again with" in step)
    assert "(this run had 20)" in needed
    assert needed.split()[3].replace(",", "") in run.findings.reason.replace(",", "")


def test_below_the_floor_nothing_was_detected(tmp_path):
    run = read_run(make_run(tmp_path / "quiet", noise_multiplier=100.0, claim=False, canaries=50))
    strongest = run.findings.strongest
    assert strongest.epsilon <= strongest.floor
    assert f"cannot see below ε = {shown(strongest.floor)}" in verdict_sentence(run)
    assert any("Nothing was detected" in step and "k = 50" in step for step in next_steps(run))


def test_without_a_claim_there_is_no_verdict(tmp_path):
    run = read_run(make_run(tmp_path / "free", claim=False))
    assert verdict_sentence(run).startswith("Nothing was claimed, so there is no verdict: the strongest attacker")
    more = {"if_analytical_were_claimed": {"verdict": "PASS", "reason": "so it is"}}
    hypothetical = dataclasses.replace(run, findings=dataclasses.replace(run.findings, raw=run.findings.raw | more))
    assert "the verdict were PASS: so it is" in next_steps(hypothetical)[0]


def test_markdown_and_json_hold_the_same(tmp_path):
    runs = [read_run(make_run(tmp_path / name, more=HOSTILE)) for name in ("a|b <i>", "c")]
    text = markdown(runs, ["no <b>run</b>"])
    assert "## a\\|b &lt;i&gt;" in text
    assert "<i>" not in text.replace("`<i>`", "")
    assert "&lt;b&gt;" in text
    rows = [line for line in text.splitlines() if line.startswith("| known-others")]
    assert len(rows) == 2
    assert shown(runs[0].findings.strongest.epsilon) in rows[0]
    again = json.loads(json.dumps(as_dict(runs)))
    assert again["runs"][0]["result"]["verdict"] == "PASS"
    assert again["runs"][0]["sentence"] == verdict_sentence(runs[0])


def test_what_the_most_presented_give_away_is_said_too(tmp_path):
    """The headline is that of most canaries; those that came more often give away more."""
    run = read_run(make_run(tmp_path / "run", claim=False, canaries=121, presentations=(1, 2, 4)))
    findings = run.findings
    assert (findings.strongest.presentations, findings.most_presented.presentations) == (1, 4)
    said = verdict_sentence(run)
    for row, words in ((findings.strongest, "off the canaries that came 1×"), (findings.most_presented, "came 4×")):
        assert words in said
        assert shown(row.epsilon) in said
        assert shown(row.lower_bound) in said
    times = [row.presentations for row in findings.listed if row.rung == "known-others"]
    assert times == [1, 2, 4]
    assert "estimate of known-others 4×" in run_page(run)
    assert read_run(make_run(tmp_path / "alike", claim=False)).findings.most_presented is None


def test_where_the_secret_lies_is_not_told(tmp_path):
    config = {"canaries": {"seed_file": "/home/whoever/secrets/seed.txt"}}
    page = run_page(read_run(make_run(tmp_path / "run", config=config)))
    assert "seed.txt" in page
    assert "whoever" not in page
