import json
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import make_run

from coalmine.estimators.literature.compare import literature_rows
from coalmine.report import read_run
from coalmine.report.document import report_text


class Cells(HTMLParser):
    """The rows of the table of published estimators."""

    def __init__(self):
        super().__init__()
        self.rows, self.here, self.inside = [], False, False

    def handle_starttag(self, tag, attributes):
        if tag == "div" and dict(attributes).get("aria-label") == "Published estimators":
            self.here = True
        elif self.here and tag == "tr":
            self.rows.append([])
        elif self.here and tag in ("th", "td"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        if tag == "table":
            self.here = False
        elif tag in ("th", "td"):
            self.inside = False

    def handle_data(self, data):
        if self.here and self.inside:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("published") / "run")


@pytest.fixture(scope="module")
def expected(run):
    scores = next(each for each in read_run(run).scores if each.rung == "known-others")
    return literature_rows(scores.observed, scores.unobserved, delta=1e-6)


def test_the_page_shows_every_row(run, expected):
    parser = Cells()
    parser.feed(report_text([run]))
    heads, *rows = parser.rows
    assert heads == ["method", "ε", "kind", "auditor controls", "auditor receives", "threshold", "assumes"]
    own, rows = rows[:4], rows[4:]
    strongest = read_run(run).findings.strongest
    assert [row[0] for row in own] == [each.name for each in strongest.estimators]
    assert float(own[0][1]) == pytest.approx(strongest.epsilon, rel=0.01)
    assert {row[4] for row in own} == {"intermediate models"}
    assert [row[0] for row in rows] == [row.name for row in expected]
    for shown, row in zip(rows, expected, strict=True):
        assert shown[2:6] == [row.kind, row.controls, row.receives, row.threshold]
        if row.value is None:
            assert shown[1] == "–"
            assert shown[6] == f"not applicable: {row.needs}"
        else:
            assert float(shown[1].replace("∞", "inf")) == pytest.approx(row.value, rel=0.01, abs=0.005)
            assert shown[6] == row.assumptions


def test_markdown_and_json_have_them_too(run, expected):
    page = report_text([run], kind="md")
    stored = json.loads(report_text([run], kind="json"))["runs"][0]["estimators"]
    assert [row["name"] for row in stored] == [row.name for row in expected]
    assert [row["value"] for row in stored] == [row.value for row in expected]
    for row in expected:
        assert f"| {row.name} |" in page


def test_several_runs_beside_each_other_are_compared_without_them(run):
    assert "Published estimators" not in report_text([run, run])


def test_without_a_log_there_are_none(run, tmp_path):
    (tmp_path / "result.json").write_text((run / "result.json").read_text())
    assert read_run(tmp_path).published == ()
    assert "Published estimators" not in report_text([tmp_path])
