"""Run directories in every state: complete, half written, damaged, not a run, or of another version."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import make_run

from coalmine.evidence.ladder import ladder
from coalmine.evidence.views import views
from coalmine.log.mapped_rounds import map_rounds
from coalmine.log.run_directory import RunDirectory
from coalmine.report import plots, read_run, round_views, write_report
from coalmine.report.document import report_text
from coalmine.report.figures import run_pictures
from coalmine.report.stored_run import read_runs
from coalmine.report.table_rows import main_rows, strongest_row
from coalmine.result.audit_result import AuditResult


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("template") / "run")


@pytest.fixture
def run(template, tmp_path):
    return shutil.copytree(template, tmp_path / "run")


def test_scores_equal_those_of_the_audit(run):
    """Memory-mapped rounds give exactly the scores of the log."""
    read = read_run(run)
    settings, _ = RunDirectory(run).read_record()
    for ours, theirs in zip(read.scores, ladder(RunDirectory(run).read_log(), settings), strict=True):
        assert ours.rung == theirs.rung
        np.testing.assert_array_equal(ours.observed, theirs.observed)
        np.testing.assert_array_equal(ours.unobserved, theirs.unobserved)
    for scores in read.scores:
        assert read.result[scores.rung].headline.estimate.mean == pytest.approx(scores.observed.mean(), rel=1e-12)


@pytest.mark.parametrize("known", [True, False])
def test_views_are_those_of_the_log(run, known, monkeypatch):
    """Without everybody else's part if it is known; few unobserved canaries are kept."""
    monkeypatch.setattr(round_views, "MOST_SCORES", 0)
    read = read_run(run)
    if not known:
        without = dict.fromkeys(("residual_norm", "residual_rest", "residual_cosines"))
        kept = tuple(dataclasses.replace(item, **without) for item in read.rounds.kept)
        read = dataclasses.replace(read, rounds=dataclasses.replace(read.rounds, kept=kept))
    assert read.views_are_residuals == known
    expected = list(views(read.rounds, read.result.settings, residual=known, whitened=False))
    assert [view.number for view in read.views] == [view.number for view in expected] == list(range(1, 13))
    for ours, theirs in zip(read.views, expected, strict=True):
        np.testing.assert_array_equal(ours.observed, theirs.observed)
        np.testing.assert_array_equal(ours.unobserved, theirs.unobserved[:256])


def test_only_the_rounds_in_the_picture_are_compared(run, monkeypatch):
    """The gauges are those of the result. A round outside a gauge's limits is always in the picture."""
    whole = {gauge.name: gauge for gauge in read_run(run).gauges}
    monkeypatch.setattr(plots.spread, "__defaults__", (4,))
    read = read_run(run)
    flagged = tuple(
        dataclasses.replace(gauge, flagged=(9,) if gauge.name == "repeat" else ()) for gauge in read.result.gauges
    )
    read = dataclasses.replace(read, result=dataclasses.replace(read.result, gauges=flagged))
    gauges = {gauge.name: gauge for gauge in read.gauges}
    assert [gauge.name for gauge in gauges.values()] == [gauge.name for gauge in flagged if gauge.name in gauges]
    values = gauges["repeat"].values
    compared = [number for number, value in zip(range(2, 13), values, strict=True) if not np.isnan(value)]
    assert compared == [5, 8, 9, 12]
    np.testing.assert_allclose(values[[3, 6, 7, 10]], whole["repeat"].values[[3, 6, 7, 10]], rtol=1e-12)
    assert gauges["repeat"].smallest == whole["repeat"].smallest
    np.testing.assert_array_equal(gauges["residual"].values, whole["residual"].values)
    picture = next(picture for picture in run_pictures(read) if picture.name == "gauges")
    assert "repeat " in picture.alt


def test_thinning_keeps_the_observed_scores(run):
    read = read_run(run)
    thin, fewer = read.rounds.thinned(read.result.settings, most=12 * 250)
    assert fewer.unobserved == 150
    for ours, whole in zip(ladder(thin, fewer), read.scores, strict=True):
        np.testing.assert_array_equal(ours.observed, whole.observed)
        np.testing.assert_array_equal(ours.unobserved, whole.unobserved[:150])


def test_epsilon_during_training_ends_at_the_result(run):
    read = read_run(run)
    assert set(read.estimates) == {"all-iterates", "known-round", "known-others"}
    for rung, line in read.estimates.items():
        assert [number for number, _ in line] == [1, 3, 5, 6, 7, 9, 11, 12][-len(line) :]
        assert line[-1][1].epsilon == read.result[rung].headline.estimate.epsilon


def test_rows_equal_those_of_the_stored_result(run):
    stored = json.loads((run / "result.json").read_text())
    result = read_run(run).result
    assert strongest_row(result).rung == "known-others"
    assert [row.rung for row in main_rows(result)] == list(stored["adversaries"])
    for row in main_rows(result):
        entry = stored["adversaries"][row.rung]
        assert row.epsilon == entry["epsilon"]
        assert row.lower_bound == entry["lower_bound"]
        assert row.floor == entry["floor"]["q95"]
    assert {each.name: each.kind for each in strongest_row(result).estimators} == {
        "estimate": "estimate", "lower bound if Gaussian": "valid bound", "lower bound": "valid bound",
        "paper's ε": "estimate", "paper's ε_lo": "heuristic",
    }  # fmt: skip


