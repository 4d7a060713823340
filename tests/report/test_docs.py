"""The notebook and the gallery match the code."""

import doctest
import importlib
import json
import os
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "examples"), [("amplification", 9), ("reading-a-result", 9)])
def test_the_examples_of_a_page_print_what_it_shows(page, examples):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    done = doctest.testfile(str(DOCS / "explanation" / f"{page}.md"), module_relative=False, optionflags=flags)
    assert (done.failed, done.attempted >= examples) == (0, True)


def test_the_page_on_amplified_claims_has_its_study_markers():
    page = (DOCS / "evidence" / "amplification.md").read_text()
    assert page.index("<!-- study -->") < page.index("<!-- /study -->")


@pytest.fixture
def notebook():
    return json.loads((DOCS / "tutorial" / "notebook.ipynb").read_text())


def test_the_notebook_shows_what_its_cells_print(tmp_path, monkeypatch, notebook):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names, outputs = importlib.import_module("studies.notebook").run_cells()
    assert names["result"].verdict.outcome == "PASS"
    assert names["broken"].verdict.outcome == "VIOLATION"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [list(map(text_of, made)) for made in outputs] == [list(map(text_of, cell["outputs"])) for cell in code]


def text_of(output):
    """What a person reads of a cell's output, up to the folded details, whose last digits are the machine's."""
    data = output.get("data", {})
    shown = "".join(output.get("text", data.get("text/html", data.get("text/plain", []))))
    return output["output_type"], re.sub(
        r"<div style=.max-width.*?</svg></div>|<details>.*", "", shown, flags=re.DOTALL
    )


def test_the_notebook_was_executed_and_is_small(notebook):
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert all(output["output_type"] != "error" for cell in code for output in cell["outputs"])
    assert (DOCS / "tutorial" / "notebook.ipynb").stat().st_size < 300_000
    assert os.sep + "home" not in (DOCS / "tutorial" / "notebook.ipynb").read_text()


def test_the_gallery_matches_its_script_and_the_docs():
    script, page = (DOCS / "make_gallery.py").read_text(), (DOCS / "how-to" / "report.md").read_text()
    made = set(re.findall(r'save\("([\w-]+)"', script)) | {"ladder", "ladder-halved-noise", "pass", "violation"}
    there = {picture.stem for picture in (DOCS / "gallery").glob("*.png")}
    assert there == made
    assert set(re.findall(r"gallery/([\w-]+)\.png", page)) <= there
    assert sum(picture.stat().st_size for picture in (DOCS / "gallery").glob("*.png")) < 500_000
