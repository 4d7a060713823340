"""Correlated noise against dense linear algebra, enumerated participation patterns, and dp-accounting."""

import itertools
import json
import math

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, SingleEpochTreeAggregationDpEvent
from dp_accounting.rdp import RdpAccountant

from coalmine.estimators.correlated import BandedNoise, TreeNoise, correlated_epsilon, correlated_noise
from coalmine.estimators.mechanism import mechanism_epsilon

ROUNDS = 13
LAWS = {
    "tree": TreeNoise(rounds=ROUNDS),
    "restarted tree": TreeNoise(rounds=ROUNDS, restart=5),
    "bands": BandedNoise.for_prefix_sums(ROUNDS, bands=4),
    "bands for momentum": BandedNoise.for_prefix_sums(ROUNDS, bands=4, momentum=0.9),
    "one band": BandedNoise.for_prefix_sums(ROUNDS, bands=1),
    "as many bands as rounds": BandedNoise.for_prefix_sums(ROUNDS, bands=ROUNDS),
}
every_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


def dyadic_prefixes(rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Tree aggregation from its definition: nodes as rows over rounds, and the nodes of each prefix sum."""
    nodes: list[range] = []
    uses = np.zeros((rounds, 4 * rounds))
    for t in range(1, rounds + 1):
        start = 0
        for bit in reversed(range(t.bit_length())):  # the binary digits of t, the largest first
            if t >> bit & 1:
                node = range(start, start + (1 << bit))
                if node not in nodes:
                    nodes.append(node)
                uses[t - 1, nodes.index(node)] = 1
                start += 1 << bit
    holds = np.array([[s in node for s in range(rounds)] for node in nodes], dtype=float)
    return holds, uses[:, : len(nodes)]


def patterns(participations: int, separation: int) -> list[tuple[int, ...]]:
    """All patterns of this many participations with this separation; rounds are counted from 1."""
    chosen = itertools.combinations(range(1, ROUNDS + 1), participations)
    return [rounds for rounds in chosen if all(b - a >= separation for a, b in itertools.pairwise(rounds))]


def test_the_tree_matches_binary_prefix_sums():
    holds, uses = dyadic_prefixes(ROUNDS)
    law = TreeNoise(rounds=ROUNDS)
    assert sorted(map(tuple, holds)) == sorted(map(tuple, law.matrix()))  # the same nodes, one for each round
    prefix = np.tri(ROUNDS)
    np.testing.assert_array_equal(uses @ holds, prefix)
    of_rounds = np.linalg.solve(prefix, uses)  # N_t - N_{t-1} in terms of the nodes
    np.testing.assert_allclose(of_rounds @ of_rounds.T, np.linalg.inv(law.matrix()) @ np.linalg.inv(law.matrix()).T)


def test_a_restarted_tree_is_a_sequence_of_trees():
    whole = TreeNoise(rounds=ROUNDS, restart=5).matrix()
    for first, size in ((0, 5), (5, 5), (10, 3)):
        block = slice(first, first + size)
        np.testing.assert_array_equal(whole[block, block], TreeNoise(rounds=size).matrix())
        assert not whole[block, :first].any()


def test_all_bands_give_the_square_root_of_the_servers_matrix():
    """With all bands, C before normalisation squares to the server's matrix."""
    for momentum in (0.0, 0.9):
        root = np.array(BandedNoise.for_prefix_sums(8, bands=8, momentum=momentum).coefficients)
        squared = np.convolve(root, root)[:8]
        np.testing.assert_allclose(squared, np.cumsum(momentum ** np.arange(8)), rtol=1e-12)


@pytest.mark.parametrize("law", [law for law in LAWS.values() if isinstance(law, BandedNoise)])
def test_banded_columns_have_length_1(law):
    matrix = law.matrix()
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1, rtol=1e-12)
    assert not np.triu(matrix, 1).any()
    assert not np.tril(matrix, -law.bands).any()
    first = matrix[:, 0]
    np.testing.assert_allclose(first[: law.bands], np.array(law.coefficients) / np.linalg.norm(law.coefficients))


@every_law
def test_a_rounds_std_is_the_norm_of_its_row_of_the_inverse(law):
    rows = np.linalg.norm(np.linalg.inv(law.matrix()), axis=1)
    np.testing.assert_allclose([law.std(t) for t in range(1, ROUNDS + 1)], rows, rtol=1e-12)


@every_law
def test_strength_equals_that_of_the_dense_matrix(law):
    matrix, rng = law.matrix(), np.random.default_rng(0)
    for rounds in [(1,), (ROUNDS,), (1, 2), (3, 4, 9), tuple(range(1, ROUNDS + 1))]:
        pattern = np.zeros(ROUNDS)
        pattern[np.array(rounds) - 1] = 1
        assert law.strength(rounds) == pytest.approx(float(np.sum((matrix @ pattern) ** 2)), rel=1e-12)
        for _ in range(20):  # updates of norm 1 that differ in each round
            updates = rng.normal(size=(ROUNDS, 3))
            updates *= (pattern / np.linalg.norm(updates, axis=1))[:, None]
            assert np.sum((matrix @ updates) ** 2) <= law.strength(rounds) * (1 + 1e-12)


