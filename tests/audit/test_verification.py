"""Forgeries that verification must reject, and honest runs from other processors that it must accept."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress

import numpy as np
import pytest
import tomli_w

from coalmine import Audit, Claim, FixedSize, Poisson, RunDirectory, amplified_epsilon, read_seed, write_seed
from coalmine.canaries import RotatedCanaries
from coalmine.log.commitment import Commitment, Precommitment
from coalmine.log.rounds_file import MAGIC, RoundLog, decode, encode
from coalmine.measure.round import Final, Round
from coalmine.measure.settings import Settings
from coalmine.measure.vectors import model_sha256
from coalmine.verdict.coverage import AuditedItem
from coalmine.verification import verify_run

DIM, ROUNDS = 600, 6
CONFIG = {
    "trainer": "test",
    "rounds": ROUNDS,
    "server": {"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.5},
    "privacy": {"noise_multiplier": 1.0},
}


def train(path, seed, *, rng_seed=1, claim=5.0):
    """An honest run with a linear server that has momentum."""
    home = RunDirectory(path)
    home.write_config(CONFIG)
    rng = np.random.default_rng(rng_seed)
    initial = rng.normal(size=DIM)
    kind = {"canaries": 30, "seed": seed, "delta": 1e-6, "rounds": ROUNDS}
    statement = Precommitment(
        claim=Claim(claim).to_dict(),
        initial_sha256=model_sha256(initial),
        facts={"noise_multiplier": 1.0, "analytical_epsilon": 5.0, "audited_by_pipeline": {}},
    )
    home.commit(seed, Audit(DIM, **kind).settings, statement)
    audit = Audit(DIM, **kind, directory=home, claim=claim)
    np.save(path / "initial.npy", initial)
    model, velocity = initial.copy(), np.zeros(DIM)
    for number in range(1, ROUNDS + 1):
        present, others = audit.canaries_in_round(number), rng.normal(size=DIM)
        delta = (others + audit.updates(present, 1.0) + rng.normal(size=DIM)) / 50
        told = {"others": others / 50, "noise_std": 1 / 50, "clip_norm": 1 / 50}
        audit.observe_round(number, delta, present=present, **told)
        velocity = 0.5 * velocity + delta
        model += 0.5 * velocity
    audit.observe_final(model, initial=initial)
    np.save(path / "model.npy", model)
    result = audit.result(analytical_epsilon=5.0)
    home.write_result(result.with_entries(accuracy=0.8, noise_multiplier=1.0))
    audit.close()


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verification")
    # a new seed in every run of this test would give another verdict once in a while
    (folder / "seed").write_text("7c1f0e35a9b84d2296d3e8f4b05a6c1d\n")
    train(folder / "run", read_seed(folder / "seed"))
    return folder


@pytest.fixture
def run(honest, tmp_path):
    shutil.copytree(honest / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def verified(honest, run):
    """A function that verifies the run with all optional inputs and returns the names of the failed checks."""
    record, result = (json.loads((honest / "run" / name).read_text()) for name in ("audit/record.json", "result.json"))

    def call(*, noted=True, **options):
        known = (
            {"commitment": record["commitment"]["statement_sha256"], "log_digest": result["log_digest"]}
            if noted
            else {}
        )
        options = {"model": honest / "run" / "model.npy"} | known | options
        checks = verify_run(run, read_seed(honest / "seed"), **options)
        return {check.name for check in checks if check.held is False}, {
            c.name for c in checks if c.held is None and c.possible
        }

    return call


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def rewrite(run, change):
    """Rewrite the log with changed rounds and a valid hash chain, as a forger would."""
    path = run / "audit" / "rounds.log"
    old = RoundLog(path, read_only=True)
    rounds, final, outcome = list(old.rounds()), old.final, old.outcome
    path.unlink()
    new = RoundLog(path)
    for item in change(rounds):
        new.append(item)
    new.finish(final)
    new.close_run(outcome)
    digest = new.digest
    new.close()
    edit_json(run / "result.json", lambda values: values.update(log_digest=digest))


def test_an_honest_run_is_verified(verified):
    assert verified() == (set(), set())


def test_without_the_noted_digests_nothing_is_verified(verified):
    assert verified(noted=False) == (set(), {"commitment date", "log date"})


def test_the_models_of_the_directory_are_taken_unless_others_are_given(verified, run):
    assert verified(model=None) == (set(), set())
    (run / "model.npy").unlink()
    assert verified(model=None) == (set(), {"cosines", "sum"})


def test_without_the_initial_model_the_rounds_are_not_tied_to_the_final_one(verified, run):
    (run / "initial.npy").unlink()
    assert verified() == (set(), {"sum"})


def test_rounds_of_another_run_are_rejected(verified, run, honest, tmp_path):
    train(tmp_path / "other", read_seed(honest / "seed"), rng_seed=2)
    others = list(RoundLog(tmp_path / "other" / "audit" / "rounds.log", read_only=True).rounds())
    rewrite(run, lambda rounds: [*rounds[:3], *others[3:]])
    assert verified(noted=False)[0] >= {"sum", "result"}
    assert "log date" in verified()[0]


def test_dropped_rounds_are_rejected(verified, run):
    rewrite(run, lambda rounds: rounds[:-1])
    assert verified(noted=False)[0] >= {"rounds", "sum"}


def test_canaries_that_contradict_the_schedule_are_rejected(verified, run):
    def swap(rounds):
        first, second = rounds[0].present, rounds[1].present
        fields = [vars(rounds[0]) | {"present": second}, vars(rounds[1]) | {"present": first}]
        return [Round(**fields[0]), Round(**fields[1]), *rounds[2:]]

    rewrite(run, swap)
    assert "schedule" in verified(noted=False)[0]


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("claimed_epsilon", 50.0, "claim"),
        ("claimed_epsilon", None, "claim"),
        ("claim_accounting", "amplified", "claim"),
        ("accuracy", 0.99, "trainer"),
        ("noise_multiplier", 2.0, "trainer"),
        ("analytical_epsilon", 1.0, "trainer"),
        ("clients", 7, "trainer"),
        ("verdict", "VIOLATION", "result"),
        ("rounds", 7, "result"),
    ],
)
def test_an_edited_result_is_rejected(verified, run, name, value, check):
    before = json.loads((run / "result.json").read_text())[name]
    edit_json(run / "result.json", lambda values: values.update({name: value}))
    assert value != before
    assert check in verified(noted=False)[0]


def test_an_edited_estimate_is_rejected(verified, run):
    def lower(values):
        values["adversaries"]["known-others"]["groups"][0]["epsilon"] *= 0.9

    edit_json(run / "result.json", lower)
    assert "result" in verified(noted=False)[0]


def test_another_config_is_rejected(verified, run):
    path = run / "config.toml"
    config = tomllib.loads(path.read_text())
    config["privacy"]["noise_multiplier"] = 2.0
    path.write_text(tomli_w.dumps(config))
    assert "trainer" in verified(noted=False)[0]


@pytest.mark.parametrize("entry", ["settings", "statement"])
def test_a_changed_record_is_rejected(verified, run, entry):
    def change(values):
        values[entry]["delta" if entry == "settings" else "claim"] = 1e-3 if entry == "settings" else None

    edit_json(run / "audit" / "record.json", change)
    assert "commitment" in verified(noted=False)[0]


def test_a_seed_and_rounds_invented_afterwards_are_rejected(verified, run, honest, tmp_path):
    """Anyone with a model can invent an audit that fits it; the commitment noted before round 1 exposes the forgery."""
    write_seed(tmp_path / "seed")
    train(tmp_path / "invented", read_seed(tmp_path / "seed"), rng_seed=3)
    record = json.loads((honest / "run" / "audit" / "record.json").read_text())
    checks = verify_run(
        tmp_path / "invented",
        read_seed(tmp_path / "seed"),
        model=tmp_path / "invented" / "model.npy",
        commitment=record["commitment"]["statement_sha256"],
    )
    assert [check.name for check in checks if check.held is False] == ["commitment date"]


def test_another_final_model_is_rejected(verified, run):
    path = run / "audit" / "rounds.log"
    log = RoundLog(path, read_only=True)
    rounds, final, outcome = list(log.rounds()), log.final, log.outcome
    path.unlink()
    new = RoundLog(path)
    for item in rounds:
        new.append(item)
    new.finish(Final(**vars(final) | {"update_cosines": -final.update_cosines}))
    new.close_run(outcome)
    new.close()
    assert "sum" in verified(noted=False)[0]


@pytest.mark.parametrize("seed", [271828, b"short", b"12345678", b"0" * 30 + b"12", 2**63])
def test_a_guessable_seed_is_called_a_demonstration(tmp_path, seed):
    train(tmp_path / "run", seed)
    checks = {check.name: check for check in verify_run(tmp_path / "run", seed)}
    assert checks["seed"].held is None
    assert "demonstration" in checks["seed"].detail
    assert checks["commitment"].held


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    ("seed", "expected"),
    [(7, True), (2**64 - 1, True), (b"1234567", True), (2**64, False), (b"a seed of 128 bi", False)],
)
def test_an_audit_knows_whether_it_is_a_demonstration(tmp_path, seed, expected, stored):
    settings = {"canaries": 20, "seed": seed, "delta": 1e-5}
    where = {"directory": tmp_path / "run"} if stored else {}
    with Audit(100, **settings, **where) as audit:
        assert audit.seed_is_guessable is expected
    if stored:
        with Audit(100, **settings, **where) as again:
            assert again.seed_is_guessable is expected


@pytest.mark.full
@pytest.mark.parametrize("core", ["Haswell", "Prescott", "Sandybridge", "Nehalem"])
def test_a_run_is_verified_on_another_processor(honest, core):
    """OpenBLAS uses other kernels there, whose sums differ in the last digits."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "coalmine",
            "verify",
            str(honest / "run"),
            "--seed-file",
            str(honest / "seed"),
            "--json",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"OPENBLAS_CORETYPE": core},
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert json.loads(done.stdout)["result"]["held"]


