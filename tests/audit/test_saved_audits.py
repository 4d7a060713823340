"""Saved audits that were edited, with valid digests: `Audit.load` rejects them with a one-line error."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest

from coalmine import Audit
from coalmine.log import audit_snapshot
from coalmine.log.commitment import Commitment, Statement
from coalmine.log.rounds_file import encode
from coalmine.measure.settings import Settings

SEED = b"a seed of these tests"
DIM, CANARIES = 400, 20


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


def saved(path, audit, change=lambda item: item, change_final=lambda item: item):
    """Save the audit to a file with its second round and its final model changed."""
    audit.save(path)
    start = len(audit_snapshot.MAGIC) + 8
    size = int.from_bytes(path.read_bytes()[start - 8 : start], "little")
    content, digest = path.read_bytes()[: start + size], b""
    items = [change(item) if item.number == 2 else item for item in audit.log.rounds()]
    for kind, item in [*(("round", item) for item in items), ("final", change_final(audit.log.final))]:
        data, digest = encode(kind, item, digest)
        content += data
    path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())
    return path


def test_an_unchanged_audit_is_loaded(audit, tmp_path):
    loaded = Audit.load(saved(tmp_path / "audit", audit), seed=SEED)
    assert loaded.result(claim=3.0).to_dict() == audit.result(claim=3.0).to_dict()
    assert all(item.law_grid is not None and item.law_tail is not None for item in loaded.log.rounds())


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
def test_load_rejects_a_round_that_no_audit_writes(audit, tmp_path, wrong):
    path = saved(tmp_path / "audit", audit, lambda item: replace(item, **wrong))
    with pytest.raises(ValueError, match=r"record 2 cannot be read|rounds of another audit") as refused:
        Audit.load(path, seed=SEED)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("wrong", [{"norm": 0.0}, {"update_norm": -1.0}, {"cosines": np.ones(3, np.float32)}])
def test_load_rejects_a_final_model_that_no_audit_writes(audit, tmp_path, wrong):
    path = saved(tmp_path / "audit", audit, change_final=lambda item: replace(item, **wrong))
    with pytest.raises(ValueError, match=r"record 4 cannot be read|rounds of another audit"):
        Audit.load(path, seed=SEED)


def edited_head(path, change):
    """Rewrite the file with a changed header, committed to with the right seed where possible."""
    data, start = path.read_bytes(), len(audit_snapshot.MAGIC) + 8
    size = int.from_bytes(data[start - 8 : start], "little")
    head = change(json.loads(data[start : start + size]))
    if isinstance(head, dict) and {"settings", "statement"} <= set(head):
        settings, statement = Settings.from_dict(head["settings"]), Statement(**head["statement"])
        head["commitment"] = vars(Commitment.to(SEED, settings, statement))
    text = json.dumps(head).encode()
    content = audit_snapshot.MAGIC + len(text).to_bytes(8, "little") + text + data[start + size : -32]
    path.write_bytes(content + hashlib.blake2b(content, digest_size=32).digest())


@pytest.mark.parametrize(
    "claim", [{}, {"epsilon": "x"}, {"epsilon": -1.0}, {"epsilon": 1.0, "../..": 2}, {"accounting": 3}]
)
def test_load_rejects_an_invalid_claim(audit, tmp_path, claim):
    path = saved(tmp_path / "audit", audit)
    edited_head(path, lambda head: head | {"statement": head["statement"] | {"claim": claim}})
    with pytest.raises(ValueError, match="claim") as refused:
        Audit.load(path, seed=SEED)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda head: [],
        lambda head: 3,
        lambda head: {},
        lambda head: {name: value for name, value in head.items() if name != "settings"},
        lambda head: {name: value for name, value in head.items() if name != "statement"},
        lambda head: head | {"schema_version": 10**400},
    ],
)
def test_load_rejects_an_invalid_header(audit, tmp_path, change):
    path = saved(tmp_path / "audit", audit)
    edited_head(path, change)
    with pytest.raises(ValueError, match="is not a saved audit of this version") as refused:
        Audit.load(path, seed=SEED)
    assert len(str(refused.value).splitlines()) == 1


def test_many_planned_rounds_do_not_slow_down_the_result(audit, tmp_path):
    path = saved(tmp_path / "audit", audit)
    edited_head(path, lambda head: head | {"settings": head["settings"] | {"rounds": 10**6}})
    assert Audit.load(path, seed=SEED).result(claim=3.0).rounds == 3


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
