"""Watching a live run from another process."""

import io
import sys
import types

import pytest
from rich.console import Console
from runs import make_run

from coalmine.cli.screen import screen
from coalmine.integrations.trackers import mlflow, tensorboard
from coalmine.log.run_directory import RunDirectory
from coalmine.report.live_view import Watcher


def render(frame):
    console = Console(file=io.StringIO(), width=120)
    console.print(screen(frame))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run [bold]", config={"rounds": 12})


def test_a_live_run_shows_its_progress(run):
    (run / "result.json").unlink()
    frame = Watcher(run).look()
    assert (frame.rounds, frame.planned, frame.finished) == (12, 12, False)
    assert set(frame.estimates) == {"final", "final-update", "all-iterates", "known-round", "known-others"}
    text = render(frame)
    assert "round 12 of 12" in text
    assert "run [bold]" in text
    assert "71.8%" in text  # 1 - 0.9^12
    assert "finished" not in text


def test_a_finished_run_names_the_next_command(run):
    assert "finished: coalmine report" in render(Watcher(run).look())


def test_watching_takes_no_lock_and_survives_a_torn_end(run):
    home = RunDirectory(run)
    home.lock()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 13, "accu')
    log = run / "audit" / "rounds.log"
    log.write_bytes(log.read_bytes()[:-100])
    assert Watcher(run).look().rounds == 12
    home.close()


def test_a_run_before_its_first_round_can_be_watched(tmp_path):
    assert "round 0" in render(Watcher(tmp_path).look())
    with pytest.raises(ValueError, match="not a run directory"):
        Watcher(tmp_path / "nowhere").look()


def test_a_damaged_file_is_reported_without_an_error(run):
    (run / "audit" / "record.json").write_text("{}")
    assert "schema version" in Watcher(run).look().problem


def test_a_damaged_line_of_metrics_is_skipped_with_a_warning(run, caplog):
    metrics = run / "metrics.jsonl"
    metrics.write_text("5\n" + metrics.read_text())
    frame = Watcher(run).look()
    assert "skipped line 1" in caplog.text
    assert frame.metrics
    screen(frame)


class Notes:
    """Stands in for a tracker's library and records its calls."""

    def __init__(self, *_):
        self.calls = []
        self.__class__.last = self  # type: ignore[attr-defined]

    def add_scalar(self, name, value, step):
        self.calls.append((name, step))

    def log_metric(self, name, value, step):
        self.calls.append((name, step))

    def flush(self):
        pass


def test_each_scalar_is_logged_once_to_tensorboard_and_mlflow(run, monkeypatch):
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Notes  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "mlflow", Notes())
    for tracker in (tensorboard(run / "events"), mlflow()):
        for _ in range(2):
            tracker.send(Watcher(run).look().scalars)
        calls = Notes.last.calls  # type: ignore[attr-defined]
        assert ("coalmine/accuracy", 12) in calls
        assert ("coalmine/epsilon/known-others", 12) in calls
        assert len(calls) == len(set(calls))


def test_a_missing_tracker_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        tensorboard("events")
    with pytest.raises(ImportError, match="pip install mlflow"):
        mlflow()
