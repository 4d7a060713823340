"""Test a Flower strategy: one round in memory, whose clients are canaries.

    release = strategy_release(strategy)
    assert_private(release, epsilon=3.0, delta=1e-5, dim=5_000, clients=100, aggregate="mean")

`clients` is the strategy's `num_sampled_clients`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.clientapp.typing import Mod
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
    from flwr.supercore.task_identity import TaskIdentity  # not public; a strategy cannot make messages without it
except ImportError as error:
    raise ImportError("testing a Flower strategy needs: pip install 'coalmine[flower]'") from error

from coalmine.argument_checks import Floats, positive_array, short_repr
from coalmine.testing.client_rows import ModelArrays, Release, client_rows, joined

__all__ = ["strategy_release"]


def strategy_release(
    strategy: Strategy,
    *,
    mods: Sequence[Mod] = (),
    model: Mapping[str, npt.NDArray[Any]] | None = None,
) -> Release:
    """A function from the clients' updates, one row each, to the change of the model in one round of the strategy.

    Every call is the next round: `configure_train`, a ClientApp with these `mods` whose update is a row, and
    `aggregate_train`. So server-side clipping runs as usual, and client-side clipping runs if its mod is in `mods`, as in
    your ClientApp: `[fixedclipping_mod]`. The model and an optimizer's moments are kept from round to round, as in training.
    An adaptive clip norm starts every round from the same value.
    `model` maps names to arrays (default: one array of zeros). The function's second argument, `weights`, has the
    values that clients report under the strategy's `weighted_by_key` (default: all 1).

    Flower's wrappers divide their noise by `num_sampled_clients`, so there must be exactly as many rows: pass it as
    `clients=…` to `assert_private`. A strategy that samples a fraction of its nodes gets enough nodes to sample one for each
    row.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a strategy of flwr.serverapp, got {short_repr(strategy)}")
    if callable(mods) or not all(callable(mod) for mod in mods):
        raise TypeError(f"mods must list the mods of your ClientApp, got {short_repr(mods)}")
    return _Rounds(strategy, ClientApp(mods=list(mods)), ModelArrays(model))


class _Rounds:
    """The strategy's rounds so far."""

    def __init__(self, strategy: Strategy, app: ClientApp, arrays: ModelArrays) -> None:
        self._strategy, self._app, self._arrays = strategy, app, arrays
        self._round, self._model = 0, ArrayRecord()
        self._updates: dict[int, Floats] = {}  # by node, in this round
        self._examples: dict[int, float] = {}
        self._key = str(_attribute(strategy, "weighted_by_key") or "num-examples")
        app.train()(self._train)

    def __call__(self, updates: Any, weights: Any = None) -> Floats:
        rows = client_rows(updates, dim=self._arrays.dim, clip_norm=_attribute(self._strategy, "clipping_norm"))
        self._check_count(len(rows))
        examples = np.ones(len(rows)) if weights is None else positive_array("weights", weights)
        if examples.shape != (len(rows),):
            raise ValueError(f"weights must be {len(rows)}, one for each client, got shape {examples.shape}")
        if not self._model:
            first = self._arrays.initial(rows.shape[1])
            self._model = ArrayRecord({name: Array(values) for name, values in first.items()})
        self._round += 1
        with _identity(), _same_clip_norm(self._strategy):
            arrays = self._train_round(rows, examples.tolist())
        if arrays is None:
            raise ValueError(
                "the strategy released no model: it rejected the replies of this round, as Flower's log says"
            )
        change = _row(arrays) - _row(self._model)
        self._model = arrays
        return change

    def _train_round(self, rows: Floats, weights: list[float]) -> ArrayRecord | None:
        count = len(rows)
        grid = _Nodes(_nodes_for(self._strategy, count))
        messages = list(self._strategy.configure_train(self._round, self._model, ConfigRecord(), grid))
        if len(messages) != count:
            raise ValueError(
                f"the strategy must send one message for each of the {count} clients, it sent {len(messages)} to "
                f"{len(grid.get_node_ids())} nodes; pass clients={len(messages)}, or check fraction_train and the minima"
            )
        nodes = [message.metadata.dst_node_id for message in messages]
        self._updates = dict(zip(nodes, rows, strict=True))
        self._examples = dict(zip(nodes, weights, strict=True))
        replies = [self._app(message, _context(node)) for message, node in zip(messages, nodes, strict=True)]
        for reply in replies:
            if reply.has_error():
                raise ValueError(f"a mod answered with an error: {reply.error.reason}")
        arrays, _ = self._strategy.aggregate_train(self._round, replies)
        return arrays

    def _train(self, message: Message, context: Context) -> Message:
        """The client's training, inside its mods."""
        (sent,) = message.content.array_records.values()
        parts = self._arrays.split(self._updates[context.node_id])
        moved = {name: Array(array.numpy() + parts[name]) for name, array in sent.items()}
        metrics = MetricRecord({self._key: self._examples[context.node_id]})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    def _check_count(self, count: int) -> None:
        configured = _attribute(self._strategy, "num_sampled_clients")
        if configured is not None and count != configured:
            raise ValueError(
                f"updates must have {configured} rows, the strategy's num_sampled_clients, by which it divides its noise; "
                f"got {count}: pass clients={configured}"
            )


class _Nodes(Grid):
    """A grid with nodes but no transport: the test calls its clients itself."""

    def __init__(self, count: int) -> None:
        self._ids = list(range(1, count + 1))

    def get_node_ids(self) -> list[int]:
        return self._ids

    @property
    def run(self) -> Any:
        raise RuntimeError("a strategy under test has no Flower run")

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("a strategy under test sends nothing: its clients are called in memory")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _refuse


@contextmanager
def _identity() -> Iterator[None]:
    """Give the process an identity, which messages need; the old one is restored at the end."""
    names = ("run_id", "task_id", "node_id")
    old = {}
    for name in names:
        try:
            old[name] = getattr(TaskIdentity, name)
        except RuntimeError:  # not set
            old[name] = None
    try:
        for name in names:
            setattr(TaskIdentity, name, 1)
        yield
    finally:
        for name in names:
            setattr(TaskIdentity, name, old[name])


@contextmanager
def _same_clip_norm(strategy: Any) -> Iterator[None]:
    """Restore an adaptive clip norm after a round: every update is longer, so it would drift away."""
    while strategy is not None and not hasattr(strategy, "clipping_norm"):
        strategy = getattr(strategy, "strategy", None)
    norm = getattr(strategy, "clipping_norm", None)
    try:
        yield
    finally:
        if norm is not None:
            strategy.clipping_norm = norm


def _context(node: int) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


def _row(record: ArrayRecord) -> Floats:
    return joined({name: array.numpy() for name, array in record.items()})


def _nodes_for(strategy: Strategy, count: int) -> int:
    """The number of nodes from which the strategy samples `count`; with fewer it would wait forever."""
    fraction = float(_attribute(strategy, "fraction_train") or 1.0)
    nodes = max(math.ceil(count / fraction - 1e-9), 1)
    while int(nodes * fraction) < count:  # Flower rounds down too
        nodes += 1
    return max(nodes, *(int(_attribute(strategy, name) or 0) for name in ("min_available_nodes", "min_train_nodes")))


def _attribute(strategy: Any, name: str) -> Any:
    """An attribute of the outermost strategy that has it, in a chain of wrappers; None if none has it."""
    while strategy is not None:
        value = getattr(strategy, name, None)
        if value is not None:
            return value
        strategy = getattr(strategy, "strategy", None)
    return None
