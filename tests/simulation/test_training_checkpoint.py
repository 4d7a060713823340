import dataclasses

import pytest
import safetensors.torch
import torch

from coalmine.simulation import RunConfig
from coalmine.simulation.dp_fedavg import TrainingState
from coalmine.simulation.training_checkpoint import NAME, PREVIOUS, load_checkpoint, save_checkpoint


@pytest.fixture
def state() -> TrainingState:
    vector = torch.randn(50, generator=torch.Generator().manual_seed(0))
    return TrainingState(7, vector, {"velocity": vector * 2}, 0.1 + 0.2)


def test_a_state_is_restored_bit_for_bit(tmp_path, state):
    assert load_checkpoint(tmp_path, RunConfig(), "cpu") is None
    save_checkpoint(tmp_path, state, RunConfig())
    again = load_checkpoint(tmp_path, RunConfig(), "cpu")
    assert again is not None
    assert (again.round_number, again.clip_norm) == (7, 0.1 + 0.2)
    assert torch.equal(again.model_vector, state.model_vector)
    assert torch.equal(again.server["velocity"], state.server["velocity"])
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_every_flipped_byte_and_truncation_is_detected(tmp_path, state):
    save_checkpoint(tmp_path, state, RunConfig())
    path = tmp_path / NAME
    whole = path.read_bytes()
    for place in range(0, len(whole), 11):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"schema version|damaged|another config"):
            load_checkpoint(tmp_path, RunConfig(), "cpu")
    for length in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="delete it to train again from round 1 with the same result"):
            load_checkpoint(tmp_path, RunConfig(), "cpu")


def test_checkpoint_of_another_run_is_rejected(tmp_path, state):
    save_checkpoint(tmp_path, state, RunConfig())
    with pytest.raises(ValueError, match="belongs to a run with another config"):
        load_checkpoint(tmp_path, dataclasses.replace(RunConfig(), seed=2), "cpu")


def test_file_of_another_kind_is_rejected(tmp_path):
    safetensors.torch.save_file({"model": torch.zeros(3)}, tmp_path / NAME)
    with pytest.raises(ValueError, match="has schema version None, this coalmine reads 1"):
        load_checkpoint(tmp_path, RunConfig(), "cpu")


def test_newest_usable_checkpoint_is_loaded(tmp_path, state, caplog):
    for number in (3, 6, 9):
        save_checkpoint(tmp_path, dataclasses.replace(state, round_number=number), RunConfig())
    assert {path.name for path in tmp_path.iterdir()} == {NAME, PREVIOUS}

    def loaded(rounds):
        found = load_checkpoint(tmp_path, RunConfig(), "cpu", recorded_rounds=rounds)
        return None if found is None else found.round_number

    assert loaded(9) == 9
    assert loaded(5) is None
    assert "training starts again from round 1" in caplog.text
    assert loaded(8) == 6
    assert "is ahead of the recorded rounds; training continues from the previous checkpoint, round 6" in caplog.text
    assert loaded(9) == 6  # the checkpoint ahead of the log was removed
    save_checkpoint(tmp_path, dataclasses.replace(state, round_number=9), RunConfig())
    (tmp_path / NAME).write_bytes(b"damaged")
    assert loaded(9) == 6
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_temporary_files_of_killed_processes_are_removed(tmp_path, state):
    save_checkpoint(tmp_path, state, RunConfig())
    (tmp_path / f".{NAME}.0123abcd.new").write_bytes(b"half")
    assert load_checkpoint(tmp_path, RunConfig(), "cpu") is not None
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
