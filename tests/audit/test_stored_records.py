"""Logs with edited records, with valid digests: who reads them gets a one-line error."""

from dataclasses import replace

import numpy as np
import pytest

from coalmine import Audit, Claim
from coalmine.log.round_schema import check_fit
from coalmine.log.rounds_file import MAGIC, RoundLog, encode
from coalmine.result.derivation import derive_result

SEED = b"a seed of these tests"
DIM, CANARIES = 400, 20
MISFIT = r"record [24] cannot be read|must"


@pytest.fixture(scope="module")
def audit():
    """An audit with every kind of measurement in its rounds, and a final model."""
    made = Audit(DIM, canaries=CANARIES, seed=SEED, delta=1e-5, rounds=3)
    rng = np.random.default_rng(1)
    for t in (1, 2, 3):
        present = made.canaries_in_round(t)
        others = 0.1 * rng.normal(size=DIM)
        delta = made.updates(present, clip_norm=1.0) + others + rng.normal(size=DIM)
        made.observe_round(t, delta, present=present, others=others, noise_std=1.0, clip_norm=1.0)
    made.observe_final(rng.normal(size=DIM), initial=rng.normal(size=DIM))
    return made


def stored(path, audit, change=lambda item: item, change_final=lambda item: item):
    """The audit's settings, and a log in a file with the audit's records, the second round and the final model changed."""
    content, digest = MAGIC, b""
    items = [change(item) if item.number == 2 else item for item in audit.log.rounds()]
    for kind, item in [*(("round", item) for item in items), ("final", change_final(audit.log.final))]:
        data, digest = encode(kind, item, digest)
        content += data
    path.write_bytes(content)
    return audit.settings, RoundLog(path, read_only=True)


def read(settings, log):
    """Read every record, as those do who read the log of somebody else."""
    for _, item in log.records():
        check_fit(item, settings)


def test_unchanged_records_give_the_same_result(audit, tmp_path):
    settings, log = stored(tmp_path / "rounds.log", audit)
    read(settings, log)
    assert derive_result(log, settings, claim=Claim(3.0)).to_dict() == audit.result(claim=3.0).to_dict()
    assert all(item.law_grid is not None and item.law_tail is not None for item in log.rounds())


NUMBERS = ("clip_norm", "scale", "noise_std", "norm", "rest", "residual_norm", "residual_rest")
WRONG = [{name: value} for name in NUMBERS for value in (0.0, -1.0, 1e-300, 1e300)]
WRONG += [{name: None} for name in ("residual_norm", "residual_rest", "residual_cosines")]
WRONG += [{name: None} for name in ("law_lags", "law_counts", "law_zeros", "law_spectrum", "law_grid", "law_peaks")]
WRONG += [
    {"law_moments": None},
    {"law_moments": np.zeros(3)},
    {"law_moments": np.array([1.0, 1e200, 1.0])},
    {"law_moments": np.ones(4)},
    {"law_zeros": np.zeros(0, np.int64)},
    {"law_zeros": np.array([-1], np.int64)},
    {"law_spectrum": np.ones(1)},
    {"law_grid": np.ones(3)},
    {"law_grid": np.full(4, np.nan)},
    {"rounding": -1.0},
    {"rounding": np.inf},
    {"cosines": np.zeros(220, np.float32)},
    {"cosines": np.ones(219, np.float32)},
    {"cosines": np.full(220, np.nan, np.float32)},
    {"present": np.array([CANARIES], np.int32)},
    {"present": np.array([-1], np.int32)},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: " ".join(wrong))
def test_a_round_that_no_audit_writes_is_rejected(audit, tmp_path, wrong):
    with pytest.raises(ValueError, match=MISFIT) as refused:
        read(*stored(tmp_path / "rounds.log", audit, lambda item: replace(item, **wrong)))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", [{"norm": 0.0}, {"update_norm": -1.0}, {"cosines": np.ones(3, np.float32)}])
def test_a_final_model_that_no_audit_writes_is_rejected(audit, tmp_path, wrong):
    with pytest.raises(ValueError, match=MISFIT):
        read(*stored(tmp_path / "rounds.log", audit, change_final=lambda item: replace(item, **wrong)))


def test_many_planned_rounds_do_not_slow_down_the_result(audit, tmp_path):
    settings, log = stored(tmp_path / "rounds.log", audit)
    assert derive_result(log, replace(settings, rounds=10**6), claim=Claim(3.0)).rounds == 3


@pytest.mark.parametrize("scale", [1e-95, 1e-70, 1e-40, 1e40, 1e70, 1e95])
@pytest.mark.filterwarnings("error")
def test_the_result_does_not_depend_on_the_units_of_the_noise(audit, tmp_path, scale):
    """Stored rounds can be read again, and the result does not depend on units."""
    with Audit(DIM, canaries=CANARIES, seed=SEED, delta=1e-5, rounds=3, directory=tmp_path / "run") as made:
        rng = np.random.default_rng(1)
        for t in (1, 2, 3):
            present = made.canaries_in_round(t)
            others = 0.1 * rng.normal(size=DIM)
            delta = made.updates(present, clip_norm=1.0) + others + rng.normal(size=DIM)
            stated = {"others": others * scale, "noise_std": scale, "clip_norm": scale}
            made.observe_round(t, delta * scale, present=present, **stated)
    with Audit(DIM, canaries=CANARIES, seed=SEED, delta=1e-5, rounds=3, directory=tmp_path / "run") as again:
        found, expected = again.result(claim=3.0), audit.result(claim=3.0)
    assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-4)
    assert found.verdict.outcome == expected.verdict.outcome
    known = {gauge.name: gauge.smallest for gauge in expected.gauges}
    assert {"residual", "sum"} <= {gauge.name for gauge in found.gauges} & set(known) or len(found.gauges) > 5
    for gauge in found.gauges:
        assert gauge.smallest == pytest.approx(known[gauge.name], rel=1e-3, abs=1e-6), gauge.name
