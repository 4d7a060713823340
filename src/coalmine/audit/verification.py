"""Verifies a finished audit: its commitment before round 1, its rounds, and the result that follows from them.

A check holds, does not hold, or could not be made. An audit is verified only if every check holds. A check that could not be
made states the missing input.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats, shown
from coalmine.audit.claim import Claim
from coalmine.audit.cohort_sampling import configured_sampling
from coalmine.audit.derivation import derive_result
from coalmine.audit.result import MU, AuditResult
from coalmine.audit.schedule import canary_schedule, schedule_key
from coalmine.canaries import BlockedCanaries, RotatedCanaries, SphereCanaries
from coalmine.estimators.amplification import amplified_epsilon
from coalmine.storage.files import json_ready
from coalmine.storage.mapped_rounds import Rounds
from coalmine.storage.record import Settings, Statement
from coalmine.storage.rounds_file import DIGEST, Final
from coalmine.storage.run_directory import RunDirectory

MATCHES = "the seed, the settings and the statement match the commitment published before round 1"
DIFFERS = (
    "the seed, the settings or the statement do not match the commitment published before round 1: this is another seed, or "
    "they were changed afterwards"
)
COSINE_TOLERANCE = 1e-5  # tolerance of a cosine in units of its null std: cosines are stored in single precision
TOLERANCE = 1e-9  # relative tolerance of a result's numbers: processors and libraries differ in the last digits
SUM_TOLERANCE = 1e-3  # relative tolerance of the final update along all canaries against the sum of the rounds
SHA256 = 32  # bytes
COMPUTED = ("analytical", "accountant")  # claims that coalmine computes
DERIVED = ("reason",)  # entries that are generated from others


@dataclass(frozen=True)
class Check:
    """One check: `held` is None if it could not be made; `detail` says what was compared, and the outcome."""

    name: str
    held: bool | None
    detail: str


@dataclass(frozen=True)
class _Evidence:
    """The content of the directory, read once."""

    settings: Settings
    statement: Statement
    log: Rounds
    stored: dict[str, Any]
    config: dict[str, Any] | None
    config_sha256: str | None
    seed: int | bytes


def verify_run(
    path: Path,
    seed: int | bytes,
    *,
    model: Path | None = None,
    commitment: str | None = None,
    log_digest: str | None = None,
) -> list[Check]:
    """Every check on a run directory.

    `model` is the final model as one .npy row. `commitment` and `log_digest` were recorded elsewhere, before round 1
    and after the last round. Without them, the owner of the directory could have made all of it up later.
    """
    _check_digest("commitment", commitment, 2 * SHA256)
    _check_digest("log digest", log_digest, 2 * DIGEST)
    run = RunDirectory(path)
    settings, published = run.read_record()
    statement = run.read_statement()
    config = run.read_config() if (path / "config.toml").exists() else None
    known = _Evidence(settings, statement, run.map_rounds(), run.read_result(), config, run.config_sha256(), seed)
    opens = published.opens_to(seed, settings, statement)
    return [
        Check("commitment", opens, MATCHES if opens else DIFFERS),
        _secrecy(statement),
        _noted("commitment date", commitment, published.statement_sha256, "before round 1", "the commitment"),
        _noted("log date", log_digest, known.log.digest, "when the run ended", "the digest of the log"),
        _claim(known),
        _rounds(known),
        _schedule(known),
        *_model_checks(known, model),
        _trainer(known),
        _derived(known),
    ]


def _check_digest(name: str, noted: str | None, digits: int) -> None:
    """Reject text that cannot be a digest: a typing error, which proves nothing about the run."""
    if noted is not None and not re.fullmatch(f"[0-9a-f]{{{digits}}}", noted.strip().lower()):
        raise ValueError(f"the {name} must be {digits} hexadecimal digits, got {shown(noted)}; copy it whole")


def _secrecy(statement: Statement) -> Check:
    if statement.demonstration:
        return Check(
            "seed",
            None,
            "a demonstration: the seed is so short that others could guess it before the run ended; make one with "
            "`coalmine seed`",
        )
    return Check("seed", True, "the seed is too long to guess")


def _noted(name: str, noted: str | None, there: str, when: str, what: str) -> Check:
    """Whether a digest is the one that was recorded elsewhere."""
    option = "--commitment" if name.startswith("commitment") else "--log-digest"
    if noted is None:
        return Check(
            name,
            None,
            f"give {what} as it was noted elsewhere {when} ({option}); without it everything here could have been written "
            "later",
        )
    same = noted.strip().lower() == there
    return Check(name, same, f"{what} is {'' if same else 'not '}the one that was noted elsewhere")


def _claim(known: _Evidence) -> Check:
    """Whether the judged claim is the one that was made before round 1, on its own or in a committed config."""
    try:
        judged = AuditResult.from_dict(known.stored).claim
    except ValueError as error:
        return Check("claim", False, f"result.json cannot be read: {error}")
    configured = (known.config or {}).get("claim") if known.statement.config_sha256 else None
    promised = known.statement.claim or (configured if isinstance(configured, dict) else None)
    if promised is None:
        detail = "no claim was made before round 1, so nobody can tell whether it was fitted to the result"
        return Check("claim", None if judged else True, detail if judged else "nothing was claimed")
    wanted = promised.get("epsilon") is not None or any(promised.get(name) is True for name in COMPUTED)
    if judged is None:
        removed = "a claim was made before round 1, and the result judges none: it was removed"
        return Check("claim", not wanted, removed if wanted else "nothing was claimed")
    if not wanted:
        return Check("claim", False, "nothing was claimed before round 1, and the result judges a claim")
    different = _differs(promised, judged) if known.statement.claim else _differs_from_config(known, promised, judged)
    if different:
        return Check("claim", False, f"the claim was changed after round 1: it differs in {', '.join(different)}")
    return Check("claim", True, "the claim is the one made before round 1")


def _differs(promised: dict[str, Any], judged: Claim) -> list[str]:
    """The fields in which a claim differs from the one that was made on its own before round 1."""
    fields = judged.to_dict()
    committed = {name: value for name, value in promised.items() if value is not None}
    if judged.amplified:
        committed.setdefault("sampling", None)
    return [name for name, value in committed.items() if not _alike(fields.get(name), value)]


def _differs_from_config(known: _Evidence, promised: dict[str, Any], judged: Claim) -> list[str]:
    """The fields in which a claim differs from the one that follows from a committed config."""
    sampled = promised.get("accountant") is True or promised.get("amplified") is True
    epsilon = promised.get("epsilon")
    if promised.get("analytical") is True:
        epsilon = known.stored.get("analytical_epsilon")
    if not sampled:
        different = ["sampling"] if judged.amplified else []
        return different + ([] if _alike(judged.epsilon, epsilon) else ["epsilon"])
    try:
        wanted = _sampled_claim(known, epsilon)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return ["sampling"]  # no claim follows from this config, so one of them was changed
    return _differs(wanted.to_dict(), judged)


def _sampled_claim(known: _Evidence, epsilon: float | None) -> Claim:
    """The amplified claim that follows from a config; without a number it is the accountant's epsilon."""
    assert known.config is not None
    pattern, noise = known.config["canaries"]["pattern"], known.config["privacy"]["noise_multiplier"]
    sampling = configured_sampling(
        known.config, population=known.stored["population"], canaries=known.settings.canaries
    )
    if sampling is None:
        raise ValueError("no accountant amplifies this participation")
    accounted = float(amplified_epsilon(noise, sampling, known.settings.delta)) if epsilon is None else epsilon
    observed = pattern != "spread"
    return Claim(accounted, sampling=sampling, noise_multiplier=noise or None, sampler_observed=observed)


