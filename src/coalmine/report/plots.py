"""The report's plots as functions, also for notebooks. Each draws on the given matplotlib Axes and returns it.

They take an `AuditResult`, its rows, or attributes of a `Run` (`read_run`):

    import matplotlib.pyplot as plt
    from coalmine.report import plots, read_run

    run = read_run("runs/digits-1")
    figure, ax = plt.subplots()
    plots.ladder(ax, run.result)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtri

from coalmine.argument_checks import Floats
from coalmine.estimators.bounds import is_law, log_upper_tail
from coalmine.estimators.gaussians import Gaussian
from coalmine.evidence.ladder import RUNGS, Scores
from coalmine.evidence.unknown_round import RUNG as UNKNOWN_ROUND
from coalmine.evidence.unknown_round import LossFit
from coalmine.evidence.views import View
from coalmine.report.table_rows import TableRow, table_rows
from coalmine.result.audit_result import AuditResult, Row
from coalmine.result.words import format_measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from coalmine.estimators.planning import Plan

# The report's page replaces each colour on a dark background.
OBSERVED, FITTED, NULL = "#1d63b8", "#b45309", "#5f6b7a"
BOUND, ANALYTICAL, CLAIM, FLOOR, ALARM = "#147a3d", "#7a3fc4", "#b3246b", "#8b95a3", "#c62828"
SERIES = (OBSERVED, FITTED, BOUND, ANALYTICAL, CLAIM, "#0e7c86", "#8a6d00", NULL)
STROKES = ("-", "--", ":")
GROUP_STROKES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (3, 1.5, 1, 1.5)), (0, (1, 1.5)))
BELOW = 0.24  # of a row of the ladder: the bounds lie below the estimate, and neither hides the other
MOST_POINTS = 400  # of one line or scatter plot


@dataclass(frozen=True)
class Bar:
    """One bar of `presentations`: its group, its number of presentations, the ε and the valid bound."""

    group: str
    presentations: int
    epsilon: float
    lower_bound: float


def ladder(ax: "Axes", result: AuditResult, *, beside: Sequence[AuditResult] = ()) -> "Axes":
    """One line for each adversary: estimate, interval, valid bound and floor, with the analytical and the claimed ε.

    If groups of canaries took part in different numbers of rounds, the line shows the headline's group. The axis has room
    for the results `beside` this one.
    """
    rows, analytical = table_rows(result), result.analytical_epsilon
    claimed = None if result.claim is None else result.claim.epsilon
    values: list[float | None] = []
    for each in beside or (result,):
        values += [each.analytical_epsilon, None if each.claim is None else each.claim.epsilon]
        for row in table_rows(each):
            values += [row.epsilon, row.lower_bound, row.lower_bound_gaussian, row.floor, *(row.interval or ())]
    right = epsilon_axis(ax, [value for value in values if value is not None], axis="x")
    for place, row in enumerate(rows):
        first = place == 0
        if not math.isnan(row.floor):
            label = _label_once("floor", first)
            ax.barh(place, min(row.floor, right), height=0.8, color=FLOOR, alpha=0.25, lw=0, label=label)
        if row.interval is not None:
            low, high = (min(end, right) for end in row.interval)
            ax.plot([low, high], [place, place], color=OBSERVED, lw=5, alpha=0.35, solid_capstyle="butt",
                    label=_label_once("95 % interval", not any(other.interval for other in rows[:place])))  # fmt: skip
        if not math.isnan(row.lower_bound):
            label = _label_once("valid bound", first)
            ax.plot(min(row.lower_bound, right), place + BELOW, marker=9, ms=9, color=BOUND, ls="", label=label)
        if row.lower_bound_gaussian is not None:
            label = _label_once("bound if Gaussian", all(other.lower_bound_gaussian is None for other in rows[:place]))
            ax.plot(min(row.lower_bound_gaussian, right), place + BELOW, marker=9, ms=9, mfc="none", color=BOUND, ls="",
                    label=label)  # fmt: skip
        ax.plot(min(row.epsilon, right), place, "o", ms=6, color=OBSERVED, label=_label_once("estimate", first))
    if analytical is not None and math.isfinite(analytical):
        ax.axvline(analytical, color=ANALYTICAL, lw=1.5, label="analytical ε")
    if claimed is not None:
        ax.axvline(claimed, color=CLAIM, lw=1.5, ls="--", label="claimed ε")
    ax.set_yticks(range(len(rows)), [_with_epsilon(row) for row in rows])
    ax.set_ylim(len(rows) - 0.4, -0.7)  # the weakest attacker on top
    ax.set_xlabel("ε")
    return ax


def _with_epsilon(row: TableRow) -> str:
    """An attacker's name with its estimate, beside the axis, where no line crosses the number."""
    return row.name if math.isnan(row.epsilon) else f"{row.name}: {format_measured(row.epsilon, row.interval)[0]}"