def judged(run, **changes):
    """Verify a run that committed to the accountant's epsilon, with a changed claim."""
    home = RunDirectory(run)
    scheme = FixedSize(23, 230, ROUNDS)  # 20 of 200 clients, and 30 canaries sampled like them
    told = {"sampling": scheme, "noise_multiplier": 1.0, "sampler_observed": True}
    told |= {"epsilon": float(amplified_epsilon(1.0, scheme, 1e-6))}
    audit = Audit(DIM, canaries=30, seed=b"a long secret", delta=1e-6, directory=home, claim=Claim(**told))
    rng = np.random.default_rng(1)
    for number in range(1, ROUNDS + 1):
        delta = rng.normal(size=DIM)
        audit.observe_round(number, delta, present=np.arange(3), others=0 * delta, noise_std=1.0, clip_norm=1.0)
    home.write_result(audit.result(claim=Claim(**told | changes)).with_entries(population=200, noise_multiplier=1.0))
    audit.close()
    return next(check for check in verify_run(run, b"a long secret") if check.name == "claim")


def test_a_committed_accountants_claim_is_accepted(tmp_path):
    assert judged(tmp_path / "run").held is True


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"epsilon": 1.0}, "epsilon"),
        ({"noise_multiplier": 0.9}, "noise_multiplier"),
        pytest.param({"sampling": FixedSize(23, 2300, ROUNDS)}, "sampling", marks=pytest.mark.full),
        ({"sampling": Poisson(0.1, ROUNDS)}, "sampling"),
        ({"sampling": None, "noise_multiplier": None, "sampler_observed": False}, "sampling"),
    ],
)
def test_a_claim_other_than_the_committed_accountants_is_rejected(tmp_path, changes, named):
    found = judged(tmp_path / "run", **changes)
    assert found.held is False
    assert named in found.detail


