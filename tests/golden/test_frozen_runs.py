"""The frozen runs: their logs give the same results, and coalmine prints the same about them.

Numbers agree to 1e-9, texts exactly. `python tests/golden/refresh.py` shows the differences; `--write` accepts them.
"""

import json
import re

import pytest
from frozen import RUNS, changes, names

from coalmine.evidence.ladder import RUNGS

INNER = {*RUNGS, "leg", "gauge", "rung", "residual"} - {"final"}  # "the final model" is no inner name
CODES = {
    "VIOLATION": {
        "accounting", "bound", "composed", "evidence", "gauge", "less noise", "mean", "round", "sampler", "stated",
    },
    "PASS": {"accounted", "legs", "power", "sampled", "sampled power", "sampler allowed"},
    "UNDERPOWERED": {
        "constant", "divisor", "gauge", "no canaries", "no claim", "noise_std", "others", "participations", "picks",
        "pipeline", "power", "range", "sampled power", "sampler", "sampler not observed", "short", "stated", "training",
        "undetected", "uneven", "unobserved", "weak", "weak rounds",
    },
}  # fmt: skip


LONG = {"sampled", "fixed-size", "sampled-twice-as-often", "sampled-own-coin"}  # ask an accountant many times


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in names()])
def test_a_frozen_run_gives_the_same_result_and_texts(name):
    lines, _ = changes(name)
    assert not lines, "\n".join(lines[:40])


def test_the_frozen_runs_show_every_verdict():
    seen = {outcome: set() for outcome in CODES}
    for name in names():
        for file in ("result.json", "printed.json"):
            note_verdicts(json.loads((RUNS / name / file).read_text()), seen)
    assert seen == CODES


@pytest.mark.parametrize("name", names())
def test_a_result_prints_in_ten_lines_without_inner_names(name):
    """The verdict comes first. Attackers are described and not named, and nothing is wider than a hundred characters."""
    texts = json.loads((RUNS / name / "printed.json").read_text())
    for printout in (texts["printout"], *(each["printout"] for each in texts["claims"].values())):
        assert len(printout) <= 10
        assert max(map(len, printout)) <= 100
        assert re.match("PASS: |VIOLATION: |UNDERPOWERED: |NO VERDICT: ", printout[0])
        words = set(re.findall(r"[\w-]+", " ".join(printout)))
        assert not words & {*INNER, *(f"{name}s" for name in INNER)}
        labels = [line[2:15].strip() for line in printout if line.startswith("  ")]
        assert [label for label in labels if label][-2:] == ["next", "more"]


def note_verdicts(values, seen):
    """Add the outcomes and codes of every verdict in a result."""
    if isinstance(values, dict):
        if values.get("reason_code"):
            seen[values["verdict"]].add(values["reason_code"])
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            note_verdicts(value, seen)
