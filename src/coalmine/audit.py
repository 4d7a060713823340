"""The audit in a training loop: it makes canaries, observes rounds, and returns a ladder of adversaries."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, SupportsIndex

from coalmine.argument_checks import names_neighbours, positive, whole_number
from coalmine.audit_arguments import AuditArguments, Seed
from coalmine.audit_thread import one_thread
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.secret import secret_seed
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.sampling import Sampling
from coalmine.log.commitment import Commitment
from coalmine.log.kept_models import KeptModels
from coalmine.log.rounds_file import RoundLog
from coalmine.log.run_directory import RunDirectory
from coalmine.log.shared_log import open_run
from coalmine.log.single_writer import SingleWriterLock, refuse_copy
from coalmine.measure.choice import measurer_of
from coalmine.measure.layout import Layout, check_same
from coalmine.measure.own_scores import Attack
from coalmine.measure.ranks import Ranks, Reduce
from coalmine.measure.round_facts import RoundFacts, checked_clip_norm, observed_indices
from coalmine.measure.schedule import CanarySchedule, Indices
from coalmine.measure.settings import checked_settings
from coalmine.result.audit_result import AuditResult
from coalmine.result.derivation import derive_result
from coalmine.result.other_rank import ResultOnRank0
from coalmine.verdict.alarm import Alarm
from coalmine.verdict.claim import Claim
from coalmine.verdict.claim_watch import ClaimWatch, OnViolation
from coalmine.verdict.coverage import AuditedItem

__all__ = ["Audit", "OnViolation", "Seed"]


class Audit:
    """An audit of one training run.

    `canaries` are observed: they take part in training. `unobserved` ones (default: ten times as many, or as many as fit)
    never do; they show the scores of absent canaries. Unobserved canary j is assigned the rounds of observed canary j
    modulo `canaries`. `seed` determines them all and stays secret until the run is over; the audit publishes a commitment
    to it.

    `rounds` and `presentations` are for `canaries_in_round`: each canary takes part in `presentations` rounds, one in each
    of as many periods; a sequence makes groups. `sampling`, a Poisson or another scheme, replaces them if the rounds of a
    client are hidden: `canaries_in_round` follows it, and `result` has the rung unknown-round. `momentum` is the server's,
    and is undone where rounds are compared. `noise` is the correlation of the noise between rounds, a TreeNoise or a
    BandedNoise of `coalmine.estimators.correlated`; the attacker of known-others then whitens it. `layers`, names and
    sizes, each get their own gauge.

    `scores` are your own attacks. Each is called in every round as attack(round_number, model_delta, canaries, previous) and
    returns a score for every canary, observed first; `previous` is its return value of the round before, None at first.

    With a `directory` every round is written to disk at once, and an audit made again with the same arguments resumes where
    that directory ends. A `claim` given here is committed to before round 1 and judged by `result`. If it is given only to
    `result`, nobody can verify that it was made in advance. `on_violation` is the reaction to a round that refutes the claim
    (see `alarm`): "warn" gives a RuntimeWarning, "raise" stops training with a ViolationError, and a function is called with
    the Alarm. A `deferred` audit measures a round in parallel with the work that follows, on its GPU or in a thread. It
    records the round when the next one comes, or on `flush`.

    >>> import numpy as np
    >>> audit = Audit(dim=10_000, canaries=1_000, seed=b"a secret", delta=1e-6, rounds=2)
    >>> rng = np.random.default_rng(0)
    >>> for t in (1, 2):
    ...     present = audit.canaries_in_round(t)
    ...     noisy = audit.updates(present, clip_norm=1.0) + rng.normal(size=10_000)
    ...     audit.observe_round(t, noisy / 600, present=present)
    >>> round(audit.result()["known-round"].headline.estimate.epsilon, 1)  # mechanism_epsilon(1.0, delta=1e-6) is 4.9
    4.7
    """

    @names_neighbours
    def __init__(
        self,
        dim: int,
        *,
        canaries: int,
        unobserved: int | None = None,
        seed: Seed,
        delta: float,
        kind: Literal["rotated", "sphere"] = "rotated",
        rounds: int | None = None,
        presentations: int | Sequence[int] = 1,
        momentum: float = 0.0,
        noise: CorrelatedNoise | None = None,
        sampling: Sampling | None = None,
        layers: Sequence[tuple[str, int]] | None = None,
        scores: Mapping[str, Attack] | None = None,
        directory: "RunDirectory | Path | str | None" = None,
        claim: Claim | float | None = None,
        on_violation: OnViolation | None = None,
        deferred: bool = False,
    ) -> None:
        seed = secret_seed(seed)  # a traceback may show this frame
        settings = checked_settings(
            dim,
            canaries=canaries,
            unobserved=unobserved,
            delta=delta,
            kind=kind,
            rounds=rounds,
            presentations=presentations,
            momentum=momentum,
            layers=layers,
            noise=noise,
            sampling=sampling,
        )
        self._begin(AuditArguments.checked(settings, seed, scores, directory, claim, on_violation, deferred))

    @classmethod
    def for_model(
        cls,
        parameters: Any,
        *,
        canaries: int,
        unobserved: int | None = None,
        seed: Seed,
        delta: float,
        rounds: int | None = None,
        presentations: int | Sequence[int] = 1,
        momentum: float = 0.0,
        noise: CorrelatedNoise | None = None,
        sampling: Sampling | None = None,
        scores: Mapping[str, Attack] | None = None,
        directory: "RunDirectory | Path | str | None" = None,
        claim: Claim | float | None = None,
        on_violation: OnViolation | None = None,
        deferred: bool = False,
        blocks: Sequence[int] | None = None,
        reduce: Reduce | None = None,
        replicated: bool = False,
    ) -> "Audit":
        """An audit of a model as its framework holds it: a dict, list, tuple or nested tree of arrays.

        The arrays may be numpy's, torch's or jax's, of different precisions, bfloat16 included. `updates` and `update`
        return the same structure, `observe_round` and `observe_final` take it. Each array gets its own noise gauge. Integers
        and flags hold no canary: their updates are zeros. Neither do torch parameters that require no gradient, if others
        do. Leave out whatever else is not trained, as it gets no noise.

        The coordinates are split into `blocks`, by default the fewest of at most 2^24 - 1, and each block has its own
        canaries: no flat copy of the model is ever made. A model of one block has the same canaries as a flat vector has
        in `Audit(dim)`. The audit commits to the blocks too. Your own `scores` take one flat vector if the model is one
        block; with several they take `model_delta` as you pass it, and `BlockedCanaries`.

        With `reduce`, several processes audit one model. Each passes its own shards, which together are the model, makes the
        audit with the same other arguments, and calls the same methods with the same facts. `reduce` sums numbers over
        the processes (`coalmine.integrations.torch_distributed.reduce_over` makes one). Once a round, the processes sum a
        few numbers per canary. Rank 0 holds the log, the directory and the result. If each process holds the whole model,
        pass `replicated=True`: then `model_delta` is the same on every rank, and `others` is the sum of a rank's own
        clients or examples.

        >>> import numpy as np
        >>> model = {"weights": np.zeros((100, 90), np.float32), "bias": np.zeros(90, np.float16)}
        >>> audit = Audit.for_model(model, canaries=100, seed=b"a secret", delta=1e-6)
        >>> sorted((name, update.shape, update.dtype.name) for name, update in audit.update(0, 1.0).items())
        [('bias', (90,), 'float16'), ('weights', (100, 90), 'float32')]
        """
        seed = secret_seed(seed)
        ranks = Ranks(reduce)
        layout = Layout.of(parameters, ranks, blocks=blocks, replicated=replicated)
        checked: list[AuditArguments] = []

        def check() -> None:
            if ranks.several and scores:
                raise ValueError("your own scores need a model that is in one process")
            settings = checked_settings(
                layout.dim,
                canaries=canaries,
                unobserved=unobserved,
                delta=delta,
                kind="rotated",
                rounds=rounds,
                presentations=presentations,
                momentum=momentum,
                layers=layout.layers,
                noise=noise,
                sampling=sampling,
                blocks=layout.blocks,
                processes=layout.processes,
                shards=layout.shards,
            )
            checked.append(AuditArguments.checked(settings, seed, scores, directory, claim, on_violation, deferred))

        ranks.gather(check)  # an argument that one rank rejects stops them all
        arguments = checked[0]
        check_same(
            ranks,
            seed=bytes(key_from_seed(seed).to_bytes(16, "little")),
            claim=arguments.stated_claim,
            on_violation=on_violation is not None,
            **arguments.settings.to_dict(),
        )
        audit = cls.__new__(cls)
        audit._begin(arguments, layout, ranks)
        return audit

    def _begin(self, arguments: AuditArguments, layout: Layout | None = None, ranks: Ranks | None = None) -> None:
        settings, seed = arguments.settings, arguments.seed
        self.settings = settings
        self._ranks = ranks or Ranks(None)
        run = open_run(arguments.directory, seed, settings, arguments.statement, self._ranks)
        self._run, self.directory, self._log = run, run.directory, run.log
        self.statement, self.commitment = run.statement, run.commitment
        self._has_layout = layout is not None
        self.measurer = measurer_of(settings, seed, layout, self._ranks)
        self._models = KeptModels(run, self.measurer, settings, self._ranks)
        self.schedule = CanarySchedule(settings, seed)
        self.scores = arguments.scores
        self.watch = ClaimWatch(settings, None if run.statement.claim is None else Claim.from_dict(run.statement.claim))
        self._writer = SingleWriterLock("the audit")
        self.deferred, self._closed = arguments.deferred, False
        self.finishes_in: str | None = None  # the framework whose integration finishes this audit
        self._recall_scores()
        if arguments.on_violation is not None:
            self.watch.start(arguments.on_violation)

    def _recall_scores(self) -> None:
        if self.scores:
            self.scores.recall(self._log.held.rounds())

    def __enter__(self) -> "Audit":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Record a round that is still being measured, and unlock the directory. A closed audit observes no more rounds."""
        if not self._writer.is_here:  # a forked process closes only itself
            return
        try:
            self.flush()
        finally:
            if self.directory is not None:
                self.directory.close()
            self._closed = True

    def __reduce__(self) -> NoReturn:
        refuse_copy("an Audit", "make a second Audit with another directory")

    def __repr__(self) -> str:
        if "_log" not in vars(self):
            return "Audit(…)"  # in a traceback through its constructor
        rounds = len(self._log.held.numbers) if self._log.is_here else self._log.state.observed
        return f"Audit(dim={self.settings.dim}, canaries={self.settings.canaries}, rounds={rounds})"

    @property
    def seed_is_guessable(self) -> bool:
        """Whether the seed can be guessed: a number below 2^64, or fewer than 8 bytes.

        Such an audit is for studies and tests: anyone can find its canaries from the commitment.
        """
        return self.statement.demonstration

    @property
    def rank(self) -> int:
        """The number of this process among those that audit the model, from 0; rank 0 holds the result."""
        return self._ranks.rank

    @property
    def log(self) -> RoundLog:
        """Everything observed so far; on rank 0 only."""
        self.flush()
        return self._log.held

    @property
    def log_digest(self) -> str:
        """A digest of all rounds recorded so far. Store it elsewhere, and no change of them goes unnoticed."""
        return self._log.held.digest

    @property
    def last_round(self) -> int:
        """Number of the last observed round, 0 before the first."""
        return self._log.last_number

    @property
    def claim(self) -> Claim | None:
        """The claim that the audit was made with, and committed to."""
        return self.watch.claim

    def canaries_in_round(self, round_number: int) -> Indices:
        """The canaries that take part in a round, counted from 1: by `sampling`, or otherwise spread over the run."""
        return self.schedule.in_round(round_number)

    def sampled_canaries(self, round_number: int, sampling_probability: float) -> Indices:
        """The canaries that take part in a round under Poisson sampling; the same in every call."""
        return self.schedule.sampled(round_number, sampling_probability)

    def updates(
        self, present: Iterable[SupportsIndex], clip_norm: float, *, scale: float = 1.0, like: Any = None
    ) -> Any:
        """The sum of the present canaries' updates, each of norm scale·clip_norm (Proj, Algorithm 2).

        `like` is an array or tensor whose kind, dtype and device the sum takes. A sum cannot be clipped client by client:
        to audit the clipping itself, send each canary's `update` through it with scale 10.
        """
        size = checked_clip_norm(clip_norm) * positive("scale", scale)
        indices = observed_indices(present, self.settings)
        if self._has_layout and like is not None:
            raise ValueError("like is for flat vectors: an audit made for a model returns updates like its parameters")
        return self.measurer.sum_of_canaries(indices, size, like)

    def update(self, index: SupportsIndex, clip_norm: float, *, scale: float = 1.0, like: Any = None) -> Any:
        """One canary client's update, of norm scale·clip_norm."""
        return self.updates([index], clip_norm, scale=scale, like=like)

    @names_neighbours
    @one_thread
    def observe_round(
        self,
        round_number: int,
        model_delta: Any,
        *,
        present: Iterable[SupportsIndex],
        others: Any = None,
        noise_std: float | None = None,
        clip_norm: float | None = None,
        scale: float = 1.0,
        participants: int | None = None,
        copy: bool = True,
    ) -> None:
        """Record the release of a round (Algorithm 3): the noised average, before the server's optimiser.

        `others` is the clipped sum of the real clients without noise, `noise_std` the noise's stated standard deviation and
        `clip_norm` the most that one client adds, all three in the units of `model_delta`: divided by the same n. Without
        `clip_norm` the audit measures the contribution of a canary, which is less precise. `scale` is the norm of the
        canaries before clipping, in clip norms; above 1, the clipping is audited too. `participants` is the number of
        clients that took part, canaries included: cohort sizes distinguish fixed-size from Poisson sampling. Without
        `copy` you promise not to change `model_delta` and `others` any more, so a `deferred` audit need not copy them. A
        delta of zeros is recorded as a skipped round. After an error nothing is recorded.
        """
        try:
            facts = RoundFacts.checked(
                self.settings,
                self._next_number(round_number),
                present=present,
                noise_std=noise_std,
                clip_norm=clip_norm,
                scale=scale,
                participants=participants,
            )
        except Exception as error:
            self.measurer.refuse(error)  # so that other ranks do not wait
            raise
        model_delta, others = self.measurer.read(model_delta, others, own=self.deferred)
        self.flush()
        order = self._log.state.observed + 1  # skipped rounds do not count; from the log, so it survives a restart
        if self.deferred and not self.scores:
            item = self.measurer.round_later(model_delta, others, facts, order, copy=copy, then=self._log.prepare)
            if item is not None:
                self._log.append_later(facts.number, item)
                return
        measured = self.measurer.round(model_delta, others, facts, order)
        self._log.append(self.scores.added_to(measured, model_delta, self.measurer.canaries, self.settings.total))
        self._check_for_alarm()
        self.watch.share(self._ranks)

    def _next_number(self, round_number: int) -> int:
        """The number of a round that may be observed now."""
        number = whole_number("round_number", round_number, minimum=1)
        self._log.check_order(number)
        if self.settings.noise is not None and number > self.settings.noise.rounds:
            raise ValueError(f"the noise was planned for {self.settings.noise.rounds} rounds, got round {number}")
        self._check_open()
        self._log.check_unfinished(number)
        return number

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the audit is closed: make a new one to observe more rounds")

    def flush(self, *, sync: bool = False) -> None:
        """Record the round that a `deferred` audit is still measuring; its errors are raised now.

        An invalid round is dropped; one that cannot be written, for example on a full disk, is kept for the next try. With
        `sync` every round is on disk when this returns: call it before you write a checkpoint that relies on it.
        """
        if self._log.has_pending:
            self._record_pending()
        if sync:
            self._run.sync()

    @one_thread
    def _record_pending(self) -> None:
        self._log.append_pending()
        self._check_for_alarm()

    def _check_for_alarm(self) -> None:
        if self._log.is_here:
            self.watch.check(self._log.held)

    @one_thread
    def commit_to(
        self,
        *,
        initial: Any = None,
        rounds: int | None = None,
        facts: Mapping[str, Any] | None = None,
        save_model: bool = True,
    ) -> Commitment:
        """Commit also to the initial model, the number of rounds, facts of the result, and config.toml as it is now.

        Call it before round 1: the commitment that it returns takes the place of the first one. In a run that has rounds
        already it changes nothing. A directory gets the initial model as initial.npy, and the final one as model.npy, for
        `coalmine verify`. Without `save_model`, as for a model that is too large, the log has the digests alone.
        """
        self._models.commit_to(initial=initial, rounds=rounds, facts=facts, save_model=save_model)
        self.statement, self.commitment = self._run.statement, self._run.commitment
        return self.commitment

    @one_thread
    def observe_final(self, model: Any, *, initial: Any = None) -> None:
        """Record the final model (Algorithm 2) and, for `final-update`, the initial one."""
        self.flush()
        self._check_open()
        if self._log.state.finished:
            raise ValueError("the final model was observed already; call rewind_to to observe another")
        self._log.finish(self._models.final(model, initial))

    @one_thread
    def rewind_to(self, round_number: int) -> None:
        """Remove every round after `round_number`, and the final model: for a trainer that resumes from a checkpoint."""
        number = whole_number("round_number", round_number, minimum=0)
        self._log.drop_pending_after(number)
        self.flush()
        self.watch.forget()
        self.measurer.forget()
        self._log.rewind_to(number)
        self._recall_scores()

    def alarm(self, claim: Claim | float | None = None, *, wait: bool = True) -> Alarm | None:
        """The first round after which the claim was refuted, and the reason; None as long as nothing refutes it.

        Call it as often as you like, even after every round: a true claim raises an alarm in at most 0.25 % of runs, however
        often it is checked. The verdict of `result` is for one check at the end. The absence of an alarm is not a PASS. The
        default claim is the one that the audit was made with. Without `wait`, a round that a `deferred` audit is still
        measuring is not included.
        """
        log = self._log.held
        if wait:
            self.flush()
        return self.watch.alarm(log, claim)

    @names_neighbours
    def result(
        self,
        *,
        claim: Claim | float | None = None,
        analytical_epsilon: float | None = None,
        clients: int | None = None,
        audited: Iterable[AuditedItem] = (),
        watched: bool | None = None,
    ) -> AuditResult:
        """The result so far: every adversary with its inputs, the gauges and, for a claim, a verdict.

        A claim may be a number: the epsilon of the mechanism for a client who takes part as often as the canaries did,
        under correlated `noise` as the most exposed canary did.
        `clients` is the largest number of real clients in a round. It bounds how much their updates can hide; without it
        known-round can refute a claim but not confirm it. `audited` lists what the caller knows about the pipeline: which
        items of `coverage.ITEMS` the audit covers or leaves out, and why. `watched` means that you checked for an `alarm`
        during training and would have stopped (default: whether `on_violation` is set). Then an alarm is a VIOLATION.
        """
        self.flush()
        return derive_result(
            self._log.held,
            self.settings,
            claim=self.claim if claim is None else Claim.of(claim),
            analytical_epsilon=analytical_epsilon,
            clients=clients,
            audited=audited,
            watched=self.watch.active if watched is None else watched,
        )

    def finish(
        self,
        *,
        claim: Claim | float | None = None,
        analytical_epsilon: float | None = None,
        clients: int | None = None,
        audited: Iterable[AuditedItem] = (),
        watched: bool | None = None,
    ) -> AuditResult | ResultOnRank0:
        """The `result` of a finished run, which is also written to result.json if the audit has a directory.

        With several ranks, call it on every one: rank 0 returns the result. On the others, a value that is false says so.
        """
        if self.finishes_in is not None:
            raise ValueError(
                f"this audit is of a run in {self.finishes_in}, which adds what it knows of the pipeline: call finish "
                "on the audit of what audited() returned"
            )
        if not self._log.is_here:
            return ResultOnRank0(self.rank)
        result = self.result(
            claim=claim, analytical_epsilon=analytical_epsilon, clients=clients, audited=audited, watched=watched
        )
        return result.written_to(self.directory)
