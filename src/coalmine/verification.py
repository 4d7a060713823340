"""Verifies a finished audit: its commitment before round 1, its rounds, and the result that follows from them.

A check holds, does not hold, or could not be made. An audit is verified only if every check holds. A check that could not be
made states the missing input.
"""

import json
import os
import re
import tokenize
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.argument_checks import Floats, short_repr
from coalmine.canaries import BlockedCanaries, RotatedCanaries, SphereCanaries
from coalmine.canaries.secret import secret_seed
from coalmine.canaries.seeds import is_guessable
from coalmine.evidence.ladder import presented_times
from coalmine.log.commitment import COMMITMENT_VERSION, TOLERANCE, Precommitment, json_equal
from coalmine.log.files import json_ready, open_regular
from coalmine.log.mapped_rounds import LogReader
from coalmine.log.result_file import PIPELINE_ITEMS, logged_entries
from coalmine.log.round_schema import check_fit
from coalmine.log.rounds_file import DIGEST
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.round import Final
from coalmine.measure.schedule import canary_schedule, schedule_key
from coalmine.measure.settings import Settings
from coalmine.measure.vectors import layer_norms, model_sha256
from coalmine.result.audit_result import MU, AuditResult
from coalmine.result.derivation import derive_result
from coalmine.verdict.amplified_claim import read_claim
from coalmine.verdict.claim import Claim

MATCHES = "the seed, the settings and the statement match the commitment published before round 1"
DIFFERS = (
    "the seed, the settings or the statement do not match the commitment published before round 1: this is another seed, or "
    "they were changed afterwards"
)
COSINE_TOLERANCE = 1e-5  # tolerance of a cosine in units of its null std: cosines are stored in single precision
SUM_TOLERANCE = 1e-3  # relative tolerance of the final update along all canaries against the sum of the rounds
LARGEST_SETTING = 1e100
SHA256 = 32  # bytes
DERIVED = ("reason",)  # entries that are generated from others, in words that may change
UNREADABLE = (  # errors of numpy's reader for files with a strange header
    ArithmeticError, EOFError, LookupError, MemoryError, OSError, RecursionError, SyntaxError, TypeError, ValueError,
    tokenize.TokenError,
)  # fmt: skip
UNCOMMITTED = ("analytical_epsilon", "population", "noise_multiplier")  # numbers that a trainer knows before round 1
ADDED = ("log_digest", "schema_version")  # entries that a result has only in its file
IF_CLAIMED = "if_analytical_were_claimed"
INITIAL = "initial.npy"  # in the run directory, if the audit committed to the initial model


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
    statement: Precommitment
    log: LogReader
    stored: dict[str, Any]
    config: dict[str, Any] | None  # None unless it was committed to
    config_sha256: str | None
    seed: int | bytes


def verify_run(
    path: Path,
    seed: int | bytes,
    *,
    model: Path | None = None,
    initial: Path | None = None,
    commitment: str | None = None,
    log_digest: str | None = None,
) -> list[Check]:
    """Every check on a run directory.

    `model` is the final model as one .npy row, and `initial` the initial one: by default initial.npy of the directory, if
    the audit committed to it. `commitment` and `log_digest` were recorded elsewhere, before round 1 and after the last
    round. Without them, the owner of the directory could have made all of it up later.
    """
    seed = secret_seed(seed)  # a traceback may show this frame
    _check_digest("commitment", commitment, 2 * SHA256)
    _check_digest("log digest", log_digest, 2 * DIGEST)
    run = RunDirectory(path)
    settings, published = run.read_record()
    statement = run.read_statement()
    committed = statement.config_sha256 is not None  # any other config could have been written afterwards
    config = run.read_config() if committed and (path / "config.toml").exists() else None
    known = _Evidence(settings, statement, run.map_rounds(), run.read_result(), config, run.config_sha256(), seed)
    if published.version != COMMITMENT_VERSION:
        raise ValueError(f"{path} holds {published.other_version}; verify it with that version")
    opens = published.opens_to(seed, settings, statement)
    if misfit := _misfit(known):
        return [Check("commitment", opens, MATCHES if opens else DIFFERS), Check("log", False, misfit)]
    cosines, added = _model_checks(known, model, _initial_file(path, statement, initial))
    return [
        Check("commitment", opens, MATCHES if opens else DIFFERS),
        _secrecy(known),
        _noted("commitment date", commitment, published.statement_sha256, "before round 1", "the commitment"),
        _noted("log date", log_digest, known.log.digest, "when the run ended", "the digest of the log"),
        _claim(known),
        _rounds(known, all_released=added.held is True),
        _schedule(known),
        cosines,
        added,
        _trainer(known),
        _derived(known),
    ]


