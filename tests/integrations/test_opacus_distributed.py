"""DP-SGD on a small transformer in real processes, under DDP and FSDP2: honest runs, faults, and killed ranks."""

import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from requires import require

require("opacus")
from opacus_training import WARNINGS, make  # noqa: E402
from torch_ranks import Ranks  # noqa: E402

from coalmine.integrations.opacus import audited  # noqa: E402
from coalmine.integrations.torch_distributed import reduce_over  # noqa: E402

pytestmark = [pytest.mark.full, *(pytest.mark.filterwarnings(text) for text in WARNINGS)]
ROOT = Path(__file__).parents[2]
EVERYBODY = {"steps": 4, "canaries": 200}  # every row in every step
HALF = {"steps": 8, "batch": 150}  # every row in half of the steps
QUICK = {
    "hooks": ("train", {"mode": "hooks", **EVERYBODY}),
    "ghost": ("train", {"mode": "ghost", **HALF, "directory": "ghost"}),
    "fsdp2": ("train", {"mode": "fsdp2", **HALF}),
    "hooks halved": ("train", {"mode": "hooks", "halved": True, "through_clip": False, **EVERYBODY}),
    "fsdp2 halved": ("train", {"mode": "fsdp2", "halved": True, "by_hand": True, **EVERYBODY}),
    "a bias spared": ("train", {"mode": "ghost", "spared": True, **EVERYBODY}),
    "small batches": ("train", {"mode": "hooks", "physical": 30, **HALF}),
    "release hooks": ("release_by_hand", {"mode": "hooks", "canaries": 30, "rows": 60, "batch": 60}),
    "release ghost": ("release_by_hand", {"mode": "ghost", "canaries": 30, "rows": 60, "batch": 60}),
    "release fsdp2": ("release_by_hand", {"mode": "fsdp2", "canaries": 30, "rows": 60, "batch": 60}),
    "errors": ("errors", {"mode": "ghost"}),
    "alarm": ("alarm", {"mode": "fsdp2"}),
    "hook replaced, hooks": ("replaced_hook", {"mode": "hooks"}),
    "hook replaced, ghost": ("replaced_hook", {"mode": "ghost"}),
    "hook replaced, fsdp2": ("replaced_hook", {"mode": "fsdp2"}),
}
KILLED = {"mode": "hooks", "directory": "killed", **EVERYBODY}
LONG = {
    "ghost": ("train", {"mode": "ghost", "steps": 24, "batch": 75}),
    "fsdp2": ("train", {"mode": "fsdp2", "steps": 24, "batch": 75}),
    "workers": ("train", {"mode": "ghost", "steps": 12, "batch": 75, "workers": 2}),
    "no Poisson": ("train", {"mode": "ghost", "steps": 24, "batch": 76, "poisson": False}),
    "the same rows": ("train", {"mode": "ghost", "steps": 12, "batch": 76, "poisson": False, "same_rows": True}),
    "the same seed": ("train", {"mode": "fsdp2", "steps": 24, "batch": 75, "same_seed": True}),
    "coin": ("train", {"mode": "ghost", "steps": 8, "batch": 76, "observe": False, "canaries": 200, "by_hand": True}),
    "small batches of ghost mode": ("train", {"mode": "ghost", "physical": 30, **HALF}),
    "small batches of fsdp2": ("train", {"mode": "fsdp2", "physical": 50, **EVERYBODY}),
    "per layer": ("train", {"mode": "hooks", "clipping": "per_layer", "max_grad_norm": [0.25] * 20, **EVERYBODY}),
    "sum": ("release_by_hand", {"mode": "hooks", "canaries": 30, "rows": 60, "batch": 60, "loss_reduction": "sum"}),
}


def run(folder, scenarios, *, size=2):
    """The findings of each rank in each scenario."""
    with start(folder, scenarios.values(), size=size) as ranks:
        ranks.finish(timeout=600)
    return read(folder, scenarios, size=size)


def start(folder, scenarios, *, size=2):
    return Ranks(folder, "opacus_ranks.py", folder, json.dumps(list(scenarios)), size=size)