def _rounds(known: _Evidence) -> Check:
    """Whether all planned rounds are in the log."""
    planned = known.settings.rounds or (known.config or {}).get("rounds")
    numbers = list(known.log.numbers)
    if not isinstance(planned, int):
        return Check("rounds", None, f"the audit has {len(numbers)} rounds; their number was not fixed before round 1")
    if numbers == list(range(1, planned + 1)):
        return Check("rounds", True, f"all {planned} planned rounds are there")
    stopped = known.stored.get("alarm") if numbers == list(range(1, len(numbers) + 1)) else None
    if isinstance(stopped, dict) and known.stored.get("verdict") == "VIOLATION":
        return Check("rounds", True, f"the alarm stopped the run after {len(numbers)} of {planned} planned rounds")
    missing = planned - len(set(numbers) & set(range(1, planned + 1)))
    return Check("rounds", False, f"{missing} of {planned} planned rounds are missing")


def _schedule(known: _Evidence) -> Check:
    """Whether canaries took part in the rounds that follow from the seed, if the verdict depends on that."""
    settings = known.settings
    if settings.rounds is None:
        return Check(
            "schedule", True, "the pipeline chose the canaries' rounds, and the verdict does not count on a schedule"
        )
    key = schedule_key(known.seed)
    planned = canary_schedule(settings, key)
    wrong = [
        entry.number
        for entry in known.log.observed
        if entry.number > settings.rounds or not np.array_equal(np.sort(entry.present), planned(entry.number))
    ]
    if not wrong:
        return Check("schedule", True, "the canaries took part in the rounds that the seed gives them")
    item = known.stored.get("audited", {}).get("participations", {})
    counted = isinstance(item, dict) and item.get("status") == "checked"
    detail = f"in {len(wrong)} rounds, first in round {wrong[0]}, other canaries took part than the seed says"
    if counted:
        return Check("schedule", False, f"{detail}, though the result counts on the audit's own schedule")
    return Check("schedule", None, f"{detail}: the pipeline chose them itself")


