import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")


def coalmine(*arguments):
    return subprocess.run([sys.executable, "-m", "coalmine", *arguments], capture_output=True, text=True)


def test_selftest_shows_what_caught_what():
    done = coalmine("selftest", "--fault", "honest", "--fault", "noise-over-2", "--fault", "one-client-twice")
    assert done.returncode == 0, done.stderr
    with_others, without = done.stdout.split("Without them")
    assert "half the noise" in with_others
    assert "known-others, " in with_others
    assert "cannot be seen" in with_others
    assert "nothing, as it should be" in without


def test_selftest_as_json():
    found = json.loads(coalmine("selftest", "--fault", "noise-reused", "--json").stdout)
    assert found[0]["fault"] == "noise-reused"
    assert "repeat gauge" in found[0]["caught_by"]
    assert found[0]["likely"] == ["noise-reused"]
    assert found[0]["smallest_signal"] >= 1


@pytest.mark.parametrize("arguments", [["--fault", "magic"], ["--seeds", "0"]])
def test_bad_input_is_one_line(arguments):
    done = coalmine("selftest", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
