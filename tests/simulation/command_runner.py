"""The script that commands.py runs in each process, with `arguments`, `output` and `environment` as globals."""

import os
import sys

import torch

from coalmine.cli.main import main

torch.set_num_threads(1)
os.environ.update(environment)  # type: ignore[name-defined]  # noqa: F821
for handle, name in ((1, output), (2, f"{output}.err")):  # type: ignore[name-defined]  # noqa: F821
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), handle)
try:
    main(arguments)  # type: ignore[name-defined]  # noqa: F821
except SystemExit as stop:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(stop.code or 0))
