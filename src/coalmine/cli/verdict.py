"""`coalmine verdict`: the verdicts of finished runs, and an exit code for scripts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import click

from coalmine.argument_checks import one_line, one_number
from coalmine.cli.exit_codes import BAD_INPUT, VERDICT_CODES
from coalmine.cli.github import GITHUB, add_summary, annotate, summary_file
from coalmine.cli.junit import Case, write_junit
from coalmine.cli.named_runs import find_runs, how_to_finish, is_finished, print_notes, print_problems, read_result
from coalmine.cli.options import Command, run_directories
from coalmine.cli.output import print_columns, print_json, shown_number
from coalmine.log.run_directory import is_run
from coalmine.result.words import Words
from coalmine.verdict.claim import Claim
from coalmine.verification import judge_again

NO_CLAIM = (
    "nothing was claimed, so there is nothing to judge: give `coalmine run` a --claim, the audit a claim, or this command "
    "--max-epsilon"
)


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """One run's line. `verdict` is None where there is none, and `reason` then says why and what to do.

    `summary` is the reason in few words. `error` is None unless the run cannot be read. `legs` are the outcomes of
    accounting, noise and sampling, for a claim amplified by sampling; `claim_sampling` is its scheme in words.
    """

    run: str
    claimed_epsilon: float | None = None
    claim_accounting: str | None = None
    claim_sampling: str | None = None
    legs: dict[str, str] | None = None
    verdict: str | None = None
    summary: str | None = None
    reason: str | None = None
    error: str | None = None

    @property
    def line(self) -> str:
        """The verdict, or that there is none, and the reason in few words."""
        return f"{self.verdict or 'NO VERDICT'}: {self.error or self.summary or self.reason}"


@click.command(cls=Command)
@run_directories()
@click.option(
    "--max-epsilon",
    type=float,
    metavar="E",
    help="Judge each run again, against this epsilon.  [default: the run's own verdict]",
)
@click.option(
    "--junit",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File for a JUnit report with one test for each run.",
)
@GITHUB
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def verdict(
    directories: tuple[Path, ...], max_epsilon: float | None, junit: Path | None, github: bool, as_json: bool
) -> int:
    """Print the verdict of each run.

    The exit code is that of the worst verdict: 0 if every run is PASS, 1 if any is VIOLATION, 3 if any is UNDERPOWERED
    or has no verdict, because it is not finished or nothing was claimed. 2 if a path holds no run or a damaged one; the
    other verdicts are still printed.

    The verdict is read from result.json; `coalmine verify` checks that it follows from the recorded rounds. With
    --max-epsilon the recorded rounds are judged again, against a number of yours. It is read as the run's own claim was:
    for the same participations, or the same sampling. A run without a claim is judged against the number alone. Views of a
    run, such as that of its server, follow it here if something was claimed for them.
    """
    if max_epsilon is not None:
        Claim(one_number("--max-epsilon", max_epsilon))  # one line, before any run is read
    if github:
        summary_file()  # before any run is judged
    named = find_runs(directories)
    found = [read_verdict(run, max_epsilon) for run in named.runs]
    views = [view for run in named.runs for view in sorted((run / "views").glob("*")) if is_run(view)]
    found += [each for each in map(read_verdict, views) if each.claimed_epsilon is not None]
    found += [RunVerdict(run=str(path), error=line) for path, line in named.problems.items()]
    if junit is not None:
        write_junit(junit, "coalmine verdict", [_junit_case(each) for each in found])
    if github:
        add_summary("coalmine verdict", {each.run: each.line for each in found})
        for each in found:
            annotate(each.verdict or "no verdict", f"{each.run}: {each.line}")
    if as_json:
        print_json([asdict(each) for each in found])
    else:
        print_columns([_cells(each) for each in found if each.error is None])
    print_notes(f"{line}: left out" for line in named.ignored.values())
    problems = [each.error for each in found if each.error is not None]
    print_problems(problems)
    return BAD_INPUT if problems else worst_exit_code(found)


def read_verdict(run: Path, max_epsilon: float | None = None) -> RunVerdict:
    """The verdict in a run's result.json, or the one on another epsilon; or why there is none."""
    name = str(run)
    if not is_finished(run):
        return RunVerdict(run=name, reason=f"the run is not finished: {how_to_finish(run)}")
    try:
        result = read_result(run)
        if max_epsilon is not None:
            result = judge_again(run, max_epsilon)
    except (OSError, ValueError) as error:
        return RunVerdict(run=name, error=one_line(str(error)))
    if result.verdict is None:
        return RunVerdict(run=name, reason=NO_CLAIM)
    claim, words = result.claim, Words.of(result)
    return RunVerdict(
        run=name,
        claimed_epsilon=None if claim is None else claim.epsilon,
        claim_accounting=None if claim is None else claim.accounting,
        claim_sampling=None if claim is None or claim.sampling is None else str(claim.sampling),
        legs={leg: str(found.outcome) for leg, found in result.legs.items()} or None,
        verdict=str(result.verdict.outcome),
        summary=words.say(result.verdict.finding.plain()),
        reason=words.say(result.verdict.reason),
    )


def worst_exit_code(found: Sequence[RunVerdict]) -> int:
    """1 if any run is VIOLATION, else 3 if any is UNDERPOWERED or has no verdict, else 0."""
    verdicts = {each.verdict or "UNDERPOWERED" for each in found}
    return next(VERDICT_CODES[name] for name in ("VIOLATION", "UNDERPOWERED", "PASS") if name in verdicts)


def _junit_case(found: RunVerdict) -> Case:
    """The test of a JUnit report: VIOLATION is a failure, and a run that could not be judged is an error."""
    run = Path(found.run)
    case = Case(classname=str(run.parent), name=run.name)
    if found.verdict == "PASS":
        return case
    kind = found.verdict or ("unreadable" if found.error is not None else "no verdict")
    problem: Literal["failure", "error"] = "failure" if found.verdict == "VIOLATION" else "error"
    return replace(case, problem=problem, kind=kind, text=f"{kind}: {found.error or found.reason}")


def _cells(found: RunVerdict) -> list[str]:
    claim = "-"
    if found.claimed_epsilon is not None:
        claim = f"claimed ε {shown_number(found.claimed_epsilon)} ({found.claim_accounting})"
    return [found.run, claim, found.verdict or "no verdict", found.summary or found.reason or ""]
