"""Audits of a language model that is fine-tuned with LoRA, as it is and with faults: docs/how-to/fine-tuning.md.

    python -m studies.fine_tuning                  prints the tables
    python -m studies.fine_tuning --write-docs     also writes them into docs/how-to/fine-tuning.md

A random Llama of two layers (hidden size 64) has adapters of rank 8 on every linear layer: 17,408 trained parameters. It
reads 2,000 rows of random tokens, 100 in a batch, in 40 steps at noise multiplier 1, with 1,000 canaries. The study fails
if an honest run is not PASS, or if a fault is not named as it must be. The second table shows what an audit costs on a GPU,
from benchmarks/results/lora_cuda.json, which `python -m benchmarks.lora_cuda` writes there.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "how-to" / "fine-tuning.md"
COSTS = ROOT / "benchmarks" / "results" / "lora_cuda.json"
DELTA, STEPS = 1e-5, 40
CLAIM = 2.48  # what the accountant quotes for noise multiplier 1, a rate of 0.05 and 40 steps
SETTINGS = {"canaries": 1_000, "seed": b"for studies only", "delta": DELTA, "claim": CLAIM}
SIZE = {"rows": 2_000, "batch": 100, "hidden": 64, "layers": 2, "rank": 8}


def run_all(only: str | None = None) -> list[dict[str, Any]]:
    """Run every case; `expected` is the verdict and its reason's code, where one must be."""
    sys.path[:0] = [str(ROOT / "tests" / "integrations"), str(ROOT / "examples" / "dp-lora")]
    import torch
    from lora_training import cut_off, frozen, halve_noise, make, plain_loop

    def loop(fault: Callable[[Any], object] | None = None, **changes: Any) -> Any:
        case = make(**(SIZE | changes))
        if fault is not None:
            fault(case)
        return plain_loop(case, steps=STEPS, **SETTINGS).finish()

    cases: dict[str, tuple[Callable[[], Any], str, str | None]] = {
        "honest, hooks": (loop, "PASS", None),
        "honest, ghost clipping": (lambda: loop(mode="ghost"), "PASS", None),
        "honest, Trainer": (_trainer, "PASS", None),
        "noise silently halved": (lambda: loop(lambda case: halve_noise(case.optimizer)), "VIOLATION", None),
        "`poisson_sampling=False`": (lambda: loop(poisson=False), "not PASS", "sampler"),
        "frozen: learning rate 0": (lambda: loop(frozen), "UNDERPOWERED", "training"),
        "frozen: only `lora_A` trained, `lora_B` is 0": (
            lambda: loop(train_only="lora_A"),
            "UNDERPOWERED",
            "training",
        ),
        "one adapter cut off from the loss": (lambda: loop(cut_off), "PASS", None),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, (run, verdict, code) in cases.items():
                if only is None or only in name:
                    start = time.process_time()
                    result = run()
                    seconds = time.process_time() - start
                    found.append({"case": name, "expected": (verdict, code), "result": result, "seconds": seconds})
    finally:
        torch.set_num_threads(threads)
    return found


def _trainer() -> Any:
    from lora_training import make, trainer_of

    from coalmine.integrations.transformers import audited

    callback = audited(**SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(make(**SIZE), callback, Path(folder), steps=STEPS).train()
    return callback.finish()


def table(found: list[dict[str, Any]]) -> str:
    """The verdicts as a Markdown table."""
    rows = ["| run | claim | verdict | reason |", "|---|---|---|---|"]
    for line in found:
        result = line["result"]
        notes = [note for note in result.notes if note.startswith("training: ")]
        reason = "; ".join([_short(result.verdict.reason), *(_short(note) for note in notes)])
        rows.append(f"| {line['case']} | {result.claim.epsilon:.3g} | {result.verdict.outcome} | {reason} |")
    return "\n".join(rows)


def _short(text: str) -> str:
    """The first sentence, without the details of a PASS, and with short names of layers."""
    plain = text.replace("base_model.model.model.", "").replace(".default.weight", "")
    return plain.partition(". ")[0].partition(": the accountant's epsilon is no more")[0]


def failures(found: list[dict[str, Any]]) -> list[str]:
    """The requirements that are not met."""
    bad = []
    for line in found:
        (expected, code), verdict = line["expected"], line["result"].verdict
        right = verdict.outcome != "PASS" if expected == "not PASS" else verdict.outcome == expected
        if not right or code not in (None, verdict.code):
            bad.append(f"{line['case']}: {verdict.outcome} ({verdict.code}), it must be {expected} ({code})")
        gauges = {gauge.name: gauge for gauge in line["result"].gauges}
        if line["case"].startswith("honest") and any(gauge.status != "ok" for gauge in gauges.values()):
            bad.append(f"{line['case']}: a gauge is outside its limits")
        if "cut off" in line["case"] and not any("received noise, but no gradient" in n for n in line["result"].notes):
            bad.append(f"{line['case']}: the layer is not named")
    return bad


def cost_table() -> str:
    """What an audit costs on a GPU, as a Markdown table; one line where nobody has measured it."""
    if not COSTS.exists():
        return "*Not measured yet: `python -m benchmarks.lora_cuda --output benchmarks/results/lora_cuda.json`.*"
    figures = json.loads(COSTS.read_text())
    rows = [
        "| model | trained parameters | batch | step | audit, mean | median | bar | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"lora": "Llama with LoRA of rank 16, hooks", "full": "GPT-2, all weights, ghost clipping"}
    for kind, name in names.items():
        if kind not in figures:
            continue
        case = figures[kind]
        plain, audit = case["without"], case["audit"]
        cells = [
            f"{name}, {case['parameters'] / 1e6:,.0f} M",
            f"{case['trained'] / 1e6:,.1f} M in {case['tensors']} tensors",
            f"{case['rows']} × {case['tokens']:,} tokens",
            f"{plain['mean_ms']:.0f} ms",
            f"{audit['share']:.2%} ± {audit['standard_error']:.2%}",
            f"{audit['median_share']:.2%}",
            f"{case['bar']:.0%}",
            f"{audit['peak_bytes'] / 2**30:.1f} GiB, {plain['peak_bytes'] / 2**30:.1f} without",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*rows, "", f"{figures['device']}, torch {figures['torch']}, transformers {figures['transformers']}."]
    )


def write_docs(**tables: str) -> None:
    """Put each table between its own marks."""
    text = DOCS.read_text()
    for name, lines in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{lines}\n{end}{rest.partition(end)[2]}"
    DOCS.write_text(text)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write-docs", action="store_true", help="write the tables into docs/how-to/fine-tuning.md")
    parser.add_argument("--costs", action="store_true", help="the table of costs alone")
    parser.add_argument("--only", help="cases whose name holds this text")
    options = parser.parse_args()
    print(cost_table())
    if options.costs:
        if options.write_docs:
            write_docs(costs=cost_table())
        return 0
    found = run_all(options.only)
    print(table(found))
    for line in found:
        print(f"{line['case']}: {line['seconds']:.1f} s of one core")
    if options.write_docs and options.only is None:
        write_docs(verdicts=table(found), costs=cost_table())
    bad = failures(found)
    print("\n".join(bad) if bad else "every bar met")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