def read(folder, scenarios, *, size=2):
    found = [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(size)]
    return {name: list(each) for name, each in zip(scenarios, zip(*found, strict=True), strict=True)}


def test_each_rank_replays_rows_of_its_own(tmp_path):
    """Two real processes with gloo: four rows each, honest at one clip norm; rows that see each other are named."""
    settings = {"mode": "hooks", "steps": 2, "canaries": 30, "rows": 60, "batch": 60, "through_clip": False}
    scenarios = {"honest": ("train", settings), "coupled": ("train", settings | {"coupled": True})}
    found = run(tmp_path, scenarios)
    status, detail = found["honest"][0]["coverage"]["rows"]
    assert status == "checked"
    assert detail.startswith("8 real clients in 1 round, at most 1.000 clip norms")
    status, detail = found["coupled"][0]["coverage"]["rows"]
    assert status == "failed"
    assert "one client moves the outputs of others" in detail


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of the quick scenarios. In the last one, a process is killed in the middle of round 3."""
    folder = tmp_path_factory.mktemp("ranks")
    with start(folder, [*QUICK.values(), ("train", KILLED | {"die": [1, 3]})]) as ranks:
        codes = [ranks.wait(1, timeout=600), ranks.wait(0, timeout=200)]
        assert codes == [-9, 1], ranks.output(0) + ranks.output(1)
    return folder


@pytest.fixture(scope="module")
def quick(folder):
    return read(folder, QUICK)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "fsdp2"])
def test_the_release_is_the_clipped_sum_plus_the_canaries(quick, mode):
    """Without noise, against gradients of single examples: 30 orthonormal canaries with the clip norm, 1."""
    for one in quick[f"release {mode}"]:
        assert one["left"] == pytest.approx(math.sqrt(30), rel=1e-5)
        assert one["entered"] == pytest.approx(math.sqrt(30), rel=1e-5)
        assert one["unexplained"] < 1e-6 * one["sum"]


@pytest.mark.parametrize("mode", ["hooks", "ghost", "fsdp2", "small batches"])
def test_an_honest_run_passes(quick, mode):
    """Rank 0 has the result for the accountant's epsilon; the other rank has none."""
    one, other = quick[mode]
    assert other == "rank 0 holds the result of this audit; this is rank 1"
    assert one["verdict"] == "PASS", one["text"]
    unusual = {name for name, status in one["gauges"].items() if status != "ok"}
    assert unusual <= {"signal by layer"}  # softmax does not depend on the bias of the keys: its gradient is nearly 0
    if unusual:
        assert any("noise alone" in note and "key.bias" in note for note in one["notes"]), one["notes"]
    low, high = one["interval"]
    assert low <= one["analytical"] <= high  # known-others, for the most frequent number of steps


@pytest.mark.parametrize("mode", ["hooks halved", "fsdp2 halved"])
def test_half_the_noise_is_a_violation(quick, mode):
    one, _ = quick[mode]
    assert one["verdict"] == "VIOLATION"
    assert one["reason"].startswith("known-others: the lower bound")
    assert one["gauges"]["residual"] == "low"


@pytest.mark.parametrize("mode", ["ghost", "fsdp2", "small batches"])
def test_a_canary_is_in_a_step_if_any_rank_samples_its_row(quick, mode):
    """All 300 rows have a canary, so a step has as many canaries as rows over both ranks; Poisson at rate one half."""
    one, _ = quick[mode]
    assert one["canaries"] == 300
    assert one["present"] == one["participants"]
    assert len(set(one["participants"])) > 1
    picked = sum(one["participants"])
    assert abs(picked - 8 * 150) < 4 * math.sqrt(8 * 300 * 0.25)
    assert one["sampling"] == "Poisson sampling with probability 0.5 in 8 rounds"
    assert one["clip_norms"] == [pytest.approx(1 / 150)]
    assert one["coverage"]["sampler"][0] == "checked"


def test_one_bias_without_noise_is_detected_under_ddp(quick):
    """No rank holds the sum of all examples, so the layer gauges use a sample of coordinates."""
    one, _ = quick["a bias spared"]
    assert one["verdict"] == "VIOLATION"
    assert {name for name, status in one["gauges"].items() if status == "low"} >= {"layer narrow.bias"}
    assert one["gauges"]["layer narrow.weight"] == "ok"