def _model_checks(known: _Evidence, model: Path | None) -> Iterator[Check]:
    final, settings = known.log.final, known.settings
    canaries: RotatedCanaries | SphereCanaries | BlockedCanaries
    try:
        if settings.blocks:
            canaries = BlockedCanaries(settings.total, settings.blocks, seed=known.seed)
        else:
            kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
            canaries = kind(settings.total, settings.dim, seed=known.seed)
    except ValueError as error:  # settings that were tampered with
        yield Check("cosines", False, f"the recorded settings allow no canaries ({error}), so they were changed")
        return
    yield _recomputed(canaries, final, model, settings.dim)
    yield _summed(known, final)


def _recomputed(canaries: Any, final: Final | None, model: Path | None, dim: int) -> Check:
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
    cosines = np.asarray(canaries.cosines(vector))
    if cosines.shape != final.cosines.shape:
        detail = (
            f"{final.cosines.size} cosines are stored but the settings say {cosines.size} canaries: one was changed"
        )
        return Check("cosines", False, detail)
    off = float(np.abs(cosines - final.cosines).max()) * dim**0.5
    compared = (
        f"the cosines of the given model differ from the stored ones by at most {off:.2g} null standard deviations"
    )
    if off < COSINE_TOLERANCE * dim**0.5 + 1e-4:
        return Check("cosines", True, f"{compared}, which is rounding")
    return Check(
        "cosines",
        False,
        f"{compared}, more than by rounding: this is another model or another seed, or the stored cosines were changed",
    )


def _summed(known: _Evidence, final: Final | None) -> Check:
    """Whether the rounds add up to the final model's update along the canaries, as they do if the server is linear."""
    if final is None or final.update_cosines is None or final.update_norm is None:
        return Check("sum", None, "the audit does not know the initial model, so the rounds cannot be added up")
    server = (known.config or {}).get("server")
    server = server if isinstance(server, dict) else None
    if server is not None and server.get("optimizer", "sgd") != "sgd":
        return Check(
            "sum", None, f"the server's optimizer ({server['optimizer']}) is not linear, so rounds do not add up"
        )
    update = np.asarray(final.update_cosines, np.float64) * final.update_norm
    total = _weighted_sum(known.log, momentum=float(server.get("momentum", 0.0)) if server else 0.0)
    if total is None or total.shape != update.shape:
        return Check("sum", False, "the rounds' cosines do not fit the final model's: one of them was changed")
    rate = max(float(total @ update), 0.0) / max(float(total @ total), 1e-300)
    if server is not None and isinstance(server.get("learning_rate"), int | float):
        rate = float(server["learning_rate"])
    off = float(np.linalg.norm(update - rate * total)) / max(float(np.linalg.norm(update)), 1e-300)
    if off < SUM_TOLERANCE:
        return Check("sum", True, f"the rounds add up to the final update, to {off:.1g} of its length")
    detail = f"the rounds do not add up to the final update: {off:.2g} of its length is missing or too much"
    if server is None:
        return Check(
            "sum",
            None,
            f"{detail}. A linear server (no Adam, no decay) must add up; the kind of this server is unknown",
        )
    return Check("sum", False, f"{detail}: rounds were replaced, dropped or changed, or the model was")


