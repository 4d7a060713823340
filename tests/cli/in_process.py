"""Commands called in the test's own process: starting another takes more than a second."""

import contextlib
import io
import subprocess
import sys

import pytest

from coalmine.cli.main import main


def called(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, int(str(stop.value.code)), out.getvalue(), err.getvalue())