def epsilon_axis(ax: "Axes", values: Sequence[float], *, axis: str) -> float:
    """Set up an axis of epsilons and return its end, where ∞ is drawn.

    If the values span a wide range, the axis is logarithmic above 1.
    """
    finite = [value for value in values if math.isfinite(value)]
    top = max([*finite, 1.0])
    wide = top > 30 and min([value for value in finite if value > 0.01], default=top) < top / 15
    end = top * (2.5 if wide else 1.12)
    setter = ax.set_xscale if axis == "x" else ax.set_yscale
    if wide:
        setter("symlog", linthresh=1.0)
        ticks = [0.0, 1.0]
        while ticks[-1] < end:
            ticks.append(ticks[-1] * (3 if str(ticks[-1])[0] == "1" else 10 / 3))
        marks = [round(tick) for tick in ticks if tick <= end]
        (ax.set_xticks if axis == "x" else ax.set_yticks)(marks, [f"{mark:,}" for mark in marks])
        (ax.xaxis if axis == "x" else ax.yaxis).set_minor_locator(_no_ticks())
    (ax.set_xlim if axis == "x" else ax.set_ylim)(0, end)
    return end


def densities(ax: "Axes", scores: Scores, row: Row | None = None) -> "Axes":
    """Histogram of observed scores over the null, with the normal law fitted to them.

    `row` is the row of the result for these scores. Without it, the law is fitted here.
    """
    low, high = _span([scores.observed, scores.unobserved])
    edges, grid = np.linspace(low, high, 51), np.linspace(low, high, 201)
    present, _ = np.histogram(scores.observed, edges, density=True)
    ax.stairs(present, edges, fill=True, color=OBSERVED, alpha=0.3, lw=0, label="observed")
    if scores.null is None:
        absent, _ = np.histogram(scores.unobserved, edges, density=True)
        ax.stairs(absent, edges, color=NULL, lw=1.2, label="unobserved")
    else:
        ax.plot(grid, law_density(scores.null, grid), color=NULL, lw=1.5, label="null")
    mean, std = float(scores.observed.mean()), float(scores.observed.std())
    if row is not None:
        mean, std = row.estimate.mean, row.estimate.std
    ax.plot(grid, normal_density(grid, mean, std), color=FITTED, lw=1.5, ls=(0, (4, 2)), label="fitted")
    ax.set_xlim(low, high)
    ax.set_yticks([])
    own_units = "largest cosine over rounds" if scores.rung in RUNGS else "score"
    ax.set_xlabel(own_units if scores.null is None else "score, in null stds")
    return ax


def overlayed_densities(ax: "Axes", groups: Mapping[str, Scores | Row]) -> "Axes":
    """Densities of the observed scores of several runs or groups, by label, over one null (Figure 1 of the paper).

    For a row of a result, its fitted normal law is drawn.
    """
    ends = [
        _span([group.observed])
        if isinstance(group, Scores)
        else (group.estimate.mean - 4 * group.estimate.std, group.estimate.mean + 4 * group.estimate.std)
        for group in groups.values()
    ]
    grid = np.linspace(min([-3.5, *(low for low, _ in ends)]), max([3.5, *(high for _, high in ends)]), 201)
    ax.plot(grid, normal_density(grid, 0.0, 1.0), color=NULL, lw=2, label="null")
    for place, (label, group) in enumerate(groups.items()):
        colour, stroke = series(place)
        if isinstance(group, Row):
            density = normal_density(grid, group.estimate.mean, group.estimate.std)
        else:
            density = smooth_density(group.observed, grid)
        ax.plot(grid, density, color=colour, ls=stroke, lw=1.4, label=label)
    ax.set_yticks([])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("score, in null stds")
    return ax


