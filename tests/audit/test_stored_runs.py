"""Ten runs stored with their results: after any refactoring, their logs must give the same numbers.

Products between rounds are now computed in double precision, so numbers based on them agree to 1e-6, all others to 1e-9.
"""

import json
import math
from pathlib import Path

import pytest

from coalmine import Claim, RunDirectory
from coalmine.log.files import json_ready
from coalmine.result.audit_result import AuditResult
from coalmine.result.derivation import derive_result
from coalmine.verdict.coverage import AuditedItem
from resumed import statistics_of

STORED = Path(__file__).parents[1] / "golden" / "stored"
RUNS = sorted(path.name for path in STORED.iterdir() if path.is_dir())


COMPARED = ("repeat", "rank", "repeat of any")
NEWER = {"canaries in the release", "carry-over"}  # gauges that the stored results do not have, read from the same logs


class near:  # noqa: N801
    """Equal to JSON whose numbers are this close."""

    def __init__(self, value, rel=1e-9):
        self.value, self.rel = value, rel

    def __eq__(self, other):
        if isinstance(self.value, dict):
            return self.value.keys() == other.keys() and all(
                near(v, self.rel) == other[k] for k, v in self.value.items()
            )
        if isinstance(self.value, list):
            return len(self.value) == len(other) and all(
                near(v, self.rel) == o for v, o in zip(self.value, other, strict=True)
            )
        if isinstance(self.value, float) and isinstance(other, float):
            return math.isclose(self.value, other, rel_tol=self.rel)
        return self.value == other

    def __hash__(self):
        return hash(self.rel)

    def __repr__(self):
        return f"near({self.value!r})"


def derived(name, **told):
    home = RunDirectory(STORED / name)
    settings, _ = home.read_record()
    return derive_result(home.read_log(), settings, **told)


@pytest.mark.parametrize("name", RUNS)
def test_a_stored_log_gives_the_stored_result(name):
    stored = json.loads((STORED / name / "result.json").read_text())
    claim = Claim(
        epsilon=stored["claimed_epsilon"],
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
    for entry in stored.keys() & again.keys() - {"adversaries", "gauges"}:
        assert again[entry] == near(stored[entry]), entry
    found, expected = statistics_of(again), statistics_of(stored)
    assert found.keys() - NEWER == expected.keys()
    for name, gauge in expected.items():
        assert found[name] == near(gauge, 1e-6 if name in COMPARED else 1e-9), name
    assert again["adversaries"].keys() == stored["adversaries"].keys()
    for rung, entries in stored["adversaries"].items():
        for entry in entries.keys() - {"reason"}:
            found = again["adversaries"][rung][entry]
            assert found == near(entries[entry], 1e-6 if rung == "known-round" else 1e-9), (rung, entry)


@pytest.mark.parametrize("name", RUNS)
def test_a_result_survives_a_round_trip(name):
    result = derived(name, claim=Claim(epsilon=3.0, sensitivity=1.2), analytical_epsilon=math.inf)
    result = result.with_entries(accuracy=0.5, trainer="test")
    assert AuditResult.from_dict(result.to_dict()) == result
    assert AuditResult.from_dict(json.loads(json.dumps(json_ready(result.to_dict())))) == result


@pytest.mark.parametrize("name", RUNS)
def test_verdict_facts_reproduce_the_stored_sentences(name):
    stored = json.loads((STORED / "verdicts.json").read_text())
    for case in (case for case in stored.values() if case.get("run") == name):
        result = derived(name, claim=Claim(**case["claim"]), clients=case["clients"])
        verdict = result.verdict
        assert (verdict.outcome, verdict.code, verdict.reason) == (case["outcome"], case["code"], case["reason"])
        assert list(result.notes) == case["notes"]
        for rung, (outcome, reason) in case["rungs"].items():
            found = result[rung].verdict
            assert (found.outcome, found.reason.removeprefix(f"{rung}: ")) == (outcome, reason)