@pytest.mark.parametrize(
    "changes",
    [
        {"claim_participations": 1},
        {"claim_sensitivity": 0.01},
        {"claim_participations": 1, "claim_sensitivity": 0.01},
    ],
)
def test_a_claim_whose_assumptions_were_added_afterwards_is_rejected(verified, run, changes):
    """With fewer participations or a smaller sensitivity, the same epsilon is a weaker claim."""
    edit_json(run / "result.json", lambda values: values.update(changes))
    assert "claim" in verified()[0]


def test_a_pipelines_items_that_were_added_afterwards_are_rejected(verified, run):
    def add(values):
        values["audited"]["sampler"] = {"status": "checked", "detail": "tested", "source": "pipeline"}

    edit_json(run / "result.json", add)
    assert "trainer" in verified()[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("population", 10**6),
        ("client_epsilon", 0.1),
        ("task", "other"),
        ("alarm", None),
        ("audited_by_pipeline", {"weights": {"status": "checked"}}),
    ],
)
def test_an_entry_that_the_log_does_not_have_is_rejected(verified, run, name, value):
    edit_json(run / "result.json", lambda values: values.update({name: value}))
    assert "result" in verified()[0]


def test_numbers_committed_to_before_round_1_cannot_change(verified, run):
    """Also if the log ends with the changed number, as it does when the auditor is the forger."""
    path = run / "audit" / "rounds.log"
    log = RoundLog(path)
    log.close_run(log.outcome | {"noise_multiplier": 2.0})
    digest = log.digest
    log.close()
    edit_json(run / "result.json", lambda values: values.update(noise_multiplier=2.0, log_digest=digest))
    assert "trainer" in verified(noted=False)[0]


