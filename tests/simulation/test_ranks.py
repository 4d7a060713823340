"""Several ranks give the result of one process; after a rank is killed, the run resumes bit for bit."""

import dataclasses
import itertools
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command, lines_of, without_torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coalmine.audit import Audit
from coalmine.data import data_folder
from coalmine.measure import torch_group
from coalmine.measure.torch_group import LostRankError, can_connect
from coalmine.simulation import RunConfig
from coalmine.simulation.client_sums import divide_clients
from coalmine.simulation.cohorts import plan_cohorts
from coalmine.simulation.config import EngineSettings
from coalmine.simulation.config_sources import merged, task_defaults
from coalmine.simulation.distributed import rank_environment, rank_group
from coalmine.simulation.distributed.local_ranks import LocalRanks, SharedExamples
from coalmine.simulation.distributed.rank_environment import (
    first_node,
    join_group,
    listening_handle,
    place_from,
)
from coalmine.simulation.distributed.rank_group import RankError, RankInputError
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import Examples, client_engine
from coalmine.simulation.models import cnn_dropout, mlp
from coalmine.simulation.planned_privacy import PlannedPrivacy
from coalmine.simulation.population import random_partition
from coalmine.simulation.tasks import Task
from coalmine.simulation.training_run import prepared
from ports import free_ports
from resumed import comparable

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
CONFIG = """
rounds = 24
checkpoint_every = 3
[canaries]
count = 30
[participation]
clients_per_round = 12
[engine]
threads = 1
"""
SAME = ("result.json", "model.npy", "audit/rounds.log")


def smallest_largest_load(steps, shares):
    """The smallest possible largest load, found by trying every division."""
    divisions = itertools.product(range(shares), repeat=len(steps))
    return min(
        max(sum(s for s, r in zip(steps, ranks, strict=True) if r == k) for k in range(shares)) for ranks in divisions
    )


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_division_has_every_client_once_and_is_near_the_optimum(shares):
    """Longest first is at most 4/3 − 1/(3m) times the optimum (Graham 1969)."""
    rng = np.random.default_rng(shares)
    for _ in range(10):
        steps = rng.integers(1, 30, size=8)
        divided = divide_clients(steps, shares)
        assert sorted(np.concatenate(divided).tolist()) == list(range(8))
        longest = max(steps[share].sum() for share in divided)
        assert longest <= (4 / 3 - 1 / (3 * shares)) * smallest_largest_load(steps.tolist(), shares)


def test_division_of_fewer_clients_than_ranks_leaves_ranks_without_work():
    assert [share.tolist() for share in divide_clients(np.array([5]), 3)] == [[0], [], []]
    assert [share.tolist() for share in divide_clients(np.array([], dtype=np.int64), 2)] == [[], []]
    assert [share.tolist() for share in divide_clients(np.array([0, 0, 0, 0]), 2)] == [[0, 2], [1, 3]]


def pictures(count):
    generator = torch.Generator().manual_seed(3)
    return Examples(torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator))


def training(model, examples, *, clients, size):
    """A training of so many ranks, without a directory."""
    settings = {"rounds": 9, "evaluate_every": 9, "participation": {"clients_per_round": clients}}
    config = RunConfig.from_dict(merged(task_defaults("mnist-by-writer"), settings))
    config = dataclasses.replace(config, engine=EngineSettings(jobs=size, threads=1, device="cpu").resolved())
    task = Task("pictures", model, examples, examples, random_partition(len(examples), clients, seed=0))
    audit = Audit(model.dim, canaries=20, seed=1, delta=1e-6, rounds=9, layers=model.sizes)
    shared = SharedExamples(examples)
    engine = client_engine("auto", model, examples, config.client)
    planned = PlannedPrivacy(config, plan_cohorts(config, clients, audit.canaries_in_round), clients)
    found = Training(planned, task=task, engine=engine, audit=audit)
    local = LocalRanks(model, shared, found.sums, size=size)
    if size > 1:
        found.clients_sum = local.compute
    return found, local


