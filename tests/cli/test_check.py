"""`coalmine check`: exit codes, bad input, JUnit and JSON."""

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from coalmine.cli.main import main

MODULE = """
import numpy as np

print("printed while it is imported")
rng = np.random.default_rng(1)
number = 3


def noised(updates, std=1.4):
    print("printed in a call")
    clipped = updates / np.maximum(np.linalg.norm(updates, axis=1, keepdims=True), 1.0)
    return clipped.sum(axis=0) + std * rng.standard_normal(updates.shape[1])


def half(updates):
    return noised(updates, std=0.7)


def laplace(updates):
    return noised(updates, std=0.0) + rng.laplace(size=updates.shape[1])


def short(updates):
    return noised(updates)[1:]


def nan(updates):
    return noised(updates) * np.nan


def raises(updates):
    raise RuntimeError("two\\nlines")


def leaves(updates):
    raise SystemExit(0)


def nothing(updates):
    pass


class Mechanism:
    @staticmethod
    def release(updates):
        return noised(updates)
"""
CLAIM = ("--epsilon", "3", "--delta", "1e-5", "--dim", "500")


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    """A function that runs the command in a folder with the test's module and returns exit code, stdout and stderr."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "incomplete.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "unreadable.py").write_text("no python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(function, *options, claim=CLAIM):
        with pytest.raises(SystemExit) as end:
            main(["check", function, *claim, *options])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    yield run
    for loaded in ("mine", "incomplete", "unreadable"):
        sys.modules.pop(loaded, None)


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        ("mine:noised", 0, "PASS: mine:noised in one call keeps ε ≤ 3 at δ 1e-5 for one client"),
        ("mine:Mechanism.release", 0, "PASS: mine:Mechanism.release in one call keeps ε ≤ 3"),
        ("mine:half", 1, "VIOLATION: mine:half in one call gives away more than the claimed ε = 3"),
        ("mine:laplace", 3, "UNDERPOWERED: nothing refutes ε ≤ 3 at δ 1e-5"),
    ],
)
def test_the_exit_code_follows_the_verdict(answer, function, code, said):
    found, out, err = answer(function)
    assert (found, out.splitlines()[0].startswith(said)) == (code, True)
    assert len(out.splitlines()) <= 10
    assert max(map(len, out.splitlines())) <= 100
    assert "  measured     ε " in out
    assert "printed" not in out
    assert "printed while it is imported" in err
    assert ("Likely: " in out) == (code != 0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("mine", "name the function as package.module:function, got 'mine'"),
        (":noised", "name the function as package.module:function"),
        ("nowhere:f", "there is no module 'nowhere' in the current directory or among the installed packages"),
        ("nowhere.below:f", "there is no module 'nowhere.below'"),
        ("incomplete:f", "incomplete cannot be imported: No module named 'a_module_that_is_not_there'"),
        ("unreadable:f", "unreadable cannot be imported: SyntaxError"),
        ("mine:other", "mine has no 'other'"),
        ("mine:number", "mine:number must be a function, got int"),
        ("mine:short", "release must return dim = 500 numbers"),
        ("mine:nan", "release must return finite numbers"),
        ("mine:raises", "mine:raises raised RuntimeError: two lines"),
        ("mine:leaves", "mine:leaves raised SystemExit: 0"),
        ("mine:nothing", "release must return the noised aggregate, got None"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(answer, function, said):
    code, out, err = answer(function, "--junit", "out.xml")
    lines = [line for line in err.splitlines() if not line.startswith("printed")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert said in lines[0]
    assert not os.path.lexists("out.xml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--epsilon", "-1"), "epsilon must be above 0"),
        (("--delta", "2"), "delta must lie in (0, 1)"),
        (("--clients", "400"), "clients must be at most dim / 2"),
        (("--dim", "3"), "dim must be at least 20"),
        (("--adjacency", "swap"), "is not one of"),
        (("--junit", "."), "is a directory"),
        (("--most-calls", "1"), "most_calls must be at least 3"),
    ],
)
def test_bad_options_are_one_line(answer, options, said):
    code, out, err = answer("mine:noised", *options)
    lines = [line for line in err.splitlines() if not line.startswith("printed")]
    assert (code, out, len(lines)) == (2, "", 1)
    assert said in lines[0]


def test_json_is_the_result_and_nothing_else(answer):
    code, out, _ = answer("mine:half", "--json", "--adjacency", "replace-one", "--clients", "30", "--aggregate", "sum")
    told = json.loads(out)
    assert (code, told["verdict"], told["check"]["adjacency"], told["clients"]) == (1, "VIOLATION", "replace-one", 30)
    assert told["headline"]["epsilon"] > 6
    assert told["check"]["likely_fault"]


@pytest.mark.parametrize(("function", "failures"), [("noised", "0"), ("half", "1"), ("laplace", "1")])
def test_a_junit_report_has_one_test_case(answer, function, failures):
    answer(f"mine:{function}", "--junit", "out.xml")
    suite = ElementTree.parse("out.xml").find("testsuite")
    case = suite.find("testcase")
    found = {prop.get("name"): prop.get("value") for prop in case.iter("property")}
    assert (suite.get("tests"), suite.get("failures"), case.get("name")) == ("1", failures, function)
    assert float(found["coalmine.epsilon"]) > 0
    assert found["coalmine.verdict"] == {"noised": "PASS", "half": "VIOLATION", "laplace": "UNDERPOWERED"}[function]
    assert (case.find("failure") is not None) == (failures == "1")
    assert not list(Path.cwd().glob(".*.new"))


def test_a_workflow_has_a_summary_and_the_function_annotated(answer, tmp_path, monkeypatch):
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    code, _, err = answer("mine:half", "--github")
    assert code == 1
    line = 1 + MODULE.splitlines().index("def half(updates):")
    (annotation,) = [text for text in err.splitlines() if text.startswith("::")]
    assert annotation.startswith(f"::error file=mine.py,line={line},title=VIOLATION::VIOLATION: mine:half in one call")
    assert summary.read_text().startswith("### coalmine check\n\n❌ **mine:half**: VIOLATION: mine:half in one call")
    assert "  next         Likely: " in summary.read_text()


def test_a_summary_needs_a_workflow(answer, monkeypatch):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    code, out, err = answer("mine:half", "--github")
    assert (code, out) == (2, "")
    assert "omit it elsewhere" in err


@pytest.mark.parametrize(("word", "meant"), [("target-epsilon", "epsilon"), ("max_grad_norm", "clip-norm")])
def test_words_of_other_libraries_name_the_option(answer, word, meant):
    code, _, err = answer("mine:noised", f"--{word}", "3")
    assert (code, err) == (2, f"coalmine: No such option '--{word}': here it is --{meant}.\n")
