"""docs/faults.md and its pictures, from runs made here: python -m docs.make_faults."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from coalmine.audit.signatures import SIGNATURES, Signature
from coalmine.report import plots
from coalmine.report.findings import Findings
from coalmine.report.pictures import STYLE
from coalmine.simulation.faults import Trial, evidence, selftest_config, try_fault

HERE = Path(__file__).parent
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
HEAD = f"""# Faults, and what catches them

An auditor that was never shown to catch a fault is a claim. `coalmine selftest` puts each of these faults into a real
training loop (scikit-learn's digits over 200 clients, d = 9,610, ten rounds, 1,000 canaries, noise multiplier NOISE, so
the claim is ε CLAIM at delta 1e-6; the real clients' part of a model delta is longer than its noise) and lets the audit
judge the claim. The loop has no branch for faults: each replaces one of its steps (`coalmine.simulation.faults`). Two that
are caught are there once more with canaries that cannot show them: nothing is raised, and the reason is given.
`coalmine report` uses the same signatures to say what is likely wrong. Pictures and text of this page:
`python -m docs.make_faults`.

## How often each is caught

`python -m studies.faults`, then `python -m studies.faults --write-docs`:

{BEGIN}
{END}

`signal` is the length of the real clients' part of a model delta, as the audit was told it, over that of the claimed noise:
the smallest of all rounds and runs. Without `others` a signal that long hides the noise from the noise gauge and most of a
canary from known-round; the difference gauge still sees what it does here because the signal is much the same from one
round to the next.
"""


def picture(trial: Trial) -> Figure:
    """The ladder beside the gauges that are a ratio to the claimed noise."""
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    plots.ladder(left, Findings.from_dict(trial.result.to_dict()))
    _ratios(right, trial)
    return figure


def _ratios(ax: Axes, trial: Trial) -> None:
    shown = [gauge for gauge in trial.result.gauges if gauge.name != "dilution" and not gauge.name.startswith("repeat")]
    for place, gauge in enumerate(shown):
        low, high = gauge.limits[0], min(gauge.limits[1], 1e6)
        ax.plot([max(low, 1e-3), high], [place, place], color="0.85", lw=9, solid_capstyle="butt")
        colour = {"ok": "#2166ac", "low": "#b2182b", "warning": "#d6604d"}[gauge.status]
        values = gauge.values.clip(1e-3)
        ax.plot(values, [place] * len(values), "|", color=colour, ms=11, mew=1.5)
    ax.set_yticks(range(len(shown)), [gauge.name for gauge in shown])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    smallest = min(float(gauge.values.min()) for gauge in shown)
    largest = max(float(gauge.values.max()) for gauge in shown)
    ax.set_xlim(max(min(smallest, 0.5) / 1.5, 8e-4), max(largest, 2.0) * 1.5)
    ax.set_xlabel("length over the claimed noise")


def section(fault: Signature, trial: Trial) -> str:
    """The text of one fault."""
    seen = ", ".join(
        dict.fromkeys("layer gauges" if name.startswith("layer ") else name for name in evidence(trial.result))
    )
    caught = f"Caught by {seen}: {trial.outcome}." if seen else f"{trial.outcome}; nothing is raised."
    if fault.reason:
        caught = f"Cannot be seen: {fault.reason}."
    alt = f"The ladder of adversaries and the gauges when {fault.title}"
    return f"""
## {fault.title[0].upper()}{fault.title[1:]}

`coalmine selftest --fault {fault.name}`

![{alt}](faults/{fault.name}.png)

{fault.meaning} {caught}

**To mend it:** {fault.mend}
"""


def main() -> None:
    """Every picture and the page; a table that is there already is kept."""
    (HERE / "faults").mkdir(exist_ok=True)
    page = HERE / "faults.md"
    old = page.read_text() if page.exists() else ""
    table = old.partition(BEGIN)[2].partition(END)[0].strip()
    text = HEAD.replace(f"{BEGIN}\n{END}", f"{BEGIN}\n{table}\n{END}" if table else f"{BEGIN}\n{END}")
    text = text.replace("NOISE", f"{selftest_config(1).privacy.noise_multiplier:g}")
    with mpl.rc_context(STYLE | {"savefig.facecolor": "white"}):
        for fault in SIGNATURES:
            trial = try_fault(fault, 1)
            picture(trial).savefig(HERE / "faults" / f"{fault.name}.png", dpi=80, metadata={"Software": None})
            text += section(fault, trial)
    page.write_text(text.replace("CLAIM", f"{trial.claim:.2f}"))


if __name__ == "__main__":
    main()
