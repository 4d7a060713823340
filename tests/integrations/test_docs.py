"""The guides: every loop runs, and the guides' diffs match the examples."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from requires import require

ROOT = Path(__file__).parents[2]


def blocks(name, language):
    text = (ROOT / "docs" / "how-to" / name).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


FACTS = """
import json
interval = result.adversaries["known-others"].headline.estimate.interval
facts = [result.verdict.outcome, interval.low, mechanism_epsilon(1.0, delta=1e-6), interval.high, str(result)]
print(chr(0) + json.dumps(facts))
"""


@pytest.mark.full
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_the_plain_loops_run(framework):
    """Each loop has ten lines, and its audit gives PASS.

    Each runs in its own process: a process with JAX's threads must not fork, and later tests do.
    """
    if find_spec(framework) is None:
        require(framework)
    start, *pairs = blocks("integrate.md", "python")
    number = ["numpy", "torch", "jax"].index(framework)
    setup, loop = pairs[2 * number : 2 * number + 2]
    assert f"import {framework}" in setup
    assert len(loop.splitlines()) == 10
    program = start + setup + loop + FACTS
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, facts = done.stdout.split(chr(0))
    outcome, low, truth, high, result = json.loads(facts)
    assert outcome == "PASS"
    assert low <= truth <= high
    assert result in printed


EXAMPLES = {
    "flower": ("flower.md", "examples/flower"),
    "opacus": ("opacus.md", "examples/opacus"),
    "jax_privacy": ("jax.md", "examples/jax_privacy"),
    "pfl": ("integrate.md", "examples"),
    "nvflare": ("integrate.md", "examples"),
}


def audited_and_plain(example):
    """An example's files, the same files before its guide's diff, and that diff."""
    guide, folder = EXAMPLES[example]
    (diff,) = [block for block in blocks(guide, "diff") if folder != "examples" or f"@@ {example}/" in block]
    audited = {str(path.relative_to(ROOT / folder)): path.read_text() for path in (ROOT / folder).rglob("*.py")}
    audited = {name: text for name, text in audited.items() if folder != "examples" or name.startswith(example + "/")}
    plain = dict(audited)
    for name, hunk in re.findall(r"^@@ (\S+) @@\n(.*?)(?=^@@|\Z)", diff, flags=re.MULTILINE | re.DOTALL):
        lines = hunk.splitlines()
        assert {line[:1] for line in lines} <= {"", " ", "+", "-"}
        new = "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        old = "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        assert plain[name].count(new) == 1, hunk
        plain[name] = plain[name].replace(new, old)
    return audited, plain, diff


def unneeded(files, folder):
    """Unused imports, variables and arguments, and undefined names, found by ruff."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    rules = ["--isolated", "--select", "F,ARG", "--output-format", "concise"]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, str(folder)], capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return {line.split(":", 3)[3] for line in done.stdout.splitlines() if line.count(":") >= 3}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_a_plain_program_plus_five_lines(example, tmp_path):
    """Without the guide's diff, the program neither audits nor prepares anything for an audit."""
    audited, plain, diff = audited_and_plain(example)
    added = [line for line in diff.splitlines() if line.startswith("+") and line != "+"]
    removed = [line for line in diff.splitlines() if line.startswith("-")]
    assert 1 <= len(removed) + 1 <= len(added) <= 5
    ours = re.compile(r"coalmine|canar|\baudit(ed)?\b", flags=re.IGNORECASE)
    for name, text in plain.items():
        code = re.sub(r'"""(.*?)"""', "", text, flags=re.DOTALL)
        assert not ours.search(code), ours.search(code)
        compile(text, name, "exec")
    assert unneeded(plain, tmp_path / "plain") <= unneeded(audited, tmp_path / "audited")


GUESSABLE = re.compile(r"""(?:[ (]seed=|["']seed["']: )\d+""")


def test_guides_and_examples_have_no_guessable_seed():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    assert len(pages) > 20
    assert [(page.name, found) for page in pages for found in GUESSABLE.findall(page.read_text())] == []
    assert GUESSABLE.search("Audit(canaries=3, seed=7)")
    assert GUESSABLE.search('{"seed": 7}')


def test_the_leak_differs_from_the_other_example_only_in_its_strategy():
    """The demo's README says that only the strategy's name differs."""
    shared = ROOT / "examples" / "flower" / "audited_digits"
    leaking = ROOT / "examples" / "flower-fedadam-leak" / "fedadam_leak"
    for name in ("client_app.py", "server_app.py", "task.py"):
        theirs = (leaking / name).read_text().replace("fedadam_leak", "audited_digits").replace("FedAdam", "FedAvg")
        ours = (shared / name).read_text()
        assert sorted(theirs.splitlines()[1:]) == sorted(ours.splitlines()[1:])  # the order of imports differs
