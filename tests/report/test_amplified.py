"""How a claim amplified by sampling is displayed: legs, the rung unknown-round, the privacy loss, advice."""

import dataclasses
import json

import numpy as np
import pytest
from chromium import Chromium
from example_findings import example
from matplotlib.figure import Figure
from runs import make_run, make_sampled_run

from coalmine import Poisson, amplified_epsilon
from coalmine.cli import main as cli
from coalmine.evidence.ladder import RUNGS
from coalmine.report import plots, read_run, write_report
from coalmine.report.advice import next_steps
from coalmine.report.brief import brief
from coalmine.report.details import claim_basis
from coalmine.report.figures import loss_picture
from coalmine.report.markdown import as_dict, markdown
from coalmine.report.page import run_page
from coalmine.report.sentences import ATTACKERS, LEGS, run_sentence
from coalmine.report.table_rows import table_rows
from coalmine.verdict.findings.amplified import (
    AccountedAboveClaim,
    DividedByCohort,
    EpsilonInRange,
    RoundsUnobserved,
    SamplerNotObserved,
    SamplerUnclear,
    TooFewPicks,
    TooFewScores,
)
from coalmine.verdict.verdict import Verdict


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    home = tmp_path_factory.mktemp("amplified")
    return {
        "honest": make_sampled_run(
            home / "honest", more={"accounted_epsilon": float(amplified_epsilon(1.0, Poisson(0.1, rounds=60), 1e-5))}
        ),
        "often": make_sampled_run(home / "often", rate=0.3),
        "blind": make_sampled_run(home / "blind", observed=False),
        "plain": make_run(home / "plain"),
    }


@pytest.fixture(scope="module")
def runs(paths):
    return {name: read_run(path) for name, path in paths.items()}


@pytest.fixture(scope="module")
def pages(runs):
    return {name: run_page(runs[name]) for name in ("honest", "often", "plain")}


def changed(run, **entries):
    """The same run with changed entries in its result."""
    return dataclasses.replace(run, result=dataclasses.replace(run.result, **entries))


def plain(result):
    """The ten lines as one."""
    return " ".join(brief(result).split())


def test_every_view_shows_the_three_parts_with_question_and_outcome(runs, pages):
    run = runs["often"]
    legs = run.result.legs
    assert {name: leg.outcome for name, leg in legs.items()} == {
        "accounting": "PASS", "noise": "PASS", "sampling": "VIOLATION",
    }  # fmt: skip
    page, text = pages["often"], markdown([run])
    for name, leg in legs.items():
        assert LEGS[name] in page
        assert f"| {name} | {leg.outcome} | {LEGS[name]} |" in text
    stored = as_dict([run])["runs"][0]["result"]["legs"]
    assert [leg["verdict"] for leg in stored.values()] == ["PASS", "PASS", "VIOLATION"]
    assert "sampling: VIOLATION: the sampler does not follow the claimed scheme" in run.result.details()


def test_other_claims_have_no_parts(runs, pages):
    assert not runs["plain"].result.legs
    assert "three parts" not in pages["plain"]
    assert "three parts" not in markdown([runs["plain"]])


def test_the_verdict_is_one_sentence(runs):
    assert run_sentence(runs["honest"]) == "PASS: the run keeps ε ≤ 5.573 at δ 1e-5 for one client, added or removed"
    assert run_sentence(runs["often"]).startswith("VIOLATION: the run gives away more than the claimed ε = 5.573")
    assert "clients are not sampled as claimed: sampled as they were, ε is at least " in plain(runs["often"].result)
    assert "nobody observed whom the pipeline's own sampler picks" in plain(runs["blind"].result)
    accounting = Verdict(finding=example(AccountedAboveClaim), part="accounting")
    assert "the accountant gives ε 0.5 for this noise" in plain(changed(runs["honest"], verdict=accounting).result)


def test_unknown_round_has_its_place_in_the_ladder(runs, pages):
    assert list(ATTACKERS) == list(RUNGS)
    result = runs["honest"].result
    assert [row.rung for row in table_rows(result)] == list(RUNGS)
    page = pages["honest"]
    assert "but not in which rounds the target took part: the attacker whose ε accountants compute" in page
    assert "and known-others may lie beyond it" in page


def test_the_claim_states_scheme_accountant_adjacency_and_kind(runs):
    result = runs["honest"].result
    assert "counting Poisson sampling with probability 0.1 in 60 rounds" in brief(result)
    assert claim_basis(result) == (
        "noise multiplier 1; accountant: dp-accounting PLD, upper bound ε = 5.57; adjacency: add or remove one"
    )
    accounting = result.legs["accounting"]
    finding = dataclasses.replace(accounting.finding, epsilon_kind="range", epsilon_range=(4.06, 4.38))
    legs = result.legs | {"accounting": dataclasses.replace(accounting, finding=finding)}
    assert "range ε between 4.06 and 4.38" in claim_basis(changed(runs["honest"], legs=legs).result)


