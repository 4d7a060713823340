import json

import numpy as np
import pytest
from scipy.special import ndtri
from test_estimate import DIM, QUANTILES, called, shifted

from coalmine import compare_estimators


@pytest.fixture
def scores(tmp_path):
    np.savez(tmp_path / "both.npz", observed=shifted(1.0), unobserved=QUANTILES)
    np.savetxt(tmp_path / "observed.csv", shifted(1.0))
    np.savetxt(tmp_path / "unobserved.csv", QUANTILES)
    return tmp_path


def every(*arguments):
    done = called("estimate", *arguments, "--delta", 1e-6, "--all", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["estimators"]


def test_json_rows_equal_the_librarys(scores):
    wanted = compare_estimators(shifted(1.0), QUANTILES, delta=1e-6)
    assert every(scores / "both.npz") == [vars(row) for row in wanted]


def test_the_table_lists_every_row_and_missing_inputs(scores):
    done = called("estimate", scores / "both.npz", "--delta", 1e-6, "--all")
    for row in compare_estimators(shifted(1.0), QUANTILES, delta=1e-6):
        assert row.name in done.stdout
    assert "not applicable: CANIFE 2022: needs scores round by round (audited_rounds=)" in done.stdout


def test_unobserved_scores_can_be_combined_with_a_null(scores):
    law = ["--dim", DIM]
    alone = every(scores / "observed.csv", *law)
    beside = every(scores / "observed.csv", *law, "--unobserved", scores / "unobserved.csv")
    held = every(scores / "both.npz", *law)
    assert [row["value"] for row in alone[:4]] == [row["value"] for row in beside[:4]]
    assert {row["needs"] for row in alone[4:14]} == {"needs scores of unobserved canaries"}
    assert None not in [row["value"] for row in beside[:14]]
    assert [row["name"] for row in held] == [row["name"] for row in beside]


def test_without_all_the_output_is_unchanged(scores):
    done = called("estimate", scores / "both.npz", "--delta", 1e-6, "--json")
    assert "estimators" not in json.loads(done.stdout)
    refused = called(
        "estimate", scores / "observed.csv", "--dim", DIM, "--unobserved", scores / "unobserved.csv", "--delta", 1e-6
    )
    assert (refused.returncode, refused.stdout) == (2, "")


def test_every_row_uses_the_same_estimated_null(tmp_path):
    """The F test that chooses the std must know how the null was estimated, or the output shows two different estimates."""
    np.savetxt(tmp_path / "wide.csv", 1 + 1.2 * ndtri((np.arange(200) + 0.5) / 200))
    law = ["--null-std", 1, "--null-dof", 30]
    done = called("estimate", tmp_path / "wide.csv", *law, "--delta", 1e-6, "--all", "--json")
    found = json.loads(done.stdout)
    own = next(row for row in found["estimators"] if row["name"] == "coalmine's estimate")
    known = every(tmp_path / "wide.csv", "--null-std", 1)[0]
    assert own["value"] == found["epsilon"] != known["value"]


def test_two_nulls_are_rejected(scores):
    done = called("estimate", scores / "observed.csv", "--dim", DIM, "--null-std", 1, "--delta", 1e-6, "--all")
    assert done.returncode == 2
    assert "give one of --dim" in done.stderr
