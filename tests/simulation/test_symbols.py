"""Symbols by TensorFlow Federated's rules, on rows computed by hand."""

import gzip
import json

import numpy as np
import pytest

from coalmine.simulation.tasks.symbols import (
    CHARACTER_VOCABULARY,
    CHARACTERS,
    Vocabulary,
    most_used_words,
    read_word_counts,
    sentence_rows,
    snippet_rows,
)
from coalmine.simulation.tasks.text_tasks import read_jsonl, texts, title_of

ABC = Vocabulary((b"a", b"b", b"c"))  # a 1, b 2, c 3, unknown 4, beginning 5, end 6


def test_a_sentence_has_a_beginning_and_an_end_unless_truncated():
    rows = sentence_rows([b"a b c", b"c", b"a b c a b", b"a b c a"], ABC, length=4)
    assert rows.tolist() == [[5, 1, 2, 3, 6], [5, 3, 6, 0, 0], [5, 1, 2, 3, 1], [5, 1, 2, 3, 1]]
    assert rows.dtype == np.int16


def test_words_are_split_at_single_spaces_and_unknown_words_share_a_symbol():
    assert sentence_rows([b"a zebra B", b"a  b", b""], ABC, length=4).tolist() == [
        [5, 1, 4, 4, 6],
        [5, 1, 4, 2, 6],  # like tf.strings.split, the empty string between two spaces is a word
        [5, 4, 6, 0, 0],
    ]


def test_ten_thousand_words_give_10004_symbols():
    vocabulary = Vocabulary(tuple(b"w%d" % number for number in range(10_000)))
    assert (vocabulary.unknown, vocabulary.beginning, vocabulary.end) == (10_001, 10_002, 10_003)
    assert vocabulary.unscored == (0, 10_001, 10_003)
    row = sentence_rows([b"w0 w9999 w10000"], vocabulary)[0]
    assert row.tolist() == [10_002, 1, 10_000, 10_001, 10_003] + [0] * 16


def test_no_sentences_give_no_rows():
    assert sentence_rows([], ABC).shape == (0, 21)


def test_a_snippet_is_split_into_rows_of_81_characters():
    assert (CHARACTER_VOCABULARY.unknown, CHARACTER_VOCABULARY.beginning, CHARACTER_VOCABULARY.end) == (87, 88, 89)
    assert snippet_rows(b"d\r~").tolist() == [[88, 1, 86, 87, 89] + [0] * 76]
    long = snippet_rows(b"h" * 160)
    assert long.shape == (2, 81)
    assert long[0].tolist() == [88] + [2] * 80
    assert long[1].tolist() == [2] * 80 + [89]
    assert snippet_rows(b"h" * 161).shape == (3, 81)
    assert snippet_rows(b"").tolist() == [[88, 89] + [0] * 79]


def test_every_byte_of_a_character_outside_the_vocabulary_is_unknown():
    assert snippet_rows("é".encode())[0, :4].tolist() == [88, 87, 87, 89]


def test_all_characters_have_a_symbol():
    row = snippet_rows(CHARACTERS[:79].encode())[0]
    assert row[1:80].tolist() == list(range(1, 80))


def test_words_are_ordered_by_number_of_users_then_alphabetically():
    users = [[b"x y", b"x"], [b"x z"], [b"y b b b b"], [b"a"]]
    assert most_used_words(users, size=4).words == (b"x", b"y", b"a", b"b")


def test_word_counts_are_read_up_to_the_vocabulary_size(tmp_path):
    path = tmp_path / "stackoverflow.word_count"
    path.write_bytes(b"the 342000\n. 341000\nto 340000\n")
    assert read_word_counts(path, size=2).words == (b"the", b".")
    path.write_bytes(b"the 342000\nto\n")
    with pytest.raises(ValueError, match=r"line 2 must be a word and a count, got 'to\\n'"):
        read_word_counts(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty: it must have a word and a count in each line"):
        read_word_counts(path)
    path.write_bytes(b"the 2\nthe 1\n")
    with pytest.raises(ValueError, match="must list each word once, got b'the' twice"):
        read_word_counts(path)


def test_invalid_vocabulary_is_rejected():
    with pytest.raises(ValueError, match="at least one word"):
        Vocabulary(())
    with pytest.raises(ValueError, match="at most 32,763 words, got 40,000"):
        Vocabulary(tuple(b"%d" % number for number in range(40_000)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"client_id": "a"}\n{', "line 2 is not JSON"),
        (b"[1]", "line 1 must be an object with a client_id"),
        (b'{"client_id": 3}', "line 1 must be an object with a client_id"),
    ],
)
def test_invalid_client_lines_are_rejected(tmp_path, content, message):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(path))


def test_truncated_file_is_rejected(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(json.dumps({"client_id": str(i)}).encode() for i in range(999)))[:-50])
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        list(read_jsonl(path))
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="is not a complete gzip file"):
        list(read_jsonl(path))


def test_texts_must_be_lists_of_strings():
    assert texts(["a", "é"], "here") == [b"a", b"\xc3\xa9"]
    for wrong in ("a", [1], None):
        with pytest.raises(ValueError, match="here must have a list of texts"):
            texts(wrong, "here")


def test_file_with_another_checksum_gets_its_own_title(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(b"mine")
    assert title_of(path, "Stack Exchange, 15 sites", sha256="0" * 64).startswith("a.gz with sha256 ")