def privacy_loss(ax: "Axes", result: AuditResult) -> "Axes":
    """Histogram of the canaries' privacy loss with the accountant's two predicted laws (rung unknown-round).

    If noise and sampling are as claimed, the histogram follows the law for participants. Raises ValueError if the result
    does not have this rung.
    """
    fit = loss_fit(result)
    if fit is None:
        raise ValueError("this result has no rung unknown-round: pass the sampling scheme to the audit (sampling=…)")
    edges, observed = np.array(fit.edges), np.array(fit.observed, dtype=np.float64)
    widths = np.diff(edges)
    ax.stairs(observed / max(observed.sum(), 1.0) / widths, edges, fill=True, color=OBSERVED, alpha=0.3, lw=0,
              label="canaries, measured")  # fmt: skip
    ax.stairs(np.array(fit.present) / widths, edges, color=FITTED, lw=1.5, label="taking part, predicted")
    ax.stairs(np.array(fit.absent) / widths, edges, color=NULL, lw=1.5, ls=(0, (4, 2)), label="absent, predicted")
    if result.claim is not None and result.claim.amplified and edges[0] < result.claim.epsilon < edges[-1]:
        ax.axvline(result.claim.epsilon, color=CLAIM, lw=1.5, ls="--", label="claimed ε")
    text = f"Kolmogorov–Smirnov p {p_value(fit.p_value)}"
    ax.set_xlim(edges[0], edges[-1])
    ax.set_ylim(bottom=0)
    ax.set_yticks([])
    ax.set_xlabel(f"privacy loss; {text}")
    return ax


def loss_fit(result: AuditResult) -> LossFit | None:
    """The fit of the canaries to the accountant's law; None if the result has no rung unknown-round."""
    adversary = result.adversaries.get(UNKNOWN_ROUND)
    return None if adversary is None else adversary.headline.fit


def quantiles(ax: "Axes", observed: Floats, row: Row | None = None) -> "Axes":
    """Q–Q plot of scores against a normal law: a straight line if they are normal.

    With `row`, the row of the result for these scores, the plot also shows the Anderson–Darling statistic.
    """
    ordered = np.sort(observed)
    places = spread(ordered.size)
    standard = ndtri((places + 0.5) / ordered.size)
    mean, std = float(ordered.mean()), float(ordered.std())
    ends = np.array([standard[0], standard[-1]])
    ax.plot(ends, mean + std * ends, color=FITTED, lw=1.2)
    ax.plot(standard, ordered[places], ".", ms=3, color=OBSERVED)
    if row is not None:
        test = row.estimate.anderson_darling
        text = f"A² = {test.statistic:.2f}, p {p_value(test.p_value)}"
        colour = ALARM if test.p_value < 0.01 else None
        ax.grid(visible=False)
        ax.text(0.97, 0.05, text, transform=ax.transAxes, ha="right", color=colour)  # where no point can lie
    ax.set_xlabel("normal quantile")
    ax.set_ylabel("score")
    return ax


def roc(ax: "Axes", rungs: Sequence[Scores], *, epsilon: float | None = None, delta: float = 0.0) -> "Axes":
    """ROC curves on log axes: true positive rate against false positive rate, one curve for each group of scores.

    With `epsilon`, the plot also shows the largest true positive rate that (ε, δ) differential privacy allows.
    """
    least = 1e-4
    groups: dict[str, int] = {}
    for scores in rungs:
        log_fpr, tpr = rates(scores)
        colour, _ = series(RUNGS.index(scores.rung) if scores.rung in RUNGS else len(RUNGS))
        stroke = GROUP_STROKES[groups.setdefault(scores.rung, 0) % len(GROUP_STROKES)]
        groups[scores.rung] += 1
        inside = log_fpr >= math.log(least) - 2
        ax.plot(np.exp(log_fpr[inside]), tpr[inside], color=colour, ls=stroke, lw=1.4, label=group_name(scores))
    grid = np.geomspace(least, 1, 100)
    ax.plot(grid, grid, color=NULL, lw=1, ls=":", label="guessing")
    if epsilon is not None and epsilon < 500:
        ax.plot(grid, np.minimum(delta + np.exp(epsilon) * grid, 1), color=ANALYTICAL, lw=1.2, ls="--",
                label=f"most at ε = {epsilon:.3g}")  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(least, 1)
    ax.set_ylim(1e-3, 1.15)
    for axis, marks in ((ax.xaxis, (1e-4, 1e-3, 1e-2, 0.1, 1)), (ax.yaxis, (1e-3, 1e-2, 0.1, 1))):
        axis.set_ticks(list(marks), [_format_rate(mark) for mark in marks])
        axis.set_minor_locator(_no_ticks())
    ax.set_xlabel("false positive rate")
    ax.set_ylabel("true positive rate")
    return ax


