import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from training import train

from coalmine import Audit, Claim, Poisson, RandomAllocation, RunDirectory
from coalmine.estimators.sampling import FixedSize, Shuffled, sampling_to_dict
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.coverage import AuditedItem

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "reference" / "result.schema.json").read_text())


@pytest.mark.parametrize("claim", [None, 3.0])
def test_results_match_the_published_schema(tmp_path, claim):
    audit = train(dim=600, canaries=60, rounds=6, presentations=(1, 2), layers=[("a", 100), ("b", 500)])
    run = RunDirectory(tmp_path)
    run.write_result(audit.result(claim=claim, analytical_epsilon=float("inf")).with_entries(accuracy=0.9))
    found = run.read_result()
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["analytical_epsilon"] == "inf"
    assert len(found["adversaries"]["known-round"]["groups"]) == 2


def test_an_item_that_failed_prevents_a_pass_and_leaves_a_violation(tmp_path):
    failed = [AuditedItem("clipping", "failed", "nothing was clipped")]
    honest, refuted = train(dim=2_000, canaries=400), train(dim=2_000, canaries=400, noise_multiplier=0.2)
    assert honest.result(claim=4.9).verdict.outcome == "PASS"
    result = honest.result(claim=4.9, audited=failed)
    assert (result.verdict.outcome, result.verdict.code, result.verdict.finding.item) == (
        "UNDERPOWERED",
        "pipeline",
        "clipping",
    )
    assert result.verdict.reason.endswith("(clipping): nothing was clipped")
    assert "clipping: failed (nothing was clipped)" in result.details()
    run = RunDirectory(tmp_path)
    run.write_result(result)
    jsonschema.Draft202012Validator(SCHEMA).validate(run.read_result())
    assert AuditResult.from_dict(run.read_result()).verdict == result.verdict
    assert refuted.result(claim=4.9, audited=failed).verdict.outcome == "VIOLATION"
    statuses = "checked, failed, not checked, cannot be checked, does not apply"
    with pytest.raises(ValueError, match=f"status must be one of {statuses}"):
        AuditedItem("clipping", "broken", "")


@pytest.mark.parametrize(
    "sampling",
    [Poisson(0.1, rounds=20), RandomAllocation(10, epochs=2), Shuffled(10), FixedSize(5, 50, rounds=20)],
)
def test_every_scheme_is_in_the_published_schema(sampling):
    schema = SCHEMA["$defs"]["sampling"]
    told = sampling_to_dict(sampling)
    jsonschema.validate(told, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(told | {"scheme": "another"}, schema)


@pytest.mark.parametrize(("noise", "alarmed"), [(1.0, False), (0.2, True)])
def test_results_of_runs_with_an_alarm_match_the_published_schema(tmp_path, noise, alarmed):
    audit, rng = Audit(400, canaries=60, seed=b"tests only", delta=1e-5, rounds=6, claim=6.0), np.random.default_rng(0)
    for t in range(1, 7):
        present = audit.canaries_in_round(t)
        release = audit.updates(present, 1.0) + noise * rng.normal(size=400)
        audit.observe_round(t, release, present=present, others=np.zeros(400), noise_std=1.0, clip_norm=1.0)
    run = RunDirectory(tmp_path)
    run.write_result(audit.result(watched=True))
    found = run.read_result()
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert (found["alarm"] is not None) == alarmed
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(found | {"alarm": {"round": 1}})


def test_results_of_amplified_claims_match_the_published_schema(tmp_path):
    sampling = Poisson(0.1, rounds=20)
    rng, dim = np.random.default_rng(0), 400
    audit = Audit(dim, canaries=60, seed=b"tests only", delta=1e-5, sampling=sampling)
    for t in range(1, 21):
        present, others = np.flatnonzero(rng.random(60) < 0.1), rng.normal(size=dim)
        delta = others + audit.updates(present, 1.0) + rng.normal(size=dim)
        audit.observe_round(t, delta, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    claim = Claim(5.0, sampling=sampling, noise_multiplier=1.0, sampler_observed=True)
    run = RunDirectory(tmp_path)
    run.write_result(audit.result(claim=claim))
    found = run.read_result()
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert list(found["legs"]) == ["accounting", "noise", "sampling"]
    assert found["claim_sampling"]["scheme"] == sampling.scheme
    assert found["plan"]["sampling"] == {"scheme": "poisson", "probability": 0.1, "rounds": 20}
    assert sum(found["adversaries"]["unknown-round"]["fit"]["observed"]) == 60
    for damage in ("noise", "sampling"):
        broken = found | {"legs": {name: leg for name, leg in found["legs"].items() if name != damage}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_the_schema_rejects_a_wrong_result(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_result(train(dim=600, canaries=60, rounds=2).result())
    found = run.read_result()
    del found["adversaries"]["final"]["floor"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(found)