@pytest.mark.parametrize("mode", ["hooks", "ghost", "fsdp2"])
def test_the_result_lists_what_was_checked(quick, mode):
    one, _ = quick[mode]
    names = {name for name, (status, _) in one["coverage"].items() if status == "checked"}
    assert names >= {"noise level", "noise law", "tensors", "sampler", "participations", "others"}
    assert ("clipping" in names) == (mode == "hooks")
    assert len([name for name in one["gauges"] if name.startswith("layer ")]) == 20


def test_rank_0_writes_the_directory(quick, folder):
    written = json.loads((folder / "ghost" / "result.json").read_text())
    assert written["verdict"] == "PASS"
    assert tomllib.loads((folder / "ghost" / "config.toml").read_text())["ranks"] == 2
    lines = (folder / "ghost" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["examples"] for line in lines] == quick["ghost"][0]["participants"]


def test_an_error_on_one_rank_is_raised_on_every_rank(quick):
    zero, one = quick["errors"]
    result = "holds a finished audit: name another directory, or remove it"
    assert zero["a result on rank 0"].endswith(result)
    assert one["a result on rank 0"].startswith("ValueError: rank 0 failed: ")
    assert one["a result on rank 0"].endswith(result)
    assert one["no seed file on rank 1"].startswith("ValueError: seed file ")
    assert zero["no seed file on rank 1"].startswith("ValueError: rank 1 failed: seed file ")
    assert one["another batch on rank 1"].startswith("ValueError: a step holds the gradients of ")
    assert zero["another batch on rank 1"].startswith("ValueError: rank 1 failed: a step holds the gradients of ")
    assert zero["left by unaudited"] == one["left by unaudited"] == "set()"
    for name, text in {
        "another seed on rank 1": "every rank must make the audit with the same arguments, but rank 1 differs",
        "a coin of each rank's own": "rng may differ from rank to rank, so omit it",
        "shorter data on rank 1": "on every rank, but the ranks' data sets have 300, 299 rows",
        "a flat audit": "the audit must be made for the optimizer's 2 processes",
    }.items():
        assert text in zero[name]
        assert one[name] == zero[name]
    assert all("\n" not in text for text in [*zero.values(), *one.values()])


def test_an_alarm_stops_every_rank_in_the_same_round(quick):
    zero, one = quick["alarm"]
    assert zero == one
    assert zero["error"].startswith(f"alarm in round {zero['round']}: ")


@pytest.mark.parametrize("mode", ["hooks", "ghost", "fsdp2"])
def test_a_replaced_hook_stops_the_next_step_of_every_rank(quick, mode):
    for one in quick[f"hook replaced, {mode}"]:
        assert one["error"].startswith("attach_step_hook replaced the audit's hook")
        assert one["same"]


LOST = (
    "LostRankError: rank 1 of 2 no longer takes part: it was killed, has failed, or was away for more than 150 s; restart "
    "all ranks, and an audit with a directory resumes after its last round"
)


def check_restart(folder, settings):
    """Check that a restart after a kill in round 3 resumes with round 3 and gives a result."""
    one, other = run(folder, {"again": ("train", settings)})["again"]
    assert other == "rank 0 holds the result of this audit; this is rank 1"
    assert one["first"] == 2
    assert len(one["participants"]) == 4
    assert one["verdict"] == "PASS", one["text"]
    assert not [note for note in one["notes"] if "warning" in note]


def test_a_killed_rank_ends_the_other_and_a_restart_resumes(folder):
    """SIGKILL ends rank 1 between the noise of round 3 and the sum of the gradients; rank 0 ends with one line."""
    assert (folder / "rank0.log").read_text().splitlines()[-2:] == ["round 2", LOST]
    assert not (folder / "killed" / "result.json").exists()
    check_restart(folder, KILLED)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_of_fsdp2_ends_the_other_and_a_restart_resumes(tmp_path, lost):
    """Rank 0 holds the log, which survives the restart."""
    settings = {"mode": "fsdp2", "directory": "run", **EVERYBODY}
    with start(tmp_path, [("train", settings | {"die": [lost, 3]})]) as ranks:
        assert ranks.wait(lost) == -9
        assert ranks.wait(1 - lost, timeout=200) == 1
        last = ranks.output(1 - lost).splitlines()[-1]
    assert last == (LOST if lost else LOST.replace("rank 1", "another rank"))  # rank 0 held the store
    check_restart(tmp_path, settings)


