"""The audit in a training loop: it makes canaries, observes rounds, and returns a ladder of adversaries."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, NoReturn, ParamSpec, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, WrongTypeError, one_number, positive_array, shown, whole_number
from coalmine.canaries import RotatedCanaries, SphereCanaries
from coalmine.canaries.base import usable
from coalmine.canaries.philox import key_from_seed
from coalmine.canaries.rotation_numpy import stay_in_one_thread
from coalmine.canaries.secret import SecretBytes, secret_seed
from coalmine.canaries.seeds import is_guessable
from coalmine.estimators.correlated import CorrelatedNoise
from coalmine.estimators.sampling import Sampling
from coalmine.evidence.ladder import RUNGS
from coalmine.log import audit_snapshot
from coalmine.log.commitment import Commitment, Statement, model_sha256
from coalmine.log.one_writer import OneWriter, refuse_copy
from coalmine.log.rounds_file import RoundLog
from coalmine.log.run_directory import RunDirectory
from coalmine.measure.coordinate_sums import CoordinateSums
from coalmine.measure.expensive_rounds import ExpensiveRounds
from coalmine.measure.layout import Layout, check_same
from coalmine.measure.noise_law import (
    MANY_COORDINATES,
    NoiseParts,
    is_on_device,
    measure_law,
    resolution_of,
)
from coalmine.measure.pieces import Pieces, canary_size
from coalmine.measure.ranks import Ranks, Reduce
from coalmine.measure.round import Final, Round, Singles
from coalmine.measure.scale import SMALLEST
from coalmine.measure.schedule import Indices, canary_schedule, rows_of_canaries, sample_canaries, schedule_key
from coalmine.measure.settings import Settings, checked_settings
from coalmine.measure.trees import Tree, host_vector
from coalmine.measure.vectors import (
    LONGEST,
    SHORTEST,
    checked_length,
    copied,
    difference,
    has_single_precision,
    layer_norms,
    like_model,
    numpy_vector,
    on_gpu,
    single_precision,
    vector_norm,
)
from coalmine.result.audit_result import AuditResult
from coalmine.result.derivation import MOST_CLIENTS, derive_result
from coalmine.verdict.alarm import Alarm, AlarmReader, ViolationError
from coalmine.verdict.claim import Claim
from coalmine.verdict.coverage import AuditedItem

Seed = SupportsIndex | bytes
SMALL_SHARE = (
    1e-3  # share of the canaries in the residual's squared length, below which coordinates are followed with them
)
OnViolation = Literal["warn", "raise"] | Callable[[Alarm], object]
Attack = Callable[..., npt.ArrayLike]
Vector = TypeVar("Vector")
Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def _one_thread(
    method: Callable[Concatenate["Audit", Parameters], Returned],
) -> Callable[Concatenate["Audit", Parameters], Returned]:
    """Guard a method that changes the audit: one thread at a time may call it, and no forked process."""

    @wraps(method)
    def guarded(self: "Audit", /, *arguments: Parameters.args, **options: Parameters.kwargs) -> Returned:
        with self._writer:
            returned = method(self, *arguments, **options)
        self._report_alarm()
        return returned

    return guarded


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

    >>> audit = Audit(dim=10_000, canaries=1_000, seed=b"a secret", delta=1e-6, rounds=2)
    >>> rng = np.random.default_rng(0)
    >>> for t in (1, 2):
    ...     present = audit.canaries_in_round(t)
    ...     noisy = audit.updates(present, clip_norm=1.0) + rng.normal(size=10_000)
    ...     audit.observe_round(t, noisy / 600, present=present)
    >>> round(audit.result()["known-round"].headline.estimate.epsilon, 1)  # mechanism_epsilon(1.0, delta=1e-6) is 4.9
    4.7
    """

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
        self._begin(settings, seed, scores, directory, claim, on_violation, deferred)

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

        >>> model = {"weights": np.zeros((100, 90), np.float32), "bias": np.zeros(90, np.float16)}
        >>> audit = Audit.for_model(model, canaries=100, seed=b"a secret", delta=1e-6)
        >>> sorted((name, update.shape, update.dtype.name) for name, update in audit.update(0, 1.0).items())
        [('bias', (90,), 'float16'), ('weights', (100, 90), 'float32')]
        """
        seed = secret_seed(seed)
        ranks = Ranks(reduce)
        layout = Layout.of(parameters, ranks, blocks=blocks, replicated=replicated)
        checked: list[tuple[Settings, Claim | None]] = []

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
            _check_on_violation(on_violation, claim)
            checked.append((settings, Claim.of(claim)))

        ranks.gather(check)  # an argument that one rank rejects stops them all
        settings, promised = checked[0]
        check_same(
            ranks,
            seed=bytes(key_from_seed(seed).to_bytes(16, "little")),
            claim=None if promised is None else promised.to_dict(),
            on_violation=on_violation is not None,
            **settings.to_dict(),
        )
        audit = cls.__new__(cls)
        audit._begin(settings, seed, scores, directory, promised, on_violation, deferred, layout, ranks)
        return audit

    _remote_log: "_RemoteLog | None" = None

    def _begin(
        self,
        settings: Settings,
        seed: Seed,
        scores: Mapping[str, Attack] | None,
        directory: "RunDirectory | Path | str | None",
        claim: Claim | float | None,
        on_violation: OnViolation | None,
        deferred: bool,
        layout: Layout | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        ranks = ranks or Ranks(None)
        tree = None if layout is None else layout.tree
        checked_attacks(scores)  # validate before creating the directory
        _check_on_violation(on_violation, claim)
        promised = Claim.of(claim)
        if promised is not None:
            promised.check_delta(settings.delta)
        stated = None if promised is None else promised.to_dict()
        opened: list[tuple[RunDirectory | None, RoundLog]] = []

        def open_run() -> dict[str, Any] | None:
            if ranks.rank:
                return None  # rank 0 holds the log and the directory
            home = (
                directory if isinstance(directory, RunDirectory) or directory is None else RunDirectory(Path(directory))
            )
            statement = Statement(claim=stated, demonstration=is_guessable(seed), watched=on_violation is not None)
            if home is None:
                commitment, log = Commitment.to(seed, settings, statement), RoundLog()
            else:
                try:
                    commitment = home.commit(seed, settings, statement)
                    statement, log = home.read_statement(), home.open_log()
                except BaseException:
                    if home is not directory:
                        home.close()  # otherwise it stays locked for as long as the error is kept
                    raise
            opened.append((home, log))
            return {"commitment": vars(commitment), "statement": vars(statement)} | _state_of(log)

        run = ranks.gather(open_run)[0]
        home, log = opened[0] if opened else (None, RoundLog())
        statement, commitment = Statement(**run["statement"]), Commitment.from_dict(run["commitment"])
        on_host = None if layout is None else layout.on_host
        self._set_up(settings, statement, seed, commitment, log, scores, home, tree, ranks, on_host)
        if ranks.rank:
            self._remote_log = _RemoteLog.of(run)
        self._deferred = deferred
        if on_violation is not None:
            self.watch(on_violation)

    def _set_up(
        self,
        settings: Settings,
        statement: Statement,
        seed: Seed,
        commitment: Commitment,
        log: RoundLog,
        scores: Mapping[str, Attack] | None,
        directory: RunDirectory | None,
        tree: Tree | None = None,
        ranks: Ranks | None = None,
        on_host: bool | None = None,
    ) -> None:
        self.settings = settings
        on_host = tree is None or tree.on_host if on_host is None else on_host
        self._ranks = ranks or Ranks(None)
        self._statement = statement
        self.commitment = commitment
        self.directory = directory
        self._tree = tree
        self._pieces: Pieces | None = None
        try:
            if tree is not None and (settings.blocks or self._ranks.several):
                self._pieces = Pieces(tree, settings, seed=seed, ranks=self._ranks, on_host=on_host)
            else:
                kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
                self._canaries = kind(settings.total, settings.dim, seed=seed)
        except MemoryError:
            raise ValueError(
                f"{settings.total:,} canaries of {settings.dim:,} numbers do not fit in memory: use fewer"
            ) from None
        self._key = SecretBytes(schedule_key(seed))
        self._expensive_rounds = ExpensiveRounds(settings, self._key)
        self._writer = OneWriter("the audit")
        self._log = log
        self._attacks = checked_attacks(scores)
        self._parts = NoiseParts.of_all(settings)
        self._before: _Before | None = None
        self._coordinate_sums: CoordinateSums | None = None  # of the rounds since the last restart
        self._last_sum: tuple[list[int], Any] | None = None
        self._deferred = self._closed = False
        self._claim = None if statement.claim is None else Claim.from_dict(statement.claim)
        self._pending: _Pending | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._finisher: Callable[..., AuditResult] | None = None
        self._on_violation: tuple[Claim, OnViolation] | None = None
        self._watched: tuple[Claim, AlarmReader] | None = None  # the claim last checked for an alarm, and its reader
        self._new_alarm: Alarm | None = None
        self._recall_scores()

    def _recall_scores(self) -> None:
        self._previous_scores: dict[str, Floats] = {}
        if self._attacks:
            for item in self._log.rounds():
                self._previous_scores |= {name: np.asarray(own, np.float64) for name, own in item.scores.items()}

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
        refuse_copy(
            "an Audit", "use Audit.save and Audit.load for a copy, or make a second Audit with another directory"
        )

    def __repr__(self) -> str:
        if "_log" not in vars(self):
            return "Audit(…)"  # in a traceback through its constructor
        return f"Audit(dim={self.settings.dim}, canaries={self.settings.canaries}, rounds={len(self._log.numbers)})"

    @property
    def demonstration(self) -> bool:
        """Whether the seed can be guessed: a number below 2^64, or fewer than 8 bytes.

        Such an audit is for studies and tests: anyone can find its canaries from the commitment.
        """
        return self._statement.demonstration

    @property
    def rank(self) -> int:
        """The number of this process among those that audit the model, from 0; rank 0 holds the result."""
        return self._ranks.rank

    def _own_log(self) -> RoundLog:
        """The log; ValueError on a rank that does not hold it."""
        if self._remote_log is not None:
            raise ValueError(
                f"rank 0 holds the log and the result of this audit; this is rank {self.rank}, so call it on rank 0"
            )
        return self._log

    @property
    def log(self) -> RoundLog:
        """Everything observed so far; on rank 0 only."""
        self.flush()
        return self._own_log()

    @property
    def log_digest(self) -> str:
        """A digest of all rounds recorded so far. Store it elsewhere, and no change of them goes unnoticed."""
        return self._own_log().digest

    @property
    def last_round(self) -> int:
        """Number of the last observed round, 0 before the first."""
        if self._remote_log is not None:
            return self._remote_log.last
        return self._pending.number if self._pending else self._log.last_number

    @property
    def own_scores(self) -> tuple[str, ...]:
        """Names of the user's own attacks."""
        return tuple(self._attacks)

    @cached_property
    def _layer_sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.settings.layers)

    @cached_property
    def _schedule(self) -> Callable[[int], Indices]:
        return canary_schedule(self.settings, self._key)

    def canaries_in_round(self, round_number: int) -> Indices:
        """The canaries that take part in a round, counted from 1: by `sampling`, or otherwise spread over the run."""
        number, rounds = whole_number("round_number", round_number, minimum=1), self.settings.rounds
        if rounds is None:
            raise ValueError("canaries_in_round needs the number of rounds: pass rounds= or sampling= to Audit")
        if number > rounds:
            raise ValueError(f"round_number must be at most rounds = {rounds}, got {number}")
        return self._schedule(number)

    def sampled_canaries(self, round_number: int, sampling_probability: float) -> Indices:
        """The canaries that take part in a round under Poisson sampling; the same in every call."""
        number = whole_number("round_number", round_number, minimum=1)
        probability = one_number("sampling_probability", sampling_probability)
        if not 0 <= probability <= 1:
            raise ValueError(f"sampling_probability must lie in [0, 1], got {probability}")
        return sample_canaries(self.settings.canaries, probability, round_number=number, key=self._key)

    def canary_rows(self, rows: int) -> npt.NDArray[np.int64]:
        """A row for each canary, in a data set with this many rows; as secret as the seed.

        A canary that takes part exactly when the pipeline picks its row shows how the pipeline samples.
        """
        return rows_of_canaries(self.settings.canaries, whole_number("rows", rows, minimum=1), key=self._key)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The entries of the result that the trainer committed to before round 1."""
        return self._statement.facts

    @property
    def rotated_canaries(self) -> RotatedCanaries:
        """The canaries themselves, for an integration that computes with them inside its framework's compiler."""
        canaries = None if self._pieces is not None else self._canaries
        if not isinstance(canaries, RotatedCanaries):
            raise ValueError("only rotated canaries of a model in one block can be compiled into a training step")
        return canaries

    def updates(
        self, present: Iterable[SupportsIndex], clip_norm: float, *, scale: float = 1.0, like: Any = None
    ) -> Any:
        """The sum of the present canaries' updates, each of norm scale·clip_norm (Proj, Algorithm 2).

        `like` is an array or tensor whose kind, dtype and device the sum takes. A sum cannot be clipped client by client:
        to audit the clipping itself, send each canary's `update` through it with scale 10.
        """
        size = _clip_norm(clip_norm) * float(positive_array("scale", one_number("scale", scale)))
        indices = self._observed_indices(present)
        if self._tree is not None and like is not None:
            raise ValueError("like is for flat vectors: an audit made for a model returns updates like its parameters")
        if self._pieces is not None:
            return self._pieces.sum_of_canaries(indices, size)
        template = like if self._tree is None else self._tree.vector_like()
        total = self._canaries.combine(indices, like=template)
        if has_single_precision(total):  # the round will need it again; half precision would show in the gauges
            self._last_sum = (indices, host_vector("updates", total))
        return total * size if self._tree is None else self._tree.from_vector(total, size)

    def update(self, index: SupportsIndex, clip_norm: float, *, scale: float = 1.0, like: Any = None) -> Any:
        """One canary client's update, of norm scale·clip_norm."""
        return self.updates([index], clip_norm, scale=scale, like=like)

    @_one_thread
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
        handover: bool = False,
    ) -> None:
        """Record the release of a round (Algorithm 3): the noised average, before the server's optimiser.

        `others` is the clipped sum of the real clients without noise, `noise_std` the noise's stated standard deviation and
        `clip_norm` the most that one client adds, all three in the units of `model_delta`: divided by the same n. Without
        `clip_norm` the audit measures the contribution of a canary, which is less precise. `scale` is the norm of the
        canaries before clipping, in clip norms; above 1, the clipping is audited too. `participants` is the number of
        clients that took part, canaries included: cohort sizes distinguish fixed-size from Poisson sampling. With
        `handover` you promise not to change `model_delta` and `others` any more, so a `deferred` audit need not copy them. A
        delta of zeros is recorded as a skipped round. After an error nothing is recorded.
        """
        stated = (round_number, present, noise_std, clip_norm, scale, participants)
        if self._pieces is not None:
            self._observe_pieces(model_delta, others, stated)
            return
        _, indices, facts = self._facts(*stated)
        model_delta, others = host_vector("model_delta", model_delta), host_vector("others", others)
        if self._tree is not None:
            model_delta = self._tree.vector("model_delta", model_delta, own=self._deferred)
            others = None if others is None else self._tree.vector("others", others, own=self._deferred)
        checked_length("model_delta", model_delta, self.settings.dim)
        if others is not None:
            checked_length("others", others, self.settings.dim)
        self.flush()
        order = self._log.observed_count + 1  # skipped rounds do not count; from the log, so it survives a restart
        copy = self._tree is None and not handover  # a tree's vector is a copy already
        if self._begin_later(model_delta, others, indices, facts, order, copy=copy):
            return
        item = self._round_now(model_delta, others, indices, self._taken_sum(indices), facts, order)
        self._record(self._with_scores(item, model_delta, self._canaries))

    def _facts(
        self,
        round_number: int,
        present: Iterable[SupportsIndex],
        noise_std: float | None,
        clip_norm: float | None,
        scale: float,
        participants: int | None,
    ) -> tuple[int, list[int], dict[str, Any]]:
        """The round's number, its canaries, and the other facts of its record; ValueError if it is out of order."""
        number = whole_number("round_number", round_number, minimum=1)
        if number <= self.last_round:
            raise ValueError(f"rounds must come in order, got round {number} after round {self.last_round}")
        if self.settings.noise is not None and number > self.settings.noise.rounds:
            raise ValueError(f"the noise was planned for {self.settings.noise.rounds} rounds, got round {number}")
        if self._closed:
            raise ValueError("the audit is closed: make a new one to observe more rounds")
        if self._finished:
            raise ValueError(
                f"the final model was observed before round {number}; call rewind_to with an earlier round first"
            )
        indices = self._observed_indices(present)
        return (
            number,
            indices,
            {
                "number": number,
                "present": np.array(indices, dtype=np.int32),
                "clip_norm": 1.0 if clip_norm is None else _clip_norm(clip_norm),
                "clip_declared": clip_norm is not None,
                "noise_std": None if noise_std is None else _noise_std(noise_std),
                "scale": _usable_size("scale", scale),
                "participants": None if participants is None else _cohort_size(participants, len(indices)),
            },
        )

    @property
    def _finished(self) -> bool:
        """Whether the final model was observed."""
        return self._log.final is not None if self._remote_log is None else self._remote_log.finished

    def _observe_pieces(self, model_delta: Any, others: Any, stated: tuple[Any, ...]) -> None:
        """Measure a round of a model in blocks, together with the other ranks, and record it on rank 0."""
        assert self._pieces is not None
        try:
            _, indices, facts = self._facts(*stated)
        except Exception as error:
            self._pieces.refuse(error)  # so that the other ranks do not wait
            raise
        observed = self._log.observed_count if self._remote_log is None else self._remote_log.observed
        item = self._pieces.round(model_delta, others, indices, facts, observed + 1)
        item = self._with_scores(item, model_delta, self._pieces.canaries)
        if self._remote_log is None:
            self._record(item)
        else:
            self._remote_log = _RemoteLog(item.number, observed + (not item.skipped), False)
        if self._ranks.several and self._on_violation is not None:
            alarm = self._ranks.gather(lambda: self._new_alarm and self._new_alarm.to_dict())[0]
            self._new_alarm = None if alarm is None else Alarm.from_dict(alarm)

    def flush(self, *, sync: bool = False) -> None:
        """Record the round that a `deferred` audit is still measuring; its errors are raised now.

        An invalid round is dropped; one that cannot be written, for example on a full disk, is kept for the next try. With
        `sync` every round is on disk when this returns: call it before you write a checkpoint that relies on it.
        """
        if self._pending is not None:
            self._record_pending()
        if sync:
            self._log.sync()

    @_one_thread
    def _record_pending(self) -> None:
        if self._pending is None:
            return
        try:
            item = self._pending.item()
        except ValueError:
            self._pending = None
            raise
        self._record(item)
        self._pending = None

    def _record(self, item: Round) -> None:
        """Write a round to the log and, if `on_violation` is set, check whether it raises an alarm."""
        self._log.append(item)
        if self._on_violation is not None:
            claim = self._on_violation[0]
            known = self._watched is not None and self._watched[0] == claim and self._watched[1].alarm is not None
            self._new_alarm = None if known else self._watch(claim).alarm

    def _watch(self, claim: Claim) -> AlarmReader:
        """The alarm reader of a claim after all rounds in the log; earlier rounds are not read again."""
        if self._watched is None or self._watched[0] != claim:
            self._watched = (claim, AlarmReader(self.settings, claim))
        reader = self._watched[1]
        for item in self._log.rounds_after(reader.last_round):
            reader.see(item)
        return reader

    def _report_alarm(self) -> None:
        """Carry out `on_violation`, once, without a lock: the user's function may call `result`."""
        alarm, self._new_alarm = self._new_alarm, None
        if alarm is None or self._on_violation is None:
            return
        action = self._on_violation[1]
        if action == "raise":
            raise ViolationError(alarm)
        if callable(action):
            action(alarm)
        elif self.rank == 0:
            warnings.warn(str(alarm), RuntimeWarning, stacklevel=3)

    def _begin_later(
        self, model_delta: Any, others: Any, present: list[int], facts: dict[str, Any], order: int, *, copy: bool
    ) -> bool:
        """Start to measure a round, to be recorded when the next one comes; False if it must be measured at once."""
        settings = self.settings
        if not self._deferred or settings.kind != "rotated" or settings.momentum or self._attacks:
            return False
        if not on_gpu(model_delta):
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "coalmine-audit", initializer=stay_in_one_thread)
            given = (model_delta, others)
            if copy:  # the caller's own arrays, which may be overwritten
                given = copied(model_delta), None if others is None else copied(others)
            total = self._taken_sum(present)
            future = self._worker.submit(self._round_now, *given, present, total, facts, order)
            self._pending = _Pending(facts["number"], future.result)
            return True
        assert isinstance(self._canaries, RotatedCanaries)
        delta = like_model(model_delta, model_delta)
        rest = None if others is None else like_model(others, delta)
        layers = self._layer_sizes if rest is not None else ()
        total = None
        if rest is not None and present:
            taken = self._taken_sum(present)
            total = self._canaries.combine(present, like=delta) if taken is None else like_model(taken, delta)
        measurement = self._canaries.measure_later(delta, rest, total, layers, copy=copy)
        if measurement is None:
            self._last_sum = (present, total) if total is not None else None  # for the measurement that follows
            return False
        self._pending = _Pending(facts["number"], lambda: self._round_of(measurement, present, facts, order))
        return True

    def _round_now(
        self, model_delta: Any, others: Any, present: list[int], total: Any, facts: dict[str, Any], order: int
    ) -> Round:
        """The record of a round; `total` is the sum of the present canaries, if it is known."""
        norm = vector_norm("model_delta", model_delta)
        if norm == 0:
            return Round(number=facts["number"], skipped=True)
        residual = None if others is None else self._without(model_delta, others)
        measured = self._canaries.cosines_of_each([model_delta] if residual is None else [model_delta, residual[0]])
        cosines, rest = self._rest_of(numpy_vector(measured[0]), norm, model_delta, present)
        extra: dict[str, Any] = {}
        if residual is not None:
            vectors = _RoundVectors(model_delta, others, total, order)
            extra = self._residual(*residual, numpy_vector(measured[1]), present, vectors, facts)
        elif facts["noise_std"] and self.settings.noise is None and self._undoes_momentum(facts["number"]):
            extra = self._follow_release(model_delta, present, total, facts)
        if self.settings.momentum:
            self._before = _Before(facts["number"], copied(model_delta), cosines.astype(np.float64) * norm)
        return Round(**facts, norm=norm, rest=rest, cosines=cosines, **extra)

    def _round_of(self, measurement: Any, present: list[int], facts: dict[str, Any], order: int) -> Round:
        """The record of a round from the measurements of a GPU."""
        numbers = measurement.numbers()
        norm, residual = float(numbers["norm"][0]), float(numbers.get("residual_norm", np.ones(1))[0])
        if not usable(norm) or not usable(residual):  # zeros, NaN, or numbers near the limits of their range
            others = measurement.others if measurement.plan.others else None
            return self._round_now(measurement.vector, others, present, None, facts, order)
        cosines, rest = self._rest_of(numbers["cosines"], norm)
        extra: dict[str, Any] = {}
        if "residual_cosines" in numbers:
            own, residual_rest = self._rest_of(numbers["residual_cosines"], residual)
            extra = {"residual_norm": residual, "residual_rest": residual_rest, "residual_cosines": own}
            size, declared = 0.0, True
            if present:
                along = np.asarray(own[present], np.float64) * residual
                size, declared = canary_size(along, residual_rest, facts, self.settings)
            if self.settings.layers:
                square = (
                    numbers["rests"] - 2 * size * numbers.get("overlaps", 0.0) + size**2 * numbers.get("totals", 0.0)
                )
                extra["layer_rests"] = np.sqrt(np.maximum(square, 0.0))
                extra["layer_others"] = np.sqrt(numbers["others"])
            with measurement.aside():
                noise = measurement.vector - measurement.others
                if present:
                    noise.sub_(measurement.total, alpha=size)
                if self._measures_law(order, cheaply=False):
                    total = measurement.total if present else None
                    vectors = _RoundVectors(measurement.vector, measurement.others, total, order)
                    extra |= vectors.resolution | self._law(noise, vectors, exact=declared)
                extra |= self._follow(noise, measurement.vector, measurement.others, facts)
        elif facts["noise_std"] and self.settings.noise is None:
            with measurement.aside():
                extra |= self._follow(measurement.vector, measurement.vector, None, facts)
        return Round(**facts, norm=norm, rest=rest, cosines=cosines, **extra)

    def _follow(self, noise: Any, release: Any, others: Any, facts: dict[str, Any]) -> dict[str, Any]:
        """Add a round's noise to the sums that follow each coordinate; their reading, if it is time for one."""
        number, sums = facts["number"], self._coordinate_sums
        if sums is None or sums.is_out_of_order(number):
            sums = self._coordinate_sums = CoordinateSums.of_vector(self.settings, self._key)
        place = sums.places[0]
        own = None if others is None else others[place]
        factor = 1 + self.settings.momentum
        added = sums.add(number, 0, noise[place], release[place], others=own, stated=facts["noise_std"], factor=factor)
        return {"law_coordinates": sums.read()} if added and sums.end(number) else {}

    def _last_reading(self) -> dict[str, Any]:
        """The reading of the sums after the last round, unless that round has it."""
        sums = self._coordinate_sums
        return {"law_coordinates": sums.read()} if sums is not None and sums.is_unread else {}

    @_one_thread
    def observe_final(self, model: Any, *, initial: Any = None) -> None:
        """Record the final model (Algorithm 2) and, for `final-update`, the initial one."""
        self.flush()
        if self._closed:
            raise ValueError("the audit is closed: make a new one to observe more rounds")
        if self._finished:
            raise ValueError("the final model was observed already; call rewind_to to observe another")
        if self._pieces is not None:
            final = self._pieces.final(model, initial)
            if self._remote_log is None:
                self._log.finish(final)
            else:
                self._remote_log = replace(self._remote_log, finished=True)
            return
        model, initial = host_vector("model", model), host_vector("initial", initial)
        if self._tree is not None:
            model = self._tree.vector("model", model)
            initial = None if initial is None else self._tree.vector("initial", initial)
        checked_length("model", model, self.settings.dim)
        norm = vector_norm("model", model)
        cosines = np.asarray(numpy_vector(self._canaries.cosines(model)), dtype=np.float32)
        sha256 = model_sha256(single_precision(model))
        record = Final(norm=norm, cosines=cosines, sha256=sha256, **self._last_reading())
        if initial is None:
            self._log.finish(record)
            return
        checked_length("initial", initial, self.settings.dim)
        moved = difference(model, initial)
        update_norm = vector_norm("model - initial", moved)
        moves = layer_norms(moved, self._layer_sizes or [self.settings.dim])
        if update_norm == 0:  # nothing moved, so there is no direction to compare with: the gauges of training say so
            self._log.finish(replace(record, layer_moves=moves))
            return
        update = np.asarray(numpy_vector(self._canaries.cosines(moved)), dtype=np.float32)
        self._log.finish(replace(record, update_norm=update_norm, update_cosines=update, layer_moves=moves))

    @_one_thread
    def rewind_to(self, round_number: int) -> None:
        """Remove every round after `round_number`, and the final model: for a trainer that resumes from a checkpoint."""
        number = whole_number("round_number", round_number, minimum=0)
        if self._pending is not None and self._pending.number > number:
            self._pending = None
        self.flush()
        self._before = self._watched = self._new_alarm = self._coordinate_sums = None
        if self._remote_log is None:
            self._log.rewind_to(number)
        if self._pieces is not None:
            self._pieces.forget()
            state = self._ranks.gather(lambda: _state_of(self._log))[0]
            if self._remote_log is not None:
                self._remote_log = _RemoteLog.of(state)
        self._recall_scores()

    @property
    def claim(self) -> Claim | None:
        """The claim that the audit was made with, and committed to."""
        return self._claim

    def watch(self, on_violation: OnViolation, claim: Claim | float | None = None) -> None:
        """From now on, check every round against a claim, by default the audit's own; `on_violation` reacts to an alarm."""
        _check_on_violation(on_violation, self._claim if claim is None else claim)
        watched = self._claim if claim is None else Claim.of(claim)
        assert watched is not None
        self._on_violation = (watched, on_violation)

    @property
    def watched(self) -> bool:
        """Whether every round is checked for an alarm."""
        return self._on_violation is not None

    def read_claim_as(self, claim: Claim) -> None:
        """Check the rounds against this reading of the audit's claim, if they are checked. For integrations."""
        if self._on_violation is not None:
            self._on_violation = (claim, self._on_violation[1])

    def alarm(self, claim: Claim | float | None = None, *, wait: bool = True) -> Alarm | None:
        """The first round after which the claim was refuted, and the reason; None as long as nothing refutes it.

        Call it as often as you like, even after every round: a true claim raises an alarm in at most 0.25 % of runs, however
        often it is checked. The verdict of `result` is for one check at the end. The absence of an alarm is not a PASS. The
        default claim is the one that the audit was made with. Without `wait`, a round that a `deferred` audit is still
        measuring is not included.
        """
        self._own_log()
        if wait:
            self.flush()
        watched = self._claim if claim is None else Claim.of(claim)
        if watched is None:
            raise ValueError("alarm needs a claim to check the rounds against: pass it to alarm, or claim= to Audit")
        return self._watch(watched).alarm

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
            self._own_log(),
            self.settings,
            claim=self._claim if claim is None else Claim.of(claim),
            analytical_epsilon=analytical_epsilon,
            clients=clients,
            audited=audited,
            watched=self._on_violation is not None if watched is None else watched,
        )

    def finish(self, *, claim: Claim | float | None = None, **facts: Any) -> AuditResult:
        """The result of a finished run, which is also written to result.json if the audit has a directory.

        With several ranks, call it on every one: rank 0 returns the result, the others None. `facts` are further arguments
        of `result`. If an integration made this audit, it adds its own facts about the run, and takes those that its page
        lists.
        """
        if self._finisher is not None:
            return self._finisher(claim=claim, **facts)
        if self._remote_log is not None:
            return cast(AuditResult, None)  # on other ranks, and only there
        result = self.result(claim=claim, **facts)
        if self.directory is not None:
            self.directory.write_result(result)
        return result

    def finish_with(self, finisher: Callable[..., AuditResult]) -> None:
        """Let an integration finish the audit: `finish` calls this function with its own arguments."""
        self._finisher = finisher

    def save(self, path: Path | str) -> None:
        """Save everything but the seed in one file: written whole or not at all, hashed, without pickle."""
        self.flush()
        audit_snapshot.save(Path(path), self.settings, self._statement, self.commitment, self._own_log())

    @classmethod
    def load(
        cls, path: Path | str, *, seed: Seed, scores: Mapping[str, Attack] | None = None, parameters: Any = None
    ) -> "Audit":
        """Load a saved audit, to resume it bit for bit; the seed must be the one it committed to.

        Only the sums that follow each coordinate over the rounds begin anew.

        An audit that was made for a model needs the model's `parameters` again, for their structure.
        """
        seed = secret_seed(seed)
        settings, statement, commitment, log = audit_snapshot.load(Path(path))
        if not commitment.opens_to(seed, settings, statement):
            raise ValueError(f"{path}: this is not the seed that the audit committed to")
        if settings.processes > 1:
            raise ValueError(
                f"{path}: an audit of several processes is resumed from its directory, not from a saved file"
            )
        tree = None if parameters is None else Tree(parameters)
        if tree is None and settings.blocks:
            raise ValueError(f"{path}: this audit was made for a model in blocks: pass its parameters too")
        if tree is not None and tuple(layer for layer in tree.layers if layer[1]) != settings.layers:
            raise ValueError(f"{path}: the parameters must be those of the audit's model, got other names or sizes")
        audit = cls.__new__(cls)
        audit._set_up(settings, statement, seed, commitment, log, scores, None, tree)
        return audit

    def _observed_indices(self, present: Iterable[SupportsIndex]) -> list[int]:
        if not isinstance(present, Iterable):
            raise WrongTypeError(f"present must list canaries, got {shown(present)}")
        listed = list(present.tolist() if hasattr(present, "tolist") else present)
        indices = [whole_number("a canary's index", index, minimum=0) for index in listed]
        beyond = [index for index in indices if index >= self.settings.canaries]
        if beyond:
            raise ValueError(f"present canaries must lie in 0..{self.settings.canaries - 1}, got {beyond[0]}")
        if len(set(indices)) < len(indices):
            raise ValueError("present canaries must differ, got one twice")
        return indices

    def _rest_of(
        self, cosines: Floats, norm: float, vector: Any = None, present: Sequence[int] = ()
    ) -> tuple[Singles, float]:
        """The cosines in single precision, and the norm of their vector orthogonal to the observed canaries."""
        if self.settings.kind == "rotated":
            observed = cosines[: self.settings.canaries]
            share = 1 - float(observed @ observed)
        else:
            along, square = self._along_present(vector, list(present))
            share = 1 - along * along * square / (norm * norm)
        # without noise only rounding errors are left: scores are then huge, but not infinite
        return cosines.astype(np.float32), norm * math.sqrt(max(share, SMALLEST))

    def _along_present(self, vector: Any, present: list[int]) -> tuple[float, float]:
        """The coefficient of the present canaries' sum in a vector, and that sum's squared norm."""
        if not present:
            return 0.0, 0.0
        total = numpy_vector(self._canaries.combine(present))
        square = float(total @ total)
        return float(numpy_vector(vector) @ total) / square, square

    def _without(self, model_delta: Any, others: Any) -> tuple[Any, float]:
        """The residual of a round, its canaries and noise without all other updates, and its norm."""
        vector = difference(model_delta, others)
        norm = vector_norm("model_delta - others", vector)
        if norm == 0:
            raise ValueError(
                "model_delta and others are equal, so no noise and no canary is left; check both arguments"
            )
        return vector, norm

    def _residual(
        self,
        vector: Any,
        norm: float,
        exact: Floats,
        present: list[int],
        vectors: "_RoundVectors",
        facts: dict[str, Any],
    ) -> dict[str, Any]:
        """The fields of a round's record for the residual, the release without all other updates."""
        cosines, rest = self._rest_of(exact, norm, vector, present)
        if self.settings.kind == "sphere" and present:
            cosines, norm = self._without_each_other(vector, cosines, norm, rest, present)
        fields: dict[str, Any] = {"residual_norm": norm, "residual_rest": rest, "residual_cosines": cosines}
        fields |= vectors.resolution
        along = np.asarray(cosines[present], np.float64) * norm
        if not self._undoes_momentum(facts["number"]):
            return fields  # undoing momentum needs the previous round, which a restart has lost
        if self.settings.momentum and self._before is not None:
            vector = difference(vector, self._before.model_delta * self.settings.momentum)
            along = along - self.settings.momentum * self._before.along[present]
        cheaply = not is_on_device(vector) and (vectors.total is not None or not present)
        by_layer = bool(self.settings.layers) and not is_on_device(vector)  # the noise is computed in any case
        measures_law = self._measures_law(vectors.order, cheaply=cheaply or by_layer)
        declared, size = True, 0.0
        if present:
            size, declared = canary_size(along, rest, facts, self.settings)
            needed = measures_law or self.settings.layers or vectors.total is not None
            if not needed and len(present) * size * size < SMALL_SHARE * rest * rest:
                return fields | self._follow(vector, vectors.release, vectors.others, facts)
            if vectors.total is None:
                vectors = replace(vectors, total=self._canaries.combine(present, like=vector))
            vector = difference(vector, vectors.total * size)
        if self.settings.layers:
            fields["layer_rests"] = layer_norms(vector, self._layer_sizes)
            fields["layer_others"] = layer_norms(vectors.others, self._layer_sizes)
        if measures_law:
            fields |= self._law(vector, vectors, exact=declared)
        return fields | self._follow(vector, vectors.release, vectors.others, facts)

    def _undoes_momentum(self, number: int) -> bool:
        """Whether the momentum of the previous round can be subtracted, or there is none."""
        if not self.settings.momentum or number == 1:
            return True
        return self._before is not None and self._before.number == number - 1

    def _follow_release(self, vector: Any, present: list[int], total: Any, facts: dict[str, Any]) -> dict[str, Any]:
        """Follow the coordinates of a release whose other updates are not known; they only add to its squares."""
        release = vector
        if self.settings.momentum and self._before is not None:
            vector = difference(vector, self._before.model_delta * self.settings.momentum)
        if present and total is not None and facts["clip_declared"]:
            vector = difference(vector, total * facts["clip_norm"])
        return self._follow(vector, release, None, facts)

    def _law(self, noise: Any, vectors: "_RoundVectors", *, exact: bool) -> dict[str, Any]:
        """The measurements of the noise's law in this round."""
        full = vectors.order in self._expensive_rounds
        sizes = [size for size in (vectors.others, vectors.total) if size is not None]
        return measure_law(noise, vectors.release, self._parts, full=full, exact=exact, sizes=sizes)

    def _measures_law(self, order: int, *, cheaply: bool) -> bool:
        """Whether the noise's law is measured in this round: always, unless the model is large and it is expensive."""
        return cheaply or self.settings.dim <= MANY_COORDINATES or order in self._expensive_rounds

    def _taken_sum(self, present: list[int]) -> Any:
        """The present canaries' sum, if the last `updates` computed it; it is kept no longer than its round."""
        last, self._last_sum = self._last_sum, None
        return last[1] if last is not None and last[0] == present else None

    def _without_each_other(
        self, vector: Any, cosines: Singles, norm: float, rest: float, present: list[int]
    ) -> tuple[Singles, float]:
        """Each sphere canary's cosine with the residual after subtracting the other present ones, which overlap with it."""
        size, _ = self._along_present(vector, present)
        total = numpy_vector(self._canaries.combine(present))
        overlap = np.asarray(self._canaries.cosines(total)) * np.linalg.norm(total)
        overlap[present] -= 1.0
        along = cosines.astype(np.float64) * norm - size * overlap
        length = math.hypot(rest, size)
        return (along / length).astype(np.float32), length

    def _with_scores(self, item: Round, model_delta: Any, canaries: Any) -> Round:
        """A round's record with the scores of the user's own attacks."""
        if item.skipped or not self._attacks:
            return item
        own = {name: self._attack(name, item.number, model_delta, canaries) for name in self._attacks}
        self._previous_scores |= {name: values.astype(np.float64) for name, values in own.items()}
        return replace(item, scores=own)

    def _attack(self, name: str, number: int, model_delta: Any, canaries: Any) -> Singles:
        returned = self._attacks[name](number, model_delta, canaries, self._previous_scores.get(name))
        values = np.asarray(numpy_vector(returned), dtype=np.float64)
        if values.shape != (self.settings.total,):
            raise ValueError(
                f"scores of {name!r} must be one for each of {self.settings.total} canaries, got shape {values.shape}"
            )
        if not np.isfinite(values).all():
            raise ValueError(f"scores of {name!r} must be finite, got NaN or infinity in round {number}")
        return values.astype(np.float32)


