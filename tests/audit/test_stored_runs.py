"""Ten runs that were stored with their results: whatever is rebuilt, their logs give the same numbers to the last digit."""

import json
from pathlib import Path

import pytest

from coalmine import Claim, RunDirectory
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.derivation import derive_result
from coalmine.storage.files import json_ready

STORED = Path(__file__).parents[1] / "golden" / "stored"
RUNS = sorted(path.name for path in STORED.iterdir() if path.is_dir())


def derived(name, **told):
    home = RunDirectory(STORED / name)
    settings, _ = home.read_record()
    return derive_result(home.read_log(), settings, **told)


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_log_gives_the_stored_result(name):
    stored = json.loads((STORED / name / "result.json").read_text())
    claim = Claim(
        epsilon=stored["claimed_epsilon"],
        accounting=stored["claim_accounting"],
        participations=stored["claim_participations"],
        sensitivity=stored.get("claim_sensitivity"),
    )
    items = [AuditedItem(item, **entry) for item, entry in stored["audited"].items() if entry["source"] == "pipeline"]
    result = derived(
        name,
        claim=claim,
        analytical_epsilon=stored["analytical_epsilon"],
        clients=stored["clients"],
        audited=items,
    )
    again = json.loads(json.dumps(json_ready(result.to_dict())))
    for entry, value in again.items():
        assert value == stored[entry], entry