def _misfit(known: _Evidence) -> str | None:
    """The reason why the log cannot be one of these settings; None if it can."""
    try:
        for item in (*known.log.kept, *([] if known.log.final is None else [known.log.final])):
            check_fit(item, known.settings)
    except ValueError as error:
        return f"the log does not fit the recorded settings: {error}"
    return None


def _check_digest(name: str, noted: str | None, digits: int) -> None:
    """Reject text that cannot be a digest: a typing error, which proves nothing about the run."""
    if noted is not None and not re.fullmatch(f"[0-9a-f]{{{digits}}}", noted.strip().lower()):
        raise ValueError(f"the {name} must be {digits} hexadecimal digits, got {short_repr(noted)}; copy it whole")


def _secrecy(known: _Evidence) -> Check:
    if known.statement.demonstration or is_guessable(known.seed):
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
            f"give {what} as it was recorded elsewhere {when} ({option}); without it everything here could have been "
            "written later",
        )
    same = noted.strip().lower() == there
    return Check(name, same, f"{what} is {'' if same else 'not '}the one that was recorded elsewhere")


def _claim(known: _Evidence) -> Check:
    """Whether the judged claim is the one that was made before round 1."""
    try:
        judged = AuditResult.from_dict(known.stored).claim
    except ValueError as error:
        return Check("claim", False, f"result.json cannot be read: {error}")
    promised = known.statement.claim
    if promised is None:
        detail = "no claim was made before round 1, so nobody can tell whether it was fitted to the result"
        return Check("claim", None if judged else True, detail if judged else "nothing was claimed")
    if judged is None:
        return Check("claim", False, "a claim was made before round 1, and the result judges none: it was removed")
    made = Claim.from_dict(promised)
    read_by_pipeline = _may_be_completed(made, judged, known.settings)
    fault = _reading_fault(known, judged) if read_by_pipeline else None
    if fault is not None:
        return Check(
            "claim", False, f"the number claimed before round 1 was read otherwise than the run allows: {fault}"
        )
    last_round = max(known.log.numbers, default=0)
    read = (
        judged
        if read_by_pipeline
        else _for_weight(made, judged) or read_claim(made, known.settings, last_round) or made
    )
    different = _differs(made.read_as(read).to_dict(), judged)
    if different:
        return Check("claim", False, f"the claim was changed after round 1: it differs in {', '.join(different)}")
    return Check("claim", True, "the claim is the one made before round 1")


def _differs(promised: dict[str, Any], judged: Claim) -> list[str]:
    """The fields in which a claim differs from the one that was made before round 1."""
    fields = judged.to_dict()
    return [name for name in sorted(fields | promised) if not json_equal(fields.get(name), promised.get(name))]


def _may_be_completed(made: Claim, judged: Claim, settings: Settings) -> bool:
    """Whether the claim leaves its accounting to the pipeline, which completed it.

    The pipeline knows its sampling scheme, unless the audit has a schedule of its own, and how often clients took part.
    """
    if settings.sampling is not None or made.amplified or made.participations or made.sensitivity:
        return False
    same_kind = made.bare or made.counts_sampling == judged.counts_sampling
    return same_kind and (settings.rounds is None or not judged.amplified)


def _for_weight(made: Claim, judged: Claim) -> Claim | None:
    """The claim for a client that weighs more than a canary, which only makes it stricter; None for any other reading."""
    if not made.participations or made.sensitivity or (judged.sensitivity or 0) < made.participations**0.5:
        return None
    times = made.participations if judged.participations else None
    return replace(made, participations=times, sensitivity=judged.sensitivity)


def _reading_fault(known: _Evidence, judged: Claim) -> str | None:
    """The reason why the pipeline cannot have read a bare number as the judged claim; None if it can.

    It knows its sampling scheme, and how often clients took part and weigh: no less than the canaries did.
    """
    rounds = max(known.log.numbers, default=0)
    if judged.sampling is not None:
        covered = judged.sampling.total_rounds
        return None if covered >= rounds else f"it was read for {covered} of {rounds} rounds"
    most = max(int(presented_times(known.log.as_log, known.settings).max()), 1)
    if judged.participations is not None and judged.participations < most:
        return f"it was read for a client in {judged.participations} rounds, and canaries were in up to {most}"
    if judged.sensitivity is not None and judged.sensitivity < (1 - TOLERANCE) * most**0.5:
        return f"it was read for a sensitivity of {judged.sensitivity:.3g}, and canaries had {most**0.5:.3g}"
    if known.settings.rounds is not None and judged.participations == most and judged.sensitivity is None:
        return "the audit's own schedule already says how often canaries take part, so participations were added"
    return None