def _check_on_violation(on_violation: object, claim: Claim | float | None) -> None:
    if on_violation is None:
        return
    if on_violation not in ("warn", "raise") and not callable(on_violation):
        kind = ValueError if isinstance(on_violation, str) else WrongTypeError
        raise kind(f"on_violation must be 'warn', 'raise' or a function, got {shown(on_violation)}")
    if claim is None:
        raise ValueError("on_violation needs a claim to check the rounds against: pass claim= too")


def checked_attacks(scores: Mapping[str, Attack] | None) -> dict[str, Attack]:
    """A user's own attacks by name. None may have the name of a rung, which verdicts depend on."""
    if scores is not None and not isinstance(scores, Mapping):
        raise WrongTypeError(f"scores must map names to attacks, got {type(scores).__name__}")
    for name, attack in (scores or {}).items():
        if name in RUNGS:
            raise ValueError(f"scores must not be named like a rung of the ladder, got {name!r}; give it another name")
        if not callable(attack):
            raise WrongTypeError(f"scores[{name!r}] must be callable, got {type(attack).__name__}")
    return dict(scores or {})


@dataclass(frozen=True)
class _RoundVectors:
    """The vectors of one round: its release, the sum of all other updates, and the present canaries' sum, if known.

    `order` is the number of the round, not counting skipped ones.
    """

    release: Any
    others: Any
    total: Any
    order: int

    @property
    def resolution(self) -> dict[str, float]:
        """The rounding of release and others."""
        release, others = resolution_of(self.release), resolution_of(self.others)
        finite = [step for step in (release, others) if step is not None]
        return {"rounding": sum(finite), "lattice": 12 * min(finite, default=0.0)}


