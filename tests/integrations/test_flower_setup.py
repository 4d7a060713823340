"""Setting up an audit in Flower: run directories, seed files, several canaries on one node, and kinds of models."""

import subprocess
import sys

import numpy as np
import pytest
from requires import require

require("flwr")
from flower_training import (  # noqa: E402
    CANARIES,
    REAL,
    SEED,
    SMALL,
    LoopGrid,
    client_app,
    config,
    cosines,
    initial_arrays,
    nodes,
    server_side,
    small_audit,
    small_run,
)
from flwr.app import Array, ArrayRecord  # noqa: E402

from coalmine.integrations.flower import Announcement, Observer, audited, canary_mod  # noqa: E402
from coalmine.integrations.flower import strategy_audit as strategy_module  # noqa: E402
from coalmine.integrations.flower.arrays import as_record  # noqa: E402
from coalmine.integrations.flower.canary_clients import parse_canaries  # noqa: E402
from coalmine.log.rounds_file import RoundLog  # noqa: E402
from coalmine.log.seed_file import read_seed  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_flower")


# Run directories


def started(directory, *, rounds, failing_client=False):
    """Start a server in a directory; its clients' app can fail in training."""
    audit = small_audit(directory=directory)
    try:
        strategy = audited(server_side(REAL), audit=audit, mode="extra")
        app = pytest.fail if failing_client else client_app()
        small_run(strategy, LoopGrid(app, nodes(canaries=0)), rounds=rounds)
    except BaseException:
        audit.directory.close()
        raise
    return audit, strategy


@pytest.mark.parametrize("rounds", [2, 5])
def test_a_finished_run_is_rejected(rounds, tmp_path):
    """Neither its old result nor further rounds describe today's clients."""
    audit, strategy = started(tmp_path, rounds=2)
    strategy.audit.finish()
    audit.directory.close()
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(ValueError, match="holds a finished audit: name another directory, or remove it"):
        started(tmp_path, rounds=rounds, failing_client=True)
    assert (tmp_path / "result.json").read_bytes() == before


def test_an_observer_rejects_a_finished_run(tmp_path):
    audit, strategy = started(tmp_path, rounds=2)
    strategy.audit.finish()
    with pytest.raises(ValueError, match="holds a finished audit"):
        Observer(audit)(0, initial_arrays(SMALL))


@pytest.mark.parametrize("killed", ["in round 3", "before the result was written"])
def test_an_interrupted_run_is_resumed(killed, tmp_path):
    audit, strategy = started(tmp_path, rounds=2)
    if killed == "before the result was written":
        strategy.audit.finish()
        (tmp_path / "result.json").unlink()
    audit.directory.close()
    audit, strategy = started(tmp_path, rounds=3)
    assert [item.number for item in audit.log.rounds()] == [1, 2, 3]
    assert strategy.audit.finish().rounds == 3


def shorten_log(directory, *, rounds):
    """Truncate the log, as a power cut might."""
    audit = small_audit(directory=directory)
    audit.rewind_to(rounds)
    audit.directory.close()


def models(directory):
    return {path.name: path.read_bytes() for path in directory.glob("checkpoint*.npz")}


def test_a_log_that_lost_a_round_resumes_from_the_previous_checkpoint(tmp_path, caplog):
    audit, _ = started(tmp_path, rounds=4)
    audit.directory.close()
    before = models(tmp_path)
    shorten_log(tmp_path, rounds=3)
    audit, strategy = started(tmp_path, rounds=4)
    assert (
        "checkpoint.npz is ahead of the recorded rounds; training continues from the previous checkpoint, round 3"
        in caplog.text
    )
    assert [item.number for item in audit.log.rounds()] == [1, 2, 3, 4]
    assert [line["round"] for line in audit.directory.read_metrics()] == [1, 2, 3, 4]
    assert models(tmp_path)["checkpoint.previous.npz"] == before["checkpoint.previous.npz"]
    assert strategy.audit.finish().rounds == 4


