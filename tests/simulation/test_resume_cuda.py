"""A run on a CUDA device that is stopped and resumed: the tolerance that docs/training.md states."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from coalmine.simulation import RunConfig, resume, start
from coalmine.simulation.config import (
    CanarySettings,
    ClaimSettings,
    ClientSettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    ServerSettings,
    TaskSettings,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DATA = Path(os.environ.get("COALMINE_DATA_DIR", "missing"))
DEVICE = "cuda"
MODEL, EPSILON = 1e-4, 1e-3  # relative, as docs/training.md has it


def config(task: str) -> RunConfig:
    """24 rounds with noise, momentum and an adaptive clip; a checkpoint every 8."""
    examples = 16 if task == "stackexchange" else None
    return RunConfig(
        rounds=24,
        evaluate_every=12,
        checkpoint_every=8,
        task=TaskSettings(name=task, max_examples_per_client=examples),
        participation=ParticipationSettings(clients_per_round=5),
        client=ClientSettings(batch_size=16, learning_rate=0.03),
        server=ServerSettings(momentum=0.9),
        privacy=PrivacySettings(noise_multiplier=0.3, clip_norm=0.1, clipping="adaptive", count_noise=0.5),
        canaries=CanarySettings(count=200, unobserved=500),
        claim=ClaimSettings(analytical=True),
        engine=EngineSettings(device=DEVICE),
    )


@pytest.mark.parametrize("task", ["digits", "mnist-by-writer", "stackexchange"])
def test_stopped_and_resumed_a_run_ends_the_same(task, tmp_path):
    if task != "digits" and not (DATA / task).is_dir():
        pytest.skip(f"needs {task} in COALMINE_DATA_DIR")
    settings = config(task)

    def stop(progress):
        if progress.report.round_number == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(settings, tmp_path / "stopped", progress=stop)
    resumed, whole = resume(tmp_path / "stopped"), start(settings, tmp_path / "whole")
    found, expected = (np.load(tmp_path / name / "model.npy") for name in ("stopped", "whole"))
    assert np.linalg.norm(found - expected) <= MODEL * np.linalg.norm(expected)
    assert resumed.result.verdict.outcome == whole.result.verdict.outcome
    for rung, adversary in whole.result.adversaries.items():
        if adversary.headline is not None:
            found = resumed.result.adversaries[rung].headline.estimate.epsilon
            assert found == pytest.approx(adversary.headline.estimate.epsilon, rel=EPSILON, abs=EPSILON)
