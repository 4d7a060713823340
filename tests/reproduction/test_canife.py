import json
import math
import os
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from coalmine.estimators.literature.canife import canife_epsilon
from coalmine.simulation.tasks.image_tasks import digits
from reproduction import section_5_3_canife as canife
from reproduction.canife import CanifeSettings
from reproduction.canife.comparison import Comparison, train
from reproduction.experiment_options import Options

DATA = os.environ.get("COALMINE_DATA_DIR")


@pytest.fixture(scope="module")
def plan():
    crafting = CanifeSettings(
        noise_multiplier=0.2, batch_size=25, pool_size=100, design_steps=150, audit_every=30, scores=50
    )
    return Comparison(runs=2, canaries=100, learning_rate=0.2, crafting=crafting)


@pytest.fixture(scope="module")
def trained(plan):
    return train(digits(), plan)


@pytest.fixture(scope="module")
def rows():
    """The accountants of the paper's run."""
    return canife.analytical(0.2, probability=128 / 60_000, rounds=469, examples=60_000)


@pytest.fixture(scope="module")
def found(trained, plan, rows):
    return canife.readings(trained, plan) | {
        "unstated": [canife._unstated(trained, plan)],
        "accountants": rows,
        "scale": "small",
    }


@pytest.mark.full
def test_the_papers_analytical_epsilon_uses_renyi_accounting_at_delta_1_over_m(rows):
    """No other usual combination of delta and accountant rounds to 34.5."""
    hits = [
        (row["accountant"], name) for row in rows for name, value in row["epsilon"].items() if round(value, 1) == 34.5
    ]
    assert hits == [(canife.RENYI, "1/m")]
    # One Gaussian release: RDP at order a is a/(2 z²), converted to (ε, δ) at the best order.
    orders = np.linspace(1.01, 10, 100_000)
    rdp = orders / (2 * 0.2**2)
    epsilon = rdp + np.log1p(-1 / orders) - (math.log(1 / 60_000) + np.log(orders)) / (orders - 1)
    assert rows[1]["epsilon"]["1/m"] == pytest.approx(epsilon.min(), abs=0.02)
    assert rows[0]["delta"] == pytest.approx(2.79e-6, rel=0.01)


@pytest.mark.full
def test_ceilings_are_the_bounds_without_errors(found):
    """The Clopper-Pearson bound for no error among n is 1 − (α/2)^(1/n)."""
    for ceiling in found["canife"]["clopper_pearson"]["ceilings"]:
        rate = 1 - 0.025 ** (1 / ceiling["scores"])
        assert ceiling["per_round"] == pytest.approx(math.log((1 - found["delta"] - rate) / rate), rel=1e-9)
        composed = canife_epsilon([ceiling["per_round"]], delta=found["delta"], sampling_probability=1 / 60, rounds=60)
        assert ceiling["composed"] == pytest.approx(composed)
    whole, half = (found["canife"]["credible"]["ceilings"][place]["per_round"] for place in (0, 1))
    assert whole > half > found["canife"]["clopper_pearson"]["ceilings"][0]["per_round"]
    assert all(value <= whole for run in found["canife"]["credible"]["per_round"] for value in run)


def test_the_credible_interval_agrees_with_the_posterior_of_the_two_rates():
    """Two errors among 50 with the canary and none among 40 without it, by Monte Carlo under Jeffreys' prior."""
    observed = np.concatenate([[-1.0, -0.5], np.linspace(1, 2, 48)])
    unobserved = np.linspace(0, 0.9, 40)
    rng = np.random.default_rng(0)
    fnr, fpr = rng.beta(2.5, 48.5, 400_000), rng.beta(0.5, 40.5, 400_000)
    epsilons = np.maximum(np.log((1 - 1e-5 - fpr) / fnr), np.log((1 - 1e-5 - fnr) / fpr))
    found = canife.credible_epsilon(observed, unobserved, delta=1e-5)
    assert found == pytest.approx(np.quantile(epsilons, 0.05), abs=0.02)


