"""The pictures of docs/gallery, from audits made here: python -m docs.make_gallery [DIRECTORY]."""

import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import coalmine
from coalmine.estimators.planning import plan_audit
from coalmine.report import Run, plots, read_run
from coalmine.report.figures import overlay, presentation_bars
from coalmine.report.svg import STYLE

HERE = Path(__file__).parent / "gallery"
DIM, CLIENTS, CLIP_NORM, DELTA = 10_000, 100, 1.0, 1e-6


def audited_run(
    path: Path, noise_multiplier: float, *, presentations: tuple[int, ...] = (1,), fault: float = 1.0
) -> Run:
    """DP-FedAvg with a drifting signal in the place of real clients; `fault` multiplies the noise that is added."""
    rng = np.random.default_rng(7)
    rounds = 32
    audit = coalmine.Audit(
        DIM, canaries=1_000, seed=b"gallery", delta=DELTA, rounds=rounds, presentations=presentations, directory=path
    )
    initial = rng.normal(size=DIM)
    model, drift = initial.copy(), rng.normal(size=DIM)
    for t in range(1, rounds + 1):
        drift = 0.9 * drift + np.sqrt(1 - 0.81) * rng.normal(size=DIM)
        present = audit.canaries_in_round(t)
        n, std = CLIENTS + len(present), noise_multiplier * CLIP_NORM
        clients = 0.5 * std * drift
        total = clients + audit.updates(present, CLIP_NORM) + fault * std * rng.normal(size=DIM)
        audit.observe_round(t, total / n, present=present, others=clients / n, noise_std=std / n)
        model += total / n
    audit.observe_final(model, initial=initial)
    analytical = coalmine.mechanism_epsilon(noise_multiplier, delta=DELTA, participations=max(presentations))
    assert audit.directory is not None
    result = audit.result(claim=analytical, analytical_epsilon=analytical)
    audit.directory.write_result(result.with_entries(noise_multiplier=noise_multiplier))
    audit.directory.close()
    return read_run(path)


def save(name: str, ax: Axes, out: Path, *, legend: bool = True) -> None:
    """One picture as a small PNG."""
    assert isinstance(ax.figure, Figure)
    if legend:  # below the plot, where it covers nothing
        ax.figure.legend(fontsize=8, loc="outside lower center", ncols=4)
    ax.figure.savefig(out / f"{name}.png", dpi=90, metadata={"Software": None})


def new_axes(height: float = 3.4) -> Axes:
    """An empty picture."""
    return Figure(figsize=(6, height), layout="constrained").add_subplot()


SEES = {  # the attackers of the first page's picture, by what they see
    "final": "the final model",
    "known-round": "every round",
    "known-others": "every round,\nand all others' updates",
}


def verdict_picture(run: Run, end: float) -> Figure:
    """What attackers measure in a run, under its verdict; the claim is a line. The axis ends at `end`."""
    assert run.result.verdict is not None
    assert run.result.claim is not None
    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    ax, claimed = figure.add_subplot(), run.result.claim.epsilon
    color = "#1a7f37" if run.result.verdict.outcome == "PASS" else "#cf222e"
    for place, rung in enumerate(SEES):
        estimate = run.result[rung].headline.estimate
        low, high = estimate.interval
        ax.plot([low, high], [place, place], color=color, lw=6, alpha=0.3, solid_capstyle="butt")
        ax.plot(estimate.epsilon, place, "o", color=color)
        ax.annotate(f"{estimate.epsilon:.1f}", (high, place), (5, 0), textcoords="offset points", va="center")
    ax.axvline(claimed, color="#444444", ls="--", lw=1.5)
    ax.annotate(f" claimed {claimed:.1f}", (claimed, len(SEES) - 0.45), fontsize=9)
    ax.set_title(run.result.verdict.outcome, loc="left", color=color, fontsize=13, fontweight="bold")
    ax.set_xlabel("measured ε, with its 95 % interval")
    ax.set_xlim(-0.2, end)
    ax.set_ylim(len(SEES) - 0.3, -0.6)
    ax.set_yticks(range(len(SEES)), [f"sees {text}" for text in SEES.values()])
    return figure


def make_gallery(out: Path) -> None:
    """Every picture, one file each."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home, mpl.rc_context(STYLE | {"savefig.facecolor": "white"}):
        honest = audited_run(Path(home) / "honest", 1.0)
        halved = audited_run(Path(home) / "halved", 1.0, fault=0.5)
        grouped = [
            audited_run(Path(home) / f"noise {z:g}", z, presentations=(1, 2, 4, 8)) for z in (0.5, 1.0, 2.0, 4.0)
        ]
        for name, run in (("ladder", honest), ("ladder-halved-noise", halved)):
            save(name, plots.ladder(new_axes(), run.result), out)
        end = 1.12 * halved.result["known-others"].headline.estimate.interval[1]
        for name, run in (("pass", honest), ("violation", halved)):
            verdict_picture(run, end).savefig(out / f"{name}.png", dpi=110, metadata={"Software": None})
        known = honest.scores[-1]
        last = honest.result["known-others"].headline
        save("densities", plots.densities(new_axes(2.6), known, last), out)
        save("quantiles", plots.quantiles(new_axes(), known.observed, last), out, legend=False)
        analytical = honest.result.analytical_epsilon
        save("roc", plots.roc(new_axes(4.2), honest.scores, epsilon=analytical, delta=DELTA), out)
        seen = honest.views
        save("rounds", plots.rounds(new_axes(), seen, canary=int(seen[4].present[0])), out)
        save("training", plots.training(new_axes(), honest.estimates, analytical=analytical), out)
        save("noise", plots.noise(new_axes(), [(run.noise_multiplier or 0.0, run.result) for run in grouped]), out)
        save("presentations", plots.presentations(new_axes(), presentation_bars(grouped)), out)
        save("overlay", plots.overlayed_densities(new_axes(), overlay(grouped, "known-others")), out)
        plans = [plan_audit(count, dim=DIM, delta=DELTA) for count in (100, 300, 1_000, 3_000)]
        save("plan", plots.plan(new_axes(), plans), out)


if __name__ == "__main__":
    make_gallery(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