def test_an_alarm_that_was_removed_is_rejected(tmp_path):
    """A run whose first rounds refute the claim, while the whole run would not."""
    run, rng = tmp_path / "run", np.random.default_rng(1)
    with Audit(
        DIM, canaries=100, seed=b"a long secret", delta=1e-6, rounds=8, directory=run, claim=3.0, on_violation="warn"
    ) as audit:
        for number in range(1, 9):
            present = audit.canaries_in_round(number)
            delta = audit.updates(present, 1.0) + 0.2 * rng.normal(size=DIM)
            with suppress(RuntimeWarning):
                audit.observe_round(number, delta, present=present, others=0 * delta, noise_std=0.2, clip_norm=1.0)
        audit.finish()
    assert "alarm" in json.loads((run / "result.json").read_text())
    before = {check.name: check.held for check in verify_run(run, b"a long secret")}
    assert before["trainer"] is before["result"] is True
    edit_json(run / "result.json", lambda values: values.pop("alarm"))
    after = {check.name: check.held for check in verify_run(run, b"a long secret")}
    assert after["trainer"] is after["result"] is False


def test_rounds_of_another_run_that_add_up_to_their_own_update_are_rejected(verified, run, tmp_path, honest):
    """The forger also replaces the stored update, but not the initial model, to which the audit committed."""
    train(tmp_path / "other", read_seed(honest / "seed"), rng_seed=2)
    other = RoundLog(tmp_path / "other" / "audit" / "rounds.log", read_only=True)
    path = run / "audit" / "rounds.log"
    own = RoundLog(path, read_only=True)
    update = {name: getattr(other.final, name) for name in ("update_norm", "update_cosines", "layer_moves")}
    final, outcome = Final(**vars(own.final) | update), own.outcome
    path.unlink()
    new = RoundLog(path)
    for item in other.rounds():
        new.append(item)
    new.finish(final)
    new.close_run(outcome)
    new.close()
    assert "sum" in verified(noted=False)[0]
    fitting = np.load(run / "model.npy") - (
        np.load(tmp_path / "other" / "model.npy") - np.load(tmp_path / "other" / "initial.npy")
    )
    np.save(run / "initial.npy", fitting)  # an initial model from which the other rounds lead to the same final model
    assert "sum" in verified(noted=False)[0]


def test_rounds_that_were_turned_into_skipped_ones_are_not_accepted(verified, run):
    rewrite(run, lambda rounds: [*rounds[:2], Round(number=3, skipped=True), *rounds[3:]])
    failed, open_ = verified(noted=False)
    assert "rounds" in open_
    assert "sum" in failed


