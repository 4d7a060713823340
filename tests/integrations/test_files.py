"""The audit of a pipeline that runs elsewhere equals the library's, whatever the files; bad files are one line."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from in_process import called

from coalmine import Audit, Claim, mechanism_epsilon
from coalmine.cli.run import BUILT_IN
from coalmine.integrations.files import audit_files, export_canaries
from coalmine.integrations.files.arrays import read_arrays
from coalmine.integrations.files.audit import FileAudit
from coalmine.integrations.files.plan import read_plan
from coalmine.log.run_directory import RunDirectory
from coalmine.measure import coordinate_sums
from coalmine.simulation.config_sources import config_with
from coalmine.simulation.tasks import load_task
from coalmine.simulation.training_run import simulate

SEED, ROUNDS, CLIENTS, CANARIES = b"the secret of a test", 5, 50, 300
SHAPES = {"b": (90,), "w": (40, 90)}  # in the order in which safetensors writes them
CLAIM = float(mechanism_epsilon(1.0, delta=1e-6))


def write_plan(folder, **changes):
    entries = {
        "seed_file": "seed", "model": "model.safetensors", "releases": "{round}.safetensors", "rounds": ROUNDS,
        "canaries": CANARIES, "delta": 1e-6, "clip_norm": 2.0, "noise_multiplier": 1.0, "divisor": float(CLIENTS),
        "others": "others-{round}.safetensors", "claim": CLAIM, **changes,
    }  # fmt: skip
    lines = [
        f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for name, value in entries.items()
        if value is not None and name != "more"
    ]
    (folder / "seed").write_bytes(SEED)
    (folder / "audit.toml").write_text("\n".join([*lines, changes.get("more", "")]))
    return folder / "audit.toml"


def trained(seed=0, rounds=ROUNDS, noise=1.0):
    """The rounds of a training with the library's canaries: what was released, and the clients' sum."""
    rng = np.random.default_rng(seed)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    audit = Audit.for_model(zeros, canaries=CANARIES, seed=SEED, delta=1e-6, rounds=rounds, claim=CLAIM)
    found = []
    for number in range(1, rounds + 1):
        present = audit.canaries_in_round(number)
        canaries = audit.updates(present, 2.0)
        others = {name: rng.normal(size=shape) * 0.3 for name, shape in SHAPES.items()}
        release = {
            name: ((others[name] + canaries[name] + noise * 2.0 * rng.normal(size=shape)) / CLIENTS).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        others = {name: (value / CLIENTS).astype(np.float32) for name, value in others.items()}
        facts = {"noise_std": 2.0 / CLIENTS, "clip_norm": 2.0 / CLIENTS}
        audit.observe_round(number, release, present=present, others=others, **facts)
        found.append((release, others))
    return audit, found


def write_rounds(folder, found, save=safetensors.numpy.save_file, ending="safetensors"):
    save({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}, folder / f"model.{ending}")
    for number, (release, others) in enumerate(found, 1):
        save(release, folder / f"{number}.{ending}")
        save(others, folder / f"others-{number}.{ending}")


def same(result, other, resumed=False):
    """Ladder, gauges and verdict, number by number; single precision adds tensors in another order.

    After a restart the gauge of coordinates begins again, as it does in a training loop.
    """
    one, two = result.to_dict(), other.to_dict()
    if resumed:
        del one["gauges"]["coordinates"], two["gauges"]["coordinates"]
    for part in ("adversaries", "gauges", "facts", "claim", "rounds"):
        assert differences(one.get(part), two.get(part), part) == []
    assert (result.verdict.outcome, result.verdict.code) == (other.verdict.outcome, other.verdict.code)
    return True


def differences(one, two, path=""):
    if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
        return [line for name in one for line in differences(one[name], two[name], f"{path}.{name}")]
    if isinstance(one, list | tuple) and len(one) == len(two):
        return [
            line
            for place, pair in enumerate(zip(one, two, strict=True))
            for line in differences(*pair, f"{path}.{place}")
        ]
    if isinstance(one, float) and isinstance(two, float) and math.isclose(one, two, rel_tol=1e-5, abs_tol=1e-9):
        return []
    return [] if one == two or (one != one and two != two) else [f"{path}: {one!r} is not {two!r}"]


@pytest.fixture
def library():
    return trained()


def save_torch(arrays, path):
    torch.save({name: torch.tensor(array) for name, array in arrays.items()}, path)


def save_npz(arrays, path):
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("ending", "save"), [("safetensors", safetensors.numpy.save_file), ("npz", save_npz), ("pt", save_torch)]
)
def test_files_give_the_librarys_result_and_records(ending, save, library, tmp_path):
    audit, found = library
    write_rounds(tmp_path, found, save, ending)
    names = {"model": f"model.{ending}", "releases": f"{{round}}.{ending}", "others": f"others-{{round}}.{ending}"}
    result = audit_files(write_plan(tmp_path, **names))
    assert same(result, audit.result())
    assert result.verdict.outcome == "PASS"
    stored = RunDirectory(tmp_path / "audit")
    records = list(stored.read_log().rounds())
    for one, two in zip(records, audit.log.rounds(), strict=True):
        assert np.allclose(one.cosines, two.cosines, rtol=1e-5, atol=1e-8)
        assert one.norm == pytest.approx(two.norm, rel=1e-6)
    assert not (tmp_path / "audit" / ".unpacked").exists()
    assert called("verdict", tmp_path / "audit").returncode == 0
    assert called("verify", tmp_path / "audit", "--seed-file", tmp_path / "seed").returncode in (0, 3)


def test_missing_noise_in_files_is_a_violation(tmp_path):
    _, found = trained(noise=0.5)
    write_rounds(tmp_path, found)
    done = called("audit", write_plan(tmp_path))
    assert done.returncode == 1
    assert done.stdout.startswith("VIOLATION")


def test_models_give_what_their_differences_give(library, tmp_path):
    audit, found = library
    model = {name: np.full(shape, 0.25, np.float32) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file(model, tmp_path / "model.safetensors")
    for number, (release, others) in enumerate(found, 1):
        model = {name: (model[name].astype(float) + release[name]) for name in model}
        safetensors.numpy.save_file(model, tmp_path / f"{number}.safetensors")
        safetensors.numpy.save_file(others, tmp_path / f"others-{number}.safetensors")
    path = write_plan(tmp_path, releases_are="models", final=f"{ROUNDS}.safetensors")
    result = audit_files(path)
    for name, adversary in audit.result().adversaries.items():
        epsilon = adversary.headline.estimate.epsilon
        assert result[name].headline.estimate.epsilon == pytest.approx(epsilon, rel=1e-3), name
    assert result.verdict.outcome == "PASS"
    assert audit_files(path).to_dict() == result.to_dict()  # a finished audit is read, not made again


def test_an_audit_goes_on_where_a_file_was_missing(library, tmp_path):
    audit, found = library
    write_rounds(tmp_path, found)
    (tmp_path / "4.safetensors").rename(tmp_path / "later")
    path = write_plan(tmp_path)
    done = called("audit", path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the release of round 4 is missing" in done.stderr
    (tmp_path / "later").rename(tmp_path / "4.safetensors")
    (tmp_path / "1.safetensors").unlink()  # recorded already
    assert same(audit_files(path), audit.result(), resumed=True)


@pytest.mark.full
def test_a_killed_audit_resumes(tmp_path):
    audit, found = trained(rounds=40)
    write_rounds(tmp_path, found)
    path = write_plan(tmp_path, rounds=40)
    command = [sys.executable, "-m", "coalmine", "audit", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = tmp_path / "audit" / "metrics.jsonl"
    while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 3):
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "audit" / "result.json").exists()
    assert same(audit_files(path), audit.result(), resumed=True)


def torn(path):
    path.write_bytes(path.read_bytes()[:-7])


def emptied(path):
    path.write_bytes(b"")


def scribbled(path):
    path.write_bytes(b"\x93NUMPY no" * 100)


def reshaped(path):
    safetensors.numpy.save_file({"w": np.zeros((3, 3), np.float32), "b": np.zeros(90, np.float32)}, path)


def renamed(path):
    safetensors.numpy.save_file({"v": np.zeros((40, 90), np.float32), "b": np.zeros(90, np.float32)}, path)


def not_finite(path):
    values = {name: np.full(shape, np.nan, np.float32) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file(values, path)


def lying(path):
    """A header whose offsets leave the file."""
    head = b'{"w":{"dtype":"F32","shape":[40,90],"data_offsets":[0,14400]},"b":{"dtype":"F32","shape":[90],'
    head += b'"data_offsets":[99999999999999,100000000000359]}}'
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(14760))


@pytest.mark.parametrize("damage", [torn, emptied, scribbled, reshaped, renamed, not_finite, lying])
def test_a_damaged_release_is_one_line_with_its_name(damage, library, tmp_path):
    write_rounds(tmp_path, library[1])
    damage(tmp_path / "3.safetensors")
    done = called("audit", write_plan(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "round 3" in done.stderr
    assert "3.safetensors" in done.stderr


@pytest.mark.parametrize("ending", ["npy", "npz", "pt"])
@pytest.mark.parametrize("damage", [torn, emptied, scribbled])
def test_damage_is_named_in_every_format(ending, damage, tmp_path):
    path = tmp_path / f"file.{ending}"
    {"npy": np.save, "npz": np.savez}.get(ending, lambda file, array: torch.save(torch.tensor(array), file))(
        path, np.arange(9.0)
    )
    read_arrays("the release", str(path), tmp_path)
    damage(path)
    with pytest.raises(ValueError, match=r"^the release .*file\.") as caught:
        read_arrays("the release", str(path), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    torch.save({"w": Path}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match="the release is damaged"):
        read_arrays("the release", str(tmp_path / "evil.pt"), tmp_path)
    np.save(tmp_path / "evil.npy", np.array([Path()], dtype=object))
    with pytest.raises(ValueError, match="the release is damaged"):
        read_arrays("the release", str(tmp_path / "evil.npy"), tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"more": "sigma = 1.0"}, "unknown entry 'sigma': here it is noise_multiplier"),
        ({"more": "rest = 1.0"}, "unknown entry 'rest': the entries are seed_file"),
        ({"releases": "one.safetensors"}, "releases must name a file for each round"),
        ({"releases": "{turn}.npy"}, "may contain {round}"),
        ({"rounds": 10**9}, "rounds must be at most 1000000"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"directory": "seed"}, "directory must be a folder, got the file"),
        ({"rounds": "five"}, "Expected `int`, got `str`"),
        ({"canaries": None}, "missing required field `canaries`"),
        ({"model": "model.bin"}, "must be a file in .npy"),
        ({"model": "none.npy"}, "the model is missing"),
        ({"clip_norm": -1.0}, "clip_norm must be above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be at least 0"),
        ({"releases_are": "gradients"}, "gradients"),
        ({"claim": "three"}, "claim must be a number such as 3"),
        ({"more": "[[round]]\nnumber = 9"}, "must lie in 1..5"),
        ({"more": "[[round]]\nnumber = 2\n[[round]]\nnumber = 2"}, "got 2 twice"),
        ({"more": "[[round]]\nnumber = 2\npresent = [3, 3]"}, "got one twice"),
        ({"more": "layers = { w = 3 }"}, "must be one vector"),
        ({"more": "layers = 3 ="}, "is not TOML"),
        ({"seed_file": "no-seed"}, "make one with: coalmine seed"),
    ],
)
def test_a_wrong_entry_is_one_line(changes, said, library, tmp_path):
    write_rounds(tmp_path, library[1])
    done = called("audit", write_plan(tmp_path, **changes))
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert said in " ".join(done.stderr.split())


def test_rounds_may_differ_from_what_stands_at_the_top(tmp_path):
    plan = read_plan(
        write_plan(
            tmp_path,
            more="[[round]]\nnumber = 2\nskipped = true\n[[round]]\nnumber = 3\nclip_norm = 4.0\npresent = [7]",
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        patch.setattr(FileAudit, "_observe", lambda self, planned, before: seen.append(planned))
        np.savez(tmp_path / "model.npz", w=np.zeros(4000, np.float32))
        plan.model = str(tmp_path / "model.npz")
        with FileAudit(plan) as audit:
            audit.observe_all()
    assert [planned.number for planned in seen] == [1, 3, 4, 5]
    assert seen[1].present == [7]
    assert seen[1].facts == {"noise_std": 4.0 / CLIENTS, "clip_norm": 4.0 / CLIENTS, "participants": None}
    assert seen[2].facts["clip_norm"] == 2.0 / CLIENTS


def test_the_claim_and_the_sampling_may_be_tables(tmp_path):
    scheme = '{ scheme = "poisson", probability = 0.1, rounds = 5 }'
    more = f"sampling = {scheme}\n[claim_]".replace("[claim_]", f"claim = {{ epsilon = 2.0, sampling = {scheme} }}")
    plan = read_plan(write_plan(tmp_path, claim=None, more=more))
    np.savez(tmp_path / "model.npz", w=np.zeros(4000, np.float32))
    plan.model = str(tmp_path / "model.npz")
    with FileAudit(plan) as audit:
        assert audit.claim == Claim.from_dict(
            {"epsilon": 2.0, "sampling": {"scheme": "poisson", "probability": 0.1, "rounds": 5}}
        )
        assert audit.settings.sampling == audit.claim.sampling


def test_releases_may_be_urls(library, tmp_path):
    fsspec = pytest.importorskip("fsspec")
    audit, found = library
    write_rounds(tmp_path, found)
    memory = fsspec.filesystem("memory")
    for number in range(1, ROUNDS + 1):
        memory.put(str(tmp_path / f"{number}.safetensors"), f"/releases/{number}.safetensors")
    path = write_plan(tmp_path, releases="memory://releases/{round}.safetensors")
    assert same(audit_files(path), audit.result())
    memory.rm("/releases/3.safetensors")
    done = called("audit", write_plan(tmp_path, releases="memory://releases/{round}.safetensors", directory="other"))
    assert done.returncode == 2
    assert "the release of round 3 is missing: memory://releases/3.safetensors" in done.stderr


def test_a_bfloat16_model_is_read_as_torch_reads_it(tmp_path):
    tensors = {"w": torch.randn(30, 40).to(torch.bfloat16), "steps": torch.tensor([3])}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    read = read_arrays("the model", str(tmp_path / "model.safetensors"), tmp_path)
    assert torch.equal(read["w"], tensors["w"])
    assert np.array_equal(read["steps"], [3])


def exported(folder, **options):
    export_canaries(folder / "audit.toml", folder / "out", **options)
    with (folder / "out" / "schedule.csv").open() as file:
        return list(csv.DictReader(file))


def test_exported_canaries_are_the_librarys(library, tmp_path):
    audit, found = library
    write_rounds(tmp_path, found)
    write_plan(tmp_path, scale=10.0)
    rows = exported(tmp_path, kind="safetensors")
    for number in range(1, ROUNDS + 1):
        assert [int(row["canary"]) for row in rows if int(row["round"]) == number] == list(
            audit.canaries_in_round(number)
        )
    for row in rows[::50]:
        canary = safetensors.numpy.load_file(tmp_path / "out" / row["file"])
        expected = audit.update(int(row["canary"]), 2.0, scale=10)
        assert all(np.array_equal(canary[name], expected[name]) for name in SHAPES)
        assert float(row["length"]) == 20.0
    assert len(list((tmp_path / "out").iterdir())) == CANARIES + 1
    for file in (tmp_path / "out").iterdir():
        assert SEED not in file.read_bytes()
    stored = RunDirectory(tmp_path / "audit")
    assert stored.read_statement().claim["epsilon"] == CLAIM  # committed to before round 1


def test_exported_sums_are_the_librarys_in_every_format(library, tmp_path):
    audit, found = library
    write_rounds(tmp_path, found)
    write_plan(tmp_path)
    rows = exported(tmp_path, kind="safetensors", summed=True)
    assert len(rows) == ROUNDS
    parquet = pytest.importorskip("pyarrow.parquet")
    export_canaries(tmp_path / "audit.toml", tmp_path / "table", kind="parquet", summed=True)
    table = parquet.read_table(tmp_path / "table" / "canaries.parquet").to_pydict()
    for number, row in enumerate(rows, 1):
        expected = audit.updates(audit.canaries_in_round(number), 2.0)
        total = safetensors.numpy.load_file(tmp_path / "out" / row["file"])
        assert all(np.array_equal(total[name], expected[name]) for name in SHAPES)
        flat = np.concatenate([expected[name].ravel() for name in SHAPES])
        assert np.array_equal(np.float32(table["update"][number - 1]), flat)
    done = called("canaries", "export", tmp_path / "audit.toml", tmp_path / "x", "--format", "npy")
    assert done.returncode == 2
    assert "use safetensors or parquet" in done.stderr


def test_one_vector_with_layers_is_a_model(library, tmp_path):
    audit, found = library

    def flat(arrays):
        return np.concatenate([arrays[name].ravel() for name in SHAPES])

    np.save(tmp_path / "model.npy", np.zeros(3690, np.float32))
    for number, (release, others) in enumerate(found, 1):
        np.save(tmp_path / f"{number}.npy", flat(release))
        np.save(tmp_path / f"others-{number}.npy", flat(others))
    names = {"model": "model.npy", "releases": "{round}.npy", "others": "others-{round}.npy"}
    path = write_plan(tmp_path, **names, more="layers = { b = 90, w = 3600 }")
    assert same(audit_files(path), audit.result())
    rows = exported(tmp_path)
    canary = np.load(tmp_path / "out" / rows[0]["file"])
    assert np.array_equal(canary, flat(audit.update(int(rows[0]["canary"]), 2.0)))


@pytest.mark.full
def test_a_model_in_blocks_takes_the_memory_of_blocks_and_not_of_the_model(tmp_path, monkeypatch):
    """What grows is a table of 0.4 MB for each block; the gauge that follows 2^24 coordinates of any model follows fewer."""
    monkeypatch.setattr(coordinate_sums, "MOST", 1 << 16)
    block = 1 << 20
    peaks = [peak_memory(tmp_path / str(blocks), block, blocks) for blocks in (3, 9)]
    for three, nine in zip(*peaks, strict=True):
        assert nine - three < 6 * (4 * block) / 8


def peak_memory(folder, block, blocks):
    """The most memory that an export and an audit of a round take."""
    folder.mkdir()
    path = write_plan(
        folder, model="model.npy", releases="{round}.npy", others="others-{round}.npy", rounds=1, canaries=100,
        unobserved=100, releases_are="models", blocks=[block] * blocks,
    )  # fmt: skip
    rng, dim = np.random.default_rng(0), block * blocks
    np.save(folder / "model.npy", np.zeros(dim, np.float32))
    exporting = peak_of(lambda: export_canaries(path, folder / "out", summed=True))
    others = rng.normal(size=dim).astype(np.float32)
    model = (others + np.load(folder / "out" / "round-1.npy") + 2.0 * rng.normal(size=dim)) / CLIENTS
    np.save(folder / "1.npy", model.astype(np.float32))
    np.save(folder / "others-1.npy", others / np.float32(CLIENTS))
    return exporting, peak_of(lambda: audit_files(path))


def peak_of(work):
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_pipeline_may_choose_the_canaries_itself(library, tmp_path):
    audit, found = library
    write_rounds(tmp_path, found)
    write_plan(tmp_path, scheduled=False)
    rows = exported(tmp_path, kind="safetensors")
    assert [(row["round"], int(row["canary"])) for row in rows] == [("", index) for index in range(CANARIES)]
    done = called("audit", tmp_path / "audit.toml")
    assert done.returncode == 2
    assert "[[round]] 1 must list the canaries that were present" in done.stderr
    stated = "".join(
        f"[[round]]\nnumber = {number}\npresent = {list(map(int, audit.canaries_in_round(number)))}\n"
        for number in range(1, ROUNDS + 1)
    )
    claim = f"claim = {{ epsilon = {CLAIM}, participations = 1 }}\n"
    (tmp_path / "audit" / "audit" / "record.json").unlink()  # of the claim above, which states no participations
    result = audit_files(write_plan(tmp_path, scheduled=False, claim=None, more=claim + stated))
    assert result.verdict.outcome == "PASS"


@pytest.mark.full
def test_files_of_the_default_run_give_its_ladder_gauges_and_verdict(tmp_path):
    """`coalmine run` without options; what it shows to its audit goes through files instead."""
    rounds = []

    def observe(audit, number, delta, **facts):
        for name, value in (("", delta), ("others-", facts.pop("others"))):
            np.save(tmp_path / f"{name}{number}.npy", value.numpy())
        rounds.append((number, facts))
        return observed(audit, number, delta, others=torch.tensor(np.load(tmp_path / f"others-{number}.npy")), **facts)

    def finish(audit, model, *, initial):
        np.save(tmp_path / "final.npy", model.numpy())
        np.save(tmp_path / "model.npy", initial.numpy())
        finished(audit, model, initial=initial)

    observed, finished = Audit.observe_round, Audit.observe_final
    config = config_with(BUILT_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Audit, "observe_round", observe)
        patch.setattr(Audit, "observe_final", finish)
        result = simulate(config)
    layers = ", ".join(f"{json.dumps(name)} = {size}" for name, size in load_task(config.task.name).model.sizes)
    claim, privacy = result.claim.to_dict(), config.privacy
    stated = [
        f"[[round]]\nnumber = {number}\npresent = {list(map(int, facts['present']))}\n"
        f"participants = {facts['participants']}\ndivisor = {privacy.clip_norm / facts['clip_norm']!r}"
        for number, facts in rounds
    ]
    claim = json.dumps({name: value for name, value in claim.items() if value is not None})
    path = write_plan(
        tmp_path, model="model.npy", releases="{round}.npy", others="others-{round}.npy", rounds=config.rounds,
        canaries=config.canaries.count, delta=privacy.delta, clip_norm=privacy.clip_norm, claim=None, scheduled=False,
        noise_multiplier=privacy.noise_multiplier, scale=config.canaries.scale,
        final="final.npy",
        more="\n".join([f"layers = {{ {layers} }}", "claim = " + claim.replace('": ', '" = '), *stated]),
    )  # fmt: skip
    (tmp_path / "seed").write_text(str(config.canary_seed()))
    assert same(audit_files(path), result)


PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "audit-files.md").read_text()
SERVER = """
int main() {
  const size_t dim = 10000;
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal(0, 1);
  for (int round = 1; round <= 5; ++round) {
    char number[4];
    std::snprintf(number, 4, "%03d", round);
    std::vector<float> sum(dim), others(dim);
    for (float& value : others) value = 0.3f * normal(random);
    for (size_t i = 0; i < dim; ++i) sum[i] = others[i] + NOISE * normal(random);
    std::ifstream schedule("canaries/schedule.csv");
    for (std::string line; std::getline(schedule, line);) {
      if (std::atoi(line.c_str()) != round) continue;
      while (!line.empty() && line.back() == '\\r') line.pop_back();
      auto update = read_npy("canaries/" + line.substr(line.rfind(',') + 1), dim);
      for (size_t i = 0; i < dim; ++i) sum[i] += update[i];
    }
    for (size_t i = 0; i < dim; ++i) { sum[i] /= 200; others[i] /= 200; }
    write_npy(std::string("releases/") + number + ".npy", sum);
    write_npy(std::string("releases/others-") + number + ".npy", others);
  }
}
"""
HEADERS = "".join(f"#include <{name}>\n" for name in ("cstdio", "cstdlib", "fstream", "random", "string", "vector"))


def block_of(language):
    return re.search(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)[1]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize(("noise", "code"), [("1.0f", 0), ("0.5f", 1)])
def test_the_pages_server_in_c_plus_plus_is_audited_by_its_files(noise, code, tmp_path):
    (tmp_path / "audit.toml").write_text(block_of("toml"))
    (tmp_path / "canary-seed").write_bytes(SEED)
    (tmp_path / "releases").mkdir()
    np.save(tmp_path / "initial.npy", np.zeros(10_000, np.float32))
    assert called("canaries", "export", tmp_path / "audit.toml", tmp_path / "canaries").returncode == 0
    (tmp_path / "server.cpp").write_text(HEADERS + block_of("cpp") + SERVER)
    subprocess.run(["g++", "-O2", f"-DNOISE={noise}", "server.cpp", "-o", "server"], cwd=tmp_path, check=True)
    subprocess.run(["./server"], cwd=tmp_path, check=True)
    assert called("audit", tmp_path / "audit.toml").returncode == code


def test_the_pages_variables_of_tensorflow_become_arrays(tmp_path):
    names = {"np": np}
    exec(block_of("python"), names)
    variables = [SimpleNamespace(name=f"dense/{name}:0", numpy=lambda: np.arange(3.0)) for name in ("kernel", "bias")]
    names["save"](tmp_path / "model.npz", variables)
    assert list(read_arrays("the model", str(tmp_path / "model.npz"), tmp_path)) == ["dense.kernel:0", "dense.bias:0"]
