"""Records and settings that no audit writes, as random edits of files and arguments made them: one line each."""

import hashlib
import json
import math

import numpy as np
import pytest

from coalmine import Audit
from coalmine.storage.audit_snapshot import DIGEST, MAGIC
from coalmine.storage.round_schema import check_values
from coalmine.storage.rounds_file import Round, RoundLog, encode, scan_records

SETTINGS = {"canaries": 30, "seed": b"tests only", "delta": 1e-5}


def observed(dim=200):
    audit, rng = Audit(dim, **SETTINGS), np.random.default_rng(0)
    audit.observe_round(1, rng.normal(size=dim), present=[1, 2])
    return audit


def one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["deep claim", "huge"])
def test_a_saved_audit_with_an_absurd_head_is_refused(tmp_path, change):
    path = tmp_path / "audit"
    observed().save(path)
    content = path.read_bytes()[:-DIGEST]
    start = len(MAGIC) + 8
    size = int.from_bytes(content[len(MAGIC) : start], "little")
    head = json.loads(content[start : start + size])
    if change == "huge":
        head["settings"] |= {"dim": 2**60, "canaries": 2**56, "unobserved": 2**56}
        text = json.dumps(head).encode()
    else:
        nested = "[" * 700 + "]" * 700
        head["statement"]["claim"] = {"epsilon": "HERE"}
        text = json.dumps(head).replace('"HERE"', nested).encode()
    content = MAGIC + len(text).to_bytes(8, "little") + text + content[start + size :]
    path.write_bytes(content + hashlib.blake2b(content, digest_size=DIGEST).digest())
    with pytest.raises(ValueError) as error:
        Audit.load(path, seed=b"tests only")
    assert one_line(error)


def test_too_many_canaries_for_any_memory_are_one_line():
    with pytest.raises(ValueError, match="dim must be at most 1,000,000,000,000"):
        Audit(2**60, canaries=2**55, seed=b"tests only", delta=1e-5)


def test_an_unknown_field_of_a_record_is_named_on_one_line(tmp_path):
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


def test_a_vector_that_is_nearly_all_canaries_is_refused():
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


def test_more_clients_than_there_can_be_are_one_line():
    with pytest.raises(ValueError, match="clients must be at most 1,000,000,000,000,000, got 1000"):
        observed().result(claim=3.0, clients=10**400)


def test_a_log_without_rounds_has_none_after_any():
    log = RoundLog()
    assert list(log.rounds_after(0)) == []
    audit = observed()
    assert [item.number for item in audit.log.rounds_after(0)] == [1]
    assert list(audit.log.rounds_after(1)) == []