def rates(scores: Scores) -> tuple[Floats, Floats]:
    """Log false positive rate and true positive rate with each observed score as threshold, thinned for a plot."""
    ordered = np.sort(scores.observed)[::-1]
    places = spread(ordered.size)
    log_fpr = _log_fpr(scores, ordered[places])
    return log_fpr, (places + 1) / ordered.size


def true_positive_rate(scores: Scores, false_positive_rate: float) -> float:
    """The share of observed canaries that a test with this false positive rate detects."""
    return float(np.mean(_log_fpr(scores, scores.observed) <= math.log(false_positive_rate)))


def _log_fpr(scores: Scores, thresholds: Floats) -> Floats:
    law = scores.bound_null if scores.rung == UNKNOWN_ROUND else scores.null
    if law is not None and is_law(law):
        return log_upper_tail(law, thresholds)
    ordered = np.sort(scores.unobserved)
    above = ordered.size - np.searchsorted(ordered, thresholds)
    with np.errstate(divide="ignore"):
        return np.log(above / ordered.size)


def rounds(ax: "Axes", seen: Sequence[View], *, canary: int | None = None) -> "Axes":
    """Scores by round: a dot for each canary that took part, over the central 90 % of the unobserved canaries.

    `seen` are the views of the rounds. `canary` is the index of a canary to follow through all rounds; rings mark the
    rounds in which it took part.
    """
    sampled = [seen[place] for place in spread(len(seen))]
    numbers = [view.number for view in sampled]
    bands = np.array([np.quantile(view.unobserved, [0.05, 0.95]) for view in sampled])
    ax.fill_between(numbers, bands[:, 0], bands[:, 1], color=NULL, alpha=0.2, lw=0, label="9 in 10 unobserved")
    x = np.concatenate([np.full(view.present.size, view.number) for view in seen])
    y = np.concatenate([view.observed[view.present] for view in seen])
    kept = spread(x.size, most=2 * MOST_POINTS)
    ax.plot(x[kept], y[kept], ".", ms=3, color=OBSERVED, alpha=0.6, label="a canary's presentation")
    if canary is not None:
        ax.plot(numbers, [view.observed[canary] for view in sampled], color=FITTED, lw=0.8, label=f"canary {canary}")
        rings = [view for view in seen if canary in view.present]
        ax.plot([view.number for view in rings], [view.observed[canary] for view in rings], "o", ms=7, mfc="none",
                color=FITTED)  # fmt: skip
    _round_axis(ax)
    ax.set_ylabel("score, in null stds")
    return ax


def training(ax: "Axes", found: Mapping[str, Sequence[tuple[int, Any]]], *, analytical: float | None = None) -> "Axes":
    """Epsilon during training. `found` has, for each rung, pairs of a round and an EpsilonEstimate (`Run.estimates`)."""
    values = [estimate.epsilon for points in found.values() for _, estimate in points]
    values += [line[-1][1].interval.high for line in found.values() if line[-1][1].interval]  # earlier ones are wider
    right = epsilon_axis(ax, [*values, *([analytical] if analytical is not None else [])], axis="y")
    for rung, points in found.items():
        colour, stroke = series(RUNGS.index(rung) if rung in RUNGS else len(RUNGS))
        numbers = [number for number, _ in points]
        ax.plot(numbers, [min(estimate.epsilon, right) for _, estimate in points], ls=stroke, color=colour, lw=1.5,
                marker="o", ms=4, label=rung)  # fmt: skip
        if all(estimate.interval for _, estimate in points):
            low, high = ([min(estimate.interval[end], right) for _, estimate in points] for end in (0, 1))
            ax.fill_between(numbers, low, high, color=colour, alpha=0.12, lw=0)
    if analytical is not None and math.isfinite(analytical):
        ax.axhline(analytical, color=ANALYTICAL, lw=1.2, ls="--", label="analytical ε")
    _round_axis(ax)
    ax.set_ylabel("ε so far")
    return ax


