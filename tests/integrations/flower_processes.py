"""Flower's processes on 127.0.0.1, with a separate home and no telemetry, each stopped by its pid."""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from ports import free_ports

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[2] / "examples"


def environment(home):
    """Environment of a Flower process: its own home, no telemetry, nothing installed at run time."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }


class Processes:
    """A SuperLink, its SuperNodes and runs of an app, in their own folder."""

    def __init__(self, folder, *, example, simulation=False):
        self.folder = folder
        self.app = folder / "app"
        shutil.copytree(EXAMPLES / example, self.app)
        self.home = folder / "home"
        self.home.mkdir()
        (self.port,) = free_ports(1)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.environment = environment(self.home)
        self.running = []
        self.simulation = simulation

    def __enter__(self):
        mode = ["--simulation"] if self.simulation else []
        self.superlink = self.start(
            "superlink", "flower-superlink", "--insecure", *mode, "--host", "127.0.0.1", "--port", str(self.port),
            "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self.wait_until(self.healthy, "the SuperLink to answer")
        return self

    def __exit__(self, *error):
        for process in reversed(self.running):
            stop(process)

    def start(self, name, *command):
        """Start a process in its own group, with its output in a file of this name."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.running.append(process)
        return process

    def supernode(self, name, config):
        """A SuperNode with this node config."""
        (port,) = free_ports(1)
        return self.start(
            name, "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", str(port),
            "--node-config", config,
        )  # fmt: skip

    def run(self, **settings):
        """Start a run of the app; its output is run.log."""
        pairs = " ".join(f"{name.replace('_', '-')}={value!r}" for name, value in settings.items())
        federation = ["--federation-config", "num-supernodes=50 client-resources-num-cpus=1"] if self.simulation else []
        command = ["flwr", "run", str(self.app), "here", "--stream", *federation, "--run-config", pairs]
        return self.start("run", *command)

    def stop_run(self, directory):
        """Stop the last run, like a kill of its ServerApp, and wait until its directory is unlocked."""
        run_id = re.findall(r"started run (\d+)", self.log("run"))[-1]
        self.start("stop", "flwr", "stop", run_id, "here").wait(200)
        self.wait_until(lambda: unlocked(directory), "the ServerApp to end")

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def healthy(self):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def wait_until(self, condition, what, seconds=300):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                logs = "\n".join(
                    f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in self.folder.glob("*.log")
                )
                raise TimeoutError(f"waited {seconds} s for {what}\n{logs}")
            time.sleep(0.2)


def unlocked(directory):
    """Whether no process holds the lock of a run directory."""
    with (directory / ".lock").open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def stop(process):
    """Stop the process, then its group, by pid and nothing else."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its session's remaining processes
    process.wait()
