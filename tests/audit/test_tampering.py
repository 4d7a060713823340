"""One edit of any field of a finished run is refused, and honest variations of the run are accepted.

Generated: every field of record.json, result.json and the log, every line of config.toml, and bytes of models. The log is
written again with a valid chain of digests, as a forger would, so the digest that was recorded elsewhere is not asked.
"""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from coalmine import RunDirectory
from coalmine.log.rounds_file import RoundLog
from coalmine.simulation.config import RunConfig
from coalmine.simulation.training_run import start
from coalmine.verification import verify_run

SEED = bytes.fromhex("7c1f0e35a9b84d2296d3e8f4b05a6c1d")
SETTINGS = {
    "rounds": 4,
    "canaries": {"count": 60, "unobserved": 120, "pattern": "clients"},
    "participation": {"kind": "poisson", "clients_per_round": 20},
    "claim": {"accountant": True},
}
SENTENCES = ("reason", "detail", "question")  # generated from other entries, in words that may change
NUMPY_HEADER = 128  # bytes
QUICK = 8  # edits of each file in the quick tests


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tampering")
    (folder / "seed").write_bytes(SEED)
    config = SETTINGS | {"canaries": SETTINGS["canaries"] | {"seed_file": str(folder / "seed")}}
    start(RunConfig.from_dict(config), folder / "run")
    return folder / "run"


@pytest.fixture
def run(honest, tmp_path):
    return shutil.copytree(honest, tmp_path / "run")


def digests(path):
    record = json.loads((path / "audit" / "record.json").read_text())
    result = json.loads((path / "result.json").read_text())
    return {"commitment": record["commitment"]["statement_sha256"], "log_digest": result["log_digest"]}


def refused(path, **noted):
    """Whether verification finds fault with a directory: a check that does not hold, or one line that says why not."""
    try:
        return any(check.held is False for check in verify_run(path, SEED, **noted))
    except ValueError:
        return True


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, item in enumerate(value) for leaf in leaves(item, (*path, index))]
    return [path]