def gauge(ax: "Axes", values: Floats, numbers: Sequence[int], limits: tuple[float, float]) -> "Axes":
    """One gauge over the rounds, with the limits that an honest run stays within. A NaN is a round without a value."""
    known = ~np.isnan(values)
    x, y = np.array(list(numbers)[-len(values) :])[known], values[known]
    low, high = limits
    places, outside = spread(y.size), (y < low) | (y > high)
    ax.plot(x[places], y[places], color=OBSERVED, lw=1, marker="." if y.size < 60 else "", ms=4)
    ax.plot(x[outside][:MOST_POINTS], y[outside][:MOST_POINTS], "o", ms=3, color=ALARM)
    for limit in (low, high):
        if math.isfinite(limit) and limit != 0:
            ax.axhline(limit, color=NULL, lw=1, ls="--")
    _round_axis(ax, most=4)
    return ax


def accuracy(ax: "Axes", points: Sequence[tuple[int, float]]) -> "Axes":
    """Accuracy over the rounds, from pairs of a round and an accuracy."""
    kept = [points[place] for place in spread(len(points))]
    ax.plot(*zip(*kept, strict=True), color=OBSERVED, lw=1.5, marker="o" if len(kept) < 60 else "", ms=3.5)
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    _round_axis(ax)
    ax.set_ylabel("accuracy")
    return ax


def noise(ax: "Axes", runs: Sequence[tuple[float, AuditResult]]) -> "Axes":
    """Epsilon against the noise multiplier, one line for each rung. `runs` are pairs of a noise multiplier and a result."""
    ordered = sorted(runs, key=lambda pair: pair[0])
    rows = [(z, row) for z, result in ordered for row in table_rows(result)]
    lines = [(z, result.analytical_epsilon) for z, result in ordered if result.analytical_epsilon is not None]
    right = epsilon_axis(ax, [*(row.epsilon for _, row in rows), *(value for _, value in lines)], axis="y")
    names = dict.fromkeys(row.rung for _, row in rows)
    for rung in names:
        points = [(z, row) for z, row in rows if row.rung == rung]
        colour, stroke = series(RUNGS.index(rung) if rung in RUNGS else len(RUNGS))
        x = [z for z, _ in points]
        if len(set(x)) < len(x):
            stroke = ""  # the runs differ in more than their noise, so no line joins them
        ax.plot(x, [min(row.epsilon, right) for _, row in points], color=colour, ls=stroke, marker="o", ms=4, lw=1.4,
                label=rung)  # fmt: skip
        for z, row in points:
            if row.interval is not None:
                ax.plot([z, z], [min(end, right) for end in row.interval], color=colour, alpha=0.4, lw=2.5)
    if len({z for z, _ in lines}) == len(lines) > 0:
        ax.plot([z for z, _ in lines], [min(value, right) for _, value in lines], color=ANALYTICAL, ls="--", lw=1.2,
                label="analytical ε")  # fmt: skip
    ax.set_xlabel("noise multiplier")
    ax.set_ylabel("ε")
    return ax


def presentations(ax: "Axes", bars: Sequence[Bar]) -> "Axes":
    """Epsilon against the number of presentations, with the valid bound as a tick (the paper's bar figure)."""
    groups = list(dict.fromkeys(bar.group for bar in bars))
    counts = sorted({bar.presentations for bar in bars})
    right = epsilon_axis(ax, [bar.epsilon for bar in bars], axis="y")
    width = 0.8 / len(counts)
    for offset, count in enumerate(counts):
        colour, _ = series(offset)
        equal = [bar for bar in bars if bar.presentations == count]
        x = [groups.index(bar.group) + (offset - (len(counts) - 1) / 2) * width for bar in equal]
        heights = [min(bar.epsilon, right) for bar in equal]
        ax.bar(x, heights, width * 0.9, color=colour, alpha=0.6, label=f"shown {count}×")
        for centre, bar in zip(x, equal, strict=True):
            ends = [centre - width * 0.4, centre + width * 0.4]
            ax.plot(ends, [min(bar.lower_bound, right)] * 2, color=ALARM, lw=2, solid_capstyle="butt")
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel("ε")
    return ax


