"""What other eyes see than the public: the server single replies, a coalition the sum without its own noise.

Each view is an audit of its own, with the same canaries, claim and verdict in its own directory. In the view of the server
every canary's reply is a round, whose release is that reply: what a client alone gives away. In the view of a coalition of m
canary nodes, the release is the sum of all replies less those of its members, who know what they sent.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Message

from coalmine.argument_checks import positive, short_repr
from coalmine.audit import Audit
from coalmine.evidence.ladder import most_presentations
from coalmine.integrations.flower.claims import read_claim
from coalmine.integrations.flower.sent_round import SentRound, only_record
from coalmine.integrations.framework_audit import FrameworkAudit
from coalmine.integrations.recorder import FinishedRun, Trainer
from coalmine.result.audit_result import AuditResult
from coalmine.result.trainer_section import SeenView
from coalmine.verdict.claim import REPLACE, ZERO_OUT, Claim

PUBLIC, SERVER = "public", "server"
COALITION = re.compile(r"coalition\((\d{1,9})\)")
FOLDER = "views"


class View(FrameworkAudit):
    """An audit of what somebody sees. `noise` is that of one client, over the clip norm; None if it is not stated."""

    trainer = Trainer("flower", "flwr", "client")
    adjacency = REPLACE
    sees = ""

    def __init__(self, core: Audit, name: str, noise: float | None) -> None:
        self.name, self.noise = name, noise
        super().__init__(core, privacy={} if noise is None else {"noise_multiplier": noise}, view=name)

    @abstractmethod
    def observe(self, sent: SentRound, real: list[Message], canaries: Mapping[int, Message], scale: float) -> None:
        """Observe the replies of a released round, of which all count the same."""

    @abstractmethod
    def last_of(self, round_number: int) -> int:
        """The last round of this view that belongs to a round of the training."""

    def finish(self, *, claim: Claim | float | None = None, task: str | None = None) -> AuditResult:
        """The result of this view. A claim that does not state participations is for the canary with the most rounds."""
        stated = self.claim
        if stated is not None and stated.participations is None:
            stated = replace(stated, participations=most_presentations(self.core.log, self.settings))
        return self.conclude(claim, FinishedRun(noise=self.noise, completed=stated), task=task or self.name)

    def seen(self, result: AuditResult) -> SeenView:
        """The result in few words, for that of the whole run."""
        verdict = result.verdict
        return SeenView(
            name=self.name,
            sees=self.sees,
            outcome=None if verdict is None else str(verdict.outcome),
            reason=None if verdict is None else verdict.finding.plain(),
            claimed=None if result.claim is None else result.claim.epsilon,
            measured=result.epsilon,
        )

    def _std(self, clip_norm: float, clients: int = 1) -> float | None:
        return None if self.noise is None else self.noise * clip_norm * clients**0.5


class ServerView(View):
    """The view of a server, or of whoever else receives single replies: each canary's reply is a round of its own."""

    sees = "every reply by itself"

    def observe(self, sent: SentRound, real: list[Message], canaries: Mapping[int, Message], scale: float) -> None:
        for index, reply in sorted(canaries.items()):
            update = np.empty_like(sent.current)
            sent.layout.update_into(update, only_record(reply), sent.current)
            self.core.observe_round(
                self.last_of(sent.number - 1) + index + 1,
                update,
                present=np.array([index], np.int32),
                others=np.zeros_like(update),
                noise_std=self._std(sent.clip_norm),
                clip_norm=sent.clip_norm,
                scale=scale,
                participants=1,
            )

    def last_of(self, round_number: int) -> int:
        return round_number * self.settings.canaries


class CoalitionView(View):
    """The view of clients who know what they sent themselves: the nodes of the last `members` canaries.

    A target's own share of the noise stays in both worlds, so one client is zeroed out, not replaced.
    """

    adjacency = ZERO_OUT

    def __init__(self, core: Audit, name: str, noise: float | None, members: int) -> None:
        super().__init__(core, name, noise)
        if not 0 < members < self.settings.canaries:
            raise ValueError(
                f"a coalition must have 1 to {self.settings.canaries - 1:,} members, fewer than canaries, got {members:,}"
            )
        self._first = self.settings.canaries - members
        self.sees = f"the sum of all replies, and what {members:,} colluding clients sent"

    def observe(self, sent: SentRound, real: list[Message], canaries: Mapping[int, Message], scale: float) -> None:
        outside = {index: reply for index, reply in canaries.items() if index < self._first}
        summed, update = np.zeros_like(sent.current), np.empty_like(sent.current)
        others = [*real, *outside.values()]
        for reply in others:
            sent.layout.update_into(update, only_record(reply), sent.current)
            summed += update
        self.core.observe_round(
            sent.number,
            summed,
            present=np.array(sorted(outside), np.int32),
            noise_std=self._std(sent.clip_norm, len(others)),
            clip_norm=sent.clip_norm,
            scale=scale,
            participants=len(others),
        )

    def last_of(self, round_number: int) -> int:
        return round_number


class Views:
    """The views of a run, by name."""

    def __init__(self, views: Iterable[View] = ()) -> None:
        self.by_name = {view.name: view for view in views}
        self.results: dict[str, AuditResult] = {}

    @classmethod
    def of(
        cls,
        wanted: "Iterable[str] | Mapping[str, Claim | float | None]",
        make: Callable[[Path | None, Claim | None], Audit],
        *,
        noise: float | None,
        delta: float | None,
        directory: Path | str | None,
    ) -> "Views":
        """The views with these names, or {name: claim}. `make` makes an audit of a directory and a claim."""
        noise = None if noise is None else positive("client_noise", noise)
        claims = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
        views = []
        for name, stated in claims.items():
            match = COALITION.fullmatch(name)
            if name == PUBLIC:
                continue
            if name != SERVER and match is None:
                raise ValueError(f"views must name 'public', 'server' or 'coalition(5)', got {short_repr(name)}")
            claim = read_claim(stated, delta)
            adjacency = ServerView.adjacency if match is None else CoalitionView.adjacency
            if claim is not None:
                claim = replace(claim, adjacency=claim.adjacency or adjacency)
            folder = None if directory is None else Path(directory) / FOLDER / name
            core = make(folder, claim)
            views.append(
                ServerView(core, name, noise) if match is None else CoalitionView(core, name, noise, int(match[1]))
            )
        return cls(views)

    def observe(self, sent: SentRound, real: list[Message], canaries: Mapping[int, Message], scale: float) -> None:
        """Let every view observe the replies of a released round."""
        for view in self.by_name.values():
            view.observe(sent, real, canaries, scale)

    def rewind_to(self, round_number: int) -> None:
        """Forget what belongs to later rounds of the training."""
        for view in self.by_name.values():
            view.rewind_to(view.last_of(round_number))

    def flush(self) -> None:
        """Write everything that was observed."""
        for view in self.by_name.values():
            view.core.flush()

    def close(self) -> None:
        """Unlock the directories of all views."""
        for view in self.by_name.values():
            view.close()

    def finish(self, task: str | None) -> tuple[SeenView, ...]:
        """The results of all views, which `results` keeps, in few words."""
        self.results = {name: view.finish(task=task) for name, view in self.by_name.items()}
        return tuple(view.seen(self.results[name]) for name, view in self.by_name.items())
