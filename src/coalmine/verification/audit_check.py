"""Verifies a finished audit: its commitment before round 1, its rounds, and the result that follows from them.

A check holds, does not hold, or could not be made. An audit is verified only if every check holds. A check that could not be
made states the missing input.
"""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coalmine.argument_checks import short_repr
from coalmine.canaries.secret import secret_seed
from coalmine.canaries.seeds import is_guessable
from coalmine.log.commitment import COMMITMENT_VERSION, TOLERANCE, json_equal
from coalmine.log.files import json_ready
from coalmine.log.mapped_rounds import LogReader
from coalmine.log.result_file import PIPELINE_ITEMS
from coalmine.log.round_schema import check_fit
from coalmine.log.rounds_file import DIGEST
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.schedule import canary_schedule, schedule_key
from coalmine.measure.settings import Settings
from coalmine.result.audit_result import MU, AuditResult
from coalmine.result.derivation import derive_result
from coalmine.verdict.claim import Claim
from coalmine.verification.check import Check, Evidence
from coalmine.verification.claim_check import check_claim
from coalmine.verification.model_check import check_model, final_file, initial_file
from coalmine.verification.trainer_check import check_trainer

MATCHES = "the seed, the settings and the statement match the commitment published before round 1"
DIFFERS = (
    "the seed, the settings or the statement do not match the commitment published before round 1: this is another seed, or "
    "they were changed afterwards"
)
SHA256 = 32  # bytes
PLAN_CHECK = "coalmine.simulation.plan_check"  # found by its name, since `simulation` is built on audits
DERIVED = ("reason",)  # entries that are generated from others, in words that may change
ADDED = ("log_digest", "schema_version")  # entries that a result has only in its file


def verify_run(
    path: Path,
    seed: int | bytes,
    *,
    model: Path | None = None,
    initial: Path | None = None,
    commitment: str | None = None,
    log_digest: str | None = None,
    opening: str | None = None,
) -> list[Check]:
    """Every check on a run directory.

    `model` is the final model as one .npy row, and `initial` the initial one: by default model.npy and initial.npy of the
    directory, if the audit committed to the initial one. `commitment` and `log_digest` were recorded elsewhere, before
    round 1 and after the last round. Without them, the owner of the directory could have made all of it up later. So was
    `opening`, after the first round: it shows which of several trainings with one commitment this is.
    """
    seed = secret_seed(seed)  # a traceback may show this frame
    _check_digest("commitment", commitment, 2 * SHA256)
    _check_digest("log digest", log_digest, 2 * DIGEST)
    _check_digest("opening digest", opening, 2 * DIGEST)
    run = RunDirectory(path)
    settings, published = run.read_record()
    statement = run.read_statement()
    committed = statement.config_sha256 is not None  # any other config could have been written afterwards
    config = run.read_config() if committed and (path / "config.toml").exists() else None
    known = Evidence(settings, statement, run.map_rounds(), run.read_result(), config, run.config_sha256(), seed)
    if published.version != COMMITMENT_VERSION:
        raise ValueError(f"{path} holds {published.other_version}; verify it with that version")
    opens = published.opens_to(seed, settings, statement)
    if misfit := _misfit(known):
        return [Check("commitment", opens, MATCHES if opens else DIFFERS), Check("log", False, misfit)]
    cosines, added = check_model(known, final_file(path, known, model), initial_file(path, statement, initial))
    return [
        Check("commitment", opens, MATCHES if opens else DIFFERS),
        _secrecy(known),
        _noted("commitment date", commitment, published.statement_sha256, "before round 1", "the commitment"),
        _noted("log date", log_digest, known.log.digest, "when the run ended", "the digest of the log"),
        _one_training(known, opening),
        check_claim(known),
        _rounds(known, all_released=added.held is True),
        _schedule(known),
        cosines,
        added,
        check_trainer(known),
        *_planned(known),
        _derived(known),
    ]


