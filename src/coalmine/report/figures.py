"""The figures of the report's page: each with its plot, its caption, and a text alternative."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from coalmine.argument_checks import printable
from coalmine.estimators.gaussians import Gaussian, gaussian_epsilon
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.ladder import RUNGS, Scores
from coalmine.evidence.unknown_round import RUNG as UNKNOWN_ROUND
from coalmine.evidence.unknown_round import LossFit
from coalmine.report import plots
from coalmine.report.sentences import interval_words
from coalmine.report.stored_run import Run
from coalmine.report.svg import draw, one_axes, themed
from coalmine.report.table_rows import all_rows, main_rows, row_of, table_rows
from coalmine.report.trade_off import profile
from coalmine.result.audit_result import AuditResult, Row
from coalmine.result.rows import POOR_FIT
from coalmine.result.words import format_bound, format_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_GAUGES, MOST_PANELS, MOST_GROUPS = 12, 12, 4
AMPLIFIED = (
    "filled triangle right of the claimed ε refutes it with 95 % confidence, if its attacker does not know the rounds. The "
    "claim relies on sampling to hide them, so known-round and known-others may lie beyond it."
)


@dataclass(frozen=True)
class Picture:
    """An SVG for a page. `alt` describes it in words, and `caption` explains how to read it."""

    name: str
    title: str
    svg: str
    alt: str
    caption: str


def make_picture(
    name: str, title: str, paint: "Callable[[Figure], None]", *, height: float, alt: str, caption: str
) -> Picture:
    """Draw a picture."""
    return Picture(name, title, themed(draw(paint, height=height), name, alt), alt, caption)


# One run


def run_pictures(run: Run) -> list[Picture]:
    """Every picture that the run's files allow."""
    result = run.result
    pictures = [ladder_picture(result)] if table_rows(result) else []
    fit = plots.loss_fit(result)
    pictures += [] if fit is None else [loss_picture(result, fit)]
    pictures += profile_pictures(result)
    scores = [group for group in run.shown_scores if group.observed.size >= 2]
    normal = [group for group in scores if group.rung != UNKNOWN_ROUND]  # whose scores follow the accountant's law
    if normal:
        pictures += [densities_picture(result, normal), roc_picture(result, scores), quantiles_picture(result, normal)]
    by_round = (_rounds_picture(run), _training_picture(run), _accuracy_picture(run), _gauges_picture(run))
    pictures += [picture for picture in by_round if picture]
    return pictures


def ladder_picture(result: AuditResult) -> Picture:
    """The ladder: one line for each attacker."""
    description = "; ".join(
        f"{row.name}: ε {format_number(row.epsilon)}{interval_words(row)}, at least {format_bound(row.lower_bound)}, "
        f"at least {format_bound(row.lower_bound_gaussian)} if Gaussian, floor {format_number(row.floor)}"
        for row in table_rows(result)
    )
    analytical = (
        "" if result.analytical_epsilon is None else f" The analytical ε is {format_number(result.analytical_epsilon)}."
    )
    return make_picture(
        "ladder",
        "The ladder of attackers",
        one_axes(plots.ladder, result, legend=3),
        height=1.6 + 0.46 * len(table_rows(result)),
        alt=f"Each attacker's ε as one line. {description}.{analytical}",
        caption="From the weakest attacker to the strongest. A dot inside its grey bar means that nothing was detected; a "
        + (
            "filled triangle right of the claimed ε refutes it with 95 % confidence."
            if result.claim is None or not result.claim.amplified
            else AMPLIFIED
        ),
    )


def loss_picture(result: AuditResult, fit: LossFit) -> Picture:
    """The accountant's law of the privacy loss, predicted and measured."""
    middles = (np.array(fit.edges)[1:] + np.array(fit.edges)[:-1]) / 2
    means = [
        float(middles @ (np.array(counts) / max(sum(counts), 1e-12)))
        for counts in (fit.observed, fit.present, fit.absent)
    ]
    follow = "follow the accountant's law" if fit.p_value >= POOR_FIT else "do not follow the accountant's law"
    test = f"Kolmogorov–Smirnov p {plots.p_value(fit.p_value)}"
    return make_picture(
        "loss",
        "The accountant's law, predicted and measured",
        one_axes(plots.privacy_loss, result, legend=2),
        height=3.4,
        alt="Histogram of the canaries' privacy loss over the accountant's two laws. Mean of the canaries "
        f"{format_number(means[0])}; predicted {format_number(means[1])} when present and {format_number(means[2])} when "
        f"absent. {test}.",
        caption=f"An accountant computes ε from these two curves. The canaries {follow} ({test}). If noise or sampling were "
        "not as claimed, the blue histogram would differ from the orange line.",
    )