def test_a_config_that_was_not_committed_to_is_ignored(tmp_path):
    seed, run, rng = b"a long secret", tmp_path / "run", np.random.default_rng(1)
    with Audit(DIM, canaries=30, seed=seed, delta=1e-6, directory=run) as audit:
        for number in range(1, 4):
            audit.observe_round(number, rng.normal(size=DIM), present=[1, 2])
        audit.finish()
    (run / "config.toml").write_text(tomli_w.dumps({"schema_version": 1, "rounds": 3}))
    assert next(check for check in verify_run(run, seed) if check.name == "rounds").held is None


@pytest.mark.parametrize("seed", [271828, b"short"])
def test_a_weak_seed_that_is_called_strong_is_a_demonstration_all_the_same(tmp_path, seed):
    train(tmp_path / "run", seed)

    def claim_strength(values):
        settings, statement = Settings.from_dict(values["settings"]), values["statement"] | {"demonstration": False}
        commitment = Commitment.to(seed, settings, Precommitment(**statement))
        values.update(statement=statement, commitment=vars(commitment))

    edit_json(tmp_path / "run" / "audit" / "record.json", claim_strength)
    checks = {check.name: check.held for check in verify_run(tmp_path / "run", seed)}
    assert checks["commitment"] is True
    assert checks["seed"] is None


def test_a_commitment_opens_to_one_seed_and_one_statement_only():
    """Part of the salt or of the seed must not pass for part of the statement."""
    settings = Audit(DIM, canaries=30, seed=1, delta=1e-6).settings
    first, second = (Precommitment(claim=Claim(epsilon).to_dict()) for epsilon in (10.0, 40.0))
    commitment = Commitment.to(b"first secret", settings, first)
    assert commitment.opens_to(b"first secret", settings, first)
    assert not commitment.opens_to(b"first secret", settings, second)
    for moved in (b"\0", b"\0\0", b"x"):
        assert not commitment.opens_to(moved + b"first secret", settings, first)
        assert not commitment.opens_to(b"first secret" + moved, settings, first)
    with pytest.raises(ValueError, match="salt must be 32 hexadecimal digits"):
        Commitment.from_dict(vars(commitment) | {"salt": commitment.salt + "\0{}"})


def test_no_other_record_has_the_bytes_of_a_record():
    """The digest does not cover where the header ends, so only one way of reading the bytes may be valid."""
    cosines = np.linspace(-0.1, 0.1, 24, dtype=np.float32)
    item = Round(number=1, present=np.array([1], np.int32), norm=1.0, rest=0.9, cosines=cosines)
    data, _ = encode("round", item, b"")
    start = data.index(b"{")
    stop = data.index(b"}") + 1
    head, body = data[start:stop], data[stop:-16]
    kind, read = decode(head, body)
    assert kind == "round"
    np.testing.assert_array_equal(read.cosines, cosines)
    for wrong in ((head + b" ", body[1:]), (head, body + b"\0"), (head[:-1] + b" }", body + b"1234")):
        with pytest.raises(ValueError, match=r"header|fill"):
            decode(*wrong)


@pytest.mark.parametrize("delta", [1e-30, 1e-9, 1e-10 * (1 + 1e-8)])
def test_a_changed_delta_is_rejected_however_small(tmp_path, delta):
    run, rng = tmp_path / "run", np.random.default_rng(1)
    with Audit(DIM, canaries=30, seed=b"a long secret", delta=1e-10, directory=run) as audit:
        audit.observe_round(1, rng.normal(size=DIM), present=[1, 2])
        audit.finish()
    edit_json(run / "result.json", lambda values: values.update(delta=delta))
    assert next(check for check in verify_run(run, b"a long secret") if check.name == "result").held is False


@pytest.mark.parametrize("place", ["adversaries", "gauges"])
def test_a_row_or_gauge_named_like_a_sentence_is_rejected(verified, run, place):
    def add(values):
        first = next(iter(values[place]))
        values[place]["reason"] = values[place][first]

    edit_json(run / "result.json", add)
    assert "result" in verified()[0]


