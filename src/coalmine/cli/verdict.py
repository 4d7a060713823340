"""`coalmine verdict`: the verdicts of finished runs, and an exit code for scripts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from coalmine.cli.exit_codes import BAD_INPUT, VERDICT_CODES
from coalmine.cli.named_runs import find_runs, how_to_finish, is_finished, print_notes, print_problems, read_result
from coalmine.cli.options import Command, run_directories
from coalmine.cli.output import print_columns, print_json, shown_number

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

    A claim amplified by sampling has three legs, accounting, noise and sampling. Their outcomes are printed before the
    reason; PASS needs all three.

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
        result = read_result(run)
    except ValueError as error:
        return RunVerdict(run=name, error=str(error))
    if result.verdict is None:
        return RunVerdict(run=name, reason=NO_CLAIM)
    if result.claim is None:
        return RunVerdict(run=name, verdict=str(result.verdict.outcome), reason=result.verdict.reason)
    return RunVerdict(
        run=name,
        claimed_epsilon=result.claim.epsilon,
        claim_accounting=result.claim.accounting,
        claim_sampling=None if result.claim.sampling is None else str(result.claim.sampling),
        legs={leg: str(found.outcome) for leg, found in result.legs.items()} or None,
        verdict=str(result.verdict.outcome),
        reason=result.verdict.reason,
    )


def worst_exit_code(found: Sequence[RunVerdict]) -> int:
    """1 if any run is VIOLATION, else 3 if any is UNDERPOWERED or has no verdict, else 0."""
    verdicts = {each.verdict or "UNDERPOWERED" for each in found}
    return next(VERDICT_CODES[name] for name in ("VIOLATION", "UNDERPOWERED", "PASS") if name in verdicts)


def _cells(found: RunVerdict) -> list[str]:
    claim = "-"
    if found.claimed_epsilon is not None:
        claim = f"claimed ε {shown_number(found.claimed_epsilon)} ({found.claim_accounting})"
    legs = ", ".join(f"{name} {outcome}" for name, outcome in (found.legs or {}).items())
    reason = "; ".join(part for part in (legs, found.reason) if part)
    return [found.run, claim, found.verdict or "no verdict", reason]
