"""The receipt of an audit: an in-toto statement that ties the verdict to the model, the log, the commitment and the code.

https://github.com/in-toto/attestation/tree/main/spec/v1. Its predicate is that of docs/reference/receipt.schema.json.
"""

import hashlib
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coalmine.evidence.levels import TOTAL
from coalmine.log.commitment import json_equal
from coalmine.log.files import PIECE, json_ready, open_regular, parse_json
from coalmine.log.model_file import FINAL
from coalmine.log.run_directory import RunDirectory
from coalmine.result.audit_result import AuditResult
from coalmine.verdict.verdict import Verdict
from coalmine.verification import Check
from coalmine.version import __version__

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:coalmine:privacy-audit:v1"
NUMBERS = "float32Numbers"  # the digest of a model's numbers, which is that of the log
MOST_NAMED = 5
NOT_COMPARED = ("coalmine", "data")  # the version that wrote it, and what the run does not know


def receipt(directory: Path, *, data: Path | None = None) -> dict[str, Any]:
    """The statement about a finished run; `data` is a file or a folder whose digest it shall hold."""
    run = RunDirectory(directory)
    result = AuditResult.from_dict(run.read_result())
    _, commitment = run.read_record()
    stated, log = run.read_statement(), run.map_rounds()
    if log.final is None or log.final.sha256 is None:
        raise ValueError(f"{directory} holds no final model, so a receipt has no subject: observe_final before finish")
    digest = {NUMBERS: log.final.sha256}
    file = directory / FINAL
    subject = {"name": FINAL, "digest": digest | ({"sha256": file_sha256(file)} if file.exists() else {})}
    code = dict(stated.code or {})
    verdict, claim = result.verdict, result.claim
    pipeline = result.trainer.pipeline
    declared = [item.clip_norm for item in log.kept if item.clip_declared]
    divisor = pipeline.clip_norm / statistics.median(declared) if declared and pipeline.clip_norm else None
    predicate = {
        "coalmine": __version__,
        "claim": None if claim is None else claim.to_dict() | {"delta": result.settings.delta},
        "unit": result.trainer.named_unit or (None if claim is None else claim.unit) or result.trainer.unit,
        "adjacency": None if claim is None else claim.stated_adjacency,
        "scheme": None if claim is None or claim.sampling is None else str(claim.sampling),
        "clip_norm": pipeline.clip_norm,
        "divisor": divisor,
        "rounds": result.rounds,
        "verdict": None if verdict is None else _verdict(verdict),
        "error_rates": {"violation_of_a_true_claim": TOTAL, "power": verdict and verdict.facts.get("power")},
        "audited": {item.name: item.status for item in result.audited},
        "not_checked": [item.name for item in result.audited if item.is_open],
        "commitment": commitment.statement_sha256,
        "log_digest": log.digest,
        "demonstration": stated.demonstration,
        "environment": code.pop("environment", None),
        "code": code or None,
        "data": None if data is None else {"name": data.name, "sha256": data_sha256(data)},
    }
    return {
        "_type": STATEMENT,
        "subject": [subject],
        "predicateType": PREDICATE,
        "predicate": json.loads(json.dumps(json_ready(predicate))),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"outcome": str(verdict.outcome), "code": verdict.code, "reason": verdict.reason}


def check_receipt(payload: bytes, directory: Path | None, model: Path | None) -> Iterator[Check]:
    """Whether a receipt is one, is about this model, and follows from this run."""
    try:
        values = parse_json(payload)
        kinds = values["_type"], values["predicateType"]
        (subject,), predicate = values["subject"], values["predicate"]
        digests = dict(subject["digest"])
        outcome = "no verdict" if predicate["verdict"] is None else predicate["verdict"]["outcome"]
        if kinds != (STATEMENT, PREDICATE):
            raise ValueError("another type")
    except (ValueError, KeyError, TypeError) as error:
        yield Check("receipt", False, f"the signed payload is no receipt of an audit ({error})")
        return
    if model is not None:
        same = file_sha256(model) == digests.get("sha256")
        yield Check("subject", same, f"the given model is {'' if same else 'not '}the file that the receipt is about")
    if directory is None:
        detail = f"without the run directory, {outcome} is the signer's word"
        yield Check("receipt", None, detail, possible=False)
        return
    expected = receipt(directory)
    ours = dict(expected["predicate"])
    names = (predicate.keys() | ours.keys()) - set(NOT_COMPARED)
    wrong = [name for name in sorted(names) if not json_equal(predicate.get(name), ours.get(name))]
    kept = expected["subject"][0]["digest"]
    if NUMBERS not in digests or any(digests[name] != kept[name] for name in digests.keys() & kept.keys()):
        wrong.insert(0, "subject")
    if wrong:
        named = ", ".join(wrong[:MOST_NAMED])
        yield Check("receipt", False, f"the run gives another {named} than the receipt states")
    else:
        yield Check("receipt", True, f"the run gives what the receipt states: {outcome}")


def data_sha256(path: Path) -> str:
    """The SHA-256 of a file; of a folder, that of the names and digests of its files, as `sha256sum` lists them."""
    if not path.exists():
        raise ValueError(f"--data must be a file or a folder, but {path} does not exist")
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    lines = "".join(f"{file_sha256(file)}  {file.relative_to(path).as_posix()}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 of an ordinary file."""
    digest = hashlib.sha256()
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            while piece := file.read(PIECE):
                digest.update(piece)
    except FileNotFoundError:
        raise ValueError(f"{path} must be a file, but it does not exist") from None
    return digest.hexdigest()
