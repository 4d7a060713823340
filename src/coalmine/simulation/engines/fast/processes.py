"""One client at a time in each of several processes: for large models on a CPU with more than one core."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait

import numpy as np
import torch
from torch import Tensor

from coalmine.simulation.batches import Batches
from coalmine.simulation.engines.plain.engine import ClientSettings, Examples, chunks, clients_that_fit
from coalmine.simulation.engines.plain.one_by_one import Step, autograd_step, described, train_client
from coalmine.simulation.models import Model, model_by_name
from coalmine.simulation.population import Indices

Description = tuple[int, tuple[int, ...], torch.dtype]  # of shared memory: its handle, and the tensor in it

# glibc keeps freed memory for the next step, in large pages. By default it returns it to the system, which costs a thousand
# page faults in every step of the CNN. Other allocators ignore this.
KEEP_MEMORY = "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=1073741824:glibc.malloc.hugetlb=1"


class Processes:
    """One process with one thread per worker; examples, model and updates are in shared memory.

    Which process trains a client has no effect on its update, so a round does not depend on timing. Processes are started
    as separate commands, since multiprocessing would run the caller's script again in each.
    """

    def __init__(
        self,
        model: Model,
        examples: Examples,
        client: ClientSettings,
        *,
        jobs: int,
        memory_limit: float,
        step: Step = autograd_step,
    ) -> None:
        self.jobs, self.model, self.client, self.step = jobs, model, client, step
        self.rows = max(clients_that_fit(4 * model.dim, memory_limit), jobs)
        self._examples = (_share(examples.inputs), _share(examples.labels))
        self._model_vector = _share(torch.zeros(model.dim))
        self._updates = Shared((0, model.dim), torch.float32)
        self._started: dict[Connection, subprocess.Popen[bytes]] = {}

    @property
    def description(self) -> str:
        return f"one by one, {described(self.step)}, in {self.jobs} processes"

    def updates(self, model_vector: Tensor, batches: Batches) -> Iterator[Tensor]:
        self._model_vector.tensor.copy_(model_vector)
        self._start(min(len(batches), self.rows))
        for clients in chunks(len(batches), len(self._updates.tensor)):
            try:
                self._train(batches, clients)
            except BaseException:
                self._give_up()
                raise
            yield self._updates.tensor[: len(clients)]

    def close(self) -> None:
        for connection, process in self._started.items():
            connection.close()  # which ends the process
            process.wait()
        self._started = {}

    def _give_up(self) -> None:
        """Kill the processes; the next round starts new ones."""
        for process in self._started.values():
            process.kill()
        self.close()
        self._updates = Shared((0, self.model.dim), torch.float32)

    def _start(self, rows: int) -> None:
        """Start the processes with a buffer of enough rows; once, and again only for a larger round."""
        if len(self._updates.tensor) >= rows:
            return
        self.close()
        self._updates = Shared((rows, self.model.dim), torch.float32)
        memory = [*self._examples, self._model_vector, self._updates]
        for _ in range(self.jobs):
            ours, theirs = Pipe()
            command = [sys.executable, "-c", f"from {__name__} import work; work({theirs.fileno()})"]
            handles = [theirs.fileno(), *(shared.handle for shared in memory)]
            environment = {"GLIBC_TUNABLES": KEEP_MEMORY, **os.environ}
            process = subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL, env=environment)
            theirs.close()
            ours.send((self.model.name, self.client, self.step, [shared.description for shared in memory]))
            self._started[ours] = process

    def _train(self, batches: Batches, clients: Indices) -> None:
        longest_first = np.argsort(-batches.steps[clients], kind="stable")  # so that all end at about the same time
        waiting = iter((int(row), int(clients[row])) for row in longest_first)
        busy = [connection for connection in self._started if _send_next(connection, waiting, batches)]
        while busy:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                try:
                    failure = connection.recv()
                except (EOFError, OSError):
                    code = self._started[connection].wait()
                    raise ChildProcessError(
                        f"a training process ended with exit code {code}; if memory was short, use fewer --jobs"
                    ) from None
                if failure is not None:
                    raise RuntimeError(f"training a client failed: {failure}")
                if not _send_next(connection, waiting, batches):
                    busy.remove(connection)


def _send_next(connection: Connection, waiting: Iterator[tuple[int, int]], batches: Batches) -> bool:
    """Send a process its next client; False if there is none left."""
    for row, client in waiting:
        steps = int(batches.steps[client])
        examples, counts = batches.examples[client, :steps], batches.counts[client, :steps]
        with suppress(OSError):  # it has ended: the next recv says so
            connection.send((row, examples, counts, int(batches.dropout_seeds[client])))
        return True
    return False


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
        self.tensor = _mapped(self.description)

    def __del__(self) -> None:
        if self.file is None:
            os.close(self.handle)


def _share(tensor: Tensor) -> Shared:
    shared = Shared(tensor.shape, tensor.dtype)
    shared.tensor.copy_(tensor)
    return shared


def _mapped(description: Description) -> Tensor:
    handle, shape, dtype = description
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(handle, 0), dtype=dtype)[:count].view(shape)


def work(handle: int) -> None:
    """The main function of each process: train the clients that arrive through the pipe, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    torch.set_num_threads(1)
    with Connection(handle) as connection:
        try:
            name, client, step, descriptions = connection.recv()
            inputs, labels, vector, updates = [_mapped(description) for description in descriptions]
            model, examples = model_by_name(name), Examples(inputs, labels)
            while True:
                row, batches, counts, dropout_seed = connection.recv()
                try:
                    train_client(model, examples, client, step, vector, batches, counts, dropout_seed, updates[row])
                    connection.send(None)
                except (RuntimeError, IndexError, ValueError) as error:
                    connection.send(f"{type(error).__name__}: {error}")
        except (EOFError, OSError):  # the parent has ended
            return