@every_law
@pytest.mark.parametrize("separation", [1, 2, 4, 6])
@pytest.mark.parametrize("participations", [1, 2, 3])
def test_the_worst_strength_bounds_every_pattern(law, participations, separation):
    found = max(law.strength(rounds) for rounds in patterns(participations, separation))
    bound = law.worst_strength(participations, separation)
    assert found <= bound * (1 + 1e-12)
    exact = participations == 1 or (isinstance(law, BandedNoise) and separation >= law.bands)
    assert bound <= found * (1 + 1e-12 if exact else 1.35)
    if exact and participations > 1:
        assert bound == pytest.approx(participations)


@pytest.mark.parametrize("steps", [1, 5, 64, 100, [16, 16, 7]])
def test_epsilon_of_the_tree_agrees_with_dp_accounting(steps):
    """Its Rényi curve of the tree is that of one Gaussian release with our sensitivity; the exact epsilon is lower."""
    sizes = steps if isinstance(steps, list) else [steps]
    law = TreeNoise(rounds=sum(sizes), restart=max(sizes))
    tree = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
    tree.compose(SingleEpochTreeAggregationDpEvent(2.0, steps))
    gaussian = RdpAccountant().compose(GaussianDpEvent(2.0 / math.sqrt(law.worst_strength(1, 1))))
    assert tree.get_epsilon(1e-6) == pytest.approx(gaussian.get_epsilon(1e-6), rel=1e-9)
    ours = correlated_epsilon(2.0, noise=law, delta=1e-6)
    assert 0.85 * tree.get_epsilon(1e-6) < ours < tree.get_epsilon(1e-6)


def test_bands_with_separated_participations_compose_as_independent_noise():
    law = BandedNoise.for_prefix_sums(100, bands=8)
    apart = correlated_epsilon(1.0, noise=law, delta=1e-6, participations=5, separation=8)
    assert apart == pytest.approx(mechanism_epsilon(1.0, delta=1e-6, participations=5), rel=1e-9)
    assert correlated_epsilon(1.0, noise=law, delta=1e-6, participations=5, separation=7) > apart
    assert correlated_epsilon(0.0, noise=law, delta=1e-6) == math.inf


@every_law
def test_the_encoder_multiplies_by_the_matrix_and_skips_rows_with_missing_rounds(law):
    values = np.random.default_rng(1).normal(size=(ROUNDS, 5))
    missing = 6
    encoder, matrix = law.encoder(), law.matrix()
    for t in range(1, ROUNDS + 1):
        if t == missing:
            continue
        row = encoder.add(t, values[t - 1])
        if matrix[t - 1, missing - 1]:
            assert row is None
        else:
            np.testing.assert_allclose(row, matrix[t - 1] @ values, atol=1e-12)


@every_law
def test_to_dict_and_correlated_noise_are_inverse(law):
    assert correlated_noise(json.loads(json.dumps(law.to_dict()))) == law


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TreeNoise(rounds=0), "rounds must be at least 1"),
        (lambda: TreeNoise(rounds=4, restart=0), "restart must be at least 1"),
        (lambda: TreeNoise(rounds=4).std(5), "rounds 1 to 4, got round 5"),
        (lambda: TreeNoise(rounds=4).strength([0]), "rounds 1 to 4, got round 0"),
        (lambda: BandedNoise.for_prefix_sums(4, bands=5), "bands must be at most rounds = 4, got 5"),
        (lambda: BandedNoise.for_prefix_sums(4, bands=0), "bands must be at least 1"),
        (lambda: BandedNoise.for_prefix_sums(4, bands=2, momentum=1.0), "momentum must lie in"),
        (lambda: BandedNoise(rounds=4, coefficients=()), "a list that starts above 0"),
        (lambda: BandedNoise(rounds=4, coefficients=(1.0, math.nan)), "must be finite"),
        (lambda: BandedNoise(rounds=4, coefficients=(1.0, 2.0)), "must not increase"),
        (lambda: BandedNoise(rounds=4, coefficients=(1.0, -0.5)), "at least 0"),
        (lambda: TreeNoise(rounds=8).worst_strength(3, 4), "do not fit into 8 rounds"),
        (lambda: correlated_noise({"kind": "forest"}), "must be tree or banded, got 'forest'"),
    ],
)
def test_invalid_settings_are_rejected(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_other_noise_objects_are_rejected():
    with pytest.raises(ValueError, match="noise must be a TreeNoise or a BandedNoise, got None"):
        correlated_epsilon(1.0, noise=None, delta=1e-5)
