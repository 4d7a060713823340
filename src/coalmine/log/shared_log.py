"""The log of an audit of several processes: rank 0 holds it, the others know how far it is."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

from coalmine.log.commitment import Commitment, Precommitment
from coalmine.log.rounds_file import RoundLog
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.ranks import Ranks
from coalmine.measure.round import Final, Round
from coalmine.measure.settings import Settings


@dataclass(frozen=True)
class LogState:
    """How far a log is: its last round, how many were not skipped, and whether the final model was observed."""

    last: int = 0
    observed: int = 0
    finished: bool = False

    @classmethod
    def of(cls, log: RoundLog) -> "LogState":
        return cls(log.last_number, log.observed_count, log.final is not None)


class SharedLog:
    """The log on rank 0, and its state on the others. Every rank calls the same methods with the same records.

    The last round may be pending: it is still being measured, and recorded later.
    """

    def __init__(self, held: RoundLog | None, state: LogState, ranks: Ranks) -> None:
        self._held, self._state, self._ranks = held, state, ranks
        self._pending: tuple[int, Callable[[], Round]] | None = None  # its number, and a function that waits for it

    @property
    def held(self) -> RoundLog:
        """The log itself; ValueError on a rank that does not hold it."""
        if self._held is None:
            raise ValueError(
                f"rank 0 holds the log and the result of this audit; this is rank {self._ranks.rank}, so call it on rank 0"
            )
        return self._held

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the log."""
        return self._held is not None

    @property
    def state(self) -> LogState:
        """How far the log is, on any rank."""
        return self._state if self._held is None else LogState.of(self._held)

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    @property
    def last_number(self) -> int:
        """Number of the last round, a pending one included; 0 before the first."""
        return self.state.last if self._pending is None else self._pending[0]

    def check_order(self, number: int) -> None:
        """Reject a round that does not come after all others."""
        if number <= self.last_number:
            raise ValueError(f"rounds must come in order, got round {number} after round {self.last_number}")

    def check_unfinished(self, number: int) -> None:
        """Reject a round after the final model."""
        if self.state.finished:
            raise ValueError(
                f"the final model was observed before round {number}; call rewind_to with an earlier round first"
            )

    def append_later(self, number: int, item: Callable[[], Round]) -> None:
        """Let a round be pending: `item` waits for its measurement."""
        self._pending = (number, item)

    def append_pending(self) -> None:
        """Record the pending round. An invalid one is dropped; one that cannot be written is kept for the next try."""
        if self._pending is None:
            return
        try:
            item = self._pending[1]()
        except ValueError:
            self._pending = None
            raise
        self.append(item)
        self._pending = None

    def drop_pending_after(self, number: int) -> None:
        """Forget a pending round that comes after `number`."""
        if self._pending is not None and self._pending[0] > number:
            self._pending = None

    def prepare(self, item: Round) -> Round:
        """Check and encode a round that `append` will get, in the thread that has measured it."""
        if self._held is not None:
            self._held.prepare(item)
        return item

    def append(self, item: Round) -> None:
        """Record a round."""
        if self._held is not None:
            self._held.append(item)
        else:
            self._state = LogState(item.number, self._state.observed + (not item.skipped))

    def finish(self, item: Final) -> None:
        """Record the final model."""
        if self._held is not None:
            self._held.finish(item)
        else:
            self._state = replace(self._state, finished=True)

    def rewind_to(self, number: int) -> None:
        """Remove the rounds after `number`, and the final model."""
        if self._held is not None:
            self._held.rewind_to(number)
        self._state = LogState(**self._ranks.gather(lambda: asdict(self.state))[0])

    def sync(self) -> None:
        """Return once every record is on disk."""
        if self._held is not None:
            self._held.sync()


class OpenedRun:
    """A run that is recorded: its directory, if it has one, its log, and what was stated and committed to before round 1."""

    def __init__(
        self,
        home: RunDirectory | None,
        log: SharedLog,
        published: dict[str, Any],
        ranks: Ranks,
        commit: Callable[[Precommitment, str], Commitment],
    ) -> None:
        self.directory, self.log, self._ranks, self._commit = home, log, ranks, commit
        self._read(published)

    def _read(self, published: dict[str, Any]) -> None:
        self.statement = Precommitment(**published["statement"])
        self.commitment = Commitment.from_dict(published["commitment"])

    def sync(self) -> None:
        """Return once rounds and metrics are on disk."""
        self.log.sync()
        if self.directory is not None:
            self.directory.sync_metrics()

    def amend(self, **changes: Any) -> None:
        """Commit to a statement with these changes, and to config.toml as it is now. Every rank calls it, before round 1."""

        def amend_here() -> dict[str, Any] | None:
            if self._ranks.rank:
                return None
            stated, home = replace(self.statement, **changes), self.directory
            commitment = self._commit(stated, self.commitment.salt)
            return _published(commitment, stated if home is None else home.read_statement())

        self._read(self._ranks.gather(amend_here)[0])


def open_run(
    directory: RunDirectory | Path | str | None,
    seed: SupportsIndex | bytes,
    settings: Settings,
    statement: Precommitment,
    ranks: Ranks,
) -> OpenedRun:
    """Commit to the settings and open the log: in the directory, which may hold earlier rounds, or in memory.

    Every rank calls it; only rank 0 opens anything.
    """
    opened: list[tuple[RunDirectory | None, RoundLog]] = []

    def open_here() -> dict[str, Any] | None:
        if ranks.rank:
            return None
        home, stated, log = directory, statement, RoundLog()
        if isinstance(home, Path | str):
            home = RunDirectory(Path(home))
        if home is None:
            commitment = Commitment.to(seed, settings, stated)
        else:
            try:
                commitment = home.commit(seed, settings, stated)
                stated, log = home.read_statement(), home.open_log()
            except BaseException:
                if home is not directory:
                    home.close()  # otherwise it stays locked for as long as the error is kept
                raise
        opened.append((home, log))
        return _published(commitment, stated) | {"state": asdict(LogState.of(log))}

    run = ranks.gather(open_here)[0]
    home, held = opened[0] if opened else (None, None)

    def commit(stated: Precommitment, salt: str) -> Commitment:
        if home is None:
            return Commitment.to(seed, settings, stated, salt=salt)
        return home.amend(seed, settings, stated, salt=salt)

    return OpenedRun(home, SharedLog(held, LogState(**run["state"]), ranks), run, ranks, commit)


def _published(commitment: Commitment, statement: Precommitment) -> dict[str, Any]:
    return {"commitment": vars(commitment), "statement": vars(statement)}
