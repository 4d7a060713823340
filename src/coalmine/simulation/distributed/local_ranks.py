"""Ranks that rank 0 starts on its own machine, with one copy of the examples in shared memory."""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from coalmine.measure.torch_group import LOOPBACK, LostRankError
from coalmine.simulation.client_sums import ClientSums, engine_of
from coalmine.simulation.config import RunConfig
from coalmine.simulation.distributed.rank_environment import listening_handle
from coalmine.simulation.distributed.rank_group import RankGroup
from coalmine.simulation.distributed.rounds import RankSums
from coalmine.simulation.engines.plain.engine import Examples
from coalmine.simulation.models import Model, model_by_name
from coalmine.simulation.population import Indices

Description = tuple[
    int, tuple[int, ...], torch.dtype
]  # of shared memory: its handle, and the shape and dtype of the tensor in it

# Makes glibc keep freed memory for the next step, in large pages. By default glibc returns it to the system, which costs a
# thousand page faults in every step of the CNN. Other allocators ignore this setting.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824:glibc.malloc.hugetlb=1"
KEPT = {-3: 33_554_432, -1: 1_073_741_824}  # the first two settings for this process, by their mallopt() numbers
END_TIMEOUT = 10.0  # seconds that a rank has to end after the last round


class LocalRanks:
    """Ranks 1 to size − 1 as processes of this machine; this process is rank 0. They start with the first round.

    They are started as separate commands, since multiprocessing would run the caller's script again in each. They end when
    this process ends, even if it is killed.
    """

    def __init__(self, model: Model, shared: "SharedExamples", sums: ClientSums, *, size: int) -> None:
        self.model, self.sums, self.size = model, sums, size
        self._shared = shared
        self._started: dict[Connection, subprocess.Popen[bytes]] = {}
        self._ranks: RankSums | None = None

    @property
    def description(self) -> str:
        return f"in {self.size} ranks"

    def compute(
        self, model_vector: Tensor, clients: Indices, round_number: int, clip_norm: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of all clipped updates, and the norms before clipping."""
        try:
            if self._ranks is None:
                self._ranks = RankSums(self._start(), self.sums)
            return self._ranks.compute(model_vector, clients, round_number, clip_norm)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the other ranks."""
        if self._ranks is not None:
            with suppress(LostRankError):
                self._ranks.group.end()
        for connection, process in self._started.items():
            connection.close()  # also ends the process
            try:
                process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started, self._ranks = {}, None

    def _kill(self) -> None:
        self._ranks = None
        for process in self._started.values():
            process.kill()
        self.close()

    def _start(self) -> RankGroup:
        _keep_memory()
        handle = listening_handle(LOOPBACK, 0)
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, master_listen_fd=handle)
        config = self.sums.config
        device = config.engine.device
        for rank in range(1, self.size):
            ours, theirs = Pipe()
            command = [sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()})"]
            environment = {"GLIBC_TUNABLES": KEEP_MEMORY, **os.environ}
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *self._shared.handles],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
            self._started[ours] = process
            theirs.close()
            parts = (rank, self.size, store.port, config.to_dict(), self.model.name)
            with suppress(OSError):  # it has ended: the next recv fails
                ours.send((*parts, self._shared.descriptions, self.sums.population))
        for connection in self._started:
            try:
                connection.recv()  # "ready"
            except (EOFError, OSError):
                raise LostRankError(self._describe_loss() or "a rank could not be started") from None
        group = RankGroup(store, 0, self.size, device=device, local=True)
        group.describe_loss = self._describe_loss
        return group

    def _describe_loss(self) -> str | None:
        """A description of the rank that has ended, or None if all are running."""
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            for rank, process in enumerate(self._started.values(), 1):
                code = process.poll()
                if code is not None:
                    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                    return f"rank {rank} of {self.size} {how}; if memory was short, use fewer --workers"
            time.sleep(0.02)
        return None


def work(handle: int) -> None:
    """The main function of the other ranks: train a share of every round until rank 0 ends."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # rank 0 handles interruptions
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(1)
    connection = Connection(handle)
    try:
        rank, size, port, values, name, descriptions, population = connection.recv()
    except (EOFError, OSError):
        return
    config, model = RunConfig.from_dict(values), model_by_name(name)
    device = config.engine.device
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(rank)
    examples = Examples(*map(_map_tensor, descriptions)).to(device)
    engine = engine_of(config, model, examples)
    sums = ClientSums(config, population, engine)
    threading.Thread(target=_end_with_rank_0, args=(connection,), daemon=True).start()
    with suppress(OSError):
        connection.send("ready")
    try:
        store = TCPStore(LOOPBACK, port, is_master=False)
        group = RankGroup(store, rank, size, device=device, local=True)
        RankSums(group, sums).follow(torch.zeros(model.dim, device=device))
    except (LostRankError, RuntimeError):  # rank 0 has failed or ended, and reports why
        os._exit(1)
    os._exit(0)


def _end_with_rank_0(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


class SharedExamples:
    """Examples in shared memory. The tensors of `examples` are moved there, so that only one copy exists."""

    def __init__(self, examples: Examples) -> None:
        self._parts = [_move_to_shared(examples.inputs), _move_to_shared(examples.labels)]

    @property
    def handles(self) -> list[int]:
        return [part.handle for part in self._parts]

    @property
    def descriptions(self) -> list[Description]:
        return [part.description for part in self._parts]


class Shared:
    """A tensor in shared memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.file = None if hasattr(os, "memfd_create") else tempfile.TemporaryFile()  # noqa: SIM115
        self.handle = os.memfd_create("coalmine") if self.file is None else self.file.fileno()
        self.description: Description = (self.handle, tuple(shape), dtype)
        size = torch.empty(0, dtype=dtype).element_size()
        for length in shape:
            size *= length
        os.ftruncate(self.handle, max(size, mmap.PAGESIZE))
        self.tensor = _map_tensor(self.description)

    def __del__(self) -> None:
        if self.file is None:
            os.close(self.handle)


def _move_to_shared(tensor: Tensor) -> Shared:
    shared = Shared(tensor.shape, tensor.dtype)
    shared.tensor.copy_(tensor)
    tensor.data = shared.tensor  # frees the original, even if it has other references
    return shared


def _map_tensor(description: Description) -> Tensor:
    handle, shape, dtype = description
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(handle, 0), dtype=dtype)[:count].view(shape)


def _keep_memory() -> None:
    """Let glibc keep freed memory in this process too, since rank 0 also trains."""
    with suppress(OSError, AttributeError):
        libc: Any = ctypes.CDLL(None)
        for name, value in KEPT.items():
            libc.mallopt(name, value)