@pytest.mark.full
def test_the_cnn_in_two_ranks_trains_as_in_one_process():
    """The same model, norms and clip norm to 1e-5; the clip norm follows from every client's norm."""
    models, reports = [], []
    for size in (1, 2):
        trained, local = training(cnn_dropout(), pictures(60), clients=5, size=size)
        state = trained.initial_state()
        for _ in range(3):
            report = trained.round(state)
        local.close()
        models.append((state.model_vector, state.clip_norm))
        reports.append(report)
    (alone, clip), (ranked, ranked_clip) = models
    assert float((ranked - alone).norm() / alone.norm()) < 1e-5
    assert float((ranked - alone).abs().max()) < 1e-5
    assert ranked_clip == pytest.approx(clip, rel=1e-5)
    assert reports[1].clipped_share == reports[0].clipped_share


@pytest.mark.parametrize("clients", [0, 1, 2, 7])
def test_sums_of_the_ranks_add_up_to_the_sum_of_one_process(clients):
    """Also where a rank has no client, or nobody takes part; norms are the same to the bit."""
    trained, _ = training(mlp(784, 4, 10), flat_pictures(120), clients=8, size=1)
    vector, present = trained.initial_vector(), np.arange(clients)
    total, norms = trained.sums.compute(vector, present, 1, 0.01)
    parts = [trained.sums.compute(vector, present, 1, 0.01, rank=rank, ranks=3) for rank in range(3)]
    torch.testing.assert_close(sum(part[0] for part in parts), total, rtol=1e-5, atol=1e-7)
    assert torch.equal(sum(part[1] for part in parts), norms)
    assert len(norms) == clients


def test_examples_are_moved_to_shared_memory_and_not_copied():
    examples = pictures(20)
    before, where = examples.inputs.clone(), examples.inputs.data_ptr()
    shared = SharedExamples(examples)
    assert torch.equal(examples.inputs, before)
    assert examples.inputs.data_ptr() != where
    assert examples.inputs.data_ptr() == shared._parts[0].tensor.data_ptr()


def flat_pictures(count):
    found = pictures(count)
    return Examples(found.inputs.flatten(1), found.labels)


def on_two_ranks(act, monkeypatch):
    """What `act` returns or raises on each rank of a group of two; ranks are threads here."""
    monkeypatch.setenv("COALMINE_RANK_TIMEOUT", "30")
    place = place_from(variables(0, 2, free_port()))

    def on_rank(rank):
        group = join_group(dataclasses.replace(place, rank=rank), device="cpu")
        try:
            return act(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(on_rank, range(2)))


@pytest.mark.parametrize(("error", "raised"), [(IndexError("out"), RankError), (ValueError("bad"), RankInputError)])
def test_an_error_on_one_rank_is_raised_on_all(monkeypatch, error, raised):
    def act(group):
        def fail():
            raise error

        return group.run_on_all(fail if group.rank == 1 else lambda: "fine")

    first, second = on_two_ranks(act, monkeypatch)
    assert type(first) is raised
    assert str(first) == f"rank 1 failed: {type(error).__name__}: {error}"
    assert second is error


@pytest.mark.full
def test_a_rank_that_hangs_is_named_after_the_time_limit(monkeypatch):
    monkeypatch.setattr(rank_group, "WAIT", 2.0)
    monkeypatch.setattr(torch_group, "ROLL_CALL", 0.2)
    noticed = threading.Event()

    def act(group):
        if group.rank == 1:
            noticed.wait(60)
            return None
        try:
            return group.add(lambda: (torch.zeros(3), torch.zeros(1)))
        finally:
            noticed.set()

    lost, _ = on_two_ranks(act, monkeypatch)
    assert isinstance(lost, LostRankError)
    assert str(lost).startswith("rank 1 of 2 no longer takes part")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    (made / "run.toml").write_text(CONFIG)
    return made


def run_of(folder, name, *more, **environment):
    """`coalmine run` in its own process; the directory is named like the output."""
    arguments = ("run", "--config", folder / "run.toml", "--out", folder / name, "--no-page", "-q", *more)
    return command(folder / f"{name}.txt", *arguments, **environment)


@pytest.fixture(scope="module")
def whole(folder):
    """An uninterrupted run with two ranks."""
    done = run_of(folder, "whole", "--workers", 2)
    assert done.wait() == 0, done.errors
    assert "2 ranks" in json.loads((folder / "whole" / "result.json").read_text())["engine"]
    return folder / "whole"