def _rounds(known: _Evidence, *, all_released: bool) -> Check:
    """Whether all planned rounds are in the log; `all_released` means that no release is missing from the final model."""
    planned = known.settings.rounds or (known.config or {}).get("rounds")
    numbers = known.log.numbers
    if not isinstance(planned, int):
        return Check("rounds", None, f"the audit has {len(numbers)} rounds; their number was not fixed before round 1")
    consecutive = all(number == place for place, number in enumerate(numbers, start=1))
    stopped = known.stored.get("alarm") if consecutive and len(numbers) < planned else None
    if isinstance(stopped, dict) and known.stored.get("verdict") == "VIOLATION":
        return Check("rounds", True, f"the alarm stopped the run after {len(numbers)} of {planned} planned rounds")
    if not consecutive or len(numbers) != planned:
        missing = planned - sum(1 <= number <= planned for number in set(numbers))
        return Check("rounds", False, f"{missing} of {planned} planned rounds are missing")
    skipped = len(numbers) - len(known.log.kept)
    if not skipped:
        return Check("rounds", True, f"all {planned} planned rounds are there")
    detail = f"all {planned} planned rounds are there, {skipped} of them without a release"
    if all_released:
        return Check("rounds", True, f"{detail}, and none is missing from the final model")
    return Check("rounds", None, f"{detail}; nothing shows that they released nothing")


def _schedule(known: _Evidence) -> Check:
    """Whether canaries took part in the rounds that follow from the seed, if the verdict depends on that."""
    settings = known.settings
    if other := _not_drawn(known):
        where = f"in {len(other)} rounds, first in round {other[0]}"
        return Check("schedule", False, f"{where}, the expensive gauges were not measured as the seed draws")
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
    items = known.stored.get("audited")
    item = items.get("participations") if isinstance(items, dict) else None
    facts = item if isinstance(item, dict) else {}
    counted = facts.get("status") == "checked" and facts.get("source", "audit") == "audit"  # not what the pipeline saw
    detail = f"in {len(wrong)} rounds, first in round {wrong[0]}, other canaries took part than the seed says"
    if counted:
        return Check("schedule", False, f"{detail}, though the result counts on the audit's own schedule")
    return Check("schedule", None, f"{detail}: the pipeline chose them itself")


def _not_drawn(known: _Evidence) -> list[int]:
    """The rounds in which the expensive gauges were measured or left out, other than the seed draws them."""
    if all(item.law_coordinates is None for item in known.log.kept):
        return []  # written before the seed drew them
    drawn = ExpensiveRounds(known.settings, schedule_key(known.seed))
    return [
        item.number
        for order, item in enumerate(known.log.kept, start=1)
        if item.law_moments is not None and (item.law_counts is not None) != (order in drawn)
    ]


def _initial_file(path: Path, statement: Precommitment, given: Path | None) -> Path | None:
    """The file of the initial model: the one that is given, or the directory's own, if the audit committed to it."""
    own = path / INITIAL
    return own if given is None and statement.initial_sha256 is not None and own.exists() else given


def _model_checks(known: _Evidence, model: Path | None, initial: Path | None) -> tuple[Check, Check]:
    """Whether the final model has the stored cosines, and whether the rounds add up to its update."""
    settings = known.settings
    canaries: RotatedCanaries | SphereCanaries | BlockedCanaries
    try:
        if settings.blocks:
            canaries = BlockedCanaries(settings.total, settings.blocks, seed=known.seed)
        else:
            kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
            canaries = kind(settings.total, settings.dim, seed=known.seed)
    except ValueError as error:  # settings that were tampered with
        changed = f"the recorded settings allow no canaries ({error}), so they were changed"
        return Check("cosines", False, changed), Check("sum", False, changed)
    final = None if model is None else _read_model(model, settings.dim)
    first = None if initial is None else _read_model(initial, settings.dim)
    return _recomputed(known, canaries, final), _summed(known, canaries, final, first)


