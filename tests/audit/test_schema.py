import json
import sys
from pathlib import Path

import jsonschema
import pytest

from coalmine import RunDirectory

sys.path.insert(0, str(Path(__file__).parent))
from training import train

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "result.schema.json").read_text())


@pytest.mark.parametrize("claim", [None, 3.0])
def test_results_keep_to_the_published_schema(tmp_path, claim):
    audit = train(dim=600, canaries=60, rounds=6, presentations=(1, 2), layers=[("a", 100), ("b", 500)])
    run = RunDirectory(tmp_path)
    run.write_result(audit.result(claim=claim, analytical_epsilon=float("inf")), accuracy=0.9)
    found = run.read_result()
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["analytical_epsilon"] == "inf"
    assert len(found["adversaries"]["known-round"]["groups"]) == 2


def test_the_schema_can_fail(tmp_path):
    run = RunDirectory(tmp_path)
    run.write_result(train(dim=600, canaries=60, rounds=2).result())
    found = run.read_result()
    del found["adversaries"]["final"]["floor"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(found)