def test_another_model_with_the_same_cosines_is_not_accepted(verified, run, honest):
    """Whoever has the seed can change a model in all directions but those of the canaries."""
    model = np.load(run / "model.npy")
    settings = Audit(DIM, canaries=30, seed=1, delta=1e-6, rounds=ROUNDS).settings
    canaries = RotatedCanaries(settings.total, DIM, seed=read_seed(honest / "seed"))
    basis = np.array([canaries.canary(index) for index in range(settings.total)])
    direction = np.random.default_rng(9).normal(size=DIM)
    direction -= basis.T @ (basis @ direction)
    inside = basis.T @ (basis @ model)
    outside = model - inside
    np.save(run / "model.npy", inside + direction * np.linalg.norm(outside) / np.linalg.norm(direction))
    assert verified(model=run / "model.npy")[0] == {"cosines", "sum"}


def test_a_config_that_was_added_afterwards_is_named(tmp_path):
    run, rng = tmp_path / "run", np.random.default_rng(1)
    with Audit(DIM, canaries=30, seed=b"a long secret", delta=1e-6, directory=run) as audit:
        audit.observe_round(1, rng.normal(size=DIM), present=[1, 2])
        audit.finish()
    (run / "config.toml").write_text(tomli_w.dumps({"schema_version": 1, "privacy": {"noise_multiplier": 50.0}}))
    check = next(check for check in verify_run(run, b"a long secret") if check.name == "trainer")
    assert check.held is None
    assert "config.toml was not committed to" in check.detail


def test_a_number_that_was_not_committed_to_is_the_auditors_word(tmp_path):
    run, rng = tmp_path / "run", np.random.default_rng(1)
    with Audit(DIM, canaries=30, seed=b"a long secret", delta=1e-6, directory=run) as audit:
        audit.observe_round(1, rng.normal(size=DIM), present=[1, 2])
        audit.directory.write_result(audit.result(analytical_epsilon=0.3).with_entries(accuracy=0.5))
    check = next(check for check in verify_run(run, b"a long secret") if check.name == "trainer")
    assert check.held is None
    assert check.detail.startswith("analytical_epsilon: not committed to before round 1")


def test_a_pipelines_items_that_were_not_committed_to_are_rejected(verified, run):
    """Also if the log ends with them, as it does when the auditor is the forger."""
    item = {"status": "checked", "detail": "tested", "source": "pipeline"}
    log = RoundLog(run / "audit" / "rounds.log")
    log.close_run(log.outcome | {"audited_by_pipeline": {"sampler": item}})
    digest = log.digest
    log.close()
    edit_json(
        run / "result.json", lambda values: values["audited"].update(sampler=item) or values.update(log_digest=digest)
    )
    assert "trainer" in verified(noted=False)[0]


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': (",
        b"{[]: 1}",
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (" + b"1" + b"0" * 30 + b",), }",
        b"-" * 5_000 + b"1",
        b"{'descr': ('<f8',), 'fortran_order': False, 'shape': (3,), }",
    ],
)
@pytest.mark.parametrize("name", ["model", "initial"])
def test_a_strange_npy_header_is_one_line(verified, run, tmp_path, header, name):
    text = header + b"\n"
    (tmp_path / "odd.npy").write_bytes(b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text)
    with pytest.raises(ValueError, match=r"must hold a model as one \.npy row of 600 numbers, got another file"):
        verified(**{name: tmp_path / "odd.npy"})


@pytest.mark.parametrize("audited", [[], 7, None])
def test_audited_items_of_the_wrong_kind_are_a_failed_check(run, audited):
    edit_json(run / "result.json", lambda values: values.update(audited=audited))
    checks = {check.name: check.held for check in verify_run(run, b"another long secret")}
    assert checks["result"] is False


@pytest.mark.parametrize("name", ["config.toml", "result.json", "audit/record.json", "audit/rounds.log", "initial.npy"])
def test_a_pipe_in_the_place_of_a_file_does_not_wait(run, honest, name):
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=r"ordinary file|another file"):
        verify_run(run, read_seed(honest / "seed"), model=honest / "run" / "model.npy")


def test_a_log_with_huge_cosines_is_damaged(tmp_path):
    cosines = np.full(24, 1e30, np.float32)
    item = Round(number=1, present=np.array([1], np.int32), norm=1.0, rest=0.9, cosines=cosines)
    (tmp_path / "rounds.log").write_bytes(MAGIC + encode("round", item, b"")[0])
    with pytest.raises(ValueError, match="cosines must be cosines"):
        RoundLog(tmp_path / "rounds.log", read_only=True)


