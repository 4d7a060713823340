"""Cosines of all pairs of rounds: the sums and the search in blocks against one big product."""

import numpy as np
import pytest

from coalmine.evidence.gauges.gauged_rounds import BLOCK, Pairs


@pytest.mark.parametrize("every", [1, 3])
def test_pairs_agree_with_one_product(every):
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(2 * BLOCK + 77, 40)).astype(np.float32)
    rows[900], rows[901] = -rows[3], rows[3] * 2  # used again, in another block; equal up to the sign
    pairs = Pairs()
    for number, row in enumerate(rows):
        pairs.add(row, compared=number % every == 0)
    largest, squares, count = pairs.results()
    units = rows.astype(np.float64)
    units /= np.linalg.norm(units, axis=1)[:, None]
    gram = np.tril(units @ units.T, -1)
    wanted = np.arange(len(rows)) % every == 0
    assert squares == pytest.approx(np.square(gram[wanted]).sum(), rel=1e-10)
    assert count == np.arange(len(rows))[wanted].sum()
    assert np.isnan(largest[~wanted]).all()
    assert np.abs(largest[wanted]) == pytest.approx(np.abs(gram).max(axis=1)[wanted], rel=1e-12)
    assert largest[900] == pytest.approx(-1.0, rel=1e-12)