def test_the_plot_shows_the_fit_of_the_result(runs):
    result = runs["honest"].result
    ax = Figure().add_subplot()
    assert plots.privacy_loss(ax, result) is ax
    fit = result["unknown-round"].headline.fit
    stairs = {patch.get_label(): patch.get_data() for patch in ax.patches}  # type: ignore[attr-defined]
    widths = np.diff(fit.edges)
    for label, shares in (
        ("canaries, measured", np.array(fit.observed) / 200),
        ("taking part, predicted", fit.present),
        ("absent, predicted", fit.absent),
    ):
        values, edges, _ = stairs[label]
        np.testing.assert_allclose(values * widths, shares)
        np.testing.assert_allclose(edges, fit.edges)
    assert sum(fit.present) == pytest.approx(1, abs=0.01)
    picture = loss_picture(result, fit)
    assert f"The canaries follow the accountant's law (Kolmogorov–Smirnov p = {fit.p_value:.2g})" in picture.caption
    often = runs["often"].result
    wrong = loss_picture(often, often["unknown-round"].headline.fit)
    assert "The canaries do not follow the accountant's law (Kolmogorov–Smirnov p < 0.001)" in wrong.caption
    with pytest.raises(ValueError, match="no rung unknown-round"):
        plots.privacy_loss(ax, runs["plain"].result)


def test_published_estimators_take_the_scores_of_unknown_round(runs):
    scores = next(group for group in runs["honest"].scores if group.rung == "unknown-round")
    fit = runs["honest"].result["unknown-round"].headline.fit
    np.testing.assert_array_equal(np.histogram(scores.observed, fit.edges)[0], fit.observed)
    assert len(runs["honest"].published) > 5


@pytest.mark.parametrize(
    "kind",
    [EpsilonInRange, SamplerUnclear, SamplerNotObserved, TooFewPicks, TooFewScores, RoundsUnobserved, DividedByCohort],
)
def test_every_undecided_leg_has_an_explanation_and_advice(runs, kind):
    finding = example(kind)
    undecided = changed(runs["honest"], verdict=Verdict(finding=finding))
    assert finding.plain() in plain(undecided.result)
    assert next_steps(undecided)[0] == finding.advice()
    assert "Resolve this first" not in finding.advice()


def test_a_refuted_leg_has_advice(runs):
    steps = next_steps(runs["often"])
    assert steps[0].startswith("Do not release this model under the claimed ε.")
    assert steps[1].startswith("Account for Poisson sampling with probability 0.3")
    assert steps[1].endswith(" rounds, or fix the sampler.")
    verdict = Verdict(finding=example(AccountedAboveClaim), part="accounting")
    assert next_steps(changed(runs["honest"], verdict=verdict))[1].startswith("Account again for")


@pytest.mark.full
def test_the_page_works_in_a_browser(paths, pages, tmp_path):
    one, several = tmp_path / "report.html", tmp_path / "several.html"
    one.write_text(pages["honest"], encoding="utf-8")
    write_report([paths["honest"], paths["often"]], several)
    browser = Chromium()
    try:
        for path in (one, several):
            browser.open(path, width=400)
            assert browser.complaints == []
            assert browser.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
            missing = (
                "[...document.querySelectorAll('[data-term]')].filter((e) => !document.getElementById(e.dataset.term))"
            )
            assert browser.evaluate(f"{missing}.length") == 0
        browser.open(one)
        heads = browser.evaluate("[...document.querySelectorAll('h2')].map((head) => head.textContent)")
        assert heads[:4] == ["What this means", "What was audited", "What to do next", "The three parts of the claim"]
        assert "Kolmogorov" in browser.evaluate("document.querySelector('#picture-loss figcaption').textContent")
    finally:
        browser.close()


def printed(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return stop.value.code, capsys.readouterr().out


def test_the_verdict_command_prints_the_reason_in_few_words(paths, capsys):
    code, out = printed(capsys, "verdict", paths["often"])
    assert code == 1
    assert "(amplified)  VIOLATION  clients are not sampled as claimed: sampled as they were, ε is at least " in out
    [row] = json.loads(printed(capsys, "verdict", paths["honest"], "--json")[1])
    assert row["legs"] == {"accounting": "PASS", "noise": "PASS", "sampling": "PASS"}
    assert row["claim_sampling"] == "Poisson sampling with probability 0.1 in 60 rounds"


@pytest.mark.parametrize(
    "damage", [{"legs": {}}, {"claim_sampling": None}, {"claim_accounting": "mechanism"}, {"legs": []}]
)
def test_a_damaged_amplified_claim_is_not_read_as_a_verdict(paths, tmp_path, capsys, damage):
    path = tmp_path / "run"
    path.mkdir()
    stored = json.loads((paths["honest"] / "result.json").read_text())
    (path / "result.json").write_text(json.dumps(stored | damage))
    (path / "config.toml").write_bytes((paths["honest"] / "config.toml").read_bytes())
    assert printed(capsys, "verdict", path)[0] == 2


def test_compare_shows_which_leg_did_not_pass(paths, capsys):
    _, out = printed(capsys, "compare", *paths.values())
    assert "all PASS" in out
    assert "legs" in out
    rows = json.loads(printed(capsys, "compare", paths["blind"], paths["plain"], "--json")[1])
    assert rows[0]["legs"] == {"accounting": "PASS", "noise": "PASS", "sampling": "UNDERPOWERED"}
    assert (rows[0]["claim_accounting"], rows[0]["claim_sampling"]["scheme"]) == ("amplified", "poisson")
    assert (rows[1]["legs"], rows[1]["claim_sampling"]) == ({}, None)
