"""Checkpoints of the training state: safetensors files with a digest, written atomically; the last two are kept."""

import hashlib
import json
import logging
from pathlib import Path

import safetensors
import torch
from safetensors import torch as safetensors_torch

from coalmine.log.checkpoints import load_newest
from coalmine.log.files import write_atomically
from coalmine.simulation.config import RunConfig
from coalmine.simulation.dp_fedavg import TrainingState

NAME = "checkpoint.safetensors"
PREVIOUS = "checkpoint.previous.safetensors"
VERSION = "1"

log = logging.getLogger(__name__)


def save_checkpoint(folder: Path, state: TrainingState, config: RunConfig) -> None:
    """Save the state in the run's folder; the existing checkpoint becomes the previous one."""
    tensors = _tensors(state)
    metadata = {
        "schema_version": VERSION,
        "round_number": str(state.round_number),
        "config": config_digest(config),
    }
    metadata["sha256"] = _digest(tensors, metadata)
    write_atomically(folder / NAME, safetensors_torch.save(tensors, metadata), keep=folder / PREVIOUS)


def load_checkpoint(
    folder: Path, config: RunConfig, device: str, *, recorded_rounds: int | None = None
) -> TrainingState | None:
    """The newest complete checkpoint that is not ahead of the recorded rounds, or None if there is none.

    Raises ValueError if a checkpoint is damaged or belongs to another run, and none is usable.
    """
    newest, previous = folder / NAME, folder / PREVIOUS
    return load_newest(newest, previous, lambda path: _read(path, config, device), log, recorded_rounds=recorded_rounds)


def _read(path: Path, config: RunConfig, device: str) -> TrainingState:
    advice = "restore it from a copy, or delete it to train again from round 1 with the same result"
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); {advice}") from None
    if metadata.get("schema_version") != VERSION:
        raise ValueError(f"{path} has schema version {metadata.get('schema_version')}, this coalmine reads {VERSION}")
    if metadata.pop("sha256", None) != _digest(tensors, metadata):
        raise ValueError(f"{path} is damaged (its digest does not match); {advice}")
    if metadata["config"] != config_digest(config):
        raise ValueError(f"{path} belongs to a run with another config; {advice}")
    server = {name.removeprefix("server."): tensor.to(device) for name, tensor in tensors.items() if "." in name}
    vector, clip_norm = tensors["model"].to(device), float(tensors["clip_norm"])
    return TrainingState(int(metadata["round_number"]), vector, server, clip_norm)


def config_digest(config: RunConfig) -> str:
    """SHA-256 of the whole config."""
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()


def _tensors(state: TrainingState) -> dict[str, torch.Tensor]:
    server = {f"server.{name}": tensor.cpu() for name, tensor in state.server.items()}
    clip_norm = torch.tensor(state.clip_norm, dtype=torch.float64)
    return {"model": state.model_vector.cpu(), "clip_norm": clip_norm} | server


def _digest(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        array = tensors[name].numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
