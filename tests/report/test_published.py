import itertools
import json
import time
from html.parser import HTMLParser

import numpy as np
import pytest
from runs import make_run

from coalmine import Audit, TreeNoise
from coalmine.estimators.literature.all_estimators import literature_rows
from coalmine.estimators.literature.jagielski2020 import jagielski2020_row
from coalmine.evidence.ladder import ladder
from coalmine.evidence.literature import canife_needs, checkpoint_scores, published_rows
from coalmine.log.rounds_file import Entry, RoundLog
from coalmine.measure.round import Round
from coalmine.measure.settings import checked_settings
from coalmine.report import read_run
from coalmine.report.document import report_text
from coalmine.report.table_rows import strongest_row

DELTA, BACK_FRONT = "Jagielski 2023, delta", "Jagielski 2023, back-front"


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
    read = read_run(run)
    scores = next(each for each in read.scores if each.rung == "known-others")
    return published_rows(scores, delta=1e-6, log=read.rounds, settings=read.result.settings)


def test_the_page_shows_every_row(run, expected):
    parser = Cells()
    parser.feed(report_text([run]))
    heads, *rows = parser.rows
    assert heads == ["method", "ε", "kind", "auditor controls", "auditor receives", "threshold", "assumes"]
    own, rows = rows[:5], rows[5:]
    strongest = strongest_row(read_run(run).result)
    assert [row[0] for row in own] == [each.name for each in strongest.estimators]
    assert float(own[0][1]) == pytest.approx(strongest.epsilon, rel=0.01)
    assert {row[4] for row in own} == {"intermediate models"}
    assert [row[0] for row in rows] == [row.name for row in expected]
    for cells, row in zip(rows, expected, strict=True):
        assert cells[2:6] == [row.kind, row.controls, row.receives, row.threshold]
        if row.value is None:
            assert cells[1] == "–"
            assert cells[6] == f"not applicable: {row.needs}"
        else:
            assert float(cells[1].replace("∞", "inf")) == pytest.approx(row.value, rel=0.01, abs=0.005)
            assert cells[6] == row.assumptions


def test_markdown_and_json_show_every_row(run, expected):
    page = report_text([run], kind="md")
    stored = json.loads(report_text([run], kind="json"))["runs"][0]["estimators"]
    assert [row["name"] for row in stored] == [row.name for row in expected]
    assert [row["value"] for row in stored] == [row.value for row in expected]
    for row in expected:
        assert f"| {row.name} |" in page


def test_comparisons_of_runs_omit_published_estimators(run):
    assert "Published estimators" not in report_text([run, run])


def test_without_a_log_there_are_no_published_estimators(run, tmp_path):
    (tmp_path / "result.json").write_text((run / "result.json").read_text())
    assert read_run(tmp_path).published == ()
    assert "Published estimators" not in report_text([tmp_path])


def test_most_rows_use_the_scores_of_one_rung(run, expected):
    scores = next(each for each in read_run(run).scores if each.rung == "known-others")
    plain = literature_rows(scores.observed, scores.unobserved, delta=1e-6)
    changed = [row.name for row, other in zip(expected, plain, strict=True) if row != other]
    assert changed == [DELTA, BACK_FRONT, "CANIFE 2022"]


def audited(*, momentum=0.0, skipped=(), left_out=(), presentations=1, scores=None, kind="rotated"):
    """An audit of eight rounds, with the model after each round and every canary."""
    rng = np.random.default_rng(3)
    audit = Audit(
        400, canaries=40, unobserved=200, seed=7, delta=1e-6, rounds=8, presentations=presentations, momentum=momentum,
        scores=scores, kind=kind,
    )  # fmt: skip
    canaries = np.stack([audit.measurer.canaries.canary(i) for i in range(240)])
    models, velocity = [rng.normal(size=400)], np.zeros(400)
    for number in range(1, 9):
        present = [] if number in skipped else audit.canaries_in_round(number)
        released = 4 * audit.updates(present, 1.0) + rng.normal(size=400) if len(present) else np.zeros(400)
        velocity = momentum * velocity + released
        models.append(models[-1] + velocity)
        if number not in left_out:
            audit.observe_round(number, velocity, present=present, noise_std=1.0)
    return audit, np.array(models) @ canaries.T


def rows_of(audit, rung, presentations=None):
    log, settings = audit.log, audit.settings
    scores = next(each for each in ladder(log, settings) if (each.rung, each.presentations) == (rung, presentations))
    return {row.name: row for row in published_rows(scores, delta=1e-6, log=log, settings=settings)}


