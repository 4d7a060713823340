"""Copies, forks and threads never harm an audit's files, and no seed or key is printed."""

import copy
import os
import pickle
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.traceback import Traceback

import coalmine
from coalmine import Audit, RunDirectory
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.secret import SecretBytes, SecretInt
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.round import Round
from coalmine.measure.schedule import schedule_key

SEED = b"correct horse battery staple"
NUMBER = 314159265358979323846
PACKAGE = str(Path(coalmine.__file__).parent)


def new_audit(directory=None, seed=SEED, **options):
    return Audit(400, canaries=40, seed=seed, delta=1e-5, rounds=6, directory=directory, **options)


def observe(audit, *numbers):
    for number in numbers:
        row = np.random.default_rng(number).normal(size=400)
        audit.observe_round(number, row, present=audit.canaries_in_round(number), others=0.1 * row, noise_std=1.0)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_and_pickling_are_rejected(tmp_path, copied, deferred):
    audit = new_audit(tmp_path / "run", deferred=deferred)
    observe(audit, 1, 2)
    log = audit.log
    whole = (tmp_path / "run" / "audit" / "rounds.log").read_bytes()
    for thing, advice in ((audit, "another directory"), (audit.directory, "another path"), (log, "read_log")):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*" + advice) as refused:
            copied(thing)
        assert "\n" not in str(refused.value)
    assert (tmp_path / "run" / "audit" / "rounds.log").read_bytes() == whole
    observe(audit, 3)


def in_child(action):
    """Run `action` in a forked process and return its result or error as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(action())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


@FORKS
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("place", ["run", None])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_cannot_write(tmp_path, place, deferred):
    home = tmp_path / place if place else None
    audit, alone = new_audit(home, deferred=deferred), new_audit()
    observe(audit, 1, 2)
    observe(alone, 1, 2, 3)
    for action in (
        lambda: observe(audit, 3),
        lambda: audit.rewind_to(1),
        lambda: audit.observe_final(np.ones(400)),
        lambda: audit._log.held.append(None),
    ):
        said = in_child(action)
        assert said.startswith("RuntimeError: the "), said
        assert "a forked process may only read it" in said
        assert "\n" not in said
    if home:
        assert "locked by the process that this one was forked from" in in_child(
            lambda: audit.directory.append_metrics({"round": 1})
        )
    observe(audit, 3)
    assert [item.cosines.tobytes() for item in audit.log.rounds()] == [
        item.cosines.tobytes() for item in alone.log.rounds()
    ]


@FORKS
def test_closing_in_a_forked_process_does_not_close_the_parents_files(tmp_path):
    """Not even a user's file that has the same descriptor number in the child is closed."""
    audit = new_audit(tmp_path / "run")
    observe(audit, 1)
    own = tmp_path / "own.txt"

    def close_everything():
        mine = audit.log._handle
        os.dup2(os.open(own, os.O_RDWR | os.O_CREAT, 0o644), mine)
        log, home = audit.log, audit.directory
        audit.close()
        home.close()
        home.__del__()
        log.close()
        log.__del__()
        os.write(mine, b"still open")
        return "done"

    assert in_child(close_everything) == "done"
    assert own.read_text() == "still open"
    with pytest.raises(ValueError, match="is being written by another process"):
        RunDirectory(tmp_path / "run").lock()
    observe(audit, 2)
    assert in_child(lambda: audit.result().rounds) == "2"
    audit.close()
    new_audit(tmp_path / "run").close()


@FORKS
def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    """A worker that outlives a killed trainer must not prevent the directory from being resumed."""
    audit = new_audit(tmp_path / "run")
    observe(audit, 1)
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wait[1])
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    audit.close()
    again = new_audit(tmp_path / "run")
    assert again.last_round == 1
    again.close()
    os.close(wait[1])
    os.waitpid(child, 0)
    for handle in (*ready, wait[0]):
        os.close(handle)