def profile_pictures(result: AuditResult) -> list[Picture]:
    """The privacy profile of an attacker who knows the rounds; none if its interval is withheld, or reaches no ε."""
    try:
        mu, found = result.mu, result.privacy_profile()
    except ValueError:
        return []
    delta = result.settings.delta
    ends = [float(gaussian_epsilon(Gaussian(0.0, 1.0), Gaussian(each, 1.0), delta=delta)) for each in (mu.low, mu.high)]
    if not math.isfinite(mu.high):
        return []
    beside = (
        "" if found.analytical is None or mu.analytical is None else f" μ of the stated noise is {mu.analytical:.3g}."
    )
    times = "" if mu.participations is None else f" {mu.participations}×"
    picture = make_picture(
        "profile",
        "δ at every ε",
        one_axes(profile, result, legend=3),
        height=3.4,
        alt=f"δ over ε, on a log axis, for {mu.rung}{times}: μ {mu.mu:.3g}, between {mu.low:.3g} and {mu.high:.3g}. At δ "
        f"{delta:g} ε lies between {format_number(ends[0])} and {format_number(ends[1])}.{beside}",
        caption="Guarantees above the band hold for this attacker, and those below it do not: with 95 % confidence for the "
        "whole curve, if the noise is Gaussian.",
    )
    return [picture]


def densities_picture(result: AuditResult, scores: Sequence[Scores]) -> Picture:
    """Histograms, one panel for each rung. Panels in the same units share their axis."""

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(len(scores), squeeze=False)[:, 0]
        for place, (ax, group) in enumerate(zip(axes, scores, strict=True)):
            plots.densities(ax, group, row_of(result, group))
            ax.set_title(plots.group_name(group))
            ax.grid(visible=False)
            if place < len(scores) - 1 and (group.null is None) == (scores[place + 1].null is None):
                ax.set_xlabel("")
        same_units = [ax for ax, group in zip(axes, scores, strict=True) if group.null is not None]
        limits = [ax.get_xlim() for ax in same_units]
        for ax in same_units:
            ax.set_xlim(min(low for low, _ in limits), max(high for _, high in limits))
        entries = {name: mark for ax in axes for mark, name in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=4)

    description = "; ".join(
        f"{plots.group_name(group)}: observed mean {group.observed.mean():.3g}, std {group.observed.std():.3g}, "
        f"against {group.unobserved.mean():.3g} and {group.unobserved.std():.3g} when absent"
        for group in scores
    )
    return make_picture(
        "densities",
        "Present and absent canaries",
        paint,
        height=0.7 + 1.25 * len(scores),
        alt=f"Histograms of the scores of observed canaries over the law of absent ones. {description}.",
        caption="The further the blue histogram lies from the grey line, the more is given away.",
    )


def roc_picture(result: AuditResult, scores: Sequence[Scores]) -> Picture:
    """All rungs' ROC curves."""
    description = "; ".join(
        f"{plots.group_name(group)}: {plots.true_positive_rate(group, 0.01):.1%} at 1 % and "
        f"{plots.true_positive_rate(group, 0.001):.1%} at 0.1 % false positives"
        for group in scores
    )
    return make_picture(
        "roc",
        "Canaries that an attacker recognises",
        one_axes(plots.roc, scores, epsilon=result.analytical_epsilon, delta=result.settings.delta, legend=3),
        height=4.4,
        alt=f"True positive rate against false positive rate on log axes. {description}.",
        caption="Higher is worse for privacy, above all on the left, where an attacker is nearly certain.",
    )