def _weighted_sum(log: Rounds, momentum: float) -> Floats | None:
    """The sum of the rounds along all canaries; a server with momentum adds each round again with decreasing weight."""
    last = max(log.numbers, default=0)
    total: Floats | None = None
    for item in log.rounds():
        left = last - item.number + 1
        weight = float(left) if momentum == 1 else (1 - momentum**left) / (1 - momentum)
        along = weight * item.norm * np.asarray(item.cosines, np.float64)
        total = along if total is None else total + along
    return total


def _trainer(known: _Evidence) -> Check:
    """Whether the trainer's own entries are those at the end of the log, and its config the committed one."""
    if known.statement.config_sha256 is not None and known.config_sha256 != known.statement.config_sha256:
        return Check("trainer", False, "config.toml is not the one that was committed to before round 1")
    noted = known.log.outcome
    if noted is None:
        return Check("trainer", None, "the log does not end with the trainer's own entries, such as the accuracy")
    changed = [name for name, value in noted.items() if not _alike(known.stored.get(name), value)]
    if changed:
        return Check("trainer", False, f"result.json differs in {', '.join(changed)} from what the log ended with")
    privacy = (known.config or {}).get("privacy")
    if isinstance(privacy, dict) and "noise_multiplier" in privacy:
        stored, configured = known.stored.get("noise_multiplier"), privacy["noise_multiplier"]
        if stored is not None and not _alike(stored, configured):
            return Check(
                "trainer", False, f"the noise multiplier is {stored} in the result and {configured} in the config"
            )
    if not _alike(known.stored.get("log_digest"), known.log.digest):
        return Check("trainer", False, "result.json holds a log digest that differs from the log's")
    return Check("trainer", True, "accuracy and other entries of the trainer are those that the log ended with")


def _derived(known: _Evidence) -> Check:
    """Recompute the result from the stored rounds and compare it with result.json."""
    stored = known.stored
    try:
        result = AuditResult.from_dict(stored)
        derived = derive_result(
            known.log.as_log,
            known.settings,
            claim=result.claim,
            analytical_epsilon=result.analytical_epsilon,
            clients=result.clients,
            audited=[item for item in result.audited if item.source == "pipeline"],
            watched=result.watched or _stops_at_alarms(known.config),
        )
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return Check(
            "result",
            False,
            f"the result cannot be recomputed: nothing follows from the stored rounds, settings and claim ({error}); one of "
            "them was changed",
        )
    again: dict[str, Any] = json.loads(json.dumps(json_ready(derived.to_dict())))
    if MU not in stored:
        again.pop(MU, None)  # results written before it existed
    changed = [name for name, value in again.items() if name not in DERIVED and not _alike(stored.get(name), value)]
    detail = "recomputing the result from the stored rounds gives result.json"
    if changed:
        detail = (
            f"result.json differs in {', '.join(changed)} from the result recomputed from the stored rounds: one of them "
            "was changed, or another version of coalmine wrote them"
        )
    return Check("result", not changed, detail)


def _stops_at_alarms(config: dict[str, Any] | None) -> bool:
    """Whether the run stops at an alarm, according to its config: then its result must state whether there was one."""
    claimed = (config or {}).get("claim")
    return isinstance(claimed, dict) and claimed.get("stop_on_violation") is True


def _alike(one: Any, two: Any) -> bool:
    """Whether two values of JSON are the same, numbers up to the last digits."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        return one == two or math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, dict) and isinstance(two, dict):
        names = (one.keys() | two.keys()) - set(DERIVED)
        return all(name in one and name in two and _alike(one[name], two[name]) for name in names)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(_alike(a, b) for a, b in zip(one, two, strict=True))
    return bool(one == two)
