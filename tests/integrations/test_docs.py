"""The guides: every loop runs, and what a user adds is what the examples have."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from requires import require

ROOT = Path(__file__).parents[2]


def blocks(name, language):
    text = (ROOT / "docs" / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_the_plain_loops_run(framework, capsys):
    """Ten lines each; the audit of a loop that keeps its claim says so."""
    if framework == "torch":
        require("torch")
    if framework == "jax":
        pytest.importorskip("jax")
    start, *pairs = blocks("integrate.md", "python")
    number = ["numpy", "torch", "jax"].index(framework)
    setup, loop = pairs[2 * number : 2 * number + 2]
    assert f"import {framework}" in setup
    assert len(loop.splitlines()) == 10
    names = {}
    for block in (start, setup, loop):
        exec(block, names)
    result = names["result"]
    assert result.verdict.outcome == "PASS"
    truth = names["mechanism_epsilon"](1.0, delta=1e-6)
    interval = result.adversaries["known-others"].headline.estimate.interval
    assert interval.low <= truth <= interval.high
    assert str(result) in capsys.readouterr().out


@pytest.mark.parametrize(("guide", "example"), [("opacus.md", "opacus"), ("flower.md", "flower")])
def test_an_example_is_audited_by_five_lines(guide, example):
    (diff,) = blocks(guide, "diff")
    code = "\n".join(path.read_text() for path in sorted((ROOT / "examples" / example).rglob("*.py")))
    lines = code.splitlines()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    assert 1 <= len(added) - len(removed) <= 5
    assert not set(removed) & set(lines)
    for line in diff.splitlines():
        assert line.startswith(("-", " #")) or line[1:] in lines, line
    ours = r"from coalmine|\b[Aa]udit\b|AuditedStrategy|attach|canary_mod|\.finish\("
    assert {line for line in lines if re.search(ours, line) and '"""' not in line} == set(added)
