"""`Audit.load` of damaged files, most with a valid digest: a ValueError, or the same audit."""

import hashlib
import json
import random
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from msgspec import convert

from coalmine import Audit
from coalmine.log.audit_snapshot import DIGEST, MAGIC
from coalmine.log.commitment import Commitment, Statement
from coalmine.measure.settings import Settings
from fuzz.cases import Case, FaultError, allow
from fuzz.run_directories import chained, split_records
from fuzz.values import damaged, edited

SEED = b"a seed of the fuzzer"


def make_case(rng: random.Random, folder: Path) -> Case:
    """A saved audit with changes in its header, its records or its bytes."""
    data, kind = _saved(rng.randrange(3)), rng.randrange(5)
    if kind == 0:
        said, data = "damaged bytes", damaged(data, rng)
    elif kind == 1:
        said, data = "damaged bytes with a right digest", _sealed(damaged(data[:-DIGEST], rng))
    elif kind in (2, 3):
        said, data = "edited head", _edited_head(data, rng)
    else:
        said, data = "edited record", _edited_record(data, rng)
    path = folder / "audit"
    path.write_bytes(data)
    return Case(said, lambda: _check(path))


def _check(path: Path) -> None:
    with allow(ValueError, OSError):
        audit = Audit.load(path, seed=SEED)
        result = audit.result(claim=3.0).to_dict()
        if any(value != value for value in (result["dim"], result["rounds"])):
            raise FaultError("a result with NaN in its settings")
        audit.save(path)


@cache
def _saved(kind: int) -> bytes:
    layers = [("first", 100), ("second", 300)] if kind == 1 else None
    audit = Audit(400, canaries=20, seed=SEED, delta=1e-5, rounds=4, presentations=(1, 2), layers=layers)
    rng = np.random.default_rng(kind)
    for t in range(1, 5):
        present = audit.canaries_in_round(t)
        others = rng.normal(size=400) * 0.1
        delta = audit.updates(present, clip_norm=1.0) + others + rng.normal(size=400)
        audit.observe_round(t, delta, present=present, others=others if kind else None, noise_std=1.0, clip_norm=1.0)
    if kind == 2:
        audit.observe_final(rng.normal(size=400), initial=rng.normal(size=400))
    with tempfile.TemporaryDirectory() as folder:
        audit.save(Path(folder) / "audit")
        return (Path(folder) / "audit").read_bytes()


def _parts(data: bytes) -> tuple[dict, bytes]:
    start = len(MAGIC) + 8
    size = int.from_bytes(data[len(MAGIC) : start], "little")
    return json.loads(data[start : start + size]), data[start + size : -DIGEST]


def _joined(head: dict, records: bytes) -> bytes:
    text = json.dumps(head, sort_keys=True).encode()
    return _sealed(MAGIC + len(text).to_bytes(8, "little") + text + records)


def _sealed(content: bytes) -> bytes:
    return content + hashlib.blake2b(content, digest_size=DIGEST).digest()


def _edited_head(data: bytes, rng: random.Random) -> bytes:
    """Change the header; half of the time with a commitment to the new settings."""
    head, records = _parts(data)
    head = edited(head, rng)
    if rng.random() < 0.5:
        try:
            settings = Settings.from_dict(head["settings"])
            statement = convert(head["statement"], Statement)
            head["commitment"] = vars(Commitment.to(SEED, settings, statement))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError):  # no commitment is possible
            return _joined(head, records)
    return _joined(head, records)


def _edited_record(data: bytes, rng: random.Random) -> bytes:
    head, rest = _parts(data)
    records = split_records(rest)
    place = rng.randrange(len(records))
    text, body = records[place]
    if rng.random() < 0.3:
        records[place] = text, rng.choice((body[:-4], body + b"\0" * 8, b"\xff" * len(body), bytes(len(body))))
    elif rng.random() < 0.2:
        records.insert(place, records[rng.randrange(len(records))])
    else:
        records[place] = json.dumps(edited(json.loads(text), rng)).encode(), body
    return _joined(head, chained(records))