@dataclass(frozen=True)
class _RemoteLog:
    """The state of the log, on a rank that does not hold it."""

    last: int
    observed: int
    finished: bool

    @classmethod
    def of(cls, state: dict[str, Any]) -> "_RemoteLog":
        return cls(state["last"], state["observed"], state["finished"])


def _state_of(log: RoundLog) -> dict[str, Any]:
    """The state of the log for other ranks."""
    return {
        "last": log.last_number,
        "observed": log.observed_count,
        "finished": log.final is not None,
    }


@dataclass(frozen=True)
class _Before:
    """The previous round, to undo a server's momentum: its number, its release, and the products with the canaries."""

    number: int
    model_delta: Any
    along: Floats


@dataclass(frozen=True)
class _Pending:
    """A round that is being measured: its number, and a function that waits for its record."""

    number: int
    item: Callable[[], Round]


def _clip_norm(value: float) -> float:
    return _usable_size("clip_norm", value)


def _noise_std(value: float) -> float | None:
    number = one_number("noise_std", value)
    if number < 0:
        raise ValueError(f"noise_std must be at least 0, got {number}")
    return _usable_size("noise_std", number) if number else None  # no noise is claimed, so there is nothing to measure


def _cohort_size(participants: int, canaries: int) -> int:
    number = whole_number("participants", participants, minimum=0)
    if number > MOST_CLIENTS:
        raise ValueError(f"participants must be at most {MOST_CLIENTS:,}, got {shown(number)}")
    if number < canaries:
        raise ValueError(f"participants must count the {canaries} canaries of the round too, got {number}")
    return number


def _usable_size(name: str, value: float) -> float:
    number = float(positive_array(name, one_number(name, value)))
    if not SHORTEST < number < LONGEST:
        raise ValueError(f"{name} must lie between {SHORTEST:g} and {LONGEST:g}, got {number:g}")
    return number