def quantiles_picture(result: AuditResult, scores: Sequence[Scores]) -> Picture:
    """Q–Q plots, a panel for each rung."""
    rows = (len(scores) + 1) // 2

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(rows, min(len(scores), 2), squeeze=False)
        for place, ax in enumerate(axes.flat):
            if place >= len(scores):
                ax.remove()
                continue
            group = scores[place]
            plots.quantiles(ax, group.observed, row_of(result, group))
            ax.set_title(plots.group_name(group))
            if place < len(scores) - 2:
                ax.set_xlabel("")
            if place % 2:
                ax.set_ylabel("")

    description = "; ".join(
        f"{each.name}: statistic {test.statistic:.2f}, p {plots.p_value(test.p_value)}"
        for each in main_rows(result)
        if each.row is not None and (test := each.row.estimate.anderson_darling)
    )
    return make_picture(
        "quantiles",
        "Are the scores normal?",
        paint,
        height=0.3 + 1.9 * rows,
        alt=f"Quantiles of the scores over normal quantiles. Anderson–Darling: {description}.",
        caption="If the dots lie on the line, the scores are normal, and the estimate and the interval can be trusted. The "
        "largest cosine over all rounds is never normal.",
    )


def _rounds_picture(run: Run) -> Picture | None:
    views = run.views
    if not any(view.present.size for view in views):
        return None
    canary = int(next(view.present[0] for view in views if view.present.size))
    kind = "minus everybody else's updates" if run.views_are_residuals else "as released"
    return make_picture(
        "rounds",
        "Round by round",
        one_axes(plots.rounds, views, canary=canary, legend=2),
        height=3.4,
        alt=f"The score of each present canary in each of {len(views)} rounds, over the range of the unobserved ones.",
        caption=f"Scores with each round's model delta, {kind}. On average a canary stands out only in the rounds in which "
        f"it took part. The line follows canary {canary} through all rounds.",
    )


def _training_picture(run: Run) -> Picture | None:
    estimates = run.estimates
    if not estimates:
        return None
    description = "; ".join(
        f"{rung} {format_number(line[0][1].epsilon)} to {format_number(line[-1][1].epsilon)}"
        for rung, line in estimates.items()
    )
    return make_picture(
        "training",
        "ε during training",
        one_axes(plots.training, estimates, analytical=run.result.analytical_epsilon, legend=2),
        height=3.4,
        alt=f"The estimate of ε from the rounds so far. {description}.",
        caption="The ε that each attacker would have measured if training had stopped there, with its 95 % interval.",
    )


def _gauges_picture(run: Run) -> Picture | None:
    if run.rounds is None:
        return None
    by_round = [gauge for gauge in run.gauges if _has_value_per_round(gauge, len(run.rounds.kept))]
    gauges = sorted(by_round, key=lambda gauge: (gauge.status == "ok", bool(gauge.part)))[:MOST_GAUGES]
    if not gauges:
        return None
    numbers, rows = [item.number for item in run.rounds.kept], (len(gauges) + 1) // 2

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(rows, min(len(gauges), 2), squeeze=False, sharex=True)
        for place, ax in enumerate(axes.flat):
            if place >= len(gauges):
                ax.remove()
                continue
            gauge = gauges[place]
            plots.gauge(ax, gauge.values, numbers, gauge.limits)
            ax.set_title(_shorten_name(gauge.name))
            if place >= len(gauges) - 2:
                ax.tick_params(labelbottom=True)
            else:
                ax.set_xlabel("")

    description = "; ".join(
        f"{_shorten_name(gauge.name)} {format_number(gauge.smallest)} to {format_number(gauge.largest)}, {gauge.status}"
        for gauge in gauges
    )
    return make_picture(
        "gauges",
        "Gauges of the noise",
        paint,
        height=0.3 + 1.35 * rows,
        alt=f"Gauges of the noise over the rounds. {description}.",
        caption="The dashed lines are the limits that an honest run stays within. A length near 1 means the stated noise; "
        "a cosine (repeat) should be near 0. Gauges outside their limits come first.",
    )


def _has_value_per_round(gauge: GaugeResult, rounds: int) -> bool:
    """Whether a gauge has one value for each round, or for each but the first, in the units of its limits."""
    values = gauge.values[~np.isnan(gauge.values)]
    if values.size < 2 or gauge.values.size not in (rounds - 1, rounds):  # some have a value for each pair of rounds
        return False
    low, high = values.min(), values.max()
    if values.size < gauge.values.size:
        slack = 1e-6 * max(abs(gauge.smallest), abs(gauge.largest))
        return bool(gauge.smallest - slack <= low and high <= gauge.largest + slack)
    return math.isclose(low, gauge.smallest) and math.isclose(high, gauge.largest)