def assert_same(directory, whole):
    for name in SAME:
        assert comparable(directory / name) == comparable(whole / name), name


@pytest.mark.full
def test_two_ranks_give_the_result_of_one_process(folder, whole):
    alone = run_of(folder, "alone", "--workers", 1)
    assert alone.wait() == 0
    models = [np.load(directory / "model.npy") for directory in (folder / "alone", whole)]
    np.testing.assert_allclose(models[1], models[0], atol=1e-5)


@pytest.mark.full
def test_an_interrupt_signal_is_not_reported_as_a_lost_rank(folder):
    """A terminal or Slurm sends the signal to every process; rank 0 handles it."""
    going = run_of(folder, "stopped", "--workers", 2)
    going.wait_for(lambda: lines_of(folder / "stopped" / "metrics.jsonl") > 3)
    [follower] = going.children
    for process in (follower, going.process.pid):
        os.kill(process, signal.SIGTERM)
    assert going.wait(200) == 128 + signal.SIGTERM
    line = f"coalmine: interrupted by SIGTERM; continue with: coalmine run --resume {folder / 'stopped'}"
    assert going.errors.strip() == line


@pytest.mark.full
@pytest.mark.parametrize("victim", ["rank 1", pytest.param("rank 0", marks=pytest.mark.slow)])
def test_run_resumes_bit_for_bit_after_a_rank_is_killed(folder, whole, victim):
    """SIGKILL gives a one-line error and exit code 2. If rank 0, the command itself, is killed, rank 1 ends."""
    name = victim.replace(" ", "-")
    going = run_of(folder, name, "--workers", 2)
    going.wait_for(lambda: lines_of(folder / name / "metrics.jsonl") > 5)
    [follower] = going.children
    os.kill(follower if victim == "rank 1" else going.process.pid, signal.SIGKILL)
    code = going.wait(200)
    if victim == "rank 1":
        assert code == 2
        [line] = going.errors.splitlines()
        assert line.startswith("coalmine: rank 1 of 2 was ended by SIGKILL; if memory was short, use fewer --workers; ")
        assert line.endswith(f"`coalmine run --resume {folder / name}` continues the run")
    else:
        assert code == -signal.SIGKILL
    end = time.monotonic() + 400
    while Path(f"/proc/{follower}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not (folder / name / "result.json").exists()
    other = run_of(folder, name, "--workers", 3)
    assert other.wait() == 2
    [line] = other.errors.splitlines()
    assert "holds a run with 2 workers, which cannot continue with 3" in line
    resumed = command(folder / "resumed.txt", "run", "--resume", folder / name, "--no-page", "-q")
    assert resumed.wait() == 0, resumed.errors
    assert_same(folder / name, whole)


def needs_mnist():
    if not data_folder().joinpath("mnist-by-writer").is_dir():
        pytest.skip("needs MNIST")


@pytest.mark.slow
def test_every_round_of_the_cnn_on_mnist_matches_one_process():
    """Two real ranks and one process from the same model, in each of five rounds of a run.

    Whole runs part after some rounds: where an activation is as good as zero, the last bit of a weight decides its side. A
    weight that is moved by 1e-8 does the same to one process.
    """
    needs_mnist()
    settings = {"rounds": 5, "canaries": {"count": 30}, "participation": {"clients_per_round": 6}}
    engine = {"engine": {"device": "cpu", "jobs": 2, "threads": 1}}
    config = RunConfig.from_dict(merged(merged(task_defaults("mnist-by-writer"), settings), engine))
    config = dataclasses.replace(config, engine=config.engine.resolved())
    with prepared(config, None, None) as trained:
        state, in_ranks = trained.initial_state(), trained.clients_sum
        differences = []

        def both(vector, clients, number, clip_norm):
            ranked, norms = in_ranks(vector, clients, number, clip_norm)
            alone, own = trained.sums.compute(vector, clients, number, clip_norm)
            differences.append(float((ranked - alone).norm() / alone.norm()))
            assert torch.equal(norms, own)
            return alone, own

        trained.clients_sum = both
        trained._accuracy = lambda state: None
        for _ in range(5):
            trained.round(state)
    assert len(differences) == 5
    assert max(differences) < 1e-5


@pytest.mark.slow
def test_the_cnn_on_mnist_is_resumed_bit_for_bit(tmp_path):
    needs_mnist()
    (tmp_path / "run.toml").write_text(
        'rounds = 3\nevaluate_every = 5\ncheckpoint_every = 1\n[task]\nname = "mnist-by-writer"\n[canaries]\n'
        "count = 30\n[participation]\nclients_per_round = 6\n[engine]\nthreads = 1\n"
    )
    done = run_of(tmp_path, "whole", "--workers", 2)
    assert done.wait(900) == 0, done.errors
    going = run_of(tmp_path, "killed", "--workers", 2)
    going.wait_for(lambda: lines_of(tmp_path / "killed" / "metrics.jsonl") > 1, seconds=900)
    [follower] = going.children
    os.kill(follower, signal.SIGKILL)
    assert going.wait(200) == 2
    resumed = command(tmp_path / "resumed.txt", "run", "--resume", tmp_path / "killed", "--no-page", "-q")
    assert resumed.wait(900) == 0, resumed.errors
    assert_same(tmp_path / "killed", tmp_path / "whole")


def free_port():
    return free_ports(1)[0]


def variables(rank, size, port):
    names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


@pytest.mark.full
def test_ranks_started_with_environment_variables_give_the_same_result(folder, whole):
    """Rank 1 is killed, which rank 0 reports. Resuming with three ranks is rejected; with two ranks it succeeds."""
    port = free_port()
    ranks = [run_of(folder, "outer", **variables(rank, 2, port)) for rank in range(2)]
    ranks[0].wait_for(lambda: lines_of(folder / "outer" / "metrics.jsonl") > 5)
    ranks[1].process.kill()
    assert ranks[0].wait(200) == 2
    assert "rank 1 of 2 no longer takes part" in ranks[0].errors
    refused = command(folder / "refused.txt", "run", "--resume", folder / "outer", **variables(0, 3, port))
    assert refused.wait() == 2
    assert "--workers must be the number of ranks that were started, 3, or be left out, got 2" in refused.errors
    port = free_port()
    again = [
        command(
            folder / f"again{rank}.txt",
            "run",
            "--resume",
            folder / "outer",
            "--no-page",
            "-q",
            **variables(rank, 2, port),
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in again] == [0, 0], again[0].errors
    assert again[1].text == ""
    assert again[1].errors == ""
    assert_same(folder / "outer", whole)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ("0", "0 is not in the range x>=1"),
        ("-1", "-1 is not in the range x>=1"),
        ("13", "must be at most participation.clients_per_round = 12"),
        ("two", "'two' is not a valid integer"),
    ],
)
def test_invalid_number_of_workers_gives_a_one_line_error(folder, workers, words):
    done = run_of(folder, "bad", "--workers", workers)
    assert done.wait() == 2
    assert words in done.errors
    assert done.errors.count("\n") == 1
    assert not (folder / "bad").exists()


