import itertools

import numpy as np
import pytest

from coalmine.estimators.literature.jagielski2020 import jagielski2020_row
from coalmine.estimators.literature.jagielski2023 import jagielski2023_rises, jagielski2023_rows, rises_of


def walks(rng, *, checkpoints, canaries, jump):
    """Scores that drift from checkpoint to checkpoint; each canary's jumps once by `jump`, at its own time."""
    steps = rng.normal(size=(checkpoints, canaries))
    steps[rng.integers(1, checkpoints, canaries), np.arange(canaries)] += jump
    return steps.cumsum(axis=0)


def test_rows_are_jagielski_2020_on_the_combined_scores():
    rng = np.random.default_rng(0)
    observed, unobserved = (walks(rng, checkpoints=6, canaries=200, jump=jump) for jump in (3.0, 0.0))
    delta_row, back_front_row = jagielski2023_rows((observed, unobserved), delta=1e-6)
    risen = [[max(b - a for a, b in itertools.pairwise(c)) for c in side.T] for side in (observed, unobserved)]
    ends = [[c[-1] - c[0] for c in side.T] for side in (observed, unobserved)]
    assert delta_row.value == jagielski2020_row(*risen, delta=1e-6).value
    assert back_front_row.value == jagielski2020_row(*ends, delta=1e-6).value
    assert (delta_row.receives, delta_row.kind) == ("intermediate models", "heuristic")


def test_checkpoints_give_a_larger_epsilon_than_the_last_model():
    """The jump of an early canary is lost in later drift unless the checkpoints around it are compared."""
    rng = np.random.default_rng(1)
    observed, unobserved = (walks(rng, checkpoints=30, canaries=1_000, jump=jump) for jump in (5.0, 0.0))
    rise, ends = jagielski2023_rows((observed, unobserved), delta=1e-6)
    last = jagielski2020_row(observed[-1], unobserved[-1], delta=1e-6)
    assert rise.value > ends.value + 1
    assert rise.value > last.value + 1


@pytest.mark.parametrize(
    ("checkpoints", "needs"),
    [(None, "needs scores at several checkpoints"), ((np.zeros((1, 20)), np.zeros((1, 20))), "got one")],
)
def test_a_row_without_input_states_what_it_needs(checkpoints, needs):
    for row in jagielski2023_rows(checkpoints, delta=1e-6):
        assert row.value is None
        assert needs in row.needs


def test_too_few_canaries_are_rejected():
    with pytest.raises(ValueError, match="at least 10 scores per row"):
        jagielski2023_rows((np.zeros((3, 5)), np.zeros((3, 20))), delta=1e-6)


def test_checkpoints_one_by_one_give_the_same_rows_as_a_table():
    rng = np.random.default_rng(2)
    tables = [walks(rng, checkpoints=7, canaries=60, jump=jump) for jump in (3.0, 0.0)]
    rises = [rises_of(iter(table)) for table in tables]
    for table, (largest, whole) in zip(tables, rises, strict=True):
        assert largest.tolist() == [max(b - a for a, b in itertools.pairwise(c)) for c in table.T]
        assert whole.tolist() == [c[-1] - c[0] for c in table.T]
    assert jagielski2023_rises(*rises, delta=1e-6) == jagielski2023_rows(tables, delta=1e-6)
    assert rises_of([]) is None
    assert rises_of([np.zeros(20)]) is None