def _accuracy_picture(run: Run) -> Picture | None:
    points = run.accuracies
    if len(points) < 2:
        return None
    return make_picture(
        "accuracy",
        "Accuracy",
        one_axes(plots.accuracy, points),
        height=2.6,
        alt=f"Accuracy over the rounds, from {points[0][1]:.1%} to {points[-1][1]:.1%}.",
        caption="Measured on examples that the model has not seen.",
    )


# Several runs


def comparison_pictures(runs: Sequence[Run]) -> list[Picture]:
    """Pictures that compare runs: their ladders, ε against noise, ε against presentations, and densities."""
    pictures = [_ladders_picture(runs)] if all(table_rows(run.result) for run in runs) else []
    noisy = [(run.noise_multiplier, run.result) for run in runs if run.noise_multiplier is not None]
    if len({noise for noise, _ in noisy}) > 1:
        pictures.append(_noise_picture([(noise, result) for noise, result in noisy if noise is not None]))
    bars = presentation_bars(runs)
    if len({bar.presentations for bar in bars}) > 1:
        pictures.append(_presentations_picture(bars))
    rung = shared_rung(runs)
    if rung is not None:
        groups = overlay(runs, rung)
        if len(groups) > 1:
            pictures.append(_overlay_picture(groups, rung))
    return pictures


def _ladders_picture(runs: Sequence[Run]) -> Picture:
    """A small multiple: the ladder of each run, on one axis of ε."""
    shown, results = runs[:MOST_PANELS], [run.result for run in runs[:MOST_PANELS]]
    columns = min(len(shown), 2)
    rows, most = math.ceil(len(shown) / columns), max(len(table_rows(result)) for result in results)

    def paint(figure: "Figure") -> None:
        axes = figure.subplots(rows, columns, squeeze=False)
        for place, ax in enumerate(axes.flat):
            if place >= len(shown):
                ax.remove()
                continue
            plots.ladder(ax, results[place], beside=results)
            names = [row.rung for row in table_rows(results[place])]
            left = [row.rung for row in table_rows(results[place - place % columns])]
            ax.set_yticks(range(len(names)), [""] * len(names) if place % columns and names == left else names)
            ax.set_ylim(most - 0.4, -0.7)
            ax.set_title(_panel_title(place, shown[place]))
            if place < len(shown) - columns:
                ax.set_xlabel("")
        entries = {name: mark for ax in axes.flat for mark, name in zip(*ax.get_legend_handles_labels(), strict=True)}
        figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=3)

    description = "; ".join(
        f"{_panel_title(place, run)}: "
        + ", ".join(f"{row.rung} {format_number(row.epsilon)}" for row in table_rows(run.result))
        for place, run in enumerate(shown)
    )
    more = f" The first {MOST_PANELS} of {len(runs)} runs." if len(runs) > MOST_PANELS else ""
    return make_picture(
        "ladders",
        "The ladder of each run",
        paint,
        height=0.9 + rows * (0.75 + 0.22 * most),
        alt=f"Each attacker's ε, one panel for each run. {description}.",
        caption=f"All panels have the same axis. The dashed line is the claimed ε.{more}",
    )


def _panel_title(place: int, run: Run) -> str:
    verdict = "" if run.result.verdict is None or run.result.claim is None else f": {run.result.verdict.outcome}"
    return f"{place + 1} {_shorten_name(run.name)}{verdict}"


def _noise_picture(runs: Sequence[tuple[float, AuditResult]]) -> Picture:
    description = "; ".join(
        f"at {format_number(noise)}: "
        + ", ".join(f"{row.rung} {format_number(row.epsilon)}" for row in table_rows(result))
        for noise, result in sorted(runs, key=lambda pair: pair[0])
    )
    return make_picture(
        "noise",
        "ε against noise",
        one_axes(plots.noise, runs, legend=3),
        height=4.2,
        alt=f"ε of each attacker against the noise multiplier. {description}.",
        caption="More noise gives less away. A vertical bar is the 95 % interval.",
    )


