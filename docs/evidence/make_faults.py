"""docs/evidence/faults.md and its pictures, from runs made here: python -m docs.evidence.make_faults."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from coalmine.evidence.faults import FAULTS, Fault
from coalmine.evidence.gauges.gauge import GaugeResult
from coalmine.evidence.gauges.length import Length
from coalmine.known_faults import likely_faults
from coalmine.report import plots
from coalmine.report.svg import STYLE
from coalmine.simulation.faults import Trial, evidence, selftest_config, try_fault

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = f"""# Faults, and what catches them

An auditor is only worth the faults that it was shown to catch. Does the audit catch each fault of
this page, and does it name the fault rightly?

`coalmine selftest` puts each fault into a real training loop and lets the audit judge the claim.
The loop trains on scikit-learn's digits: 200 clients, d = 9,610, ten rounds, 1,000 canaries, noise multiplier NOISE.
The claim is the analytical ε, CLAIM at delta 1e-6. The real clients' part of a model delta is longer than its noise.

    python -m studies.faults
    python -m studies.faults --write-docs        # only writes the table
    python -m docs.evidence.make_faults          # makes the pictures and the text of this page

The loop has no branch for faults: each fault replaces one of its steps (`coalmine.simulation.faults`). Noise in a
subspace runs for 30 rounds, because it shows only by comparing many of them. Two faults are there a second time, with
canaries that cannot detect them. Nothing is raised there, and the reason is given.

A fault is *caught* if a rung or a gauge speaks against the claim and the verdict is not PASS.
There are two ways:

* **VIOLATION**: the claim is refuted. A rung measured more than the claimed ε, or a gauge proves that too little
  noise is left.
* **UNDERPOWERED**, with a gauge named: something is wrong, but it does not prove a larger ε. Uniform noise of the
  right length is an example. The accounting does not hold for it, so no PASS is possible, yet the canaries measure no
  excess.

A fault is *named* if `coalmine.known_faults` finds it likely from the result alone, or finds one with the same meaning
likely. `coalmine report` does the same.

## How often each is caught

{BEGIN}
{END}

`signal` is the length of the real clients' part of a model delta over that of the claimed noise, the smallest of all
rounds and runs.

With `others`, the audit catches and names every fault that it can detect in at least 95 % of runs,
or the study fails. Without `others` it catches fewer. A signal that long hides the noise from the noise gauge and
most of a canary from known-round. The gauges of the noise's law need `others` too. The difference gauge still detects
missing noise here, because the signal is much the same from one round to the next.

Faults that are not on this page may go unnoticed. [Limits](../explanation/limits.md) lists what an audit cannot see.

## What each looks like

One run of each (`coalmine selftest --fault NAME`; NAME is that of the picture). A picture has the ladder on the left,
with the claim as a vertical line. In the middle are the gauges of lengths, beside what an honest run keeps to; on the
right are those of the noise's law, each over its limit. Blue is in order, red is evidence of less noise, orange is a
warning.

| a fault and what it does | verdict | rungs and gauges that see it | named as likely | remedy | picture |
|---|---|---|---|---|---|
"""
COLOURS = {"ok": "#2166ac", "low": "#b2182b", "warning": "#d6604d"}


def picture(trial: Trial) -> Figure:
    """The ladder, the gauges that are a ratio to the claimed noise, and the gauges of the noise's law."""
    figure = Figure(figsize=(12, 3.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[3, 2, 2])
    plots.ladder(left, trial.result)
    gauges = [gauge for gauge in trial.result.gauges if gauge.statistic is not Length.DILUTION]
    lengths = [gauge for gauge in gauges if gauge.gauge.measures_length]
    _ratios(middle, lengths)
    _law(right, [gauge for gauge in gauges if gauge not in lengths])
    return figure


def _ratios(ax: Axes, shown: list[GaugeResult]) -> None:
    for place, gauge in enumerate(shown):
        low, high = gauge.limits[0], min(gauge.limits[1], 1e6)
        ax.plot([max(low, 1e-3), high], [place, place], color="0.85", lw=9, solid_capstyle="butt")
        values = gauge.values.clip(1e-3)
        ax.plot(values, [place] * len(values), "|", color=COLOURS[gauge.status], ms=11, mew=1.5)
    smallest = min(float(gauge.values.min()) for gauge in shown)
    largest = max(float(gauge.values.max()) for gauge in shown)
    ax.set_xlim(max(min(smallest, 0.5) / 1.5, 8e-4), max(largest, 2.0) * 1.5)
    _finish(ax, shown, "length over the claimed noise")


def _law(ax: Axes, shown: list[GaugeResult]) -> None:
    readings = [max(_over_limit(gauge), 1e-2) for gauge in shown]
    ax.axvline(1, color="0.6", lw=1)
    for place, (gauge, reading) in enumerate(zip(shown, readings, strict=True)):
        ax.plot([reading], [place], "o", color=COLOURS[gauge.status], ms=5)
    ax.set_xlim(8e-3, max(*readings, 2.0) * 2)
    _finish(ax, shown, "reading over its limit")


def _over_limit(gauge: GaugeResult) -> float:
    """How far a reading lies from the middle of its limits, or from 0, over how far an honest one may."""
    low, high = gauge.limits
    middle = 0.0 if low == 0 else (low + high) / 2
    return max(abs(gauge.smallest - middle), abs(gauge.largest - middle)) / (high - middle)


def _finish(ax: Axes, shown: list[GaugeResult], label: str) -> None:
    ax.set_yticks(range(len(shown)), [gauge.name for gauge in shown])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(label)


def row(fault: Fault, trial: Trial) -> str:
    """One fault's line of the table."""
    likely = [found.title for found in likely_faults(trial.result)]
    return line(fault, trial.outcome, evidence(trial.result), likely)


def line(fault: Fault, outcome: str, against: list[str], likely: list[str]) -> str:
    """A fault, its verdict, what speaks against the claim, the titles of likely faults, and the remedy."""
    names = list(
        dict.fromkeys("layers" if name.startswith("layer ") else name.removesuffix(" gauge") for name in against)
    )
    found = ", ".join(names) or fault.reason or "nothing is raised"
    cells = (f"{fault.title}: {fault.meaning}", outcome, found, "; ".join(likely) or "-", fault.fix)
    return f"| {' | '.join(cells)} | [picture](faults/{fault.name}.png) |\n"


def main() -> None:
    """Make every picture and the page; keep a table that is there already."""
    (HERE / "faults").mkdir(exist_ok=True)
    page = HERE / "faults.md"
    old = page.read_text() if page.exists() else ""
    table = old.partition(BEGIN)[2].partition(END)[0].strip()
    text = HEAD.replace(f"{BEGIN}\n{END}", f"{BEGIN}\n{table}\n{END}" if table else f"{BEGIN}\n{END}")
    text = text.replace("NOISE", f"{selftest_config(1).privacy.noise_multiplier:g}")
    with mpl.rc_context(STYLE | {"savefig.facecolor": "white"}):
        for fault in FAULTS:
            trial = try_fault(fault, 1)
            picture(trial).savefig(HERE / "faults" / f"{fault.name}.png", dpi=80, metadata={"Software": None})
            text += row(fault, trial)
    page.write_text(text.replace("CLAIM", f"{trial.claim:.2f}"))


if __name__ == "__main__":
    main()
