"""What a person sees of an audited training: a line at its start, a bar with the verdict so far, a dashboard."""

import contextlib
import importlib
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from coalmine.argument_checks import count_of
from coalmine.audit import Audit
from coalmine.integrations.trackers import trackers
from coalmine.result.audit_result import AuditResult
from coalmine.result.words import Words, format_number, short_power

EVERY = 0.5  # least seconds between two looks at the alarm
Progress = bool | Literal["line"] | None
Dashboards = str | Sequence[str] | None  # names: tensorboard, mlflow, wandb
ShowBar = tuple[Callable[[int, str], None], Callable[[], None]]  # set step and text; end


class Follower:
    """Tells a person, and dashboards, how an audited training goes. It changes nothing, and reads only what is recorded.

    `progress` None prints the line at the start, and shows a bar in a terminal or a notebook. True shows the bar anywhere,
    "line" prints only the line, and False nothing. `planned` is the number of rounds, None if nobody knows it. `words` has
    the user's word for a round.
    """

    def __init__(
        self,
        core: Audit,
        words: Words,
        *,
        planned: int | None,
        progress: Progress = None,
        log_to: Dashboards = None,
    ) -> None:
        self._core, self._words, self._planned = core, words, planned
        self._trackers = trackers(log_to, None if core.directory is None else core.directory.path)
        self._prints = progress is not False
        self._awaits_opening = self._prints and core.directory is not None and core.last_round == 0
        self._show: ShowBar | None = None
        self._verdict, self._next_look = "", 0.0
        if self._prints:
            print(start_line(core, words, planned), file=sys.stderr)
        if progress is True or (progress is None and _has_reader()):
            self._show = _bar(words.step, core.last_round, planned)

    def round_done(self, number: int, values: Mapping[str, Any]) -> None:
        """Show and log one observed round; after the first one, print its digest."""
        self._print_opening()
        if self._show is not None:
            if time.monotonic() >= self._next_look:
                self._verdict = self._look()
                self._next_look = time.monotonic() + EVERY
            self._show[0](number, self._verdict)
        numbers = {name: value for name, value in values.items() if _is_number(value)}
        for each in self._trackers:
            each.send((f"coalmine/{name}", float(value), number) for name, value in numbers.items())

    def finished(self, result: AuditResult) -> None:
        """End the bar, print the digest of the log, and log the measured and the claimed ε of every attacker."""
        self.close()
        self._awaits_opening = False
        if self._prints and result.log_digest is not None:
            print(
                f"coalmine has written the result; store this log digest elsewhere: {result.log_digest}",
                file=sys.stderr,
            )
        scalars = {"claimed epsilon": result.claim.epsilon} if result.claim is not None else {}
        for name, adversary in result.adversaries.items():
            estimate = adversary.headline and adversary.headline.estimate
            if estimate and math.isfinite(estimate.epsilon):
                scalars[f"epsilon/{name}"] = estimate.epsilon
        for each in self._trackers:
            each.send((f"coalmine/{name}", value, result.rounds) for name, value in scalars.items())

    def _print_opening(self) -> None:
        """Print the digest of the first round, once it is recorded, if the run has just begun and is kept."""
        if self._awaits_opening and (digest := self._core.log_digest):
            print(
                f"coalmine has recorded {self._words.step} 1; store this opening elsewhere: {digest}", file=sys.stderr
            )
            self._awaits_opening = False

    def close(self) -> None:
        """End the bar."""
        if self._show is not None:
            self._show[1]()
            self._show = None

    def _look(self) -> str:
        """The running verdict: that of the alarm, which may be asked after every round."""
        if self._core.watch.reading is None:
            return "no claim: nothing is judged"
        if self._planned is None and self._core.claim is not None and self._core.claim.bare:
            return "judged at the end"  # what a bare number allows depends on the number of rounds
        try:
            alarm = self._core.watch.alarm(self._core.log, self._core.watch.reading)
        except ValueError:  # a claim that only the finished run can explain
            return "judged at the end"
        if alarm is None:
            return "nothing refutes the claim so far"
        return f"VIOLATION since {self._words.step} {alarm.round}"


def start_line(core: Audit, words: Words, planned: int | None) -> str:
    """One line: what is audited, the claim, where it is written, and the commitment to store elsewhere."""
    settings, claim = core.settings, core.claim
    length = words.steps(planned) if planned else "this training"
    parts = [f"coalmine audits {length} with {count_of(settings.canaries, 'canary').replace('canarys', 'canaries')}"]
    if core.last_round:
        parts[0] += f", from {words.step} {core.last_round + 1} on"
    if claim is None:
        parts.append("no claim, so nothing can pass")
    else:
        delta = short_power(settings.delta)
        parts.append(f"claim: ε ≤ {format_number(claim.epsilon, 4)} at δ {delta} for one {words.unit}")
    if core.directory is None:
        parts.append("nothing is written (directory= keeps a report)")
    else:
        parts.append(f"written to {core.directory.path}")
        parts.append(f"store this commitment elsewhere: {core.commitment.statement_sha256}")
    return "; ".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _has_reader() -> bool:
    return _in_notebook() or bool(sys.stderr and sys.stderr.isatty())


def _bar(step: str, done: int, planned: int | None) -> ShowBar | None:
    """tqdm's bar in a notebook, rich's elsewhere; none if neither is installed."""
    makers = (_tqdm_bar, _rich_bar) if _in_notebook() else (_rich_bar, _tqdm_bar)
    for make in makers:
        with contextlib.suppress(ImportError):
            return make(step, done, planned)
    return None


def _rich_bar(step: str, done: int, planned: int | None) -> ShowBar:
    shown = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = [shown.TextColumn("{task.description}"), shown.BarColumn(), shown.MofNCompleteColumn()]
    columns += [shown.TimeRemainingColumn(), shown.TextColumn("{task.fields[verdict]}", markup=False)]
    progress = shown.Progress(*columns, console=console)
    task = progress.add_task(f"audited {step}s", total=planned, completed=done, verdict="")
    progress.start()
    return lambda number, text: progress.update(task, completed=number, verdict=text), progress.stop


def _tqdm_bar(step: str, done: int, planned: int | None) -> ShowBar:
    bar = importlib.import_module("tqdm.auto").tqdm(total=planned, initial=done, desc=f"audited {step}s", unit=step)

    def update(number: int, text: str) -> None:
        bar.set_postfix_str(text, refresh=False)
        bar.update(number - bar.n)

    return update, bar.close