def plan(ax: "Axes", plans: "Sequence[Plan]") -> "Axes":
    """Power against the number of canaries: the smallest detectable ε, the floor, and the ceiling of the lower bound."""
    ordered = sorted(plans, key=lambda each: each.canaries)
    counts = [each.canaries for each in ordered]
    lines = (
        ("smallest detectable ε", OBSERVED, "-", [each.detectable for each in ordered]),
        ("floor", NULL, ":", [each.floor.q95 for each in ordered]),
        ("ceiling of the bound", BOUND, "--", [each.ceiling for each in ordered]),
    )
    for label, colour, stroke, values in lines:
        ax.plot(counts, values, color=colour, ls=stroke, marker="o", ms=4, lw=1.5, label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(counts, [f"{count:,}" for count in counts])
    ax.xaxis.set_minor_locator(_no_ticks())
    marks = [mark for mark in (0.03, 0.1, 0.3, 1, 3, 10, 30, 100) if ax.get_ylim()[0] <= mark <= ax.get_ylim()[1]]
    ax.set_yticks(marks, [f"{mark:g}" for mark in marks])
    ax.yaxis.set_minor_locator(_no_ticks())
    ax.set_xlabel("canaries")
    ax.set_ylabel("ε")
    return ax


def series(place: int) -> tuple[str, str]:
    """Colour and stroke of the line with this index. They repeat after 24 lines."""
    return SERIES[place % len(SERIES)], STROKES[place // len(SERIES) % len(STROKES)]


def group_name(scores: Scores) -> str:
    """A rung's name, followed by the number of presentations if the scores are grouped by it."""
    return scores.rung if scores.presentations is None else f"{scores.rung} {scores.presentations}×"


def law_density(law: Any, grid: Floats) -> Floats:
    """The density of a null that is known in closed form."""
    return normal_density(grid, law.mean, law.std) if isinstance(law, Gaussian) else np.asarray(law.pdf(grid))


def smooth_density(values: Floats, grid: Floats) -> Floats:
    """A kernel density estimate from at most 400 of the values. They must not all be equal."""
    from scipy.stats import gaussian_kde  # imported on use: it takes half a second

    kept = np.sort(values)[np.linspace(0, values.size - 1, min(values.size, MOST_POINTS)).round().astype(int)]
    density: Floats = gaussian_kde(kept)(grid)
    return density


def normal_density(grid: Floats, mean: float | Floats, std: float) -> Floats:
    """The density of a normal distribution."""
    return np.exp(-0.5 * ((grid - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))


def p_value(value: float) -> str:
    """A p-value for plots, with its relation: "= 0.03" or "< 0.001"."""
    return "< 0.001" if value < 0.001 else f"= {value:.2g}"


def spread(count: int, most: int = MOST_POINTS) -> Any:
    """At most `most` indices out of `count`: all near both ends, and evenly spaced ones between them."""
    if count <= most:
        return np.arange(count)
    ends = most // 8
    middle = np.linspace(ends, count - 1 - ends, most - 2 * ends).round().astype(int)
    return np.unique(np.concatenate([np.arange(ends), middle, np.arange(count - ends, count)]))


def _span(arrays: Sequence[Floats]) -> tuple[float, float]:
    low, high = min(float(array.min()) for array in arrays), max(float(array.max()) for array in arrays)
    # a hundred bins of scores that are nearly equal must still have a width
    margin = max(0.03 * (high - low), 1e-9 * max(abs(low), abs(high)), 1e-12)
    return low - margin, high + margin


def _round_axis(ax: "Axes", most: int = 6) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(most, integer=True))
    ax.set_xlabel("round")


def _label_once(label: str, first: bool) -> str:
    return label if first else "_nolegend_"


def _format_rate(value: float) -> str:
    return f"{value:.4g}" if value >= 1e-3 else "0.0001"


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()
