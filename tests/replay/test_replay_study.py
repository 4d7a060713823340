"""The study of clips of public code: each fault is refuted, each honest twin is not, and the page has these numbers."""

from pathlib import Path

import pytest

pytest.importorskip("studies")
from studies import replay as study

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "replay.md"


def test_every_clip_of_public_code_is_refuted_and_its_honest_twin_is_not():
    text, wrong = study.table()
    assert wrong == []
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "VIOLATION" in line]
    assert len(rows) == len(study.CASES)
    assert all(float(row[1]) > 1.3 for row in rows)
    assert all(row[-1].startswith("1.000") for row in rows)
    assert text in PAGE.read_text(encoding="utf-8")


def test_a_whole_batch_that_is_clipped_turns_by_at_most_two_clip_norms():
    factors = [study.measured(study.whole_batch, study.batch_of(case)).factor for case in study.CASES]
    assert 1 < max(factors) <= 2 + 1e-9


def test_a_row_that_is_never_cleared_counts_in_every_later_sum():
    """By hand: three sums that each move by one clip norm move by √3 together."""
    found = study.measured(study.never_cleared, study.batch_of(study.CASES[2]))
    assert found.factor == pytest.approx(3**0.5, abs=1e-6)
