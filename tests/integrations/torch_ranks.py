"""Real torch.distributed processes on 127.0.0.1, each stopped by its pid."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent


class Ranks:
    """The ranks of one job: each runs a script in this folder as `python script.py rank size address arguments…`."""

    def __init__(self, folder, script, *arguments, size=2, store="tcp"):
        self.folder, self.size = folder, size
        folder.mkdir(parents=True, exist_ok=True)
        address = f"file://{folder / f'store-{time.monotonic_ns()}'}" if store == "file" else tcp_address()
        self.processes = [
            self._start(rank, [str(FOLDER / script), str(rank), str(size), address, *map(str, arguments)])
            for rank in range(size)
        ]

    def _start(self, rank, command):
        settings = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with (self.folder / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen([sys.executable, *command], cwd=self.folder, env=settings, stdout=log, stderr=log)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()

    def output(self, rank):
        return (self.folder / f"rank{rank}.log").read_text()

    def wait(self, rank, timeout=400):
        """Wait for a rank to end and return its exit code."""
        return self.processes[rank].wait(timeout=timeout)

    def finish(self, timeout=400):
        """Wait until every rank ends, and check that none fails."""
        end = time.monotonic() + timeout
        for rank in range(self.size):
            code = self.wait(rank, max(end - time.monotonic(), 0.1))
            assert code == 0, f"rank {rank} ended with {code}:\n{self.output(rank)}"

    def wait_for(self, rank, text, timeout=200):
        """Wait until a rank prints a text."""
        end = time.monotonic() + timeout
        while text not in self.output(rank):
            assert self.processes[rank].poll() is None, self.output(rank)
            assert time.monotonic() < end, f"rank {rank} did not print {text!r}:\n{self.output(rank)}"
            time.sleep(0.02)

    def send(self, rank, number):
        os.kill(self.processes[rank].pid, number)


def tcp_address():
    from ports import free_ports  # a rank, which runs in a process of its own, does not find it

    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def start_rank():
    """Join the job started by `Ranks` and return rank, size and the script's arguments."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rank, size, address, *arguments = sys.argv[1:]
    distributed.init_process_group("gloo", init_method=address, rank=int(rank), world_size=int(size))
    return int(rank), int(size), arguments