def test_a_log_shorter_than_both_checkpoints_starts_from_round_1(tmp_path, caplog):
    audit, _ = started(tmp_path, rounds=4)
    audit.directory.close()
    shorten_log(tmp_path, rounds=2)
    audit, _ = started(tmp_path, rounds=4)
    assert "the recorded rounds end before every checkpoint, so training starts again from round 1" in caplog.text
    assert [item.number for item in audit.log.rounds()] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(tmp_path, caplog):
    audit, _ = started(tmp_path, rounds=3)
    audit.directory.close()
    path = tmp_path / "checkpoint.npz"
    path.write_bytes(path.read_bytes()[:-1])
    audit, _ = started(tmp_path, rounds=4)
    assert "training continues from the previous checkpoint, round 2" in caplog.text
    assert [item.number for item in audit.log.rounds()] == [1, 2, 3, 4]


def test_rounds_are_on_the_disk_before_the_checkpoint_that_relies_on_them(tmp_path, monkeypatch):
    steps = []
    sync, save = RoundLog.sync, strategy_module.save_checkpoint  # type: ignore[attr-defined]
    monkeypatch.setattr(RoundLog, "sync", lambda self: (steps.append("sync"), sync(self)))
    monkeypatch.setattr(strategy_module, "save_checkpoint", lambda *given: (steps.append("save"), save(*given)))
    started(tmp_path, rounds=2)
    assert steps == ["sync", "save"] * 2


# Seeds in files


def seed_file(folder, content=SEED + b"\n"):
    path = folder / "seed"
    path.write_bytes(content)
    return path


def client_audit(**settings):
    arrays = initial_arrays(SMALL)
    return audited(server_side(REAL + CANARIES, noise=0.0), arrays, canaries=CANARIES, delta=1e-5, **settings)


def nodes_with(path):
    return [{**node, "coalmine-seed-file": str(path)} if "canary-id" in node else node for node in nodes()]


@pytest.mark.parametrize("content", [SEED, SEED + b"\n", SEED + b"\r\n", b"%d\n" % 2**64])
def test_server_and_nodes_read_the_same_seed_file(content, tmp_path):
    """With or without a line end; the seed itself is never announced."""
    path = seed_file(tmp_path, content)
    strategy = client_audit(seed_file=path)
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes_with(path)))
    assert [item.present.size for item in strategy.audit.log.rounds()] == [CANARIES] * 3
    assert cosines(strategy.audit)[:, :CANARIES] == pytest.approx(1 / np.sqrt(CANARIES), abs=0.01)
    announced = strategy._sent.messages[0].content["config"]
    assert "coalmine-canaries" in announced
    assert "coalmine-seed" not in announced
    assert not any(content.strip() in str(value).encode() for value in announced.values())


@pytest.mark.parametrize("content", [b"7", b"%d" % (2**64 - 1), b"1234567", b"secret\n"])
def test_guessable_seed_files_are_rejected(content, tmp_path):
    """Both on the server, before anything is written, and on a canary node."""
    path, home = seed_file(tmp_path, content), tmp_path / "run"
    with pytest.raises(
        ValueError, match=r"seed file .*seed must be hard to guess, got .*: make one with: coalmine seed"
    ):
        client_audit(seed_file=path, directory=home)
    assert not home.exists()
    audit = small_audit(seed=read_seed(path))
    strategy = audited(server_side(REAL + CANARIES), audit=audit)
    with pytest.raises(ValueError, match=r"must be hard to guess, got .*: make one with coalmine seed, for the server"):
        small_run(strategy, LoopGrid(client_app([canary_mod]), nodes_with(path)))


class HttpGrid(LoopGrid):
    """A grid with the class name of Flower's grid in a deployment."""


@pytest.mark.parametrize("seed", [7, 2**64 - 1, b"1234567"])
@pytest.mark.parametrize("mode", ["client", "extra"])
def test_a_deployment_rejects_a_guessable_seed(seed, mode):
    strategy = client_audit(seed=seed, mode=mode)
    with pytest.raises(ValueError, match=r"the seed of a deployment must be hard to guess, got .*: give seed_file="):
        small_run(strategy, HttpGrid(client_app([canary_mod]), nodes()))
    small_run(strategy, LoopGrid(client_app([canary_mod]), nodes()), rounds=1)  # a simulation accepts it


