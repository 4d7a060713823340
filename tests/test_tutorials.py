"""The tutorials: every command runs in an empty folder, and prints what the page shows."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from coalmine import Claim, Poisson

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorial"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
HOW_TO = ROOT / "docs" / "how-to"
NEEDS = {
    "first-audit": ("torch", "sklearn", "matplotlib"),
    "privacy-test": (),
    "audit-opacus": ("opacus", "sklearn"),
    "audit-flower": ("flwr", "ray", "sklearn"),
}


def follow(name, folder, pages=TUTORIALS):
    """Do what a page says, step by step: write its files, run its commands, compare their output with the page's."""
    places = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(place for place in places if place),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "FLWR_HOME": str(folder / ".flwr"),
        "COLUMNS": "200",
    }
    shutil.copytree(ROOT / "examples", folder / "examples")
    printed, commands = None, 0
    for language, content in FENCE.findall((pages / f"{name}.md").read_text()):
        if language == "python" and (file := re.match(r"# (\w+\.py)\n", content)):
            (folder / file[1]).write_text(content.replace("default_rng()", "default_rng(1)"))
        elif language == "bash":
            command = ["bash", "-e", "-c", content]
            done = subprocess.run(
                command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            assert done.returncode == 0, f"{content}{done.stdout}"
            printed, commands = done.stdout, commands + 1
        elif language == "text":
            assert printed is not None, "output before any command"
            assert matches(content, printed), f"the page shows\n{content}\nthe command printed\n{printed}"
    return commands


def matches(shown, printed):
    """Whether a command printed what a page shows, where … stands for anything. Spaces are one space."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    pattern = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in re.split(r"\s*…\s*", shown))
    return re.fullmatch(rf"\s*{pattern}\s*", plain, flags=re.DOTALL) is not None


def test_output_must_be_as_shown():
    assert matches("PASS: …\nε  11.2\n", "PASS: all good\nε 11.2")
    assert not matches("PASS: …\nε  11.2\n", "PASS: all good\nε 11.3")
    assert not matches("PASS\n", "a warning\nPASS\n")


@pytest.mark.full
def test_the_unit_test_of_the_tutorial_passes_and_fails_as_shown(tmp_path):
    assert follow("privacy-test", tmp_path) == 3


@pytest.mark.full
@pytest.mark.parametrize("name", ["statement"])
def test_every_printout_of_a_guide_is_what_its_commands_print(name, tmp_path):
    pytest.importorskip("torch")
    assert follow(name, tmp_path, HOW_TO) == 2


@pytest.mark.full
def test_the_printouts_of_the_installation_are_those_of_its_commands():
    page = (TUTORIALS / "install.md").read_text()
    command = re.search(r"^    (coalmine epsilon .*)$", page, flags=re.MULTILINE)[1]
    table = re.search(r"^    (Gaussian mechanism,.*?┘)$", page, flags=re.MULTILINE | re.DOTALL)[1]
    program = "import sys; from coalmine.cli import main; main.main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", program, *command.split()[1:]], text=True, capture_output=True)
    assert matches(table, done.stdout)


def test_the_guides_show_a_claim_as_a_result_prints_it():
    sentence = Claim(3.0, unit="row", sampling=Poisson(0.1, rounds=60)).sentence(1e-5)
    assert f"    {sentence}\n" in (ROOT / "docs" / "explanation" / "verdicts.md").read_text()
    shown = re.search(r"^    (claimed epsilon .*)\(…\)$", (HOW_TO / "opacus.md").read_text(), flags=re.MULTILINE)[1]
    assert sentence.startswith(shown)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NEEDS if name != "privacy-test"])
def test_every_step_of_a_tutorial_works(name, tmp_path):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    try:
        assert follow(name, tmp_path) >= 3
    finally:
        stop_flower(tmp_path)


@pytest.mark.full
def test_the_audit_of_the_first_page_takes_four_lines_and_prints_what_it_shows(tmp_path):
    """The snippet of the README audits the tutorial's model; a fixed seed makes its numbers those of the page."""
    for module in NEEDS["audit-opacus"]:
        pytest.importorskip(module)
    shown = (ROOT / "README.md").read_text().partition("<!-- start -->")[2].partition("<!-- end -->")[0]
    (_, seed), (_, audit), (_, output) = FENCE.findall(shown)
    assert seed.startswith("coalmine seed canary-seed ")
    loop = "...  # your training loop, as it is\n"
    lines = [line for line in audit.replace(loop, "").splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    (tmp_path / "canary-seed").write_bytes(b"a" * 32)
    pages = FENCE.findall((TUTORIALS / "audit-opacus.md").read_text())
    (tmp_path / "training.py").write_text(next(text for _, text in pages if text.startswith("# training.py")))
    start = "from training import prepare, train\nmodel, optimizer, loader, _ = prepare()\n"
    program = start + audit.replace(loop, "train(model, optimizer, loader)\n")
    places = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": places}, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def stop_flower(folder):
    """`flwr run` leaves a SuperLink running; ends the processes that were started with this folder as their home."""
    mine = f"FLWR_HOME={folder / '.flwr'}\0".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if int(environment.parent.name) != os.getpid() and mine in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGTERM)


def test_every_tutorial_is_followed_here():
    pages = {page.stem for page in TUTORIALS.glob("*.md")} - {"index", "install"}
    assert pages == set(NEEDS)
    index = (TUTORIALS / "index.md").read_text()
    assert all(f"]({page}.md)" in index for page in pages)


def test_every_extra_that_a_page_installs_exists():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        (page.name, extra)
        for page in pages
        for group in re.findall(r"pip install (?:\S+ )*?'(?:coalmine|\.)\[([\w,]+)\]", page.read_text())
        for extra in group.split(",")
    ]
    assert len(named) > 8
    assert [pair for pair in named if pair[1] not in extras] == []