def with_final(run, **changes):
    """Rewrite the log with a changed final record."""
    path = run / "audit" / "rounds.log"
    old = RoundLog(path, read_only=True)
    rounds, final, outcome = list(old.rounds()), old.final, old.outcome
    path.unlink()
    new = RoundLog(path)
    for item in rounds:
        new.append(item)
    new.finish(Final(**vars(final) | changes))
    new.close_run(outcome)
    digest = new.digest
    new.close()
    edit_json(run / "result.json", lambda values: values.update(log_digest=digest))


def test_a_log_without_the_final_models_digest_is_not_accepted(verified, run):
    with_final(run, sha256=None)
    assert "cosines" in verified(noted=False)[1]


@pytest.mark.parametrize("change", [None, 3.0])
def test_changed_lengths_of_the_layers_updates_are_rejected(verified, run, change):
    moves = RoundLog(run / "audit" / "rounds.log", read_only=True).final.layer_moves
    with_final(run, layer_moves=None if change is None else moves * change)
    assert "sum" in verified(noted=False)[0]


def test_a_log_of_other_settings_is_a_failed_check(verified, run):
    with_final(run, layer_moves=np.ones(7))
    assert verified(noted=False)[0] == {"log"}


def test_a_committed_item_that_was_dropped_is_rejected(tmp_path):
    run, seed, rng = RunDirectory(tmp_path / "run"), b"a long secret", np.random.default_rng(1)
    item = AuditedItem("participations", "not checked", "clients take part more often")
    kind = {"canaries": 30, "seed": seed, "delta": 1e-6, "rounds": 1}
    facts = {"audited_by_pipeline": {item.name: item.to_dict()}}
    run.commit(seed, Audit(DIM, **kind).settings, Precommitment(facts=facts))
    with Audit(DIM, **kind, directory=run) as audit:
        audit.observe_round(1, rng.normal(size=DIM), present=audit.canaries_in_round(1))
        for audited, held in (([item], True), ([], False)):
            run.write_result(audit.result(audited=audited))
            check = next(check for check in verify_run(run.path, seed) if check.name == "trainer")
            assert check.held is held


def test_an_audit_of_another_version_is_named(run, honest):
    edit_json(run / "audit" / "record.json", lambda values: values["commitment"].update(version=3))
    with pytest.raises(ValueError, match=r"another version of coalmine started \(commitment version 3"):
        verify_run(run, read_seed(honest / "seed"))
    with pytest.raises(ValueError, match=r"another version .* finish it with that version"):
        Audit(DIM, canaries=30, seed=read_seed(honest / "seed"), delta=1e-6, rounds=ROUNDS, directory=run)


def test_an_outcome_that_could_not_be_read_again_is_not_written(tmp_path):
    deep = []
    for _ in range(80):
        deep = [deep]
    log = RoundLog(tmp_path / "rounds.log")
    with pytest.raises(ValueError, match="nested more than 64 levels"):
        log.close_run({"deep": deep})
    log.close()
    assert RoundLog(tmp_path / "rounds.log", read_only=True).outcome is None


def test_a_final_model_beyond_single_precision_is_observed_without_a_warning():
    audit = Audit(DIM, canaries=30, seed=1, delta=1e-6)
    audit.observe_final(1e60 * np.random.default_rng(1).normal(size=DIM))
    assert audit.log.final.sha256


@pytest.mark.parametrize("name", ["model", "initial"])
@pytest.mark.parametrize(
    ("vector", "message"),
    [
        (None, "but the file does not exist"),
        (np.zeros(7), r"got float64 of shape \(7,\)"),
        (np.full(DIM, np.nan), "got NaN or infinity in 600 of them"),
    ],
)
def test_a_wrong_model_file_is_named_with_its_fault(verified, tmp_path, name, vector, message):
    file = tmp_path / "wrong.npy"
    if vector is not None:
        np.save(file, vector)
    with pytest.raises(ValueError, match=rf"wrong\.npy must hold a model as one \.npy row of 600 numbers, {message}"):
        verified(**{name: file})
