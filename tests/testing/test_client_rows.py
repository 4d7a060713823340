"""Updates are checked before a framework receives them, and a model's arrays are joined into a row in order."""

import numpy as np
import pytest

from coalmine.testing.client_rows import ModelArrays, client_rows, joined

ROWS = np.eye(3, 4)


@pytest.mark.parametrize("updates", [[1.0, 2.0], np.zeros((2, 3, 4)), np.zeros((0, 4)), np.zeros((2, 0))])
def test_updates_must_be_a_matrix(updates):
    with pytest.raises(ValueError, match=r"updates must be a matrix with one row for each client, got shape \("):
        client_rows(updates)


def test_updates_must_be_finite_numbers_of_the_models_size():
    assert client_rows(ROWS.tolist(), dim=4).tolist() == ROWS.tolist()
    with pytest.raises(ValueError, match="updates must be finite, got nan"):
        client_rows(np.full((2, 2), np.nan))
    with pytest.raises(ValueError, match="updates must have 5 numbers for each client, got 4; pass dim=5"):
        client_rows(ROWS, dim=5)


def test_the_longest_update_must_reach_the_clip_norm():
    """A short update among long ones is allowed: the privacy test makes such calls."""
    uneven = ROWS * [[2.0], [0.1], [0.1]]
    assert client_rows(uneven, clip_norm=2.0) is not None
    assert client_rows(ROWS.astype(np.float32), clip_norm=1.0) is not None
    with pytest.raises(ValueError, match="the longest has length 2: pass clip_norm=3"):
        client_rows(uneven, clip_norm=3.0)


def test_a_row_is_split_into_the_models_arrays_and_joined_again():
    model = {"first": np.zeros((2, 3), dtype=np.float32), "last": np.zeros(2)}
    arrays, row = ModelArrays(model), np.arange(8.0)
    parts = arrays.split(row)
    assert arrays.dim == 8
    assert [(name, part.shape, part.dtype) for name, part in parts.items()] == [
        ("first", (2, 3), np.float32),
        ("last", (2,), np.float64),
    ]
    assert joined(parts).tolist() == row.tolist()
    assert ModelArrays(None).dim is None
    assert ModelArrays(None).split(row)["weights"].tolist() == row.tolist()


def test_a_model_must_map_names_to_floating_point_arrays():
    with pytest.raises(TypeError, match="model must map names to arrays, got "):
        ModelArrays([np.zeros(3)])
    with pytest.raises(ValueError, match="got int64 in 'steps'; leave it out of the test"):
        ModelArrays({"steps": np.zeros(1, dtype=np.int64)})
