"""How often the `known-round` interval covers the truth in Flower: the study behind docs/flower.md.

    python -m studies.flower_coverage             20 seeds for each side of the clip, and FedAdam in the wrapper

z = 1, five rounds, 400 canaries, d = 10,000, real updates short beside the noise. A finished seed is one line of
studies/out/flower_coverage.jsonl and is not run again. Flower's strategies and mods are the real ones, in one process.
"""

import json
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "studies" / "out" / "flower_coverage.jsonl"
CASES = ("server", "client", "adam")
SEEDS = 20


def run_case(case: str, seed: int) -> dict[str, Any]:
    """One run, and what `known-round` says of it."""
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
    from coalmine.integrations.flower import AuditedStrategy, canary_mod

    logging.getLogger("flwr").setLevel(logging.ERROR)
    secret = SEED + seed.to_bytes(2)
    audit = new_audit(seed=secret)
    if case == "client":
        wrapper = DifferentialPrivacyClientSideFixedClipping(FedAvg(fraction_evaluate=0.0), 1.0, 1.0, 410)
        strategy = AuditedStrategy(wrapper, audit, "client", seed=secret)
        configs = [{} for _ in range(10)] + [{"canary-id": index} for index in range(400)]
        app = client_app([fixedclipping_mod, canary_mod])
    else:
        inner = FedAvg(fraction_evaluate=0.0) if case == "server" else FedAdam(fraction_evaluate=0.0)
        wrapper = DifferentialPrivacyServerSideFixedClipping(inner, 1.0, 1.0, 20)
        strategy = AuditedStrategy(wrapper, audit, "extra")
        configs, app = [{} for _ in range(20)], client_app()
    run(strategy, LoopGrid(app, configs), seed=seed)
    result = strategy.finish()
    found = result.adversaries["known-round"].headline.estimate
    truth = float(mechanism_epsilon(1.0, delta=1e-5, participations=5))
    dilution = next(gauge.largest for gauge in result.gauges if gauge.name == "dilution")
    assert found.interval is not None
    assert result.verdict is not None
    low, high = float(found.interval.low), float(found.interval.high)
    return {
        "case": case, "seed": seed, "epsilon": found.epsilon, "low": low, "high": high, "truth": truth,
        "covers": low <= truth <= high, "dilution": dilution, "verdict": result.verdict.outcome,
    }  # fmt: skip


def read() -> list[dict[str, Any]]:
    """The finished seeds."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    """Run what is not there yet, and print the table."""
    done = {(line["case"], line["seed"]) for line in read()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        for seed in range(1, SEEDS + 1):
            if (case, seed) not in done:
                line = run_case(case, seed)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, file=sys.stderr)
    print("| case | seeds | covers 11.48 | epsilon, smallest … largest | PASS | VIOLATION |\n|---|---|---|---|---|---|")
    for case in CASES:
        lines = [line for line in read() if line["case"] == case]
        found = [line["epsilon"] for line in lines]
        verdicts = [sum(line["verdict"] == word for line in lines) for word in ("PASS", "VIOLATION")]
        covers = sum(line["covers"] for line in lines)
        print(
            f"| {case} | {len(lines)} | {covers} | {min(found):.1f} … {max(found):.1f} | {verdicts[0]} | {verdicts[1]} |"
        )


if __name__ == "__main__":
    main()
