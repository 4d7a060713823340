"""Records and settings that no audit writes, found by fuzzing: each is rejected with a one-line error."""

import hashlib
import json
import math

import numpy as np
import pytest

from coalmine import Audit
from coalmine.log.round_schema import check_values
from coalmine.log.rounds_file import RoundLog, encode, scan_records
from coalmine.measure.round import Round

SETTINGS = {"canaries": 30, "seed": b"tests only", "delta": 1e-5}


def observed(dim=200):
    audit, rng = Audit(dim, **SETTINGS), np.random.default_rng(0)
    audit.observe_round(1, rng.normal(size=dim), present=[1, 2])
    return audit


def one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["deep claim", "huge"])
def test_a_record_with_absurd_entries_is_rejected(tmp_path, change):
    Audit(200, **SETTINGS, directory=tmp_path).close()
    path = tmp_path / "audit" / "record.json"
    record = json.loads(path.read_text())
    if change == "huge":
        record["settings"] |= {"dim": 2**60, "canaries": 2**56, "unobserved": 2**56}
        text = json.dumps(record)
    else:
        record["statement"]["claim"] = {"epsilon": "HERE"}
        text = json.dumps(record).replace('"HERE"', "[" * 700 + "]" * 700)
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        Audit(200, **SETTINGS, directory=tmp_path)
    assert one_line(error)


def test_a_canary_count_beyond_any_memory_is_rejected():
    with pytest.raises(ValueError, match="dim must be at most 1,000,000,000,000"):
        Audit(2**60, canaries=2**55, seed=b"tests only", delta=1e-5)


def test_error_names_the_unknown_field_of_a_record(tmp_path):
    item = next(observed().log.rounds())
    data, _ = encode("round", item, b"")
    head_end = data.index(b"{") + data[data.index(b"{") :].index(b"}") + 1
    head = json.loads(data[data.index(b"{") : head_end]) | {"law\nb": 1}
    text, body = json.dumps(head).encode(), data[head_end:-16]
    digest = hashlib.blake2b(text + body, digest_size=16).digest()
    (tmp_path / "log").write_bytes(
        data[:4] + len(text).to_bytes(8, "little") + len(body).to_bytes(8, "little") + text + body + digest
    )
    size = (tmp_path / "log").stat().st_size
    with (tmp_path / "log").open("rb") as file, pytest.raises(ValueError, match="cannot be read") as error:
        list(scan_records(file, size, None))
    assert one_line(error)


def test_a_vector_that_is_almost_all_canaries_is_rejected():
    item = next(observed().log.rounds())
    values = {name: getattr(item, name) for name in vars(item)}
    check_values(item)
    with pytest.raises(ValueError, match="rest must be at least 1e-08 of norm"):
        check_values(Round(**(values | {"rest": 1e-12 * item.norm})))


def test_vectors_beyond_single_precision_are_measured_without_a_warning():
    torch = pytest.importorskip("torch")
    audit = Audit(200, **SETTINGS)
    release = 1e60 * torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    audit.observe_round(1, release, present=[1, 2], others=torch.zeros(200), clip_norm=3.0)
    assert math.isfinite(next(audit.log.rounds()).norm)


def test_an_absurd_number_of_clients_is_rejected():
    with pytest.raises(ValueError, match="clients must be at most 1,000,000,000,000,000, got 1000"):
        observed().result(claim=3.0, clients=10**400)


def test_an_empty_log_has_no_rounds_after_any_round():
    log = RoundLog()
    assert list(log.rounds_after(0)) == []
    audit = observed()
    assert [item.number for item in audit.log.rounds_after(0)] == [1]
    assert list(audit.log.rounds_after(1)) == []
