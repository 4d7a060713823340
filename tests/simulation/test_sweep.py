"""The grid of a sweep: its runs, their names, and settings rejected before anything starts."""

import dataclasses
import multiprocessing

import pytest
import tomli_w

from coalmine.simulation import start
from coalmine.simulation.config import RunConfig
from coalmine.simulation.sweep import is_finished, make_points, read_sweep, run_sweep

TINY = {"rounds": 2, "evaluate_every": 2, "canaries": {"count": 20}, "participation": {"clients_per_round": 10}}


def write(path, **values):
    path.write_text(tomli_w.dumps(values))
    return path


def test_grid_has_every_combination_with_the_first_name_slowest(tmp_path):
    text = 'rounds = 3\n[privacy]\nclip_norm = 0.25\n[sweep]\nprivacy.noise_multiplier = [0.5, 1]\n"seed" = [1, 2]\n'
    (tmp_path / "sweep.toml").write_text(text)
    points = read_sweep(tmp_path / "sweep.toml")
    assert [point.name for point in points] == [
        "noise_multiplier=0.5,seed=1",
        "noise_multiplier=0.5,seed=2",
        "noise_multiplier=1,seed=1",
        "noise_multiplier=1,seed=2",
    ]
    assert [(point.config.privacy.noise_multiplier, point.config.seed) for point in points] == [
        (0.5, 1), (0.5, 2), (1.0, 1), (1.0, 2),
    ]  # fmt: skip
    assert {(point.config.rounds, point.config.privacy.clip_norm) for point in points} == {(3, 0.25)}
    assert points[1].values == {"privacy.noise_multiplier": 0.5, "seed": 2}


def test_run_names_are_unique_and_valid_file_names():
    rates = make_points({}, {"client.learning_rate": [0.1], "server.learning_rate": [1.0]})
    assert rates[0].name == "client.learning_rate=0.1,server.learning_rate=1.0"
    groups = make_points({"rounds": 8}, {"canaries.presentations": [1, [1, 2, 4]]})
    assert [point.name for point in groups] == ["presentations=1", "presentations=1+2+4"]
    assert groups[1].config.canaries.presentations == (1, 2, 4)
    alike = make_points({}, {"task.data_dir": ["/a b", "/a/b"]})
    assert len({point.name for point in alike}) == 2
    assert all("/" not in point.name and " " not in point.name for point in alike)
    [long] = make_points({}, {"task.data_dir": ["/" + "x" * 400]})
    assert len(long.name) < 140
    assert make_points({}, {"task.data_dir": ["/" + "x" * 400]})[0].name == long.name


def test_swept_task_uses_its_own_defaults():
    digits, example = make_points({}, {"task.level": ["client", "example"]})
    assert (digits.config.participation.kind, example.config.participation.kind) == ("shuffled", "poisson")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "has no .sweep. section"),
        ({"sweep": 3}, "sweep must be a section, got 3"),
        ({"sweep": {}}, "must name at least one setting"),
        ({"sweep": {"seed": []}}, "seed must list at least one value"),
        ({"sweep": {"seed": 3}}, "seed must be a list of values, got 3"),
        ({"sweep": {"seed": [1, 2, 1]}}, "seed lists 1 twice"),
        ({"sweep": {"privacy.noise_multiplyer": [1]}}, "a config has no privacy.noise_multiplyer"),
        ({"sweep": {"privacy.noise_multiplier": [1, -1]}}, "run noise_multiplier=-1: privacy.noise_multiplier must be"),
        ({"sweep": {"privacy.noise_multiplier": [1, "low"]}}, "must be float, got 'low'"),
        ({"sweep": {"seed.more": [1]}}, "seed must be int, got"),
        ({"task": 3, "sweep": {"seed": [1]}}, "task must be a section"),
        ({"sweep": {"engine.device": ["gpu"]}}, "engine.device 'gpu' is not available"),
        ({"rounds": 0, "sweep": {"seed": [1]}}, "rounds must be at least 1"),
    ],
)
def test_bad_grid_is_rejected_before_anything_starts(tmp_path, values, words):
    with pytest.raises(ValueError, match=words) as error:
        read_sweep(write(tmp_path / "sweep.toml", **values))
    assert "\n" not in str(error.value)


def test_finished_run_is_skipped_and_another_run_in_its_place_is_rejected(tmp_path):
    points = make_points(TINY, {"seed": [1, 2]})
    start(points[0].config, tmp_path / "seed=1")
    written = (tmp_path / "seed=1" / "result.json").stat().st_mtime_ns
    seen = []
    runs = run_sweep(points, tmp_path, progress=seen.append)
    assert [run.error for run in runs] == [None, None]
    assert (tmp_path / "seed=1" / "result.json").stat().st_mtime_ns == written
    assert all(is_finished(point, tmp_path / point.name) for point in points)
    assert (seen[0].done, seen[0].runs, seen[0].current) == (1, 2, "")
    assert [(step.current, step.round_number, step.rounds) for step in seen[1:3]] == [
        ("seed=2", 1, 2),
        ("seed=2", 2, 2),
    ]
    assert (seen[-1].done, seen[-1].failed, seen[-1].seconds_left) == (2, 0, 0)
    other = make_points(TINY | {"privacy": {"clip_norm": 0.3}}, {"seed": [3, 1]})
    with pytest.raises(ValueError, match=r"seed=1 holds a run with another config \(it differs in privacy\)"):
        run_sweep(other, tmp_path)
    assert not (tmp_path / "seed=3").exists()
    threads = make_points(TINY | {"engine": {"threads": 7}}, {"seed": [1]})
    with pytest.raises(ValueError, match=r"differs in engine\.threads"):
        run_sweep(threads, tmp_path)


def test_a_failed_run_does_not_stop_the_others(tmp_path):
    points = make_points(TINY, {"client.learning_rate": [1e30, 0.1]})
    seen = []
    failed, finished = run_sweep(points, tmp_path, progress=seen.append)
    assert "training has diverged" in failed.error
    assert finished.error is None
    assert (finished.directory / "result.json").exists()
    assert (seen[-1].done, seen[-1].failed) == (1, 1)


@pytest.mark.full
def test_a_killed_worker_fails_only_its_run(tmp_path):
    points = make_points(TINY | {"rounds": 50}, {"seed": [1, 2, 3]})
    killed = []

    def kill_one(seen):
        if seen.round_number and not killed:
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    runs = run_sweep(points, tmp_path, jobs=2, progress=kill_one)
    assert sorted(str(run.error) for run in runs) == ["None", "None", "its process died"]
    assert [is_finished(run.point, run.directory) for run in runs] == [run.error is None for run in runs]


def test_an_invalid_number_of_jobs_is_rejected(tmp_path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        run_sweep(make_points(TINY, {"seed": [1]}), tmp_path, jobs=0)


def test_resumed_run_keeps_its_number_of_threads(tmp_path):
    [point] = make_points(TINY | {"checkpoint_every": 1}, {"seed": [1]})
    begun = dataclasses.replace(point.config, engine=dataclasses.replace(point.config.engine, threads=2))

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(begun, tmp_path / point.name, progress=stop)
    assert run_sweep([point], tmp_path)[0].error is None
    stored = (tmp_path / point.name / "config.toml").read_text()
    assert "threads = 2" in stored
    assert RunConfig.from_dict(read_stored(tmp_path / point.name)).engine.threads == 2


def read_stored(directory):
    from coalmine.log.run_directory import RunDirectory

    return RunDirectory(directory).read_config()
