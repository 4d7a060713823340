"""JSON from files that somebody else may have edited."""

import json

import pytest

from coalmine.log.files import DEEPEST, parse_json


def nested(depth):
    return "[" * depth + "]" * depth


def test_a_plain_text_is_read():
    assert parse_json('{"a": [1, 2.5, null, "NaN"], "b": {"a": true}}') == {
        "a": [1, 2.5, None, "NaN"],
        "b": {"a": True},
    }
    assert parse_json(nested(DEEPEST)) == json.loads(nested(DEEPEST))


@pytest.mark.parametrize("depth", [DEEPEST + 2, 900, 100_000])
def test_deep_nesting_is_an_error_of_its_own_and_never_a_recursion_error(depth):
    with pytest.raises(ValueError, match=f"nested more than {DEEPEST} levels deep"):
        parse_json(nested(depth))


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', "[Infinity]", "[-Infinity]", "[1e999]", '{"a": -1e400}', f"[1{'0' * 400}]"]
)
def test_numbers_that_json_does_not_have_are_rejected(text):
    with pytest.raises(ValueError, match="not finite"):
        parse_json(text)


def test_a_key_that_stands_twice_is_rejected():
    with pytest.raises(ValueError, match="the key 'epsilon' occurs twice"):
        parse_json('{"rows": [{"epsilon": 1, "epsilon": 2}]}')
