import json
import re

import pytest

from resumed import statistics_of

pytest.importorskip("torch")
from in_process import called


def test_selftest_lists_what_detected_each_fault():
    done = called("selftest", "--fault", "honest", "--fault", "noise-over-2", "--fault", "one-client-twice")
    assert done.returncode == 0, done.stderr
    with_others, without = done.stdout.split("Without them")
    assert "half the noise" in with_others
    assert "known-others, " in with_others
    assert "cannot be detected" in with_others
    assert "nothing, as expected" in without


@pytest.mark.full
def test_selftest_prints_the_margin_of_each_detection():
    """The value and limit of the gauge or rung; a fault that cannot be detected has a reason, too."""
    names = ("small-tensor-without-noise", "noise-on-one-layer", "clip-forgotten-at-scale-1", "weighted-mean-declared")
    done = called("selftest", *(word for name in names for word in ("--fault", name)))
    assert done.returncode == 0, done.stderr
    with_others, without = (rows(table) for table in done.stdout.split("Without them"))
    assert re.fullmatch(
        r"coordinates gauge reads \d\.\d+e-08 for at least 0\.09\d+",
        with_others["a small tensor without noise"][-1],
    )
    both = with_others["noise on one layer only"][-1]
    assert re.fullmatch(
        r"known-others reads [\d.]+ for 6\.31; (layer \S+|coordinates) gauge reads \d\.\d+e-08 for at least 0\.\d+",
        both,
    )
    assert re.fullmatch(r"difference gauge reads 0\.3\d+ for at least 0\.968", without["noise on one layer only"][-1])
    for title in (
        "clipping forgotten, canaries no longer than the clip norm",
        "updates weighted by examples, canaries of the mean weight",
    ):
        caught, _, verdict, by, margin = with_others[title]
        assert (caught, verdict) == ("0 of 1", "PASS 1")
        assert by.startswith("cannot be detected: a canary of the ")
        assert re.fullmatch(r"known-others reads [\d.]+ for 6\.31", margin)


def rows(table):
    """The cells of each row of a printed table; wrapped lines are joined."""
    found = []
    for line in table.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[1]:
                found.append(cells)
            else:
                found[-1] = [f"{before} {more}".strip() for before, more in zip(found[-1], cells, strict=True)]
    return {cells[0]: cells[1:] for cells in found}


def test_selftest_as_json():
    found = json.loads(called("selftest", "--fault", "noise-reused", "--json").stdout)
    assert found[0]["fault"] == "noise-reused"
    assert "repeat gauge" in found[0]["caught_by"]
    assert found[0]["likely"] == ["noise-reused"]
    assert found[0]["smallest_signal"] >= 1
    assert [margin["by"] for margin in found[0]["margins"]] == found[0]["caught_by"]
    gauges = statistics_of(found[0]["result"])
    by = {margin["by"]: (margin["reading"], margin["limit"]) for margin in found[0]["margins"]}
    assert by["repeat gauge"] == (gauges["repeat"]["largest"], gauges["repeat"]["limits"][1])
    assert by["difference gauge"] == (gauges["difference"]["smallest"], gauges["difference"]["limits"][0])
    (blind,) = found[0]["margins_without_others"]
    assert blind["by"] == "difference gauge"
    assert blind["reading"] < blind["limit"]


@pytest.mark.parametrize("arguments", [["--fault", "magic"], ["--seeds", "0"]])
def test_bad_input_is_one_line(arguments):
    done = called("selftest", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