@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.7}, {"skipped": (3, 4)}, {"kind": "sphere"}],
    ids=lambda each: next(iter(each), "plain"),
)
def test_checkpoint_scores_agree_with_the_models_of_the_run(settings):
    """Products of each canary with each model, including the initial one, and their increments."""
    audit, products = audited(**settings)
    rises = np.array([max(b - a for a, b in itertools.pairwise(scores)) for scores in products.T])
    whole = products[-1] - products[0]
    rows = rows_of(audit, "all-iterates")
    for name, scores in ((DELTA, rises), (BACK_FRONT, whole)):
        assert rows[name].value == jagielski2020_row(scores[:40], scores[40:], delta=1e-6).value
        assert rows[name].assumptions.endswith("and a score the canary's product with it")
    assert rows[DELTA].value > 0.5
    scores = np.array(list(checkpoint_scores(audit.log, audit.settings, "final")))
    np.testing.assert_allclose(np.diff(scores, axis=0).max(axis=0), rises, atol=1e-5)
    np.testing.assert_allclose(scores[-1], whole, atol=1e-5)


def test_only_the_canaries_of_the_rung_are_used():
    audit, products = audited(presentations=(1, 2))
    rises, whole = np.diff(products, axis=0).max(axis=0), products[-1] - products[0]
    rows = rows_of(audit, "known-round", 2)
    assert rows[DELTA].value == jagielski2020_row(rises[20:40], rises[40:], delta=1e-6).value
    assert rows[BACK_FRONT].value == jagielski2020_row(whole[20:40], whole[40:], delta=1e-6).value


def test_a_custom_attack_is_used_in_the_rounds_with_scores():
    returned = []

    def attack(number, model_delta, canaries, previous):
        returned.append(np.random.default_rng(number).normal(size=240).astype(np.float32))
        return returned[-1]

    audit, _ = audited(scores={"mine": attack}, left_out=(5,))
    rows = rows_of(audit, "mine")
    rises = np.diff(np.array(returned, dtype=np.float64), axis=0).max(axis=0)
    assert len(returned) == 7
    assert rows[DELTA].value == jagielski2020_row(rises[:40], rises[40:], delta=1e-6).value
    assert "after which the attack gave scores" in rows[DELTA].assumptions


def test_an_unobserved_round_is_named():
    rows = rows_of(audited(left_out=(2, 5))[0], "all-iterates")
    for name in (DELTA, BACK_FRONT):
        assert rows[name].value is None
        assert rows[name].needs == "needs what every round released: 2 of rounds 1 to 8 were not observed"


def test_missing_canife_inputs_are_named_for_this_run(run):
    read = read_run(run)
    few = canife_needs(read.rounds, read.result.settings)
    assert few.startswith("needs 10 or more scores with the canary in each audited round (here at most 9 canaries")
    assert "probability with which Poisson sampling puts a client into a round" in few
    settings = checked_settings(
        400, canaries=40, unobserved=200, delta=1e-6, kind="rotated", rounds=8, presentations=1, momentum=0.0,
        layers=None, noise=TreeNoise(rounds=8),
    )  # fmt: skip
    log = RoundLog()
    cosines = np.full(240, 0.01, np.float32)
    log.append(Round(number=1, present=np.arange(12, dtype=np.int32), norm=1.0, rest=0.9, cosines=cosines))
    many = canife_needs(log, settings)
    assert many.startswith("needs noise that is fresh in every round (here it is correlated); the probability")
    assert f"not applicable: {few}" in report_text([run], kind="md").replace("\\", "")


def test_a_long_run_is_evaluated_quickly():
    """2,048 rounds and 4,000 canaries on each side, read like the report reads them."""
    rng = np.random.default_rng(0)
    settings = checked_settings(
        100_000, canaries=4_000, unobserved=4_000, delta=1e-6, kind="rotated", rounds=2_048, presentations=1,
        momentum=0.0, layers=None,
    )  # fmt: skip
    cosines = rng.normal(size=(16, 8_000)).astype(np.float32)

    class Long:
        numbers = range(1, 2_049)

        @staticmethod
        def rounds():
            return (
                Round(
                    number=n,
                    present=np.arange(2 * n - 2, 2 * n, dtype=np.int32) % 4_000,
                    norm=1.0,
                    cosines=cosines[n % 16],
                )
                for n in range(1, 2_049)
            )

    Long.observed = [Entry.of(item) for item in Long.rounds()]  # type: ignore[attr-defined]
    start = time.process_time()
    steps = sum(1 for _ in checkpoint_scores(Long, settings, "all-iterates"))
    canife_needs(Long, settings)
    assert steps == 2_049
    assert time.process_time() - start < 2