def test_without_variables_there_is_one_process():
    assert place_from({}) is None
    assert place_from({"MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}  # a batch script, outside srun
    assert place_from(batch) is None
    assert place_from({**batch, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_variables_of_torchrun_and_slurm_give_the_place():
    place = place_from(variables(1, 4, 29500) | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (place.rank, place.size, place.local_rank, place.address, place.port) == (1, 4, 1, "127.0.0.1", 29500)
    assert place.agent
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123456",
        "SLURM_STEP_NODELIST": "gpu[03-04,7],cpu1",
    }
    place = place_from(slurm)
    assert (place.rank, place.size, place.local_rank, place.address) == (5, 8, 1, "gpu03")
    assert place.port == place_from(slurm | {"SLURM_PROCID": "0"}).port
    assert 20_000 <= place.port < 40_000
    named = place_from(slurm | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (named.address, named.port) == ("head", 1234)
    assert place_from(slurm | variables(0, 2, 29500)).size == 2  # torchrun inside a step


@pytest.mark.parametrize(
    ("nodes", "first"), [("node1", "node1"), ("a-b,c", "a-b"), ("n[1-3]", "n1"), ("x[007,9]", "x007"), ("", "")]
)
def test_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE and MASTER_ADDR and MASTER_PORT must be set together with RANK"),
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR"),
        (variables(2, 2, 29500), "RANK must lie between 0 and WORLD_SIZE - 1 = 1, got 2"),
        (variables(-1, 2, 29500), "RANK must lie between 0"),
        (variables(0, 0, 29500), "WORLD_SIZE must be between 1 and 1,024, got 0"),
        (variables(0, 10**7, 29500), "WORLD_SIZE must be between"),
        (variables(0, "two", 29500), "WORLD_SIZE must be a whole number, got 'two'"),
        (variables(0, 2, 0), "MASTER_PORT must be a port between 1 and 65535, got 0"),
        (variables(0, 2, 70000), "MASTER_PORT must be a port"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID must be set"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "MASTER_ADDR must name the machine of rank 0"),
        (
            {"SLURM_STEP_NUM_TASKS": "x", "SLURM_PROCID": "0", "MASTER_ADDR": "a"},
            "SLURM_STEP_NUM_TASKS must be a whole",
        ),
    ],
)
def test_inconsistent_variables_give_a_one_line_error(given, words):
    with pytest.raises(ValueError, match=words) as error:
        place_from(given)
    assert "\n" not in str(error.value)


class Clock:
    """A clock that moves by 100 seconds whenever somebody waits."""

    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, _seconds):
        self.now += 100


def join(monkeypatch, seconds="300", **changes):
    monkeypatch.setattr(rank_environment, "time", Clock())
    monkeypatch.setenv("COALMINE_RANK_TIMEOUT", seconds)
    return join_group(dataclasses.replace(place_from(variables(0, 2, free_port())), **changes), device="cpu")


def test_port_in_use_gives_a_one_line_error(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"MASTER_PORT must be a free port, but {port} is taken"):
            join(monkeypatch, port=port)


def test_checking_the_port_never_accepts_another_rank(monkeypatch):
    """A rank that is looking for rank 0 would take whatever listens there for the store, and torch warns of its loss."""
    reached, connect = [], rank_environment.can_connect  # type: ignore[attr-defined]
    place = place_from(variables(0, 2, free_port()))

    def meanwhile(host, port):
        reached.append(connect(place.address, place.port))
        return connect(host, port)

    monkeypatch.setattr(rank_environment, "can_connect", meanwhile)
    with pytest.raises(LostRankError, match="rank 1 of 2 did not arrive"):
        join(monkeypatch, port=place.port)
    assert reached == [False]


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_unreachable_address_gives_an_error_after_the_time_limit(monkeypatch, address, capfd):
    with pytest.raises(ValueError, match="MASTER_ADDR must be an address of the machine of rank 0"):
        join(monkeypatch, address=address)
    with pytest.raises(LostRankError, match=f"but {address}:[0-9]+ could not be reached for 200 s"):
        join(monkeypatch, seconds="200", rank=1, address=address)
    assert without_torch(capfd.readouterr().err) == ""


def test_missing_rank_is_named(monkeypatch, capfd):
    with pytest.raises(LostRankError, match="rank 1 of 2 did not arrive within 200 s"):
        join(monkeypatch, seconds="200")
    assert without_torch(capfd.readouterr().err) == ""


@pytest.mark.parametrize("seconds", ["0", "-1", "soon", "inf", "nan"])
def test_invalid_time_limit_is_rejected(monkeypatch, seconds):
    with pytest.raises(ValueError, match="COALMINE_RANK_TIMEOUT must be a positive number of seconds"):
        join(monkeypatch, seconds)


def test_replaced_steps_need_one_worker():
    from coalmine.simulation import Steps, simulate

    with pytest.raises(ValueError, match="jobs must be 1 where the steps of a round are replaced, got 2"):
        simulate(RunConfig(rounds=2, engine=EngineSettings(jobs=2)), steps=Steps())


def test_a_store_listens_at_its_own_address_alone():
    handle = listening_handle("127.0.0.1", 0)
    with closing(socket.socket(fileno=os.dup(handle))) as seen:
        assert seen.getsockname()[0] == "127.0.0.1"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=handle)
    assert can_connect("127.0.0.1", store.port)
    assert not can_connect("127.0.0.2", store.port)
