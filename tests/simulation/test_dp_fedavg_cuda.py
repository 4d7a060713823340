"""Whole runs on a CUDA device: resumed, within the tolerance of docs/how-to/training.md, and on a single stream."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coalmine.simulation import RunConfig, resume, start
from coalmine.simulation import training_run as runs
from coalmine.simulation.config import (
    CanarySettings,
    ClaimSettings,
    EngineSettings,
    ParticipationSettings,
    PrivacySettings,
    TaskSettings,
)
from coalmine.simulation.dp_fedavg import Training
from coalmine.simulation.engines import ClientSettings
from coalmine.simulation.server_optimizer import ServerSettings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DATA = Path(os.environ.get("COALMINE_DATA_DIR", "missing"))
DEVICE = "cuda"
MODEL, EPSILON = 1e-4, 1e-3  # relative tolerances of docs/how-to/training.md


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


@pytest.fixture(params=["digits", "mnist-by-writer", "stackexchange"])
def task(request):
    if request.param != "digits" and not (DATA / request.param).is_dir():
        pytest.skip(f"needs {request.param} in COALMINE_DATA_DIR")
    return request.param


def test_resume_after_stop_gives_identical_results(task, tmp_path):
    settings = config(task)

    def stop(progress):
        if progress.report.round_number == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(settings, tmp_path / "stopped", progress=stop)
    resumed, whole = resume(tmp_path / "stopped"), start(settings, tmp_path / "whole")
    found, expected = (np.load(tmp_path / name / "model.npy") for name in ("stopped", "whole"))
    assert np.linalg.norm(found - expected) <= MODEL * np.linalg.norm(expected)
    assert resumed.verdict.outcome == whole.verdict.outcome
    for rung, adversary in whole.adversaries.items():
        if adversary.headline is not None:
            found = resumed.adversaries[rung].headline.estimate.epsilon
            assert found == pytest.approx(adversary.headline.estimate.epsilon, rel=EPSILON, abs=EPSILON)


def trained(settings: RunConfig, *, plainly: bool):
    """The final model and the audit's rounds; `plainly` uses one stream and measures every round at once."""
    with runs.prepared(settings, None, None) as training:
        if plainly:
            training.audit.deferred = False
        state = training.initial_state()
        for _ in training.rounds(state):
            pass
        training.audit.flush()
        return state.model_vector.double().cpu().numpy(), [item for _, item in training.audit.log.records()]


def test_parallel_work_does_not_change_results(task, monkeypatch):
    """Canaries and noise on a second stream, and the audit during the next round, give the same models and cosines."""
    settings = replace(config(task), engine=config(task).engine.resolved())
    (model, noted), (again, _) = (trained(settings, plainly=False) for _ in range(2))
    monkeypatch.setattr(Training, "_run_in_parallel", lambda self, work: work)
    plain, noted_plainly = trained(settings, plainly=True)
    assert np.linalg.norm(model - again) <= MODEL * np.linalg.norm(model)
    assert np.linalg.norm(model - plain) <= MODEL * np.linalg.norm(model)
    assert len(noted) == len(noted_plainly) == settings.rounds
    for one, other in zip(noted, noted_plainly, strict=True):
        np.testing.assert_allclose(one.cosines, other.cosines, atol=1e-5)
        np.testing.assert_allclose(one.residual_cosines, other.residual_cosines, atol=1e-5)
        assert one.rest == pytest.approx(other.rest, rel=1e-4)
