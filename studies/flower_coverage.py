"""How often the `known-round` interval covers the truth in Flower: the study behind docs/evidence/flower.md.

    python -m studies.flower_coverage             20 seeds for each side of the clip, and FedAdam in the wrapper

z = 1, five rounds, 400 canaries, d = 10,000, real updates short compared with the noise. It fails if fewer than 18 of 20
intervals cover the truth on either side of the clip, if real updates are not short (dilution gauge 1.1 or more), or if
FedAdam is not VIOLATION every time. A finished seed is one line of studies/out/flower_coverage.jsonl and is not run again.
Flower's strategies and mods are real and run in one process. Every run has its own seed and therefore its own canaries and
noise.
"""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "flower_coverage.jsonl"
CASES = {"server": range(1, 21), "client": range(1001, 1021), "adam": range(2001, 2021)}  # seeds of each case
COVERED, DILUTION = 18, 1.1


def run_case(case: str, seed: int) -> dict[str, Any]:
    """One run and its `known-round` interval."""
    sys.path.insert(0, str(ROOT / "tests" / "integrations"))
    from flower_training import SEED, LoopGrid, client_app, new_audit, run
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp.strategy import (
        DifferentialPrivacyClientSideFixedClipping,
        DifferentialPrivacyServerSideFixedClipping,
        FedAdam,
        FedAvg,
    )

    from coalmine import mechanism_epsilon
    from coalmine.integrations.flower import audited, canary_mod

    logging.getLogger("flwr").setLevel(logging.ERROR)
    secret = SEED + seed.to_bytes(2)
    audit = new_audit(seed=secret)
    if case == "client":
        wrapper = DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 1.0, 1.0, 410)
        strategy = audited(wrapper, audit=audit, mode="client", seed=secret)
        configs = [{} for _ in range(10)] + [{"canary-id": index} for index in range(400)]
        app = client_app([fixedclipping_mod, canary_mod])
    else:
        inner = FedAvg(fraction_evaluate=0.0) if case == "server" else FedAdam(fraction_evaluate=0.0)
        wrapper = DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 20)
        strategy = audited(wrapper, audit=audit, mode="extra")
        configs, app = [{} for _ in range(20)], client_app()
    run(strategy, LoopGrid(app, configs), seed=seed)
    truth = float(mechanism_epsilon(1.0, delta=1e-5, participations=5))
    result = strategy.audit.finish(claim=truth)
    found = result.adversaries["known-round"].headline.estimate
    dilution = next(gauge.largest for gauge in result.gauges if gauge.name == "dilution")
    assert found.interval is not None
    assert result.verdict is not None
    low, high = float(found.interval.low), float(found.interval.high)
    return {
        "case": case, "seed": seed, "epsilon": found.epsilon, "low": low, "high": high, "truth": truth,
        "covers": low <= truth <= high, "dilution": dilution, "verdict": result.verdict.outcome,
    }  # fmt: skip


def read() -> list[dict[str, Any]]:
    """The finished seeds of all cases."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return [line for line in map(json.loads, lines) if line["seed"] in CASES[line["case"]]]


def table(lines: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    heads = ["case", "seeds", "covers 11.48", "epsilon, smallest … largest", "largest dilution", "PASS", "VIOLATION"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for case in CASES:
        mine = [line for line in lines if line["case"] == case]
        if mine:
            found = [line["epsilon"] for line in mine]
            verdicts = [sum(line["verdict"] == word for line in mine) for word in ("PASS", "VIOLATION")]
            span, dilution = f"{min(found):.1f} … {max(found):.1f}", max(line["dilution"] for line in mine)
            cells = [case, len(mine), sum(line["covers"] for line in mine), span, f"{dilution:.3f}", *verdicts]
            rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def failures(lines: list[dict[str, Any]]) -> list[str]:
    """The missed bars."""
    bad = []
    for case, seeds in CASES.items():
        mine = [line for line in lines if line["case"] == case]
        if {line["seed"] for line in mine} != set(seeds):
            bad.append(f"{case}: {len(mine)} of {len(seeds)} seeds were run")
        if case == "adam":
            caught = sum(line["verdict"] == "VIOLATION" for line in mine)
            if caught < len(mine):
                bad.append(f"{case}: VIOLATION in {caught} of {len(mine)}")
            continue
        covered, dilution = sum(line["covers"] for line in mine), max((line["dilution"] for line in mine), default=0.0)
        if covered < COVERED:
            bad.append(f"{case}: {covered} of {len(mine)} intervals cover the truth, {COVERED} must")
        if not dilution < DILUTION:
            bad.append(f"{case}: a dilution gauge reads {dilution:.3f}, below {DILUTION} it must be")
    return bad


def main() -> int:
    """Run the remaining seeds, print the table, and name the missed bars."""
    done = {(line["case"], line["seed"]) for line in read()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for case, seeds in CASES.items():
        for seed in seeds:
            if (case, seed) not in done:
                line = run_case(case, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, file=sys.stderr)
    lines = read()
    print(table(lines))
    bad = failures(lines)
    print("\n".join(bad) if bad else "every bar met")
    return bool(bad)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(main())
