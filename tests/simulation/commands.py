"""Real processes that run `coalmine`, forked from a server that has already imported it to save time."""

import contextlib
import multiprocessing
import os
import re
import runpy
import time
from pathlib import Path

RUNNER = Path(__file__).with_name("command_runner.py")
PRELOADED = ["coalmine.cli.main", "coalmine.simulation.sweep", "coalmine.report", "sklearn.datasets"]


class Command:
    """One command in a process of its own."""

    def __init__(self, arguments, output, environment):
        self.output = output
        self.process = context().Process(
            target=runpy.run_path,
            args=(str(RUNNER),),
            kwargs={
                "init_globals": {
                    "arguments": [str(argument) for argument in arguments],
                    "output": str(output),
                    "environment": environment,
                },
                "run_name": "__main__",
            },
        )
        self.process.start()

    def wait(self, seconds=180):
        """Wait for the end and return the exit code, which is negative if a signal ended the process."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, f"still running: {self.text}"
        return self.process.exitcode

    def wait_for(self, condition, seconds=180):
        """Wait until a condition holds; the command must still be running."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.is_alive(), self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.002)

    @property
    def text(self):
        return self.output.read_text()

    @property
    def errors(self):
        """The output on stderr, without torch's log."""
        return without_torch(Path(f"{self.output}.err").read_text())

    @property
    def children(self):
        """The process ids of its child processes, the ranks."""
        children = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.process.pid and fields[0] != "Z":
                    children.append(int(path.parent.name))
        return sorted(children)


def context():
    """The context of the fork server, which has one thread, since forking with several is unsafe."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # `errors` is what coalmine prints, without torch's warnings
    return made


def without_torch(text):
    """What coalmine printed: torch logs lost connections and missing host names, depending on the machine."""
    return re.sub(
        r"^(\[rank\d+\]: ?)?(\[[WE]\d* |frame #\d+: |Exception raised from ).*\n", "", text, flags=re.MULTILINE
    )


def command(output, *arguments, **environment):
    return Command(arguments, output, environment)


def lines_of(path):
    """The number of complete lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0
