"""Checking a finished audit: does the seed open the commitment, and does the result follow from the stored rounds?"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.audit.audit import derive_result
from coalmine.audit.coverage import AuditedItem
from coalmine.audit.numbers import json_ready
from coalmine.audit.rounds import RoundLog
from coalmine.audit.run_directory import RunDirectory
from coalmine.audit.settings import Settings
from coalmine.audit.verdict import Claim
from coalmine.canaries import RotatedCanaries, SphereCanaries

TOLERANCE = 1e-5  # of a cosine, in units of its null std: cosines are stored in single precision


@dataclass(frozen=True)
class Check:
    """One thing that was checked, and whether it held; None where there was nothing to check."""

    name: str
    held: bool | None
    detail: str


def verify_run(path: Path, seed: int | bytes, *, model: Path | None = None) -> list[Check]:
    """Every check on a run directory. `model` is the final model as one .npy row, to recompute its cosines."""
    run = RunDirectory(path)
    settings, commitment = run.read_record()
    opens = commitment.opens_to(seed, settings)
    checks = [
        Check("commitment", opens, "seed and settings give the published hash" if opens else "they do not give it")
    ]
    log = run.read_log()
    kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
    try:
        canaries = kind(settings.total, settings.dim, seed=seed)
    except ValueError as error:  # settings that were tampered with
        checks.append(Check("cosines", False, f"there can be no such canaries ({error})"))
    else:
        checks.append(_recomputed(canaries, log.final, model, settings.dim))
    return [*checks, _derived(run.read_result(), log, settings)]


def _derived(stored: dict[str, Any], log: RoundLog, settings: Settings) -> Check:
    """Whether the stored result is the one that follows from the rounds; what nothing follows from was tampered with."""
    try:
        claim = None
        if stored.get("claimed_epsilon") is not None:
            claim = Claim(
                epsilon=float(stored["claimed_epsilon"]),
                accounting=stored["claim_accounting"],
                participations=stored.get("claim_participations"),
                sensitivity=_number(stored.get("claim_sensitivity")),
            )
        derived = derive_result(
            log,
            settings,
            claim=claim,
            analytical_epsilon=_number(stored.get("analytical_epsilon")),
            clients=stored.get("clients"),
            audited=[
                AuditedItem(name, **item) for name, item in stored["audited"].items() if item["source"] == "pipeline"
            ],
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Check("result", False, f"nothing follows from the stored rounds, settings and claim ({error})")
    again: dict[str, Any] = json.loads(json.dumps(json_ready(derived.to_dict())))
    changed = [name for name, value in again.items() if stored.get(name) != value]
    detail = "result.json follows from the stored rounds" if not changed else f"differs in {', '.join(changed)}"
    return Check("result", not changed, detail)


def _recomputed(canaries: Any, final: Any, model: Path | None, dim: int) -> Check:
    if final is None or model is None:
        missing = "no final model was observed" if final is None else "no model was given (--model FILE.npy)"
        return Check("cosines", None, f"not recomputed: {missing}")
    try:
        vector = np.load(model, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{model} must hold the final model as one .npy row: {error}") from None
    if not isinstance(vector, np.ndarray):
        raise ValueError(f"{model} must hold the final model as one .npy row, got an archive of several arrays")
    if vector.shape != (dim,) or vector.dtype.kind not in "fiu":
        raise ValueError(f"{model} must hold one row of {dim} numbers, got {vector.dtype} of shape {vector.shape}")
    found = np.asarray(canaries.cosines(vector))
    if found.shape != final.cosines.shape:
        return Check("cosines", False, f"{final.cosines.size} are stored, of {found.size} canaries")
    off = float(np.abs(found - final.cosines).max()) * dim**0.5
    return Check("cosines", off < TOLERANCE * dim**0.5 + 1e-4, f"largest difference {off:.2g} null stds")


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