def presentation_bars(runs: Sequence[Run], *, by_run: bool = False) -> list[plots.Bar]:
    """A bar for each number of presentations, for the strongest rung that all runs have, grouped by noise.

    They are grouped by run if two runs with the same noise have different bars for the same number.
    """
    rung = shared_rung(runs)
    bars: dict[tuple[str, int], plots.Bar] = {}
    collide = False
    for run in sorted(runs, key=lambda run: (run.noise_multiplier is not None, run.noise_multiplier or 0.0)):
        group = "" if run.noise_multiplier is None else f"noise {format_number(run.noise_multiplier)}"
        group = _shorten_name(run.name) if by_run else group
        rows = [row for row in all_rows(run.result) if row.rung == rung]
        grouped = [row for row in rows if row.presentations is not None]
        for row in grouped or rows:
            times = row.presentations or run.result.trainer.presentations
            if times:
                bar = plots.Bar(group, times, row.epsilon, row.lower_bound)
                collide |= bars.setdefault((group, times), bar) != bar
    if collide and not by_run:
        return presentation_bars(runs, by_run=True)
    groups = list(dict.fromkeys(bar.group for bar in bars.values()))[:8]
    return [bar for bar in bars.values() if bar.group in groups]


def _presentations_picture(bars: Sequence[plots.Bar]) -> Picture:
    description = "; ".join(
        f"{bar.group} shown {bar.presentations}×: {format_number(bar.epsilon)}, at least {format_bound(bar.lower_bound)}"
        for bar in bars
    )
    return make_picture(
        "presentations",
        "ε against presentations",
        one_axes(plots.presentations, bars, legend=4),
        height=3.6,
        alt=f"Bars of ε by the number of presentations. {description}.",
        caption="The more often somebody takes part, the more is given away. The red tick is the valid bound.",
    )


def shared_rung(runs: Sequence[Run]) -> str | None:
    """The strongest rung that every run has and whose scores have the same unit in all runs."""
    own_units = ("all-iterates", UNKNOWN_ROUND)
    shared = [rung for rung in RUNGS if rung not in own_units and all(rung in run.result.adversaries for run in runs)]
    return shared[-1] if shared else None


def overlay(runs: Sequence[Run], rung: str) -> dict[str, Scores | Row]:
    """The scores of one rung for each run and group, by short names; where there are none, the row with the fitted law."""
    groups: dict[str, Scores | Row] = {}
    for place, run in enumerate(runs, start=1):
        candidates: list[Scores | Row] = [
            group
            for group in run.few_scores
            if group.rung == rung and group.observed.size >= 10 and np.ptp(group.observed) > 0
        ]
        candidates = candidates or [*run.result[rung].rows]
        if len(runs) > 2 or len(candidates) > MOST_GROUPS:  # one line for each run: its largest group
            candidates = [max(candidates, key=lambda group: (_size(group), group.presentations or 0))]
        for group in candidates:
            times = f" {group.presentations}×" if (group.presentations or 1) > 1 else ""
            groups[f"{place} {_shorten_name(run.name)}{times}"] = group
    return dict(list(groups.items())[:24])


def _size(group: Scores | Row) -> int:
    return group.canaries if isinstance(group, Row) else group.observed.size


def _overlay_picture(groups: dict[str, Scores | Row], rung: str) -> Picture:
    means = {
        name: group.estimate.mean if isinstance(group, Row) else group.observed.mean() for name, group in groups.items()
    }
    description = "; ".join(f"{name}: mean {mean:.3g}" for name, mean in means.items())
    fitted = any(isinstance(group, Row) for group in groups.values())
    return make_picture(
        "overlay",
        f"Densities of {rung}",
        one_axes(plots.overlayed_densities, groups, legend=2),
        height=3 + 0.2 * (len(groups) // 2),
        alt=f"Densities of the observed canaries' scores of each run, over the law of an absent canary. {description}.",
        caption="The grey curve is an absent canary. The further to the right, the more is given away."
        + " Where rounds are missing or too many, the fitted normal law replaces the scores." * fitted,
    )


def _shorten_name(name: str) -> str:
    """A name, shortened to fit into a picture."""
    plain = printable(name)
    return plain if len(plain) <= 24 else f"{plain[:12]}…{plain[-10:]}"
