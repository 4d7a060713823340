"""The classes of gauges: what they say, how their statistics are stored, and that nothing else knows their names."""

import ast
import json
from pathlib import Path

import pytest
from reference_pages import with_parts
from training import train

from coalmine.evidence.faults import FAULTS
from coalmine.evidence.gauges.gauge import all_gauges, all_statistics, gauge_of, statistic_of
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.coverage import ITEMS
from literal_words import words_in

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "coalmine"
NAMES = {*all_statistics(), *(gauge.name for gauge in all_gauges())}


@pytest.fixture(params=all_gauges(), ids=lambda each: each.__name__)
def kind(request):
    return request.param


def test_a_gauge_asks_one_question_and_has_its_statistics(kind):
    assert kind.question().endswith("?")
    assert kind.question().count("?") == 1
    assert kind.item in ("", *ITEMS)
    for each in kind.statistics():
        for text in (each.name, each.meaning, each.law, each.advice):
            assert text
            assert "\n" not in text
        assert 0 <= each.refutes <= 1
        assert gauge_of(each) is kind
        assert statistic_of(each.name) == (each, "")
        if each.by_tensor:
            assert statistic_of(f"{each.name} a tensor") == (each, "a tensor")
        else:
            with pytest.raises(ValueError, match="no gauge has"):
                statistic_of(f"{each.name} a tensor")
    for symptom in kind.symptoms():
        assert symptom.of in kind.statistics()
        assert symptom.always or symptom.sometimes


def test_every_name_belongs_to_one_statistic():
    listed = [each.name for gauge in all_gauges() for each in gauge.statistics()]
    assert len(listed) == len(set(listed))
    assert len({gauge.name for gauge in all_gauges()}) == len(all_gauges())
    with pytest.raises(ValueError, match="no gauge has the statistic 'a gauge of tomorrow'"):
        statistic_of("a gauge of tomorrow")


def test_every_detectable_fault_is_always_seen_by_something():
    """By a gauge, unless it only scales updates: then a rung sees it."""
    seen = {fault.name for gauge in all_gauges() for each in gauge.symptoms() for fault in each.always}
    missing = {fault.name for fault in FAULTS if fault.detectable} - seen
    assert missing == {"clip-forgotten", "canaries-twice", "weighted-by-examples", "noise-after-adam"}
    assert not seen & {fault.name for fault in FAULTS if not fault.detectable}


def test_stored_statistics_are_read_as_the_same():
    result = train(dim=1_000, canaries=50, rounds=6, layers=[("a b", 400), ("noise", 600)]).result()
    again = AuditResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert again.gauges == result.gauges
    assert {each.part for each in again.gauges} == {"", "a b", "noise"}
    assert [each.to_dict() for each in again.gauges] == [each.to_dict() for each in result.gauges]


def test_the_page_has_every_statistic():
    page = with_parts((ROOT / "docs" / "explanation" / "gauges.md").read_text(encoding="utf-8"))
    for each in all_statistics().values():
        assert f"| `{each.name}{' NAME' * each.by_tensor}` | " in page
        assert each.advice in page
    for gauge in all_gauges():
        assert gauge.question() in " ".join(page.split())


def test_no_other_module_knows_a_name():
    """From the syntax trees: a name stands in its class alone, other code asks for the class or the statistic."""
    found = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in SOURCE.rglob("*.py")
        if "gauges" not in path.parts[len(SOURCE.parts) :]
        for line, name in words_in(ast.parse(path.read_text(encoding="utf-8")), NAMES, "gauge", "statistic")
    ]
    assert found == []


def test_that_search_finds_names():
    text = """
if gauge.name == "rank" or each.statistic.name in ("grid", "tails"): pass
make(gauge="shape")
TABLE = {"residual": "too long", "repeat": "draw it anew"}
words = "pooled residual"
other = shape == "rank"
"""
    found = sorted(name for _, name in words_in(ast.parse(text), NAMES, "gauge", "statistic"))
    assert found == sorted(["rank", "grid", "tails", "shape", "residual", "repeat", "pooled residual"])
