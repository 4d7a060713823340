"""coalmine on a system without fcntl, pread and pwrite, such as Windows."""

import subprocess
import sys

HIDDEN = """
import os, subprocess, sys, tempfile, types  # the standard library looks for msvcrt too
sys.modules["fcntl"] = None
held = set()
fake = types.ModuleType("msvcrt")
fake.LK_NBLCK = 1
def locking(handle, mode, size):
    inode = os.fstat(handle).st_ino
    if inode in held:
        raise OSError("locked")
    held.add(inode)
fake.locking = locking
sys.modules["msvcrt"] = fake
del os.pread, os.pwrite
import numpy as np
import coalmine

def train():
    audit = coalmine.Audit(600, canaries=20, seed=1, delta=1e-6, rounds=3, directory=sys.argv[1])
    for number in range(audit.last_round + 1, 4):
        present = audit.canaries_in_round(number)
        noise = np.random.default_rng(number).normal(size=600)
        audit.observe_round(number, audit.updates(present, 1.0) + noise, present=present)
    return audit

audit = train()
print(audit.log.digest, audit.finish().rounds)
try:
    coalmine.Audit(600, canaries=20, seed=1, delta=1e-6, rounds=3, directory=sys.argv[1])
except ValueError as error:
    print("refused:", error)
"""


def test_an_audit_works_without_fcntl_pread_and_pwrite(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, str(tmp_path / "run")], capture_output=True, text=True, check=True
    )
    digest, refused = done.stdout.splitlines()
    assert digest.endswith(" 3")
    assert refused.startswith("refused:")
    assert "is being written" in refused


def test_coalmine_is_imported_without_fcntl_and_without_msvcrt(tmp_path):
    hidden = "import sys; sys.modules['fcntl'] = sys.modules['msvcrt'] = None; import coalmine"
    audit = f"coalmine.Audit(600, canaries=20, seed=1, delta=1e-6, directory={str(tmp_path / 'run')!r})"
    subprocess.run([sys.executable, "-c", f"{hidden}; {audit}"], check=True)
