"""The examples of docs/testing.md run, and the page has room for its study."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from coalmine.testing import assert_private

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
sys.path.insert(0, str(ROOT))


@pytest.fixture
def names(monkeypatch):
    """What the first example defines, its generator seeded."""
    unseeded = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed=1: unseeded(seed))
    found = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0], found)
    return found


def test_the_first_example_passes(names):
    names["test_my_aggregate_is_private"]()


def test_the_message_on_the_page_is_the_one_of_half_the_noise(names):
    whole, quarter = names["my_aggregate"], []

    def my_aggregate(updates):
        quarter.append(whole(np.zeros_like(updates) + 1e-12) / 2)  # its noise alone
        norms = np.linalg.norm(updates, axis=1, keepdims=True)
        return (updates / np.maximum(norms, 1.0)).sum(axis=0) + quarter.pop()

    with pytest.raises(AssertionError) as failed:
        assert_private(my_aggregate, dim=5_000, epsilon=3.0, delta=1e-5)
    shown = re.findall(r"^    (my_aggregate is not .*?)\n\n", PAGE, re.S | re.M)[0]

    def without_numbers(text):
        return [re.sub(r"[\d.]+", "", line.strip()) for line in text.splitlines()]

    assert without_numbers(str(failed.value))[0:2] == without_numbers(shown)[0:2]
    assert without_numbers(str(failed.value))[3:] == without_numbers(shown)[3:]


def test_every_argument_is_on_the_page():
    from inspect import signature

    from coalmine.testing import check_private

    missing = [name for name in signature(check_private).parameters if f"`{name}" not in PAGE and name != "progress"]
    assert missing in ([], ["release"], ["delta"])


def test_the_study_has_its_markers():
    from studies.mechanisms import rows

    for name in ("correct", "faulty", "unseen"):
        assert PAGE.index(f"<!-- {name} -->") < PAGE.index(f"<!-- end of {name} -->")
    assert {row.kind for row in rows().values()} == {"correct", "faulty", "unseen"}
