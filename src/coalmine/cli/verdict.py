"""`coalmine verdict`: the verdicts of finished runs, and an exit code for scripts."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from coalmine.audit.legs import LEGS
from coalmine.cli.exit_codes import BAD_INPUT, VERDICT_CODES
from coalmine.cli.named_runs import (
    find_runs,
    how_to_finish,
    is_finished,
    print_notes,
    print_problems,
    read_error,
)
from coalmine.cli.options import Command, run_directories
from coalmine.cli.output import print_columns, print_json, shown_number
from coalmine.estimators.sampling import sampling_from_dict
from coalmine.storage.run_directory import RunDirectory

NO_CLAIM = "nothing was claimed, so there is nothing to judge: give `coalmine run` a --claim, or the audit a claim"


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """One run's line. `verdict` is None where there is none, and `reason` then says why and what to do.

    `error` is None unless the run cannot be read. `legs` are the outcomes of accounting, noise and sampling, for a claim
    amplified by sampling; `claim_sampling` is its scheme in words.
    """

    run: str
    claimed_epsilon: float | None = None
    claim_accounting: str | None = None
    claim_sampling: str | None = None
    legs: dict[str, str] | None = None
    verdict: str | None = None
    reason: str | None = None
    error: str | None = None


@click.command(cls=Command)
@run_directories()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def verdict(directories: tuple[Path, ...], as_json: bool) -> int:
    """Print the verdict of each run.

    The exit code is that of the worst verdict: 0 if every run is PASS, 1 if any is VIOLATION, 3 if any is UNDERPOWERED
    or has no verdict, because it is not finished or nothing was claimed. 2 if a path holds no run or a damaged one; the
    other verdicts are still printed.

    A claim amplified by sampling has three legs, accounting, noise and sampling. Their outcomes stand before the reason;
    PASS needs all three.

    The verdict is read from result.json; `coalmine verify` checks that it follows from the recorded rounds.
    """
    named = find_runs(directories)
    found = [read_verdict(run) for run in named.runs]
    found += [RunVerdict(run=str(path), error=line) for path, line in named.problems.items()]
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_columns([_cells(each) for each in found if each.error is None])
    print_notes(f"{line}: left out" for line in named.ignored.values())
    problems = [each.error for each in found if each.error is not None]
    print_problems(problems)
    return BAD_INPUT if problems else worst_exit_code(found)


def read_verdict(run: Path) -> RunVerdict:
    """The verdict in a run's result.json, or why there is none."""
    name = str(run)
    if not is_finished(run):
        return RunVerdict(run=name, reason=f"the run is not finished: {how_to_finish(run)}")
    try:
        return _from_result(name, RunDirectory(run).read_result())
    except (KeyError, TypeError, OverflowError, AttributeError):
        error = f"{run / 'result.json'} is not a result as an audit writes it; restore it from a copy"
        return RunVerdict(run=name, error=error)
    except (OSError, ValueError, RecursionError) as error:
        return RunVerdict(run=name, error=read_error(run, error))


def worst_exit_code(found: Sequence[RunVerdict]) -> int:
    """1 if any run is VIOLATION, else 3 if any is UNDERPOWERED or has no verdict, else 0."""
    verdicts = {each.verdict or "UNDERPOWERED" for each in found}
    return next(VERDICT_CODES[name] for name in ("VIOLATION", "UNDERPOWERED", "PASS") if name in verdicts)


def _from_result(run: str, result: dict[str, Any]) -> RunVerdict:
    """KeyError or TypeError where the result has another shape: a gate must not read a damaged file as a verdict."""
    claim, outcome, reason = result["claimed_epsilon"], result["verdict"], result["reason"]
    if claim is None and outcome is None:
        return RunVerdict(run=run, reason=NO_CLAIM)
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not math.isfinite(claim):
        raise TypeError("a claim is a finite number")
    if outcome not in list(VERDICT_CODES) or not isinstance(reason, str):
        raise TypeError("a claim has a verdict and a reason")
    accounting = result["claim_accounting"]
    if not isinstance(accounting, str):
        raise TypeError("a claim has an accounting")
    sampling, legs = result.get("claim_sampling"), _legs(result["legs"])
    if (accounting == "amplified") != (sampling is not None) or (sampling is not None) != bool(legs):
        raise TypeError("a claim amplified by sampling has a scheme and three legs")
    if outcome == "PASS" and set(legs.values()) - {"PASS"}:
        raise TypeError("a PASS has no leg that did not pass")
    return RunVerdict(
        run=run,
        claimed_epsilon=claim,
        claim_accounting=accounting,
        claim_sampling=None if sampling is None else str(sampling_from_dict(sampling)),
        legs=legs or None,
        verdict=outcome,
        reason=reason,
    )


def _legs(found: Any) -> dict[str, str]:
    """The outcome of each leg."""
    legs = {name: leg["verdict"] for name, leg in found.items()}
    if legs and (list(legs) != list(LEGS) or set(legs.values()) - set(VERDICT_CODES)):
        raise TypeError("an amplified claim has three legs, each with a verdict")
    return legs


def _cells(found: RunVerdict) -> list[str]:
    claim = "-"
    if found.claimed_epsilon is not None:
        claim = f"claimed ε {shown_number(found.claimed_epsilon)} ({found.claim_accounting})"
    legs = ", ".join(f"{name} {outcome}" for name, outcome in (found.legs or {}).items())
    reason = "; ".join(part for part in (legs, found.reason) if part)
    return [found.run, claim, found.verdict or "no verdict", reason]
