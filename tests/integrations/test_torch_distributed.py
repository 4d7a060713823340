"""Sums over real processes: the same bits on every rank, and a one-line error if a rank is lost."""

import json
import re
import signal

import numpy as np
import pytest
from requires import require

torch = require("torch")
from torch_ranks import Ranks  # noqa: E402

from coalmine.integrations.torch_distributed import reduce_over  # noqa: E402

TIMEOUT = 20  # seconds: long enough for a rank that waits for a busy core
LOST = re.compile(
    r"(another rank|rank [\d, ]+) of 3 no longer takes part: it was killed, has failed, or was away for more than "
    r"\d+ s; restart all ranks, and an audit with a directory resumes after its last round"
)


def lose(folder, lost, how, store):
    """The output of each rank before and after another is lost."""
    with Ranks(folder, "reduce_ranks.py", TIMEOUT, size=3, store=store) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "summing")
        ranks.send(lost, how)
        for rank in {0, 1, 2} - {lost}:
            assert ranks.wait(rank) == 0, ranks.output(rank)
        return [ranks.output(rank).splitlines() for rank in range(3)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    return lose(tmp_path_factory.mktemp("ranks"), 1, signal.SIGSTOP, "file")


@pytest.mark.full
def test_every_rank_gets_the_same_sum_and_the_same_errors(printed):
    """Three ranks, float64 numbers over 24 orders of magnitude, a group of two ranks, and arrays of unequal length."""
    every = [json.loads(lines[0]) for lines in printed]
    assert [(one["rank"], one["size"], one["dtype"]) for one in every] == [(i, 3, "float64") for i in range(3)]
    assert len({one["digest"] for one in every}) == 1
    assert max(one["error"] for one in every) < 2 * np.finfo(np.float64).eps  # two additions with possible cancellation
    assert [one["empty"] for one in every] == [0, 0, 0]
    assert [every[0]["pair"], every[2]["pair"]] == [[0, 2, 4.0], [1, 2, 4.0]]
    assert every[1]["outside"] == "this process is not in the group: only its members call reduce_over"
    for rank, one in enumerate(every):
        assert one["lengths"] == (
            f"every rank must be at the same point of the training: rank {rank} passed {3 if rank else 4} numbers, and "
            "all 3 ranks 10 in total; each must take the same steps in the same order"
        )
        assert one["after"] == [3.0]


def check_lost(printed, lost, named):
    for lines in printed[:lost] + printed[lost + 1 :]:
        assert len(lines) == 3, lines  # nothing else is printed
        one = json.loads(lines[2])
        assert LOST.fullmatch(one["error"]), one
        assert one["error"].startswith(named)
        assert f"for more than {TIMEOUT} s" in one["error"]


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_others_with_one_line(printed):
    check_lost(printed, 1, "rank 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "how", "named"),
    [
        (1, signal.SIGKILL, "rank 1"),
        (0, signal.SIGKILL, "another rank"),  # it held the store, so its number is unknown
        (0, signal.SIGSTOP, "another rank"),
    ],
)
def test_a_lost_rank_ends_the_others_with_one_line(tmp_path, lost, how, named):
    check_lost(lose(tmp_path, lost, how, "tcp"), lost, named)


def test_a_sum_over_one_process_is_its_own_numbers(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        reduce = reduce_over()
        assert (reduce.rank, reduce.size) == (0, 1)
        given = np.array([1.0, -2.0, np.nan])
        assert np.array_equal(reduce(given), given, equal_nan=True)
        assert reduce(given) is not given
        with pytest.raises(
            ValueError, match="must be a one-dimensional array of float64, got an array of float32 with 1 dim"
        ):
            reduce(np.ones(3, dtype=np.float32))
        with pytest.raises(ValueError, match="of float64, got an array of float64 with 2 dimensions"):
            reduce(np.ones((3, 1)))
        with pytest.raises(ValueError, match=r"of float64, got \[1.0\]"):
            reduce([1.0])
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds, got 0"):
            reduce_over(timeout=0)
        with pytest.raises(ValueError, match="backend must be 'gloo' or 'nccl', got 'mpi'"):
            reduce_over(backend="mpi")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_sums_work_next_to_nccl(tmp_path, backend):
    """Training uses an NCCL group. NCCL allows one process per GPU, so this is a sum over one process."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        given = np.random.default_rng(0).normal(size=11_000)
        assert np.array_equal(reduce_over(backend=backend)(given), given)
    finally:
        torch.distributed.destroy_process_group()


def test_a_sum_requires_a_process_group():
    with pytest.raises(ValueError, match="needs a process group: call torch"):
        reduce_over()