@pytest.mark.slow
def test_longer_runs_and_other_samplers_have_the_right_verdict(tmp_path):
    found = {name: each[0] for name, each in run(tmp_path, LONG).items()}
    small = ("small batches of ghost mode", "small batches of fsdp2")
    for name in ("ghost", "fsdp2", "workers", "per layer", *small):
        assert found[name]["verdict"] == "PASS", found[name]["text"]
    assert found["coin"]["verdict"] == "UNDERPOWERED"  # nobody observed the sampler that the claim counts
    assert found["ghost"]["sampling"] == "Poisson sampling with probability 0.25 in 24 rounds"
    assert found["no Poisson"]["verdict"] == "VIOLATION"
    assert "canaries return after a fixed number of rounds" in found["no Poisson"]["reason"]
    assert found["the same rows"]["verdict"] == "VIOLATION"
    assert any(
        "picked a row more than once in 12 steps, up to 2 times" in note for note in found["the same rows"]["notes"]
    )
    assert "canaries are picked in groups" in found["the same seed"]["reason"]
    assert found["the same seed"]["verdict"] != "PASS"
    assert found["coin"]["coverage"]["sampler"][0] == "not checked"
    assert found["sum"]["left"] == pytest.approx(math.sqrt(30), rel=1e-5)
    assert found["sum"]["unexplained"] < 1e-6 * found["sum"]["sum"]


@pytest.mark.slow
def test_three_ranks_work_with_an_empty_shard(tmp_path):
    """The head has four rows, so the third rank's shard of it is empty."""
    scenarios = {mode: ("train", {"mode": mode, **EVERYBODY}) for mode in ("hooks", "fsdp2")}
    for mode, each in run(tmp_path, scenarios, size=3).items():
        assert ["rank 0 holds the result" in str(each[rank]) for rank in (1, 2)] == [True, True]
        assert each[0]["verdict"] == "PASS", (mode, each[0]["text"])


def torchrun(folder, *options):
    """Run the example like a user and return its result."""
    require("sklearn")
    (folder / "canary-seed").write_text("the seed of this test\n")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ROOT / "examples" / "opacus-distributed" / "train.py"
    done = subprocess.run(
        [sys.executable, *command, str(script), "--out", str(folder / "run"), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((folder / "run" / "result.json").read_text())
    assert (
        "PASS: the run keeps ε ≤ 5.6 at δ 1e-5 for one row, added or removed\n  claim        whole training, counting "
        in done.stdout
    )
    assert f"epsilon {result['accounted_epsilon']:.3g} by the accountant" in done.stdout
    assert "warnings" not in result
    return result


def test_the_example_passes(tmp_path):
    result = torchrun(tmp_path, "--epochs", "2")
    assert (result["verdict"], result["rounds"]) == ("PASS", 20)


@pytest.mark.slow
def test_the_example_passes_under_fsdp2(tmp_path):
    assert torchrun(tmp_path, "--sharded")["verdict"] == "PASS"


def test_the_guide_shows_the_lines_of_the_example():
    guide = (ROOT / "docs" / "how-to" / "opacus.md").read_text()
    (shown,) = re.findall(r"^```python\n(.*?)^```", guide, flags=re.MULTILINE | re.DOTALL)
    assert shown in (ROOT / "examples" / "opacus-distributed" / "train.py").read_text()


def test_one_process_rejects_reduce(tmp_path):
    import torch

    model, optimizer, _, loader, _ = make(examples=100, batch=50)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="reduce is for several processes, and DPOptimizer is for one: omit it"):
            audited(optimizer, model, canaries=10, seed=b"test", delta=1e-5, data_loader=loader, reduce=reduce_over())
    finally:
        torch.distributed.destroy_process_group()
