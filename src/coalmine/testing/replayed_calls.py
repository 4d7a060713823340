"""Calls that are made again without one client, all random numbers frozen: what one client moves, without the noise.

Canaries are orthogonal, so they never show what a client moves beside others that point the same way, or the opposite one.
These updates do. The change is compared with the noise of the same calls, so a sum and a mean need not be told apart.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri

from coalmine.argument_checks import Floats, one_line
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.gaussian_bound import GaussianBound
from coalmine.evidence.gaussian_gate import NOT_MEASURED
from coalmine.measure.noise_law import resolution_of
from coalmine.replay.frozen import Frozen
from coalmine.replay.neighbours import FAINT
from coalmine.replay.step import ROUNDING
from coalmine.result.audit_result import Headline
from coalmine.testing.call_plan import SHORT
from coalmine.testing.shaped_calls import ShapedPattern
from coalmine.testing.tested_mechanism import Mechanism
from coalmine.testing.update_arrays import released_vector
from coalmine.verdict.coverage import AuditedItem
from coalmine.verdict.findings.checks import ReplyMovesTooFar

DOUBT = 1e-6  # probability with which the noise of the replayed calls may be taken for too small
ALONG = 6.0  # standard deviations by which a change beside the clients' own directions may point along the noise
RANK = 1e-12  # share of the largest eigenvalue below which there is no direction
ROWS = 3  # clients that are left out of each call, the one that counts most among them
RUNG = "known-others"
UNTESTED = "what one client moves beside others was not replayed"


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The updates of a call: their norms in clip norms along unit vectors, and the clients that are left out in turn."""

    name: str
    rows: Floats
    tried: list[int]
    every: bool = False  # whether the client that counts most is tried too


@dataclass(frozen=True, kw_only=True)
class ReplayedCalls:
    """What the replays showed: the largest change and the kind of updates that made it, or why there is none.

    Changes are in standard deviations of the noise, for each clip norm by which a client may move the sum.
    """

    clients: int = 0
    scenes: int = 0
    score: float = 0.0
    scene: str = ""
    certain: float = 0.0  # the score with the largest noise that the calls allow, and without rounding
    likely: float = 0.0  # the same with the smallest noise
    problem: str | None = None

    def finding(self, mechanism: Mechanism) -> ReplyMovesTooFar | None:
        """The refutation, if one client moves the release further than the claim implies."""
        if self.certain * mechanism.allowed_noise <= 1:
            return None
        return ReplyMovesTooFar(updates=self.scene, score=self.score, claimed_score=1 / mechanism.needed_noise)

    def headline(self, mechanism: Mechanism) -> Headline:
        """The epsilon of one call for the client that moves it furthest."""
        epsilon, low, high = (
            float(mechanism_epsilon(1 / (mechanism.moves * score), delta=mechanism.delta))
            for score in (self.score, self.certain, self.likely)
        )
        withheld = GaussianBound(withheld=NOT_MEASURED)
        return Headline(
            rung=RUNG, participations=1, epsilon=epsilon, interval=(low, high), gaussian=withheld, pooled=True
        )

    def item(self, mechanism: Mechanism) -> AuditedItem:
        """The item "rows" of a check."""
        if self.problem is not None:
            return AuditedItem("rows", "not checked", f"{self.problem}: {UNTESTED}")
        share = self.score * mechanism.needed_noise
        detail = (
            f"{self.clients} clients were left out of {self.scenes} kinds of calls, with the same random numbers: at most "
            f"{share:.3g} of what the claim allows (calls with {self.scene} updates)"
        )
        return AuditedItem("rows", "checked" if self.finding(mechanism) is None else "failed", detail)


def replay_calls(mechanism: Mechanism, seed: bytes) -> ReplayedCalls:
    """Call the function with several kinds of updates, and again without some of the clients; its state is restored."""
    if mechanism.form.is_half:
        return ReplayedCalls(problem="updates come in half precision, whose rounding moves with a client")
    frozen: Frozen | None = None
    try:
        frozen = Frozen(mechanism.release)
        with np.errstate(all="ignore"):
            return _Replays(mechanism, frozen).of_scenes(list(_scenes(mechanism, seed)))
    except _NothingToSeeError as nothing:
        return ReplayedCalls(problem=str(nothing))
    except Exception as error:  # the function need not take such updates
        return ReplayedCalls(problem=f"the function fails ({type(error).__name__}: {one_line(str(error))[:100]})")
    finally:
        if frozen is not None:
            frozen.rewind()


class _NothingToSeeError(Exception):
    """Why nothing can be said of the function."""


@dataclass(frozen=True)
class _Change:
    """What one client moved: the length of the change, and the rounding in it."""

    scene: str
    length: float
    rounding: float