def edited(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else value * 1.001 + 1e-6
    if isinstance(value, str) and len(value) >= 32:
        return ("0" if value[0] != "0" else "1") + value[1:]
    return "edited" if value is None or isinstance(value, str) else [None]


def unrefused(path, file, noted, paths):
    """The fields of a JSON file that can be edited without being noticed."""
    whole, passed = (path / file).read_text(), []
    for place in paths:
        values = json.loads(whole)
        holder = values
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = edited(holder[place[-1]])
        (path / file).write_text(json.dumps(values))
        if not refused(path, **noted):
            passed.append(place)
    (path / file).write_text(whole)
    return passed


def chosen(paths, share):
    return paths if share == "all" else random.Random(1).sample(paths, min(QUICK, len(paths)))


SHARES = ["some", pytest.param("all", marks=pytest.mark.full)]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("file", ["audit/record.json", "result.json"])
def test_an_edited_field_is_refused(run, file, share):
    noted = digests(run)
    paths = leaves(json.loads((run / file).read_text()))
    paths = [path for path in paths if not any(key in SENTENCES for key in path)]
    assert not refused(run, **noted)
    assert unrefused(run, file, noted, chosen(paths, share)) == []


def changed_fields(item):
    """Each field of a record of the log with another value, and each array with another entry."""
    for part in dataclasses.fields(item):
        value = getattr(item, part.name)
        if value is None or part.name == "scores":
            continue
        if isinstance(value, np.ndarray):
            if not value.size:
                continue
            array = value.copy()
            place = array.size // 2
            array[place] = array[place] + 1 if array.dtype.kind == "i" else array[place] * 1.01 + 0.001
            yield part.name, {part.name: array}
        else:
            yield part.name, {part.name: edited(value)}


def rewritten(source, target, number, change):
    """A copy of a run whose record `number` has changes: of a round, or -1 for the final model."""
    shutil.copytree(source, target)
    file = target / "audit" / "rounds.log"
    old = RoundLog(file, read_only=True)
    rounds, final, outcome = list(old.rounds()), old.final, old.outcome
    old.close()
    file.unlink()
    new = RoundLog(file)
    try:
        for index, item in enumerate(rounds):
            new.append(dataclasses.replace(item, **change) if index == number else item)
        new.finish(dataclasses.replace(final, **change) if number < 0 else final)
        new.close_run(outcome)
    finally:
        new.close()
    values = json.loads((target / "result.json").read_text())
    (target / "result.json").write_text(json.dumps(values | {"log_digest": new.digest if new._digests else ""}))
    return target


@pytest.mark.parametrize("share", SHARES)
def test_an_edited_record_of_the_log_is_refused(honest, tmp_path, share):
    """By the digest that was recorded always; by what the rounds must add up to, for all that enters a result."""
    old = RoundLog(honest / "audit" / "rounds.log", read_only=True)
    records = [*enumerate(old.rounds()), (-1, old.final)]
    edits = [(number, *edit) for number, item in records for edit in changed_fields(item)]
    old.close()
    commitment = digests(honest)
    for count, (number, name, change) in enumerate(chosen(edits, share)):
        try:
            path = rewritten(honest, tmp_path / str(count), number, change)
        except (ValueError, TypeError):
            continue  # such a record cannot be written
        assert refused(path, **commitment), (number, name)
        shutil.rmtree(path)


@pytest.mark.full
@pytest.mark.parametrize("file", ["model.npy", "initial.npy", "config.toml", "audit/rounds.log"])
def test_a_flipped_bit_is_refused(run, file):
    noted, whole = digests(run), (run / file).read_bytes()
    rng = random.Random(2)
    first = NUMPY_HEADER if file.endswith(".npy") else 0  # a space more or less there changes no number
    for place in [rng.randrange(first, len(whole)) for _ in range(QUICK)]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(7)
        (run / file).write_bytes(bytes(flipped))
        assert refused(run, **noted), place


MOVES = {
    "moved": lambda path: path.rename(path.with_name("other name")),
    "without the report": lambda path: [file.unlink(missing_ok=True) for file in [path / "report.html"]],
    "with other modes": lambda path: [file.chmod(0o444) for file in path.rglob("*") if file.is_file()],
    "with other times": lambda path: [os.utime(file, (0, 0)) for file in path.rglob("*")],
    "reformatted": lambda path: (path / "result.json").write_text(
        json.dumps(json.loads((path / "result.json").read_text()), sort_keys=True)
    ),
    "with notes beside it": lambda path: (path / "README").write_text("notes"),
    "without metrics": lambda path: (path / "metrics.jsonl").unlink(),
    "with a torn line of metrics": lambda path: (path / "metrics.jsonl").write_bytes(
        (path / "metrics.jsonl").read_bytes() + b'{"round": 9'
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_an_honest_variation_is_accepted(run, name):
    noted = digests(run)
    MOVES[name](run)
    path = run if run.exists() else run.with_name("other name")
    assert [check for check in verify_run(path, SEED, **noted) if not check.held] == []


@pytest.mark.full
@pytest.mark.parametrize("core", ["NEHALEM", "HASWELL", "SKYLAKEX"])
def test_a_run_is_accepted_on_another_kind_of_core(run, core):
    code = (
        "import sys, pathlib; from coalmine.verification import verify_run\n"
        "checks = verify_run(pathlib.Path(sys.argv[1]), bytes.fromhex(sys.argv[2]))\n"
        "sys.exit(any(check.held is False for check in checks))"
    )
    environment = os.environ | {"OPENBLAS_CORETYPE": core, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, run, SEED.hex()], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_resumed_run_is_accepted(honest, tmp_path):
    """Killed after two rounds and resumed: another log in the same form, which verifies with its own digests."""
    values = SETTINGS | {"canaries": SETTINGS["canaries"] | {"seed_file": str(honest.parent / "seed")}}
    config = RunConfig.from_dict(values | {"checkpoint_every": 2})

    def stop(progress):
        if progress.report.round_number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(config, tmp_path / "run", progress=stop)
    from coalmine.simulation.training_run import resume

    resume(tmp_path / "run")
    noted = digests(tmp_path / "run")
    assert [check for check in verify_run(tmp_path / "run", SEED, **noted) if not check.held] == []
    assert RunDirectory(tmp_path / "run").map_rounds().numbers == (1, 2, 3, 4)
