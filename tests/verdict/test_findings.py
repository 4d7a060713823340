"""Findings: what their sentences say, how they are stored, and that nothing else in the package knows their codes."""

import ast
import json
import re
from pathlib import Path

import pytest
from example_findings import example
from reference_pages import with_parts

from coalmine.verdict.findings.canaries import Undetected
from coalmine.verdict.findings.finding import Doubt, Significance, all_findings
from coalmine.verdict.findings.gauges import LongResidual, NoiseRemovable, OutsideLimits
from coalmine.verdict.findings.noise import LessThanStated, MeanTooHigh
from coalmine.verdict.findings.power import PowerHidden, PowerOutOfReach
from coalmine.verdict.verdict import Verdict
from literal_words import words_in

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "coalmine"
CODES = {each.code for each in all_findings()}


@pytest.fixture(params=all_findings(), ids=lambda each: each.__name__)
def kind(request):
    return request.param


def test_a_stored_verdict_is_read_as_the_same_finding(kind):
    verdict = Verdict(finding=example(kind), rung=kind.rung, part="noise", evidence=("final", "the noise gauge"))
    again = Verdict.from_dict(json.loads(json.dumps(verdict.to_dict())))
    assert again == verdict
    assert type(again.finding) is kind
    assert again.to_dict() == verdict.to_dict()


def test_a_finding_has_its_sentence_its_advice_and_its_row(kind):
    finding = example(kind)
    for text in (finding.sentence(), finding.advice(), kind.meaning(), kind.remedy):
        assert text
        assert "\n" not in text
        assert "None" not in text
    assert repr(Verdict(finding=finding)).startswith(f"{kind.outcome} ({kind.code}): ")
    assert not issubclass(kind, Doubt) or kind.headline


@pytest.mark.parametrize("kind", [each for each in all_findings() if issubclass(each, Significance)])
def test_a_p_value_that_underflows_is_not_printed_as_0(kind):
    sentence = example(kind, p_value=0.0).sentence()
    assert "p = 0" not in sentence
    assert ("p < 1e-99" in sentence) == ("p = 0.001" in example(kind, p_value=0.001).sentence())


def test_facts_are_flat_beside_the_code():
    verdict = Verdict(finding=Undetected(score=0.1, claimed_score=1.0, stds=0.2), part="noise")
    stored = verdict.to_dict()
    assert (stored["verdict"], stored["reason_code"], stored["decided_by"]) == ("UNDERPOWERED", "undetected", None)
    assert stored["facts"] == {"score": 0.1, "claimed_score": 1.0, "stds": 0.2, "leg": "noise"}


def test_less_noise_than_stated_wraps_what_refutes_it():
    finding = LessThanStated(refuted=example(MeanTooHigh, score=2.0))
    assert finding.sentence().endswith(finding.refuted.sentence())
    assert finding.facts == {**finding.refuted.facts, "detail": "mean"}


def test_the_rung_tells_two_findings_without_enough_power_apart():
    facts = {"power": 0.1, "canaries": 5, "claimed_noise": 1.0}
    for rung, kind in (("known-round", PowerHidden), ("known-others", PowerOutOfReach), (None, PowerOutOfReach)):
        stored = {"verdict": "UNDERPOWERED", "reason_code": "power", "decided_by": rung, "facts": facts}
        assert type(Verdict.from_dict(stored).finding) is kind


@pytest.mark.parametrize(
    ("code", "facts", "message"),
    [
        ("undetected", {"score": 0.1}, "the facts of a verdict of code 'undetected' do not fit its sentence"),
        ("undetected", {"score": "a", "claimed_score": 1, "stds": 1}, "do not fit its sentence"),
        ("mean", {}, "the facts of a verdict of code 'mean' fit no UNDERPOWERED that this version knows"),
        ("nothing", {}, "fit no UNDERPOWERED that this version knows"),
    ],
)
def test_facts_without_a_finding_are_rejected(code, facts, message):
    with pytest.raises(ValueError, match=message):
        Verdict.from_dict({"verdict": "UNDERPOWERED", "reason_code": code, "decided_by": None, "facts": facts})


def test_other_evidence_ends_the_sentence():
    names = ("one", "two", "three", "four", "five")
    reading = {"reading": (0.5, 0.5), "limits": (0.9, 1.1)}
    refuted = Verdict(finding=NoiseRemovable(gauge="repeat", **reading), evidence=names)
    assert refuted.reason.endswith("; also one, two, three, four and 1 more")
    outside = Verdict(finding=OutsideLimits(gauge="shape", **reading), evidence=names[:2])
    assert outside.reason.endswith(" Also outside their limits: one, two.")
    long = Verdict(finding=LongResidual(gauge="residual", **reading, length=1.2), evidence=names)
    assert "two" not in long.reason


def test_the_pages_list_every_code():
    pages = [ROOT / "docs" / "explanation" / f"{name}.md" for name in ("verdicts", "amplification")]
    text = "".join(with_parts(page.read_text(encoding="utf-8")) for page in pages)
    for each in all_findings():
        row = re.search(rf"^\| `{each.code}` \| .*{re.escape(each.meaning())}", text, flags=re.MULTILINE)
        assert row or each.outcome == "PASS", each.__name__


def test_no_other_module_compares_or_makes_a_code():
    """From the syntax trees: a code stands in its class alone, other code asks for the class."""
    found = [
        f"{path.relative_to(SOURCE)}:{line} {code}"
        for path in SOURCE.rglob("*.py")
        if "findings" not in path.parts[len(SOURCE.parts) :]
        for line, code in words_in(ast.parse(path.read_text(encoding="utf-8")), CODES, "code")
    ]
    assert found == []


def test_that_search_finds_codes():
    text = """
if verdict.code == "power" or verdict.code in ("gauge", "mean"): pass
make(code="range")
code = "uneven"
TABLE = {"weak": "too weak", "constant": "more canaries"}
note = "sampler not observed"
read(values["power"], {"power": 1})
match verdict.code:
    case "short": pass
"""
    codes = sorted(code for _, code in words_in(ast.parse(text), CODES, "code"))
    assert codes == sorted(
        ["constant", "gauge", "mean", "power", "range", "sampler not observed", "short", "uneven", "weak"]
    )