class _Replays:
    """The releases of a function from one state, with the same random numbers."""

    def __init__(self, mechanism: Mechanism, frozen: Frozen) -> None:
        self._mechanism, self._frozen = mechanism, frozen
        self._energy, self._dof = 0.0, 0  # of the noise
        self._first: Floats | None = None  # the noise of the first call
        self._changes: list[_Change] = []

    def of_scenes(self, scenes: list[Scene]) -> ReplayedCalls:
        for number, scene in enumerate(scenes):
            base = self._release(scene.rows)
            if not number and np.linalg.norm(base - self._release(scene.rows)) > ROUNDING * np.linalg.norm(base):
                raise _NothingToSeeError("the function does not repeat with the same random numbers")
            if resolution_of(base):
                raise _NothingToSeeError("the release is rounded, and its rounding moves with a client")
            self._replay(scene, base)
            self._frozen.advance()
        if not self._dof or not self._energy or not self._changes:
            raise _NothingToSeeError("the noise of the replayed calls could not be measured")
        noise = math.sqrt(self._energy / self._dof)
        most, least = (math.sqrt(self._energy / float(chdtri(self._dof, tail))) for tail in (1 - DOUBT, DOUBT))
        worst = max(self._changes, key=lambda change: change.length - change.rounding)
        return ReplayedCalls(
            clients=len(self._changes),
            scenes=len(scenes),
            score=worst.length / noise,
            scene=worst.scene,
            certain=max(worst.length - worst.rounding, 0.0) / most,
            likely=(worst.length + worst.rounding) / least,
        )

    def _replay(self, scene: Scene, base: Floats) -> None:
        span = _orthonormal(scene.rows)
        rest = _without(base, span)
        if self._first is None or not _along(rest, self._first):  # the noise has other random numbers
            self._energy += float(rest @ rest)
            self._dof += rest.size - len(span)
        self._first = rest if self._first is None else self._first
        tried = list(scene.tried)
        if scene.every:
            along = np.einsum("ij,j->i", scene.rows, base - self._released(np.zeros_like(scene.rows)))
            tried = list(dict.fromkeys([int(np.argmax(along)), *tried]))[: max(len(tried), 1)]
        rounding = ROUNDING * float(np.linalg.norm(base))
        for row in tried:
            change = base - self._without_client(scene.rows, row)
            self._check_noise(_without(change, span), rest, change, rounding)
            length = float(np.linalg.norm(change)) / self._mechanism.moves
            self._changes.append(_Change(scene.name, length, rounding))

    def _check_noise(self, beside: Floats, noise: Floats, change: Floats, rounding: float) -> None:
        """Stop if the noise itself moves with a client: then the change is not that of the sum."""
        if float(np.linalg.norm(beside)) <= max(rounding, 1e-3 * float(np.linalg.norm(change))):
            return
        if _along(beside, noise):
            raise _NothingToSeeError("the noise moves with a client, beside what they contribute")

    def _without_client(self, rows: Floats, row: int) -> Floats:
        """The release with one client's update replaced: by zeros or, under replace-one, by its opposite."""
        other = rows.copy()
        other[row] = -rows[row] if self._mechanism.moves == 2 else 0.0
        return self._released(other, faint=row)

    def _released(self, rows: Floats, faint: int | None = None) -> Floats:
        """The release; where zeros have no direction, they are nearly zeros."""
        try:
            return self._release(rows)
        except (ZeroDivisionError, ValueError):
            rows = rows.copy()
            rows[np.arange(len(rows)) if faint is None else faint, 0] += FAINT * self._mechanism.clip_norm
            return self._release(rows)

    def _release(self, rows: Floats) -> Floats:
        mechanism = self._mechanism
        self._frozen.restore()
        arguments = [mechanism.form.present(rows.copy())]
        if mechanism.weights is not None:
            arguments.append(mechanism.form.vector(np.full(mechanism.clients, mechanism.weights.max())))
        return released_vector(mechanism.release(*arguments), mechanism.dim)


def _scenes(mechanism: Mechanism, seed: bytes) -> Iterator[Scene]:
    """Updates of several kinds. Under `scale=1` none is longer than the clip norm."""
    count, dim, clip = mechanism.clients, mechanism.dim, mechanism.clip_norm
    rng = np.random.default_rng([*seed[:64], *b"replayed"])
    long = mechanism.scale
    units = rng.standard_normal((count, dim))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    some = rng.permutation(count)[:ROWS].tolist()
    yield Scene(name="independent", rows=long * clip * units, tried=some, every=True)
    if count > 1:
        lengths = np.where(np.arange(count) == some[0], long, SHORT)
        yield Scene(name="short", rows=clip * lengths[:, None] * units, tried=[some[0], some[-1]])
        for name, length in (("aligned", long), ("level", 1.0), ("faint", 0.5)):
            yield Scene(name=name, rows=length * clip * np.repeat(units[:1], count, axis=0), tried=some[:1])
        for name, own, others in (
            ("opposed", max(long, 3.0 * count) if long > 1 else 1.0, 1.0),
            ("outvoted", long, long),
        ):
            signs = np.where(np.arange(count) == some[0], own, -others)
            yield Scene(name=name, rows=clip * signs[:, None] * units[:1], tried=[some[0], some[-1]])
    for shape in ("one-hot", "sparse"):
        shaped = ShapedPattern(shape, count, dim, long).units(seed, 1)
        yield Scene(name=shape, rows=long * clip * shaped, tried=some, every=True)


def _orthonormal(rows: Floats) -> Floats:
    """An orthonormal basis of the space of some rows, as rows."""
    squares, vectors = np.linalg.eigh(rows @ rows.T)
    kept = squares > RANK * squares[-1]
    basis: Floats = (vectors[:, kept] / np.sqrt(squares[kept])).T @ rows
    return basis


def _along(one: Floats, other: Floats) -> bool:
    """Whether two vectors point the same way, or opposite ones, more than chance explains."""
    sizes = float(np.linalg.norm(one) * np.linalg.norm(other))
    return sizes > 0 and abs(float(one @ other)) > sizes * ALONG / math.sqrt(one.size)


def _without(vector: Floats, span: Floats) -> Floats:
    rest: Floats = vector - (span @ vector) @ span
    return rest