def _planned(known: Evidence) -> list[Check]:
    """For a directory of `coalmine run`, whether everything follows from its config."""
    if known.config is None or "trainer" in known.config or not {"task", "privacy"} <= known.config.keys():
        return []
    try:
        check: Check = importlib.import_module(PLAN_CHECK).check_plan(known)
    except ImportError as error:
        check = Check(
            "plan", None, f"to make the plan again from config.toml: pip install 'coalmine[simulation]' ({error})"
        )
    return [check]


def _misfit(known: Evidence) -> str | None:
    """The reason why the log cannot be that of a finished run with these settings; None if it can."""
    if known.log.left_over and known.log.outcome is not None:
        return f"{known.log.left_over} bytes follow the end of the finished log: they were added later"
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


def _secrecy(known: Evidence) -> Check:
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


def _one_training(known: Evidence, opening: str | None) -> Check:
    """Whether the commitment can open to one training alone: that of its seed, or the one whose first round was recorded."""
    if opening is not None:
        same = opening.strip().lower() == known.log.opening
        return Check(
            "training", same, f"the first round is {'' if same else 'not '}the one that was recorded elsewhere"
        )
    if isinstance((known.config or {}).get("seed"), int) and "trainer" not in (known.config or {}):
        return Check("training", True, "the commitment binds the training's seed, so it opens to one training")
    detail = (
        "one of possibly several trainings: the operator could have trained several times with this commitment. The digest "
        "of the first round, recorded elsewhere right after it (--opening), would show that this is the first"
    )
    return Check("training", None, detail, possible=False)


def _rounds(known: Evidence, *, all_released: bool) -> Check:
    """Whether all planned rounds are in the log; `all_released` means that no release is missing from the final model."""
    planned = known.settings.rounds or known.statement.rounds or (known.config or {}).get("rounds")
    numbers = known.log.numbers
    if not isinstance(planned, int):
        return Check("rounds", None, f"the audit has {len(numbers)} rounds; their number was not fixed before round 1")
    consecutive = all(number == place for place, number in enumerate(numbers, start=1))
    stopped = known.stored.get("alarm") if consecutive and len(numbers) < planned else None
    if isinstance(stopped, dict) and known.stored.get("verdict") == "VIOLATION":
        return Check("rounds", True, f"the alarm stopped the run after {len(numbers)} of {planned} planned rounds")
    if consecutive and len(numbers) > planned:
        return Check("rounds", False, f"{len(numbers)} rounds ran, and {planned} were planned before round 1")
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


def _schedule(known: Evidence) -> Check:
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


def _not_drawn(known: Evidence) -> list[int]:
    """The rounds in which the expensive gauges were measured or left out, other than the seed draws them."""
    if all(item.law_coordinates is None for item in known.log.kept):
        return []  # written before the seed drew them
    drawn = ExpensiveRounds(known.settings, schedule_key(known.seed))
    return [
        item.number
        for order, item in enumerate(known.log.kept, start=1)
        if item.law_moments is not None and (item.law_counts is not None) != (order in drawn)
    ]


def _derived(known: Evidence) -> Check:
    """Recompute the result from the stored rounds and compare it with result.json."""
    stored = known.stored
    try:
        result = AuditResult.from_dict(stored)
        watched = known.statement.watched or "alarm" in (stored if known.log.outcome is None else known.log.outcome)
        derived = _derive_again(result, known.log, known.settings, claim=result.claim, watched=watched)
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
        log,
        settings,
        claim=claim,
        analytical_epsilon=result.analytical_epsilon,
        clients=result.clients,
        audited=[item for item in result.audited if item.source == "pipeline"],
        watched=watched,
    )


def _without_words(value: Any) -> Any:
    """A value of JSON without the sentences that are generated from other entries, at any depth."""
    if isinstance(value, dict):
        return {
            name: _without_words(item)
            for name, item in value.items()
            if name not in DERIVED or not (item is None or isinstance(item, str))
        }
    return [_without_words(item) for item in value] if isinstance(value, list) else value
