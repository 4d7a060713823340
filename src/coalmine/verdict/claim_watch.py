"""Check every round against a claim, and react to an alarm."""

import warnings
from collections.abc import Callable
from typing import Literal

from coalmine.argument_checks import WrongTypeError, short_repr
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.ranks import Ranks
from coalmine.measure.settings import Settings
from coalmine.verdict.alarm import Alarm, AlarmReader, ViolationError
from coalmine.verdict.claim import Claim

OnViolation = Literal["warn", "raise"] | Callable[[Alarm], object]


def check_on_violation(on_violation: object, claim: Claim | float | None) -> None:
    """ValueError for a reaction that does not exist, or that no claim can trigger."""
    if on_violation is None:
        return
    if on_violation not in ("warn", "raise") and not callable(on_violation):
        kind = ValueError if isinstance(on_violation, str) else WrongTypeError
        raise kind(f"on_violation must be 'warn', 'raise' or a function, got {short_repr(on_violation)}")
    if claim is None:
        raise ValueError("on_violation needs a claim to check the rounds against: pass claim= too")


class ClaimWatch:
    """The claim of an audit, and the alarm of its rounds."""

    def __init__(self, settings: Settings, claim: Claim | None) -> None:
        self._settings = settings
        self.claim = claim  # what the audit was made with, and committed to
        self.reading = claim  # the same, as the pipeline's accounting reads it
        self._reaction: tuple[Claim, OnViolation] | None = None
        self._reader: tuple[Claim, AlarmReader] | None = None  # the claim last checked for an alarm, and its reader
        self._new_alarm: Alarm | None = None

    @property
    def active(self) -> bool:
        """Whether every round is checked for an alarm."""
        return self._reaction is not None

    def start(self, on_violation: OnViolation, claim: Claim | float | None = None) -> None:
        """From now on, check every round against a claim, by default the audit's own; `on_violation` reacts to an alarm."""
        check_on_violation(on_violation, self.claim if claim is None else claim)
        watched = self.claim if claim is None else Claim.of(claim)
        assert watched is not None
        self._reaction = (watched, on_violation)

    def read_claim_as(self, claim: Claim) -> None:
        """Check the rounds against this reading of the audit's claim, if they are checked. For integrations."""
        self.reading = claim
        if self._reaction is not None:
            self._reaction = (claim, self._reaction[1])

    def check(self, log: RoundLog) -> None:
        """Note an alarm that the rounds in the log raise, unless it was noted before."""
        if self._reaction is not None:
            claim = self._reaction[0]
            known = self._reader is not None and self._reader[0] == claim and self._reader[1].alarm is not None
            self._new_alarm = None if known else self._read(log, claim).alarm

    def share(self, ranks: Ranks) -> None:
        """Let every rank know the alarm that rank 0 noted."""
        if ranks.several and self._reaction is not None:
            alarm = ranks.gather(lambda: self._new_alarm and self._new_alarm.to_dict())[0]
            self._new_alarm = None if alarm is None else Alarm.from_dict(alarm)

    def react(self, rank: int) -> None:
        """Carry out `on_violation` once after an alarm was noted. The user's function may call the audit's `result`."""
        alarm, self._new_alarm = self._new_alarm, None
        if alarm is None or self._reaction is None:
            return
        action = self._reaction[1]
        if action == "raise":
            raise ViolationError(alarm)
        if callable(action):
            action(alarm)
        elif rank == 0:
            warnings.warn(str(alarm), RuntimeWarning, stacklevel=3)  # in the line that called the audit

    def alarm(self, log: RoundLog, claim: Claim | float | None = None) -> Alarm | None:
        """The first alarm of the rounds in the log against a claim, by default the audit's own."""
        watched = self.claim if claim is None else Claim.of(claim)
        if watched is None:
            raise ValueError("alarm needs a claim to check the rounds against: pass it to alarm, or claim= to Audit")
        return self._read(log, watched).alarm

    def forget(self) -> None:
        """Forget the rounds that were read, because some of them were rewound."""
        self._reader = self._new_alarm = None

    def _read(self, log: RoundLog, claim: Claim) -> AlarmReader:
        """The alarm reader of a claim after all rounds in the log; earlier rounds are not read again."""
        if self._reader is None or self._reader[0] != claim:
            self._reader = (claim, AlarmReader(self._settings, claim))
        reader = self._reader[1]
        for item in log.rounds_after(reader.last_round):
            reader.see(item)
        return reader