def test_a_deployment_warns_of_a_seed_announced_to_all_clients():
    strategy = client_audit(seed=SEED)
    small_run(strategy, HttpGrid(client_app([canary_mod]), nodes()), rounds=1)
    assert strategy._warnings.texts == [
        "every client receives the seed, so a hostile one can imitate canaries: give seed_file= instead"
    ]


@pytest.mark.parametrize("given", [{}, {"seed": SEED, "seed_file": "seed"}])
def test_exactly_one_of_seed_and_seed_file_must_be_given(given):
    with pytest.raises(ValueError, match=r"exactly one of seed and seed_file must be given, got (neither|both)"):
        client_audit(**given)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (b"another", r"seed file .*seed must hold the seed of the server's audit, got another: copy the server's file"),
        (SEED + b"\n", r"seed file .*seed must be read in the same way everywhere, .* use audited\(seed_file=\.\.\.\)"),
    ],
    ids=["another seed", "raw bytes with a line end"],
)
def test_a_wrong_seed_file_is_named_on_the_server(server, says, tmp_path, caplog):
    """Every canary node reports that it cannot send its canary, and they are the majority; the error explains it."""
    strategy = audited(server_side(REAL + CANARIES), audit=small_audit(seed=server), mode="client")
    grid = LoopGrid(client_app([canary_mod]), nodes_with(seed_file(tmp_path)), catching=True)
    with pytest.raises(ValueError, match=rf"which would change the training, so it stops: .* {says}"):
        small_run(strategy, grid)
    assert strategy._warnings.texts == []  # none about a missing canary_mod


def test_an_audit_without_rounds_is_an_error():
    strategy = audited(server_side(REAL), audit=small_audit(), mode="extra")
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), rounds=0)
    with pytest.raises(ValueError, match="an audit needs at least one round, got none"):
        strategy.audit.finish()


# Several canaries on one node


@pytest.mark.parametrize(
    ("value", "canaries"),
    [(3, (3,)), ("3", (3,)), ("0-2", (0, 1, 2)), ("0,2,4", (0, 2, 4)), ("7, 0 - 1", (7, 0, 1)), ("4-4", (4,))],
)
def test_canary_ids_are_parsed(value, canaries):
    assert parse_canaries(value, count=10) == canaries


@pytest.mark.parametrize(
    "value", ["", "a", "1-", "-1", -1, 1.5, True, "2-1", "0-10", 10, "1,1", "0-3,2", "0-999999999"]
)
def test_invalid_canary_ids_are_rejected(value):
    with pytest.raises(ValueError, match="canary-id must "):
        parse_canaries(value, count=10)


def in_turn(way, **settings):
    """Three nodes with four canaries each, over six rounds."""
    groups = [range(0, 4), [4, 6, 8, 10], (5, 7, 9, 11)]
    texts = ["0-3", "4,6,8,10", "5,7,9,11"]
    audit = small_audit(**settings)
    plain = [{"partition-id": i} for i in range(REAL)]
    if way == "canary-id":
        strategy = audited(server_side(REAL + 3, noise=0.0), audit=audit, mode="client", seed=SEED)
        configs = plain + [{"canary-id": text} for text in texts]
    else:
        named = {REAL + 1 + i: group for i, group in enumerate(groups)}
        seed = {"seed": SEED} if way == "client" else {}
        strategy = audited(server_side(REAL + 3, noise=0.0), audit=audit, mode=way, canary_nodes=named, **seed)
        configs = plain + [{} for _ in groups]
    return audit, strategy, LoopGrid(client_app([canary_mod]), configs)


@pytest.mark.parametrize("way", ["canary-id", "client", "replace"])
def test_a_node_alternates_between_its_canaries(way):
    audit, strategy, grid = in_turn(way)
    small_run(strategy, grid, rounds=6)
    present = [sorted(item.present.tolist()) for item in audit.log.rounds()]
    turns = [[0, 4, 5], [1, 6, 7], [2, 8, 9], [3, 10, 11]]
    assert present == [*turns, *turns[:2]]
    for found, canaries in zip(cosines(audit), present, strict=True):
        assert found[canaries] == pytest.approx(1 / np.sqrt(3), abs=0.01)
        assert np.abs(np.delete(found, canaries)).max() < 0.01