def _read_model(file: Path, dim: int) -> Floats:
    """A model from a file; ValueError unless it is one row of `dim` numbers."""
    advice = f"{file} must hold a model as one .npy row of {dim} numbers"
    try:
        with os.fdopen(open_regular(file), "rb") as content:  # a pipe would wait for ever
            if content.read(2) == b"PK":
                raise ValueError(f"{advice}, got an archive of several arrays")
            content.seek(0)
            vector = np.lib.format.read_array(content, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{advice}, but the file does not exist") from None
    except UNREADABLE as error:
        reason = str(error) if str(error).startswith(advice) else f"{advice}, got another file"
        raise ValueError(reason) from None
    if vector.shape != (dim,) or vector.dtype.kind not in "fiu":
        raise ValueError(f"{advice}, got {vector.dtype} of shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{advice}, got NaN or infinity in {(~np.isfinite(vector)).sum()} of them")
    return np.asarray(vector, np.float64)


def _recomputed(known: _Evidence, canaries: Any, vector: Floats | None) -> Check:
    final = known.log.final
    if final is None or vector is None:
        missing = (
            "the audit observed no final model, so there are no cosines to recompute"
            if final is None
            else "give the final model (--model FILE.npy) to recompute its cosines with the canaries"
        )
        return Check("cosines", None, missing)
    off = _largest_difference(canaries, vector, final.cosines)
    if isinstance(off, str):
        return Check("cosines", False, off)
    compared = (
        f"the cosines of the given model differ from the stored ones by at most {off:.2g} null standard deviations"
    )
    if off < _rounding(len(vector)):
        detail = f"{compared}, which is rounding"
        if final.sha256 is None and not known.settings.blocks:
            return Check("cosines", None, f"{detail}, but the log lacks the digest of the final model")
        if final.sha256 not in (None, model_sha256(vector)):
            return Check("cosines", None, f"{detail}, but its numbers are not those that the audit observed")
        return Check("cosines", True, detail)
    return Check(
        "cosines",
        False,
        f"{compared}, more than by rounding: this is another model or another seed, or the stored cosines were changed",
    )


def _rounding(dim: int) -> float:
    return COSINE_TOLERANCE * dim**0.5 + 1e-4


def _largest_difference(canaries: Any, vector: Floats, stored: Any) -> float | str:
    """By how many null standard deviations stored cosines differ from those of a vector at most; or why they cannot fit."""
    cosines = np.asarray(canaries.cosines(vector))
    if cosines.shape != stored.shape:
        return f"{stored.size} cosines are stored but the settings say {cosines.size} canaries: one was changed"
    return float(np.abs(cosines - stored).max()) * len(vector) ** 0.5


def _summed(known: _Evidence, canaries: Any, model: Floats | None, initial: Floats | None) -> Check:
    """Whether the rounds add up to the final model's update along the canaries, as they do if the server is linear."""
    final = known.log.final
    if final is not None and final.layer_moves is not None and not final.layer_moves.any():
        return Check("sum", None, "the final model is the initial one, so there is nothing to add up")
    if final is None or final.update_cosines is None or final.update_norm is None:
        return Check("sum", None, "the audit does not know the initial model, so the rounds cannot be added up")
    server = (known.config or {}).get("server")
    server = server if isinstance(server, dict) else None
    if server is not None and server.get("optimizer", "sgd") != "sgd":
        return Check(
            "sum", None, f"the server's optimizer ({server['optimizer']}) is not linear, so rounds do not add up"
        )
    momentum, rate = (_server_number(server, name) for name in ("momentum", "learning_rate"))
    if momentum is not None and not 0 <= momentum <= 1:
        return Check("sum", False, f"the config's server.momentum must lie in [0, 1], got {momentum:g}: it was changed")
    update = np.asarray(final.update_cosines, np.float64) * final.update_norm
    total = _weighted_sum(known.log, momentum=momentum or 0.0)
    if total is None or total.shape != update.shape:
        return Check("sum", False, "the rounds' cosines do not fit the final model's: one of them was changed")
    if rate is None:
        rate = max(float(total @ update), 0.0) / max(float(total @ total), 1e-300)
    off = float(np.linalg.norm(update - rate * total)) / max(float(np.linalg.norm(update)), 1e-300)
    if off < SUM_TOLERANCE:
        detail = f"the rounds add up to the final update, to {off:.1g} of its length"
        return _tied_to_model(known, canaries, final, model, initial, detail)
    detail = f"the rounds do not add up to the final update: {off:.2g} of its length is missing or too much"
    if server is None:
        return Check(
            "sum",
            None,
            f"{detail}. A linear server (no Adam, no decay) must add up; the kind of this server is unknown",
        )
    return Check("sum", False, f"{detail}: rounds were replaced, dropped or changed, or the model was")


def _server_number(server: dict[str, Any] | None, name: str) -> float | None:
    """A number of the config's server; None if it has none that is usable."""
    value = (server or {}).get(name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_SETTING
    return float(value) if usable and value is not None else None


def _tied_to_model(
    known: _Evidence, canaries: Any, final: Final, model: Floats | None, initial: Floats | None, detail: str
) -> Check:
    """Whether the update to which the rounds add up leads from the initial model to the final one."""
    if model is None or initial is None:
        missing = " and ".join(
            text
            for text, vector in (("final model (--model)", model), ("initial one (--initial-model)", initial))
            if vector is None
        )
        return Check("sum", None, f"{detail}; give the {missing} to check that it is that of the model")
    committed = known.statement.initial_sha256
    if committed is not None and model_sha256(initial) != committed:
        return Check("sum", False, "the initial model is not the one that was committed to before round 1")
    moved = model - initial
    length = float(np.linalg.norm(moved))
    assert final.update_norm is not None
    if not length or abs(length / final.update_norm - 1) > SUM_TOLERANCE:
        return Check(
            "sum", False, f"the models differ by a vector of length {length:.4g}, the log says {final.update_norm:.4g}"
        )
    off = _largest_difference(canaries, moved, final.update_cosines)
    sizes = [size for _, size in known.settings.layers] or [len(moved)]
    if final.layer_moves is None:
        return Check("sum", False, "the log lacks the lengths of the layers' updates: it was changed")
    in_order = not known.settings.shards  # otherwise a layer is in several places of the vector
    if in_order and not np.allclose(layer_norms(moved, sizes), final.layer_moves, rtol=SUM_TOLERANCE, atol=0):
        return Check("sum", False, "the lengths of the layers' updates in the log are not those of the models")
    if isinstance(off, str) or off > _rounding(len(moved)):
        return Check(
            "sum", False, "the update to which the rounds add up is not the one from the initial to the final model"
        )
    return Check("sum", True, f"{detail}, which leads from the initial to the final model")


def _weighted_sum(log: LogReader, momentum: float) -> Floats | None:
    """The sum of the rounds along all canaries; a server with momentum adds each round again with decreasing weight."""
    last = max(log.numbers, default=0)
    total: Floats | None = None
    for item in log.rounds():
        left = last - item.number + 1
        weight = float(left) if momentum == 1 else (1 - momentum**left) / (1 - momentum)
        along = weight * item.norm * np.asarray(item.cosines, np.float64)
        if total is not None and along.shape != total.shape:
            return None
        total = along if total is None else total + along
    return total


def _trainer(known: _Evidence) -> Check:
    """Whether the trainer's own entries are those at the end of the log, and its config the committed one."""
    if known.statement.config_sha256 is not None and known.config_sha256 != known.statement.config_sha256:
        return Check("trainer", False, "config.toml is not the one that was committed to before round 1")
    stored, noted = known.stored, known.log.outcome
    facts, entries = dict(known.statement.facts), logged_entries(stored, stored)
    items = facts.pop(PIPELINE_ITEMS, None)
    early = [name for name, value in facts.items() if not json_equal(entries.get(name), value)]
    if isinstance(items, dict):
        now = entries[PIPELINE_ITEMS]
        decided = _decided_by_audit(stored)  # the audit itself may have tested the sampler since
        early += [name for name in {*items, *now} - decided if not json_equal(items.get(name), now.get(name))]
    if early:
        return Check(
            "trainer", False, f"result.json differs in {', '.join(early)} from what was committed to before round 1"
        )
    if noted is None:
        return Check("trainer", None, "the log does not end with the trainer's own entries, such as the accuracy")
    changed = [name for name, value in noted.items() if name not in entries or not json_equal(entries[name], value)]
    if changed:
        return Check("trainer", False, f"result.json differs in {', '.join(changed)} from what the log ended with")
    if known.statement.config_sha256 is None and known.config_sha256 is not None:
        return Check(
            "trainer", None, "config.toml was not committed to before round 1: anyone could have written it since"
        )
    privacy = (known.config or {}).get("privacy")
    if isinstance(privacy, dict) and "noise_multiplier" in privacy:
        noise, configured = stored.get("noise_multiplier"), privacy["noise_multiplier"]
        if noise is not None and not json_equal(noise, configured):
            return Check(
                "trainer",
                False,
                f"the noise multiplier is {short_repr(noise)} in the result, {short_repr(configured)} in the config",
            )
    if not json_equal(stored.get("log_digest"), known.log.digest):
        return Check("trainer", False, "result.json holds a log digest that differs from the log's")
    late = [name for name in UNCOMMITTED if stored.get(name) is not None and name not in facts]
    if late:
        return Check(
            "trainer", None, f"{', '.join(late)}: not committed to before round 1, so this is the auditor's word"
        )
    return Check(
        "trainer",
        True,
        "entries of the trainer are those that the log ended with, and those known before round 1 the committed ones",
    )


def _decided_by_audit(stored: dict[str, Any]) -> set[str]:
    """The sampler, if the audit itself tested it: then the pipeline's own item is replaced."""
    items = stored.get("audited")
    sampler = items.get("sampler") if isinstance(items, dict) else None
    tested = isinstance(sampler, dict) and sampler.get("source") == "audit" and sampler.get("status") == "checked"
    return {"sampler"} if tested else set()


def _derived(known: _Evidence) -> Check:
    """Recompute the result from the stored rounds and compare it with result.json."""
    stored = known.stored
    try:
        result = AuditResult.from_dict(stored)
        watched = known.statement.watched or "alarm" in (stored if known.log.outcome is None else known.log.outcome)
        derived = _derive_again(result, known.log, known.settings, claim=result.claim, watched=watched)
        if_claimed = _if_analytical_were_claimed(known)
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
    changed = [
        name
        for name in again
        if not json_equal(_without_words(stored.get(name)), _without_words(again[name]), abs_tol=TOLERANCE)
    ]
    changed = [name for name in changed if name not in DERIVED]
    if result.settings != known.settings:
        changed.append("settings")
    if not if_claimed:
        changed.append(IF_CLAIMED)
    unknown = stored.keys() - again.keys() - ((known.log.outcome or {}).keys() - {PIPELINE_ITEMS}) - set(ADDED)
    if unknown:
        listed = ", ".join(sorted(map(short_repr, unknown)))
        return Check(
            "result", False, f"result.json holds entries that neither follow from the log nor occur in it: {listed}"
        )
    detail = "recomputing the result from the stored rounds gives result.json"
    if changed:
        detail = (
            f"result.json differs in {', '.join(changed)} from the result recomputed from the stored rounds: one of them "
            "was changed, or another version of coalmine wrote them"
        )
    return Check("result", not changed, detail)


def judge_again(path: Path, max_epsilon: float) -> AuditResult:
    """The result of a finished run, judged against another epsilon; ValueError with one line if it cannot be.

    The number is read as the run's own claim was. If there was none, it is a claim of this number alone.
    """
    run = RunDirectory(path)
    result = AuditResult.from_dict(run.read_result())
    settings, _ = run.read_record()
    log = run.map_rounds()
    claim = Claim.of(max_epsilon) if result.claim is None else replace(result.claim, epsilon=max_epsilon)
    try:
        for item in (*log.kept, *([] if log.final is None else [log.final])):
            check_fit(item, settings)
        return _derive_again(result, log, settings, claim=claim, watched=result.watched)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be judged again from its rounds: {error}") from None


def _derive_again(
    result: AuditResult, log: LogReader, settings: Settings, *, claim: Claim | None, watched: bool
) -> AuditResult:
    """The result that follows from a stored log and what the pipeline stated about itself, with this claim."""
    return derive_result(
        log.as_log,
        settings,
        claim=claim,
        analytical_epsilon=result.analytical_epsilon,
        clients=result.clients,
        audited=[item for item in result.audited if item.source == "pipeline"],
        watched=watched,
    )


def _if_analytical_were_claimed(known: _Evidence) -> bool:
    """Whether the verdict that a claim of the analytical epsilon would get is the one that follows from the log."""
    said, facts = known.stored.get(IF_CLAIMED), known.statement.facts
    if said is None:
        return True
    claim = Claim(
        facts["analytical_epsilon"],
        participations=facts["presentations"],
        sensitivity=None if known.settings.noise is None else facts["sensitivity"],
    )
    verdict = derive_result(known.log.as_log, known.settings, claim=claim).verdict
    return isinstance(said, dict) and verdict is not None and said.get("verdict") == verdict.outcome


def _without_words(value: Any) -> Any:
    """A value of JSON without the sentences that are generated from other entries, at any depth."""
    if isinstance(value, dict):
        return {
            name: _without_words(item)
            for name, item in value.items()
            if name not in DERIVED or not (item is None or isinstance(item, str))
        }
    return [_without_words(item) for item in value] if isinstance(value, list) else value
