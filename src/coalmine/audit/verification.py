"""Verify a finished audit: the seed must match the commitment, and the stored rounds must give the result."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.audit.derivation import derive_result
from coalmine.audit.result import AuditResult
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.storage.files import json_ready
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import RoundLog
from coalmine.storage.run_directory import RunDirectory

MATCHES = "the seed and the settings match the commitment published before round 1"
DIFFERS = (
    "the seed and the settings do not match the commitment published before round 1: this is another seed, or the settings "
    "were changed afterwards"
)
TOLERANCE = 1e-5  # of a cosine, in units of its null std: cosines are stored in single precision


@dataclass(frozen=True)
class Check:
    """One check: `held` is None if it could not be made; `detail` says what was compared and what that means."""

    name: str
    held: bool | None
    detail: str


def verify_run(path: Path, seed: int | bytes, *, model: Path | None = None) -> list[Check]:
    """Every check on a run directory. `model` is the final model as one .npy row, to recompute its cosines."""
    run = RunDirectory(path)
    settings, commitment = run.read_record()
    opens = commitment.opens_to(seed, settings)
    checks = [Check("commitment", opens, MATCHES if opens else DIFFERS)]
    log = run.read_log()
    kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
    try:
        canaries = kind(settings.total, settings.dim, seed=seed)
    except ValueError as error:  # settings that were tampered with
        checks.append(
            Check("cosines", False, f"the recorded settings allow no canaries ({error}), so they were changed")
        )
    else:
        checks.append(_recomputed(canaries, log.final, model, settings.dim))
    return [*checks, _derived(run.read_result(), log, settings)]


def _derived(stored: dict[str, Any], log: RoundLog, settings: Settings) -> Check:
    """Recompute the result from the stored rounds and compare it with result.json."""
    try:
        told = AuditResult.from_dict(stored)
        derived = derive_result(
            log,
            settings,
            claim=told.claim,
            analytical_epsilon=told.analytical_epsilon,
            clients=told.clients,
            audited=[item for item in told.audited if item.source == "pipeline"],
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Check(
            "result",
            False,
            f"the result cannot be recomputed: nothing follows from the stored rounds, settings and claim ({error}); one of "
            "them was changed",
        )
    again: dict[str, Any] = json.loads(json.dumps(json_ready(derived.to_dict())))
    changed = [name for name, value in again.items() if stored.get(name) != value]
    detail = "recomputing the result from the stored rounds gives result.json"
    if changed:
        detail = (
            f"result.json differs in {', '.join(changed)} from the result recomputed from the stored rounds: one of them "
            "was changed, or another version of coalmine wrote them"
        )
    return Check("result", not changed, detail)


def _recomputed(canaries: Any, final: Any, model: Path | None, dim: int) -> Check:
    if final is None or model is None:
        missing = (
            "the audit observed no final model, so there are no cosines to recompute"
            if final is None
            else "give the final model (--model FILE.npy) to recompute its cosines with the canaries"
        )
        return Check("cosines", None, missing)
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
        detail = f"{final.cosines.size} cosines are stored but the settings say {found.size} canaries: one was changed"
        return Check("cosines", False, detail)
    off = float(np.abs(found - final.cosines).max()) * dim**0.5
    compared = (
        f"the cosines of the given model differ from the stored ones by at most {off:.2g} null standard deviations"
    )
    if off < TOLERANCE * dim**0.5 + 1e-4:
        return Check("cosines", True, f"{compared}, which is rounding")
    return Check(
        "cosines",
        False,
        f"{compared}, more than by rounding: this is another model or another seed, or the stored cosines were changed",
    )