LOADER = """
import sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from coalmine import Audit

audit = Audit(400, canaries=40, seed=7, delta=1e-5, rounds=6, directory=sys.argv[1], deferred=True)

class Rows(Dataset):
    def __init__(self):
        self.audit = audit
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.from_numpy(np.random.default_rng(index).normal(size=400))

loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
number = 0
for _ in range(3):
    for batch in loader:
        number += 1
        audit.observe_round(number, batch[0].numpy(), present=audit.canaries_in_round(number))
audit.close()
print(Audit(400, canaries=40, seed=7, delta=1e-5, rounds=6, directory=sys.argv[1]).log.numbers)
"""


@pytest.mark.full
@FORKS
def test_loader_workers_do_not_disturb_the_audit(tmp_path):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADER, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "[1, 2, 3, 4, 5, 6]", done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_concurrent_rounds_raise_an_error_and_do_no_damage(tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def attack(number, model_delta, canaries, previous):
        began.set()
        go_on.wait(10)
        return np.zeros(canaries.count)

    audit = new_audit(tmp_path / "run", scores={"slow": attack})
    thread = threading.Thread(target=observe, args=(audit, 1))
    thread.start()
    assert began.wait(10)
    for action in (lambda: observe(audit, 1), lambda: audit.rewind_to(0), lambda: audit.observe_final(np.ones(400))):
        with pytest.raises(RuntimeError, match="in use by another thread; observe one round at a time"):
            action()
    go_on.set()
    thread.join()
    observe(audit, 2)
    assert RunDirectory(tmp_path / "run").read_log().numbers == [1, 2]


def test_concurrent_appends_leave_a_readable_log(tmp_path):
    log, refused = RoundLog(tmp_path / "rounds.log"), []

    def append():
        for number in range(1, 200):
            try:
                log.append(Round(number=number, norm=1.0, rest=1.0, cosines=np.ones(500, np.float32)))
            except RuntimeError as error:
                refused.append(error)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = len(log.numbers)
    assert written + len(refused) == 4 * 199
    log.close()
    assert len(RoundLog(tmp_path / "rounds.log", read_only=True).numbers) == written


def traceback_with_locals(error):
    """The error's traceback with all local variables and the attributes of `self`."""
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(Traceback.from_exception(type(error), error, error.__traceback__, show_locals=True))
    text = console.export_text()
    text += "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    frame = error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        text += repr(vars(owner)) if hasattr(owner, "__dict__") else ""
        frame = frame.tb_next
    console.file.close()
    return text


@pytest.mark.parametrize("seed", [SEED, NUMBER])
@pytest.mark.parametrize("fault", ["settings", "round", "directory"])
def test_tracebacks_with_locals_show_neither_seed_nor_key(tmp_path, seed, fault):
    audit = new_audit(tmp_path / "run", seed=seed)
    secrets = [str(seed), repr(seed), str(int(key_from_seed(seed))), repr(schedule_key(seed))]
    calls = {
        "settings": lambda: new_audit(seed=secret.pop(), presentations=7),
        "round": lambda: audit.observe_round(1, np.ones(3), present=[]),
        "directory": lambda: new_audit(tmp_path / "other", seed=secret.pop()),
    }
    secret = [seed]
    new_audit(tmp_path / "other", seed=b"another secret of this test").close()
    with pytest.raises(ValueError) as refused:
        calls[fault]()
    # coalmine is not responsible for the caller's frames.
    inner = refused.value.__traceback__
    while not inner.tb_frame.f_code.co_filename.startswith(PACKAGE):
        inner = inner.tb_next
    text = traceback_with_locals(refused.value.with_traceback(inner))
    assert not [secret for secret in secrets if secret in text]


@pytest.mark.parametrize("hidden", [SecretInt(NUMBER), SecretBytes(SEED)])
def test_a_hidden_secret_is_not_printed_but_computes_normally(hidden):
    assert {repr(hidden), str(hidden), f"{hidden}", f"{hidden!r}", repr([hidden])} == {"<secret>", "[<secret>]"}
    plain = NUMBER if isinstance(hidden, int) else SEED
    assert hidden == plain
    assert key_from_seed(hidden) == key_from_seed(plain)
    assert new_audit(seed=hidden).canaries_in_round(1).tolist() == new_audit(seed=plain).canaries_in_round(1).tolist()


def test_a_partly_constructed_audit_can_be_printed():
    assert repr(Audit.__new__(Audit)) == "Audit(…)"
