"""Run `coalmine` commands in forked processes whose disk can fail, for test_interrupted_runs.py.

Imports happen once, so that hundreds of real processes can be killed in little time. Each line of stdin is a JSON list:
the arguments, a file for the output, a fault or null, and the seconds until SIGKILL or null. The answer is the exit
code.

A fault is a kind and a number n. `short` lets every write take at most n bytes. The others begin with the n-th call that
changes the disk (a write, an fsync or a rename): `full` fails with ENOSPC, `half` does so after half of a write, `broken`
fails with EIO, and `power` kills the process after half of a write.
"""

import errno
import json
import os
import signal
import sys
import time

import sklearn.datasets  # noqa: F401 - the digits

import coalmine.report
import coalmine.simulation.sweep
import coalmine.simulation.training_run  # noqa: F401
from coalmine.cli.main import main


class FailingDisk:
    """Replaces the functions of `os` that write to the disk."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number, self.calls = kind, number, 0
        self.real = {name: getattr(os, name) for name in ("pwrite", "write", "fsync", "replace")}
        os.pwrite = lambda handle, data, place: self._written("pwrite", handle, data, place)
        os.write = lambda handle, data: self._written("write", handle, data)
        os.fsync = lambda handle: self._called("fsync", handle)
        os.replace = lambda source, target: self._called("replace", source, target)

    def _fails(self) -> bool:
        self.calls += 1
        return self.kind != "short" and self.calls >= self.number

    def _written(self, name, handle, data, *place):
        write = self.real[name]
        if self.kind == "short":
            return write(handle, bytes(data)[: self.number], *place)
        if self._fails():
            if self.kind in ("half", "power") and self.calls == self.number:
                written = write(handle, bytes(data)[: len(data) // 2], *place)
                if self.kind == "half" and written:
                    return written
            self._fail()
        return write(handle, data, *place)

    def _called(self, name, *arguments):
        if self._fails():
            self._fail()
        return self.real[name](*arguments)

    def _fail(self):
        if self.kind == "power":
            os.kill(os.getpid(), signal.SIGKILL)
        number = errno.EIO if self.kind == "broken" else errno.ENOSPC
        raise OSError(number, os.strerror(number))


def run(arguments, output, fault):
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if fault is not None:
        FailingDisk(*fault)
    code = 70
    try:
        main(arguments)
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for line in sys.stdin:
        *request, kill_after = json.loads(line)
        process, started = os.fork(), time.monotonic()
        if process == 0:
            run(*request)
        done, status = 0, 0
        while not done:
            done, status = os.waitpid(process, 0 if kill_after is None else os.WNOHANG)
            if not done and time.monotonic() - started >= kill_after:
                os.kill(process, signal.SIGKILL)
                kill_after = None
            elif not done:
                time.sleep(0.001)
        print(os.waitstatus_to_exitcode(status), flush=True)
