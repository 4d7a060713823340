"""`python -m reproduction amplification`: its training loops are honest, and its checks can fail."""

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from coalmine.estimators.sampling import Poisson
from reproduction import accountant_measured
from reproduction.experiment import save_figure
from reproduction.experiment_options import Options


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accountant_measured, "SCHEMES", (Poisson(0.1, rounds=40),))
        patch.setattr(accountant_measured, "NOISES", {"small": (1.0, 2.0)})
        patch.setattr(accountant_measured, "SIZES", {"small": (1_500, 200)})
        return accountant_measured.gather(Options(out=".", seeds=2), lambda *_: None)


def outcomes(found):
    return [check.holds for check in accountant_measured.checks(found)]


@pytest.mark.full
def test_honest_loops_agree_with_the_accountant(found, tmp_path):
    assert [loop["noise_multiplier"] for loop in found["loops"]] == [1.0, 1.0, 2.0, 2.0]
    assert outcomes(found) == [True, True, True, True]
    assert found["loops"][0]["accounted"] > 2 * found["loops"][2]["accounted"]
    [table] = accountant_measured.tables(found)
    assert [row[-1] for row in table.rows] == ["2 PASS", "2 PASS"]
    assert "4 of 4 claims pass" in accountant_measured.conclusion(found)
    save_figure(tmp_path / "picture.png", accountant_measured.EXPERIMENT, found)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {"interval": [90.0, 99.0]}),
        (1, {"lower_bound": 99.0}),
        (2, {"all_iterates_bound": 99.0}),
        (3, {"verdict": "VIOLATION"}),
    ],
)
def test_checks_fail_if_the_numbers_disagree(found, place, changes):
    broken = copy.deepcopy(found)
    for loop in broken["loops"]:
        loop.update(changes)
    assert outcomes(broken)[place] is False
