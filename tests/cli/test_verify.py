"""`coalmine verify` and its explanations, and `read_seed`, the one way to read a seed file."""

import json

import numpy as np
import pytest

import coalmine
from coalmine import RunDirectory
from coalmine.cli import main as cli


@pytest.fixture
def seed_file(tmp_path):
    # a new seed in every run of this test would give another verdict once in a while
    (tmp_path / "seed").write_text("7c1f0e35a9b84d2296d3e8f4b05a6c1d\n")
    return tmp_path / "seed"


@pytest.fixture
def run(tmp_path, seed_file):
    seed = coalmine.read_seed(seed_file)
    audit = coalmine.Audit(500, canaries=20, seed=seed, delta=1e-6, rounds=4, directory=tmp_path / "run", claim=5.0)
    rng = np.random.default_rng(5)
    initial = rng.normal(size=500)
    model = initial.copy()
    for number in range(1, 5):
        present = audit.canaries_in_round(number)
        delta = audit.updates(present, 1.0) + rng.normal(size=500)
        audit.observe_round(number, delta, present=present)
        model += 0.5 * delta
    audit.observe_final(model, initial=initial)
    np.save(tmp_path / "model.npy", model)
    np.save(tmp_path / "initial.npy", initial)
    audit.finish()
    audit.close()
    return tmp_path / "run"


@pytest.fixture
def noted(run):
    """The digests noted elsewhere when the run began and ended, as options."""
    record, result = (
        json.loads((run / "audit" / "record.json").read_text()),
        json.loads((run / "result.json").read_text()),
    )
    return "--commitment", record["commitment"]["statement_sha256"], "--log-digest", result["log_digest"]


@pytest.fixture
def verified(capsys, run, tmp_path):
    """The exit code, and check, outcome and detail of each line."""

    def call(seed, *arguments):
        with pytest.raises(SystemExit) as stop:
            cli.main(["verify", str(run), "--seed-file", str(seed), *map(str, arguments)])
        lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
        rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
        return stop.value.code, {check: (outcome, detail) for check, outcome, detail in rows}

    return call


def test_an_unchanged_record_is_verified(verified, seed_file, tmp_path, noted, run):
    models = ("--model", tmp_path / "model.npy", "--initial-model", tmp_path / "initial.npy")
    code, found = verified(seed_file, *models, *noted)
    assert {name for name, (outcome, _) in found.items() if outcome != "holds"} == {"training"}
    assert found["training"][0] == "CANNOT BE CHECKED"
    assert "one of possibly several trainings" in found["training"][1]
    assert code == 0
    opening = RunDirectory(run).map_rounds().opening
    for digest, expected in ((opening, (0, "holds")), ("0" * 32, (1, "DOES NOT HOLD"))):
        code, found = verified(seed_file, *models, *noted, "--opening", digest)
        assert (code, found["training"][0]) == expected
    code, found = verified(seed_file, *models[:2], *noted)
    assert code == 3
    assert found["sum"] == ("NOT CHECKED", found["sum"][1])
    assert "give the initial one (--initial-model)" in found["sum"][1]
    assert "match the commitment published before round 1" in found["commitment"][1]
    assert found["cosines"][1].endswith("null standard deviations, which is rounding")
    assert found["result"][1] == "recomputing the result from the stored rounds gives result.json"


def test_another_seed_is_named_as_the_likely_cause(verified, tmp_path):
    (tmp_path / "other").write_text("12345\n")
    code, found = verified(tmp_path / "other", "--model", tmp_path / "model.npy")
    assert code == 1
    assert found["commitment"][0] == "DOES NOT HOLD"
    assert "this is another seed, or they were changed afterwards" in found["commitment"][1]
    assert "this is another model or another seed" in found["cosines"][1]
    assert found["result"][0] == "holds"


def test_without_a_model_the_cosines_are_not_checked(verified, seed_file, noted, run):
    (run / "model.npy").unlink()
    code, found = verified(seed_file, *noted)
    assert code == 3
    assert found["cosines"] == (
        "NOT CHECKED",
        "give the final model (--model FILE.npy) to recompute its cosines with the canaries",
    )


@pytest.mark.parametrize("option", ["--commitment", "--log-digest"])
def test_a_malformed_digest_is_bad_input(capsys, run, seed_file, noted, option):
    good = noted[noted.index(option) + 1]
    for text in ("nonsense", "", good[:-1], good + "0", "g" + good[1:], "\x1b[31m" + good):
        with pytest.raises(SystemExit) as stop:
            cli.main(["verify", str(run), "--seed-file", str(seed_file), option, text])
        told = capsys.readouterr()
        assert (stop.value.code, told.out, len(told.err.splitlines())) == (2, "", 1), text
        assert f"must be {len(good)} hexadecimal digits, got" in told.err


@pytest.mark.parametrize("option", ["--commitment", "--log-digest"])
def test_a_well_formed_digest_that_is_not_the_noted_one_fails(verified, seed_file, noted, option):
    good = noted[noted.index(option) + 1]
    code, found = verified(seed_file, option, ("1" if good[0] == "0" else "0") + good[1:])
    assert code == 1
    assert [name for name, (outcome, _) in found.items() if outcome == "DOES NOT HOLD"] == [
        {"--commitment": "commitment date", "--log-digest": "log date"}[option]
    ]
    code, found = verified(seed_file, option, f" {good.upper()} ")  # case and spaces do not matter
    assert code == 3


def test_a_changed_result_is_named_with_its_entries(verified, seed_file, run):
    path = run / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"skipped_rounds": 1, "rounds": 7}))
    code, found = verified(seed_file)
    assert code == 1
    assert found["result"][1].startswith("result.json differs in rounds, skipped_rounds from the result recomputed")


@pytest.mark.parametrize(
    ("content", "seed"),
    [
        (b"123", 123),
        (b"123\n", 123),
        (b"123\r\n", 123),
        (b"secret\n", b"secret"),
        (b"secret \n", b"secret "),
        (b"12 34\n", b"12 34"),
        (b"\x00\xff\n", b"\x00\xff"),
    ],
)
def test_read_seed_drops_one_line_end(tmp_path, content, seed):
    path = tmp_path / "seed"
    path.write_bytes(content)
    assert coalmine.read_seed(path) == coalmine.read_seed(str(path)) == seed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; make one with: coalmine seed"),
        (b"\n\n", "is empty"),
        (b"secret\n\n", "must end in one line end at most, got several; remove the blank lines"),
        (b"9" * 40, "must hold a number below 2\\^128"),
        (b"x" * 5000, "at most 4096 bytes, got 5000"),
        (None, "is missing; make one with: coalmine seed"),
    ],
)
def test_read_seed_rejects_unclear_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "seed").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        coalmine.read_seed(str(tmp_path / "seed"))


def test_write_seed_never_overwrites(tmp_path):
    path = str(tmp_path / "seed")
    coalmine.write_seed(path)
    seed = coalmine.read_seed(path)
    assert isinstance(seed, int | bytes)
    with pytest.raises(ValueError, match="exists already"):
        coalmine.write_seed(path)
    assert coalmine.read_seed(path) == seed