@pytest.mark.full
def test_claims_hold_on_the_digits(found):
    assert all(check.holds for check in canife.checks(found)), canife.checks(found)


@pytest.mark.full
def test_a_broken_pipeline_does_not_pass(trained, plan, rows):
    """Half the noise: an attacker who knows all other updates sees twice the shift."""
    halved = replace(trained, known_others=2 * trained.known_others)
    checks = canife.checks(canife.readings(halved, plan) | {"accountants": rows})
    assert [check.holds for check in checks if "known-others" in check.claim] == [False]


@pytest.mark.full
def test_tables_show_our_values_and_the_papers(found):
    tables = canife.tables(found)
    rows = {row[0]: row[1:] for row in tables[0].rows}
    assert rows["ε_lo, the paper's lower bound"][1] == "1.82 ± 0.46"
    assert rows["CANIFE, rounds by credible interval"][1] == "0.88 ± 0.12"
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    text = canife.conclusion(found)
    assert "nan" not in text
    assert "34.5" in text


@pytest.mark.full
def test_stored_scores_give_the_same_numbers(tmp_path, trained, plan, found):
    path = tmp_path / "deep" / "scores.npz"
    canife.save(path, trained, plan)
    again = canife.load(path, plan)
    assert again is not None
    rest = canife.readings(again, plan)
    json.dumps(rest, allow_nan=False)
    assert rest["canife"]["credible"]["composed"] == pytest.approx(found["canife"]["credible"]["composed"])
    assert rest["ours"] == pytest.approx(found["ours"], rel=1e-4)


@pytest.mark.full
def test_stored_scores_of_other_plans_are_ignored(tmp_path, trained, plan):
    path = tmp_path / "scores.npz"
    assert canife.load(path, plan) is None
    canife.save(path, trained, plan)
    assert canife.load(path, replace(plan, learning_rate=0.3)) is None
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="does not hold scores of this comparison"):
        canife.load(path, plan)


def no_progress(*_):
    pass


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch):
    trainings = []

    def quick(task, plan, **_):
        trainings.append(plan)
        small = replace(plan.crafting, pool_size=50, design_steps=5, batch_size=50, audit_every=20, scores=20)
        return train(digits(), replace(plan, canaries=50, rounds=None, crafting=small))

    monkeypatch.setattr(canife, "train", quick)
    monkeypatch.setattr(canife, "load_task", lambda *_, **__: digits())
    monkeypatch.setattr(canife, "accountants", lambda *_: [])
    found = canife.gather(Options(out=tmp_path, seeds=1, device="cpu"), no_progress)
    assert len(trainings) == 1 + len(canife.UNSTATED)
    assert [plan.crafted for plan in trainings] == [True] + [False] * len(canife.UNSTATED)
    again = canife.gather(Options(out=tmp_path, seeds=1, device="cpu"), no_progress)
    assert len(trainings) == 1 + len(canife.UNSTATED)
    assert again["ours"] == pytest.approx(found["ours"], rel=1e-4)


@pytest.mark.full
def test_the_plot_has_every_estimate(found):
    figures = pytest.importorskip("matplotlib.figure")
    figure = figures.Figure()
    canife.draw(figure, found)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert "known-others" in labels
    assert len(labels) == 6


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="COALMINE_DATA_DIR names no folder with the real data")
def test_the_small_comparison_agrees_with_the_paper(tmp_path):
    """CANIFE lies below the lower bound, the bound below the analytical epsilon, and known-others at it."""
    found = canife.gather(Options(out=tmp_path, data_dir=DATA, device="cpu"), no_progress)
    assert all(check.holds for check in canife.checks(found)), canife.checks(found)
    assert (found["rounds"], found["dim"], len(found["ours"])) == (469, 25_450, 3)
