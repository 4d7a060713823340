"""The page on scaling up: its code runs in one process and in two, and its tables match the study's output."""

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from requires import require

from coalmine import Audit
from ports import free_ports

ROOT = Path(__file__).parents[2]
if not (ROOT / "studies" / "scaling_costs.py").exists():
    pytest.skip("the studies are in the repository, not in the package", allow_module_level=True)
costs = importlib.import_module("studies.scaling_costs")
on_ranks = importlib.import_module("tests.audit.thread_ranks").on_ranks
PAGE = (ROOT / "docs" / "how-to" / "scaling.md").read_text()
COSTS = (ROOT / "docs" / "evidence" / "scaling.md").read_text()

FACTS = """
import json
from coalmine import AuditResult, mechanism_epsilon
def facts(found):
    if not isinstance(found, AuditResult):
        return str(found)
    interval = found.adversaries["known-others"].headline.estimate.interval
    return [found.verdict.outcome, interval.low, float(mechanism_epsilon(1.0, delta=1e-6)), interval.high]
"""


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def assert_passes(facts):
    outcome, low, truth, high = facts
    assert outcome == "PASS"
    assert low <= truth <= high


def run(program, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def printed(process):
    """The facts in a program's last output line."""
    out, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    return json.loads(out.split(chr(0))[1])


@pytest.mark.full
def test_the_loop_with_a_dict_runs():
    program = blocks(PAGE)[0] + FACTS + "print(chr(0) + json.dumps(facts(result)))"
    assert_passes(printed(run(program)))


@pytest.mark.full
def test_the_loop_with_a_torch_model_runs():
    if find_spec("torch") is None:
        require("torch")
    guide = (ROOT / "docs" / "how-to" / "integrate.md").read_text()
    section = guide.partition("\n## Models in pieces\n")[2].partition("\n## ")[0]
    setup, loop = blocks(section)
    assert len(loop.splitlines()) == 10
    program = blocks(guide)[0] + setup + loop + FACTS + "print(chr(0) + json.dumps(facts(result)))"
    assert_passes(printed(run(program)))


@pytest.mark.full
def test_the_loops_with_two_processes_run():
    if find_spec("torch") is None:
        require("torch")
    _, sharded, replicated = blocks(PAGE)
    program = sharded + replicated + FACTS
    program += "print(chr(0) + json.dumps([facts(result), facts(replicated_result), audit.settings.to_dict()]))"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    started = [run(program, RANK=str(rank), **address) for rank in range(2)]
    first, second = (printed(process) for process in started)
    assert_passes(first[0])
    assert_passes(first[1])
    assert second[:2] == ["rank 0 holds the result of this audit; this is rank 1"] * 2
    assert first[2]["processes"] == second[2]["processes"] == 2


def table(name):
    return COSTS.partition(f"<!-- table: {name} -->\n")[2].partition(f"\n{costs.END}")[0]


def test_the_measured_tables_match_the_results():
    for name, made in {"sums": costs.sums_table(), "H200": costs.gpu_table(), "CPU": costs.cpu_table()}.items():
        assert table(name) == made


def test_the_computed_table_matches_the_study():
    """Checks some rows; the others take seconds each."""
    lines, shown = costs.read_lines(), table("computed").splitlines()
    assert len(shown) == 2 + len(costs.SIZES) * len(costs.GPUS)
    for dim, gpus in ((10**6, 1), (10**6, 1_024), (10**8, 8), (10**9, 1), (10**9, 8), (10**10, 64), (10**11, 1)):
        assert f"| {' | '.join(costs.row_of(dim, gpus, lines))} |" in shown


def test_a_line_fits_the_measurements():
    lines = costs.read_lines()
    for model in json.loads((costs.RESULTS / "blocked_cuda.json").read_text())["models"].values():
        row = model["audited round with others"]
        assert lines["others"].at(model["parameters"]) == pytest.approx(row["wall_ms"])
        assert lines["bytes"].at(model["parameters"]) == pytest.approx(row["extra_bytes"])


def test_the_stated_traffic_equals_what_an_audit_sums():
    """Counted on two ranks that sum only the audit's numbers."""
    sums = []

    def rank(reduce):
        class Counted:
            rank, size = reduce.rank, reduce.size

            def __call__(self, numbers):
                if self.rank == 0:
                    sums.append(len(numbers))
                return reduce(numbers)

        shard = {name: np.random.default_rng(1).normal(size=3_000) for name in ("one", "two")}
        audit = Audit.for_model(shard, canaries=100, seed=b"counted", delta=1e-5, reduce=Counted())
        if reduce.rank == 0:
            sums.clear()
        audit.observe_round(1, shard, present=[0], others={name: 0.1 * value for name, value in shard.items()})
        return audit.settings

    settings = on_ranks(2, rank)[0]
    assert sums == [
        costs.numbers_in_a_round(settings),
        costs.numbers_of_the_law(settings),
        costs.numbers_of_the_coordinates(settings),
    ]
    assert sums[2] == 8 * 2 + len(settings.layers) + 3
    total, count = settings.total, len(settings.block_sizes)
    assert sums[0] == 2 * (total + 2 * count) + 2 * len(settings.layers) + 272 * count + 3 * 2
