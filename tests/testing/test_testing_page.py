"""The examples of docs/how-to/testing.md run, and the page of measurements has the markers of its study."""

import re
from inspect import signature
from pathlib import Path

import pytest

from coalmine.testing import check_private

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "testing.md").read_text()
MEASURED = (ROOT / "docs" / "evidence" / "mechanisms.md").read_text()


def test_the_first_example_passes_for_the_reason_on_the_page():
    names = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0].replace("default_rng()", "default_rng(1)"), names)
    results = []
    names["assert_private"] = lambda *given, **claim: results.append(check_private(*given, **claim))
    names["test_my_aggregate_is_private"]()
    assert results[0].verdict.outcome == "PASS"
    assert f"    {results[0].verdict.reason}\n" in PAGE


def test_the_message_on_the_page_matches_half_the_noise():
    """The first example with a generator of seed 1 and a scale of 0.7."""
    code = re.findall(r"```python\n(.*?)```", PAGE, re.S)[0]
    names = {}
    exec(code.replace("default_rng()", "default_rng(1)").replace("scale=1.4", "scale=0.7"), names)
    with pytest.raises(AssertionError) as failed:
        names["test_my_aggregate_is_private"]()
    shown = re.findall(r"^    (my_aggregate is not .*?)\n\n", PAGE, re.S | re.M)[0]
    assert [line.strip() for line in shown.splitlines()] == str(failed.value).splitlines()


def test_every_argument_is_on_the_page():
    assert [name for name in signature(check_private).parameters if f"`{name}" not in PAGE] == ["progress"]


def test_the_study_has_its_markers():
    from studies.mechanisms import rows

    for name in ("correct", "faulty", "unseen"):
        assert MEASURED.index(f"<!-- {name} -->") < MEASURED.index(f"<!-- end of {name} -->")
    assert {row.kind for row in rows().values()} == {"correct", "faulty", "unseen"}
