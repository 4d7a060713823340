"""`replay`: run any step again with one row less, all randomness frozen, and measure what moves."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

from coalmine.argument_checks import Floats, WrongTypeError, nonnegative, positive, short_repr, whole_number
from coalmine.canaries.array_types import is_tensor
from coalmine.replay.neighbours import (
    MOVES,
    Adjacency,
    blank,
    copied,
    faint,
    has_floats,
    has_tokens,
    leaves,
    longest_row,
    loud,
    ones_like_rows,
    quiet,
    rarest_label,
    reordered,
    row_count,
    weight_without,
    with_row,
    with_row_of,
    without_row,
)
from coalmine.replay.outcome import Replay, RowChange, TensorChange
from coalmine.replay.randomness import Draws, Randomness
from coalmine.replay.state import Snapshot, moved

ROWS = 8  # default number of rows
ROUNDING = 1e-6  # of the sum's norm, in single precision; other precisions in proportion to their unit roundoff
SINGLE = float(np.finfo(np.float32).eps)
COUPLING = 1e-5  # of the outputs' size, in single precision: rows that see each other move further than this
MASKED = 1e5  # times the median output: what is larger masks something
REAL = "real"


def replay(
    step: Callable[..., Any],
    batch: Any,
    *,
    rows: int | Iterable[int] = ROWS,
    clip_norm: float = 1.0,
    adjacency: Adjacency = "add-remove",
    model: Any = None,
    optimizer: Any = None,
    state: Iterable[Any] = (),
    generators: Iterable[Any] = (),
    extremes: bool = True,
    has_aux: bool = False,
    tolerance: float | None = None,
) -> Replay:
    """What one row of a real batch can move in one step, measured exactly.

    `step` is a function of a batch that returns its release: the sum or mean, with its noise or before. The step is run
    with the batch and with its neighbour, from the same state and the same random numbers, so the difference has no noise
    in it. `batch` is an array, or a tuple, list or dictionary of arrays whose first axis counts the rows. A function of jax
    has its key inside: `lambda batch: step(batch, key)`.

    With `model`, a torch module, a step may return None: its release is then the change of the model's parameters.
    `optimizer`, and everything in `state` (objects with a state_dict, or dictionaries of arrays), is restored with it.
    Buffers and attributes of the model, and everything in `state`, are compared between the two runs: what moves there
    depends on a row and is outside of the release. A step of jax returns (release, others) with `has_aux`, and the others
    are compared.

    `clip_norm` is the most that one row may add, in the units of the release: divided by the expected batch size for a mean,
    and times the learning rate for weights. The neighbour follows `adjacency`. Under "add-remove" the row is dropped. If the
    step draws random numbers by row, as dropout does, it must take a weight for each row as its second argument: the
    neighbour keeps the shape, the row's content is 0 and its weight 0. Under "zero-out" the row becomes zeros, as the
    update of a client that leaves, and under "replace-one" the next row of the batch takes its place.

    `rows` is a number of rows, spread over the batch, or their indices. With `extremes` some are also tried 100 times as
    large and as zeros, and the longest sequence, all padding and the rarest label are among them. `tolerance` is the
    rounding, relative to the change that is allowed; by default it follows from the precision and the length of the sum.

    >>> def clipped_sum(rows):
    ...     return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1)).sum(axis=0)
    >>> batch = np.random.default_rng(1).normal(size=(20, 50))
    >>> round(replay(clipped_sum, batch).factor, 6)
    1.0
    >>> round(replay(lambda rows: clipped_sum(rows - rows.mean(axis=0)), batch, rows=[0]).factor, 2) > 1
    True
    """
    if not callable(step):
        raise WrongTypeError(f"step must be a function of a batch, got {short_repr(step)}")
    if short_repr(adjacency) not in map(repr, get_args(Adjacency)):
        raise ValueError(f"adjacency must be 'zero-out', 'add-remove' or 'replace-one', got {short_repr(adjacency)}")
    norm = positive("clip_norm", clip_norm)
    if tolerance is not None:
        tolerance = nonnegative("tolerance", tolerance)
    chosen = _chosen_rows(batch, rows)
    runner = _Runner(step, model, [optimizer, *state], generators, has_aux=has_aux)
    try:
        return Comparison(runner, batch, norm, adjacency, tolerance).of_rows(chosen, extremes=extremes)
    finally:
        runner.restore()


def _chosen_rows(batch: Any, rows: int | Iterable[int]) -> list[int]:
    count = row_count(batch)
    if count == 0:
        raise ValueError("batch must hold at least one row, got none")
    if isinstance(rows, Iterable):
        chosen = [whole_number("rows", row, minimum=0) for row in rows]
        if not chosen or max(chosen) >= count:
            raise ValueError(f"rows must be indices below the batch's {count} rows, got {short_repr(chosen)}")
        return chosen
    number = min(whole_number("rows", rows, minimum=1), count)
    return sorted({round(place) for place in np.linspace(0, count - 1, number)})


class Run(NamedTuple):
    """The release of one run by tensor, everything else that the step wrote, and the outputs of each row if they are known.

    `kept` is what the step leaves in attributes, which a later step may read; each output has one row for each of the batch.
    """

    release: dict[str, Floats]
    written: dict[str, Any]
    outputs: tuple[Floats, ...] = ()
    kept: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_finite(self) -> bool:
        return all(np.isfinite(part).all() for part in self.release.values())


class Runner(Protocol):
    """Runs a step from the same state and the same random numbers each time.

    `takes_weights` means that a row can be left out by its weight, and `resizes` that the step takes batches of any size.
    """

    takes_weights: bool
    resizes: bool
    unit: float  # the coarsest unit roundoff of a release
    precision: float  # that of the step's own computation
    draws: bool  # whether the step draws random numbers

    def run(self, batch: Any, weights: Any = None, after: Mapping[str, Any] | None = None) -> Run:
        """One run; `weights` are 1 for each row unless given, and `after` is what an earlier run left in attributes."""


class _Runner:
    """A runner of a function."""

    resizes = True

    def __init__(
        self, step: Callable[..., Any], model: Any, others: Sequence[Any], generators: Iterable[Any], *, has_aux: bool
    ) -> None:
        self._step, self._model, self._has_aux = step, model, has_aux
        self._snapshot = Snapshot([each for each in (model, *others) if each is not None])
        self._randomness = Randomness(generators)
        self.takes_weights = _takes_weights(step)
        self.unit, self.precision, self.draws = 0.0, 0.0, False

    def restore(self) -> None:
        self._snapshot.restore()
        self._randomness.restore()

    def run(self, batch: Any, weights: Any = None, after: Mapping[str, Any] | None = None) -> Run:
        """One run; `weights` are 1 for each row unless given."""
        self.restore()
        before, draws = self._weights(), Draws()
        arguments = (ones_like_rows(batch) if weights is None else weights,) if self.takes_weights else ()
        returned = self._step(copied(batch), *arguments)
        self.draws |= draws.happened()
        written = self._snapshot.written()
        if self._has_aux:
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise ValueError(f"with has_aux step must return (release, others), got {short_repr(returned)}")
            returned, others = returned
            written |= dict(_named(others, "aux"))
        parts = self._moved_weights(before) if returned is None else dict(_named(returned, ""))
        self.unit = max([self.unit, *map(_roundoff, parts.values())])
        return Run({name: _vector(part) for name, part in parts.items()}, written)

    def _weights(self) -> dict[str, Any]:
        if self._model is None:
            return {}
        return {name: p.detach().clone() for name, p in self._model.named_parameters() if p.requires_grad}

    def _moved_weights(self, before: Mapping[str, Any]) -> dict[str, Any]:
        if self._model is None:
            raise ValueError(
                "step must return its release, got None; pass model= if the release is the change of its weights"
            )
        return {name: p.detach() - before[name] for name, p in self._model.named_parameters() if p.requires_grad}


@dataclass
class Comparison:
    """Compares runs of a batch with runs of its neighbours."""

    runner: Runner
    batch: Any
    clip_norm: float
    adjacency: Adjacency
    given_tolerance: float | None
    most_cases: int | None = None
    _caches: set[str] = field(default_factory=set)  # attributes that no later step reads

    def of_rows(self, rows: Sequence[int], *, extremes: bool) -> Replay:
        """What each of these rows moves, and some extreme ones made of them."""
        base = self.runner.run(self.batch)
        if not base.is_finite:
            raise ValueError("step must return finite numbers for the batch itself, got NaN or infinity")
        allowed = MOVES[self.adjacency] * self.clip_norm
        difference = _distance(base, self.runner.run(self.batch)) / allowed
        tolerance = self._tolerance(base) if self.given_tolerance is None else self.given_tolerance
        changes: list[RowChange] = []
        leaks: dict[str, float] = {}
        broken: list[str] = []
        coupled = 0.0
        for row, kind, batch in self._cases(rows, extremes=extremes):
            name = f"row {row} ({kind})"
            try:
                run = base if batch is self.batch else self.runner.run(batch)
            except ZeroDivisionError:  # a row of zeros has no direction
                broken.append(name)
                continue
            other = self._neighbour(batch, row)
            if (
                run.is_finite and not other.is_finite
            ):  # empty content may mean nothing, such as a mask without any token
                other = self._neighbour(batch, row, (row + 1) % row_count(batch))
            if not (run.is_finite and other.is_finite):
                broken.append(name)
                continue
            changes.append(self._change(row, kind, run, other))
            coupled = max(coupled, _moved_outputs(run, other, row))
            found = moved(run.written, other.written) | self._read_later(run, other, tolerance, leaks)
            leaks |= {name: max(size, leaks.get(name, 0.0)) for name, size in found.items() if size > tolerance}
        return Replay(
            adjacency=self.adjacency,
            clip_norm=self.clip_norm,
            batch=row_count(self.batch),
            rows=tuple(changes),
            tolerance=tolerance,
            difference=difference,
            leaks=leaks,
            coupled=coupled if coupled > self._coupling else 0.0,
            unaligned=self._unaligned(base, tolerance),
            divisor=self._divisor(rows[0]),
            not_finite=tuple(broken),
        )

    def _cases(self, rows: Sequence[int], *, extremes: bool) -> list[tuple[int, str, Any]]:
        """Row, kind and batch of everything that is tried: at most `most_cases`, of several kinds."""
        cases = [(row, REAL, self.batch) for row in rows]
        if not extremes:
            return cases[: self.most_cases]
        real = len(cases)
        for found, kind in ((longest_row(self.batch), "the longest"), (rarest_label(self.batch), "the rarest label")):
            if found is not None and found not in rows:
                cases.append((found, kind, self.batch))
        made = []
        if has_floats(self.batch):
            made += [("100 times as large", loud), ("zeros", quiet)]
        if has_tokens(self.batch):
            made.append(("all padding", blank))
        for place, (kind, make) in enumerate(made):
            row = rows[place % len(rows)]
            cases.append((row, kind, with_row(self.batch, row, make)))
        turns = [
            each for pair in zip_longest(cases[:real], cases[: real - 1 : -1]) for each in pair if each is not None
        ]
        return turns if self.most_cases is None else turns[: self.most_cases]

    def _read_later(self, run: Run, other: Run, tolerance: float, known: Mapping[str, float]) -> dict[str, float]:
        """The attributes that moved with a row, if the next step comes out otherwise for them; else they are a cache."""
        found = {name: size for name, size in moved(run.kept, other.kept).items() if size > tolerance}
        if found.keys() <= known.keys() | self._caches:
            return {}
        left = ({name: each.kept[name] for name in found if name in each.kept} for each in (run, other))
        first, second = (self.runner.run(self.batch, after=after) for after in left)
        apart = _distance(first, second) / self.clip_norm > tolerance
        apart |= max(moved(first.written, second.written).values(), default=0.0) > tolerance
        if apart or _moved_outputs(first, second, None) > self._coupling:
            return found
        self._caches |= found.keys()
        return {}

    @property
    def _coupling(self) -> float:
        return COUPLING * max(self.runner.precision / SINGLE, 1.0)

    def _neighbour(self, batch: Any, row: int, instead: int | None = None) -> Run:
        """The run without a row; its content is that of the row `instead`, or zeros."""
        if self.adjacency == "replace-one":
            return self.runner.run(with_row_of(batch, row, (row + 1) % row_count(batch)))
        if self.adjacency == "zero-out" or self.runner.takes_weights:
            weights = None
            if self.runner.takes_weights:
                weights = weight_without(ones_like_rows(batch), row)
            empty = with_row(batch, row, blank) if instead is None else with_row_of(batch, row, instead)
            try:
                return self.runner.run(empty, weights)
            except ZeroDivisionError:  # such as Flower's clip of zeros
                return self.runner.run(with_row(batch, row, faint), weights)
        return self.runner.run(without_row(batch, row))

    def _change(self, row: int, kind: str, run: Run, other: Run) -> RowChange:
        parts = {name: _norm(run.release[name] - part) / self.clip_norm for name, part in _matched(run, other)}
        change = _norm(np.array(list(parts.values())))
        ordered = sorted(parts.items(), key=lambda item: -item[1])
        tensors = tuple(TensorChange(name=name, change=size) for name, size in ordered if size > 0)
        return RowChange(row=row, kind=kind, change=change, factor=change / MOVES[self.adjacency], tensors=tensors)

    def _tolerance(self, base: Run) -> float:
        # A sum of n rows of length C that cancel is short, but each addition rounds at the length of a row: at least √n·C.
        length = max(_norm(np.concatenate(list(base.release.values()))) / self.clip_norm, row_count(self.batch) ** 0.5)
        unit = max([self.runner.unit, *map(_roundoff, leaves(self.batch))])
        return ROUNDING * unit / SINGLE * length

    def _unaligned(self, base: Run, tolerance: float) -> bool:
        """Whether random numbers belong to places in the batch: then a batch with a row less has other ones."""
        if self.adjacency != "add-remove" or self.runner.takes_weights or not self.runner.draws:
            return False
        turned = self.runner.run(reordered(self.batch, list(range(row_count(self.batch)))[::-1]))
        return _distance(base, turned) / self.clip_norm > tolerance

    def _divisor(self, row: int) -> float | None:
        """The release with a row of weight 0 over the one without that row; None if the step takes no weights."""
        if (
            not self.runner.resizes
            or self.adjacency != "add-remove"
            or not self.runner.takes_weights
            or self.runner.draws
        ):
            return None
        kept, dropped = self._neighbour(self.batch, row), self.runner.run(without_row(self.batch, row))
        one, other = (np.concatenate(list(run.release.values())) for run in (kept, dropped))
        length = float(other @ other)
        return None if length == 0 else float(one @ other) / length


def _takes_weights(step: Callable[..., Any]) -> bool:
    """Whether the step has a second positional argument without a default: the rows' weights."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) >= 2


