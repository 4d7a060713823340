"""Plots on a given Axes show the values of the result and the scores."""

import math
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from runs import make_run

from coalmine import CosineNull, Gaussian
from coalmine.estimators.planning import plan_audit
from coalmine.evidence.ladder import Scores
from coalmine.evidence.views import views
from coalmine.report import plots, read_run
from coalmine.report.svg import needs_matplotlib, save_plot
from coalmine.report.table_rows import all_rows, table_rows
from coalmine.result.words import format_measured


@pytest.fixture
def ax():
    return Figure().add_subplot()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read_run(make_run(tmp_path_factory.mktemp("plots") / "run", presentations=(1, 2)))


def normal_scores(mean, *, count=20_000, null=None):
    rng = np.random.default_rng(0)
    return Scores(rung="known-round", observed=rng.normal(mean, 1, count), unobserved=rng.normal(size=count), null=null)


@pytest.mark.parametrize("null", [Gaussian(0.0, 1.0), CosineNull(100_000, scale=math.sqrt(100_000)), None])
@pytest.mark.parametrize("rate", [0.01, 0.001])
def test_true_positive_rates_match_shifted_normals(null, rate):
    """Pr(N(2, 1) > z) at the threshold with Pr(N(0, 1) > z) = rate: 0.3720 and 0.1378."""
    expected = {0.01: 0.37203, 0.001: 0.13783}[rate]
    measured = plots.true_positive_rate(normal_scores(2.0, null=null), rate)
    spread = math.sqrt(expected * (1 - expected) / 20_000)
    threshold = (
        0.0 if null is not None else 0.25 * math.sqrt(1 / (20_000 * rate))
    )  # sampling error of the unobserved scores
    assert abs(measured - expected) < 4 * (spread + threshold * 0.3)


def test_the_roc_curve_of_guessing_is_the_diagonal():
    log_fpr, tpr = plots.rates(normal_scores(0.0, null=Gaussian(0.0, 1.0)))
    assert len(tpr) <= plots.MOST_POINTS
    inside = tpr > 0.01
    np.testing.assert_allclose(np.exp(log_fpr[inside]), tpr[inside], rtol=0.3)


def test_the_ladder_draws_one_line_for_each_attacker(ax, run):
    plots.ladder(ax, run.result)
    rows = table_rows(run.result)
    assert len({row.rung for row in rows}) == len(rows) < len(all_rows(run.result))
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        f"{row.name}: {format_measured(row.epsilon, row.interval)[0]}" for row in rows
    ]
    marks = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in marks] == [row.epsilon for row in rows]
    assert ax.get_xscale() == "linear"


@pytest.mark.parametrize(
    ("values", "scale"), [([0.1, 5.0], "linear"), ([0.1, 300.0], "symlog"), ([math.inf, 2.0], "linear")]
)
def test_widely_spread_epsilons_get_a_log_axis(ax, values, scale):
    end = plots.epsilon_axis(ax, values, axis="x")
    assert ax.get_xscale() == scale
    assert math.isfinite(end)
    assert end > max(value for value in values if math.isfinite(value))


def test_every_plot_draws_on_the_axes_it_is_given(run):
    views_seen = list(views(run.rounds, run.result.settings))
    bars = [plots.Bar("noise 1", 1, 3.0, 1.0), plots.Bar("noise 1", 2, math.inf, 2.0)]
    scores = run.scores[0]
    row = run.result[scores.rung].headline
    calls = [
        (plots.densities, scores, row),
        (plots.densities, scores),
        (plots.overlayed_densities, {"a": scores, "b": row}),
        (plots.quantiles, scores.observed, row),
        (plots.roc, run.scores),
        (plots.rounds, views_seen),
        (plots.gauge, run.gauges[0].values, run.rounds.numbers, run.gauges[0].limits),
        (plots.accuracy, run.accuracies),
        (plots.noise, [(1.0, run.result), (2.0, run.result)]),
        (plots.presentations, bars),
        (plots.plan, [plan_audit(count, dim=10_000, delta=1e-6) for count in (100, 1_000)]),
    ]
    for plot, *arguments in calls:
        figure = Figure()
        ax = figure.add_subplot()
        assert plot(ax, *arguments) is ax
        assert ax.has_data()
        figure.canvas.draw()


def test_a_smoothed_density_integrates_to_one():
    grid = np.linspace(-8, 8, 401)
    density = plots.smooth_density(np.random.default_rng(1).normal(size=5_000), grid)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(density, plots.normal_density(grid, 0.0, 1.0), atol=0.03)


def test_a_plot_can_be_saved_to_a_file(run, tmp_path):
    for name, start in (("ladder.png", b"\x89PNG"), ("ladder.svg", b"<?xml"), ("ladder.pdf", b"%PDF")):
        save_plot(tmp_path / name, plots.ladder, run.result)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(ValueError, match=r"must end in .png, .svg or .pdf"):
        save_plot(tmp_path / "ladder.doc", plots.ladder, run.result)


def test_importing_the_report_loads_no_matplotlib():
    code = "import sys, coalmine.report, coalmine.report.page; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_without_matplotlib_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'coalmine\[report\]'"):
        needs_matplotlib()


@pytest.mark.parametrize("value", [0.0, 1.0, -3e60, 1e-200])
def test_equal_scores_have_bins_of_some_width(value):
    """A log that was edited can have the same score for every canary."""
    low, high = plots._span([np.full(5, value), np.full(3, value)])
    assert (np.diff(np.linspace(low, high, 201)) > 0).all()
