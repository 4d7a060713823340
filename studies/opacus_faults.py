"""The table in docs/evidence/opacus.md: Opacus unchanged, with half the noise, without a clip, or with a bias without noise.

    python -m studies.opacus_faults                  takes a few seconds
    python -m studies.opacus_faults --write-docs     also writes the table into docs/evidence/opacus.md

The noise multiplier is 1, and all 1,000 examples are in each of five steps. The study fails if an honest run is not PASS, or
if a fault is not VIOLATION. It also fails if the accountant's epsilon differs from the mechanism's: the accountant does not
detect any fault.
"""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "evidence" / "opacus.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
DELTA = 1e-5
HONEST = ("learnable data, hooks mode", "learnable data, ghost mode")


def run_all() -> list[dict[str, Any]]:
    """Run every case and return the accountant's and the audit's figures."""
    sys.path.insert(0, str(ROOT / "tests" / "integrations"))
    import torch
    from opacus_training import forget_clip, halve_noise, spare_last_bias, train

    cases: dict[str, dict[str, Any]] = {
        HONEST[0]: {},
        HONEST[1]: {"mode": "ghost"},
        "noise silently halved, learnable data": {"fault": halve_noise},
        "noise silently halved, gradients near zero": {"fault": halve_noise, "learnable": False},
        "one bias of 10 numbers without noise": {"fault": spare_last_bias},
        "clip forgotten, canaries through it": {"fault": forget_clip, "through_clip": True, "canaries": 100},
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the model is too small for more
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus warns about its random numbers and a sampling probability of 1
            return [{"case": case} | _run(train, settings) for case, settings in cases.items()]
    finally:
        torch.set_num_threads(threads)


def _run(train: Any, settings: dict[str, Any]) -> dict[str, Any]:
    audit, result, engine = train(**settings)
    gauges = {gauge.name: gauge for gauge in result.gauges}
    layers = [gauge for gauge in result.gauges if gauge.name.startswith("layer ")]
    return {
        "canaries": audit.settings.canaries,
        "accountant": engine.get_epsilon(DELTA),
        "claim": result.claim.epsilon,
        "known-round": result.adversaries["known-round"].headline.estimate.epsilon,
        "known-others": result.adversaries["known-others"].headline.estimate.epsilon,
        "verdict": result.verdict.outcome,
        "noise": gauges["noise"].largest,
        "residual": (gauges["residual"].smallest, gauges["residual"].largest, gauges["residual"].status),
        "layers": (
            min(gauge.smallest for gauge in layers),
            max(gauge.largest for gauge in layers),
            next((status for status in ("low", "warning") if status in {gauge.status for gauge in layers}), "ok"),
        ),
    }


def table(found: list[dict[str, Any]]) -> str:
    """The figures as a Markdown table."""
    heads = [
        "",
        "canaries",
        "accountant",
        "`known-round`",
        "`known-others`",
        "verdict",
        "noise gauge",
        "residual gauge",
        "layer gauges",
    ]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in found:
        low, high, status = line["residual"]
        lowest, highest, worst = line["layers"]
        spans = [f"{low:.3g} … {high:.3g}, {status}", f"{lowest:.2f} … {highest:.2f}, {worst}"]
        epsilons = [f"{line[name]:.3g}" for name in ("accountant", "known-round", "known-others")]
        cells = [line["case"], line["canaries"], *epsilons, line["verdict"], f"{line['noise']:.3g}"]
        rows.append(f"| {' | '.join(map(str, [*cells, *spans]))} |")
    return "\n".join(rows)


def failures(found: list[dict[str, Any]]) -> list[str]:
    """The missed requirements."""
    bad = []
    for line in found:
        expected = "PASS" if line["case"] in HONEST else "VIOLATION"
        if line["verdict"] != expected:
            bad.append(f"{line['case']}: the verdict is {line['verdict']}, it must be {expected}")
        if abs(line["accountant"] / line["claim"] - 1) > 0.01:
            bad.append(
                f"{line['case']}: the accountant says {line['accountant']:.3g}, the mechanism {line['claim']:.3g}"
            )
    return bad


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="Write the table into docs/evidence/opacus.md.")
    arguments = parser.parse_args()
    found = run_all()
    print(table(found))
    if arguments.write_docs:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")
    bad = failures(found)
    print("\n".join(bad) if bad else "every bar met")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