def _named(value: Any, name: str) -> list[tuple[str, Any]]:
    """Name and array of each leaf of a release."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _named(item, f"{name}.{key}".lstrip("."))]
    if isinstance(value, list | tuple) and not all(isinstance(item, int | float) for item in value):
        return [pair for key, item in enumerate(value) for pair in _named(item, f"{name}.{key}".lstrip("."))]
    return [(name or "release", value)]


def _vector(part: Any) -> Floats:
    try:
        if is_tensor(part):
            part = part.detach().cpu().resolve_conj()
            part = part.double().numpy() if part.is_floating_point() else part.numpy()
        if np.iscomplexobj(part):
            part = np.stack([np.real(part), np.imag(part)])
        return np.array(part, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise WrongTypeError(
            f"step must return an array of numbers, or a list or dictionary of them, got {short_repr(part)}"
        ) from None


def _roundoff(part: Any) -> float:
    """The unit roundoff of an array's precision; 0 for anything but floating-point numbers."""
    if is_tensor(part):
        import torch

        return float(torch.finfo(part.dtype).eps) if part.is_floating_point() else 0.0
    kind = getattr(getattr(part, "dtype", None), "kind", "")
    if kind == "V":  # jax's bfloat16
        return 2.0**-7
    return float(np.finfo(part.dtype).eps) if kind == "f" else 0.0