@pytest.mark.parametrize("way", ["canary-id", "client", "replace"])
def test_the_alternation_continues_after_a_restart(way, tmp_path):
    """Flower restarts its round numbers at 1; the audit does not."""
    audit, strategy, grid = in_turn(way, directory=tmp_path)
    small_run(strategy, grid, rounds=3)
    audit.directory.close()
    audit, strategy, grid = in_turn(way, directory=tmp_path)
    small_run(strategy, grid, rounds=4)
    assert [sorted(item.present.tolist()) for item in audit.log.rounds()][3:] == [[3, 10, 11]]


def test_a_node_alternates_between_its_canaries_under_an_observer():
    """The observer's announcement never changes; the node gets the round number from Flower."""
    audit = small_audit()
    watch = Observer(audit, clip_norm=1.0, participants=REAL + 1, present=lambda number: [(number - 1) % CANARIES])
    announced = config(**watch.announce(initial_arrays(SMALL), seed=SEED))
    configs = [{} for _ in range(REAL)] + [{"canary-id": "0-11"}]
    grid = LoopGrid(client_app([canary_mod]), configs)
    small_run(server_side(REAL + 1, noise=0.0), grid, train_config=announced, evaluate_fn=watch)
    assert cosines(audit)[[0, 1, 2], [0, 1, 2]] == pytest.approx(1.0, abs=0.05)


def test_several_canaries_require_a_round_number():
    announcement = Announcement(canaries=12, dim=SMALL, kind="rotated", clip_norm=1.0, scale=1.0)
    assert announcement.index_of({}, {"canary-id": 3}) == 3
    assert announcement.index_of({"server-round": 2}, {"canary-id": "3-5"}) == 4
    with pytest.raises(ValueError, match="a node with several canaries must know the round"):
        announcement.index_of({}, {"canary-id": "3-5"})


@pytest.mark.parametrize("named", [{1: [0, 0]}, {1: [0, 1], 2: [1]}, {1: []}, {1: [12]}, {1: [-1]}, {1: "a"}])
def test_invalid_canary_assignments_are_rejected(named):
    with pytest.raises(ValueError, match="canary_nodes must "):
        audited(server_side(5), audit=small_audit(), mode="replace", canary_nodes=named)


# Models


def test_a_torch_module_a_state_dict_and_an_array_record_are_equivalent():
    torch = require("torch")
    module = torch.nn.Sequential(torch.nn.Linear(40, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 2))
    models = [module, module.state_dict(), ArrayRecord(module.state_dict()), dict(as_record(module).items())]
    made = [audited(server_side(REAL), model, mode="extra", canaries=12, seed=SEED, delta=1e-5) for model in models]
    assert len({strategy.audit.settings for strategy in made}) == 1
    assert made[0].audit.settings.layers[:2] == (("0.weight", 1920), ("0.bias", 48))
    strategy = audited(server_side(REAL, noise=0.1), module, mode="extra", canaries=12, seed=SEED, delta=1e-5)
    small_run(strategy, LoopGrid(client_app(), nodes(canaries=0)), arrays=module)
    assert strategy.audit.finish().rounds == 3


def test_numpy_arrays_are_a_valid_model():
    rows = [np.zeros((3, 4), np.float32), np.zeros(5, np.float64)]
    assert list(as_record(rows)) == ["0", "1"]
    assert as_record({"a": rows[0]})["a"].shape == (3, 4)


@pytest.mark.parametrize("model", [5, "model", None, {"a": "text"}, {"a": None}])
def test_invalid_models_are_rejected(model):
    with pytest.raises(TypeError, match="a model must "):
        as_record(model)


def test_a_type_that_numpy_lacks_is_named():
    torch = require("torch")
    with pytest.raises(TypeError, match=r"array 'weight' must be of a type that numpy knows, got torch\.bfloat16"):
        as_record({"weight": torch.zeros(3, dtype=torch.bfloat16)})


def test_the_integration_does_not_import_torch():
    script = "import sys, coalmine.integrations.flower; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_flower_arrays_are_accepted():
    array = Array(np.zeros(3, np.float32))
    assert as_record({"a": array})["a"].data == array.data