def test_an_unfinished_run_is_reported_up_to_its_last_round(run):
    (run / "result.json").unlink()
    log = run / "audit" / "rounds.log"
    log.write_bytes(log.read_bytes()[:-5_000])  # torn in the last record
    read = read_run(run)
    assert not read.finished
    assert read.result.rounds == 12
    assert read.result.verdict.code == "no claim"
    assert "not finished" in write_report([run]).read_text()


@pytest.mark.parametrize("own", ["result.json", "audit/record.json", "audit/rounds.log"])
def test_a_report_does_not_overwrite_a_file_of_the_run(run, own, tmp_path):
    before = (run / own).read_bytes()
    (tmp_path / "link").symlink_to(run / own)
    for target in (run / own, tmp_path / "link"):
        with pytest.raises(ValueError, match="is a file of the run itself; name another file"):
            write_report([run], target)
    assert (run / own).read_bytes() == before


@pytest.mark.parametrize("lost", ["config.toml", "metrics.jsonl", "audit/record.json", "audit/rounds.log"])
def test_missing_files_are_left_out_of_the_report(run, lost):
    (run / lost).unlink(missing_ok=True)
    assert "**PASS" in report_text([run], kind="md")
    assert read_run(run).problems == ()


@pytest.mark.parametrize("cut", [0, 3, 5_000, 100_000])
def test_a_truncated_log_does_not_hide_the_result(run, cut):
    log = run / "audit" / "rounds.log"
    log.write_bytes(log.read_bytes()[:cut])
    page = write_report([run]).read_text()
    assert 'id="picture-ladder"' in page
    assert ("Not everything could be read" in page) == (cut < 18)  # without its magic line the log is unreadable


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("audit/rounds.log", b"coalmine rounds 1\n" + b"REC\nnonsense" * 1000),
        ("audit/rounds.log", b"PK\x03\x04 another program's file"),
        ("audit/record.json", b'{"schema_version": 1, "settings": {}}'),
        ("metrics.jsonl", b'{"round": 1}\nnot json\n{"round": 2}\n'),
        ("metrics.jsonl", b'[1, 2]\n{"round": "x", "accuracy": "high"}\n'),
        ("config.toml", b"= not toml"),
        ("config.toml", b"schema_version = 99\n"),
    ],
)
def test_a_damaged_part_is_named_and_the_rest_shown(run, name, content):
    (run / name).write_bytes(content)
    read = read_run(run)
    assert read.result.verdict.outcome == "PASS"
    if name != "metrics.jsonl":  # damaged lines are skipped with a warning
        assert any(Path(name).name in problem or "record" in problem for problem in read.problems)
    text = report_text([run], kind="md")
    assert "**PASS" in text
    assert text.count("> not read:") == len(read.problems)


def test_a_damaged_result_is_derived_again_without_its_claim(run):
    (run / "result.json").write_text('{"schema_version": 1, "adversaries": [1, 2]}')
    read = read_run(run)
    assert not read.finished
    assert any("not a result of an audit" in problem for problem in read.problems)
    assert strongest_row(read.result).epsilon > 0


def test_a_flipped_bit_is_detected(run):
    log = run / "audit" / "rounds.log"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    read = read_run(run)
    assert read.rounds is None
    assert any("damaged" in problem for problem in read.problems)


def test_rounds_of_another_audit_are_not_used(run, tmp_path):
    other = make_run(tmp_path / "other", canaries=50)
    (run / "audit" / "rounds.log").write_bytes((other / "audit" / "rounds.log").read_bytes())
    read = read_run(run)
    assert read.rounds is None
    assert "does not fit" in read.problems[0]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no run"),
        ({"photo.jpg": b"\xff\xd8"}, "holds no run"),
        ({"result.json": b"{"}, "is not JSON"),
        ({"result.json": b'{"schema_version": 0, "epsilon": 3}'}, "has schema version 0, this coalmine reads 1"),
        ({"result.json": b'{"schema_version": 1, "loss": 3}'}, "not a result of an audit ('adversaries' is missing)"),
        ({"result.json": b"\xff\xfe\x00"}, "is not text"),
    ],
)
def test_a_directory_without_a_run_is_rejected_with_one_line(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as refused:
        read_run(tmp_path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_one_bad_directory_among_several_is_named(run, tmp_path):
    page = write_report([run, tmp_path / "nowhere"], tmp_path / "both.html").read_text()
    assert "nowhere is not a run directory" in page
    with pytest.raises(ValueError, match="nowhere"):
        read_runs([tmp_path / "nowhere", tmp_path / "neither"])


@pytest.mark.parametrize(
    "place",
    [
        ("delta",),
        ("adversaries", "final", "groups", 0, "epsilon"),
        ("gauges", "length", "statistics", "noise", "limits"),
    ],
)
@pytest.mark.parametrize("value", ["text", [], {}, True, [None, None, None]])
def test_a_result_with_values_of_the_wrong_type_is_rejected(run, place, value):
    stored = json.loads((run / "result.json").read_text())
    inner = stored
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match="not a result of an audit"):
        AuditResult.from_dict(stored)


def test_an_empty_log_has_no_rounds(tmp_path):
    (tmp_path / "rounds.log").write_bytes(b"coalmine rounds 1\n")
    assert map_rounds(tmp_path / "rounds.log").numbers == ()