def _matched(run: Run, other: Run) -> list[tuple[str, Floats]]:
    shapes = [{name: part.size for name, part in each.release.items()} for each in (run, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"step must return arrays of the same shapes for every batch, got {shapes[0]} and {shapes[1]}")
    return list(other.release.items())


def _moved_outputs(run: Run, other: Run, row: int | None) -> float:
    """The largest change of another row's output, relative to the largest output of those rows; all rows if none left."""
    pairs = zip(run.outputs, other.outputs, strict=False)
    return max((_moved_output(one, two, row) for one, two in pairs if one.shape == two.shape), default=0.0)


def _moved_output(one: Floats, other: Floats, row: int | None) -> float:
    before, after = (each if row is None else np.delete(each, row, axis=0) for each in (one, other))
    finite = np.isfinite(before)
    if not np.array_equal(finite, np.isfinite(after)):
        return 1.0
    before, after = before[finite], after[finite]
    sizes = np.abs(before)
    seen = sizes[sizes > 0]
    if seen.size:  # a mask such as -1e9 is no size of an output
        sizes = sizes[sizes <= MASKED * np.median(seen)]
    largest = float(sizes.max(initial=0.0))
    return 0.0 if largest == 0 else float(np.abs(before - after).max(initial=0.0)) / largest


def _distance(run: Run, other: Run) -> float:
    return _norm(np.concatenate([run.release[name] - part for name, part in _matched(run, other)]))


def _norm(vector: Floats) -> float:
    return float(np.linalg.norm(vector))
