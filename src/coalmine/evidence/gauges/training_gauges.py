"""Gauges of the training itself: did the weights move, did gradients reach every layer, is an update more than noise?

A run whose weights never move is private, and no training. So these gauges never prove a VIOLATION. One of them prevents a
PASS only if nothing was trained at all; otherwise they name the layers, and the verdict on privacy stands.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, count_of
from coalmine.evidence.gauges.gauge import GRADIENT, MOVED, SIGNAL, TRAINED, Gauge
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Final
from coalmine.measure.settings import Settings

FEWEST_ROUNDS = 5  # with gradients, before a layer without one is named: LoRA's A has none until B has moved
ALL_NOISE = 0.01  # standard deviations: an update that nobody can tell from noise by more than this
NAMED = 5  # layers in a note


class TrainingReader:
    """Takes one round after another, and has the gauges of training at the end.

    A layer's *signal* is √Σ_t ‖o_t‖²/σ_t², with o_t everybody's sum in that layer and σ_t the noise's standard deviation. By
    so many standard deviations an observer who knows every o_t can tell the layer's updates from noise alone, and nobody
    can tell them better. It does not depend on the size of the layer, or on how many of its coordinates have a gradient.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = [name for name, _ in settings.layers] or ["the model"]
        self._squares = np.zeros(len(self._names))
        self._signals = np.zeros(len(self._names))
        self._observed = self._rounds = self._with_gradient = self._with_noise = 0

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item = look.item
        self._observed += 1
        if item.layer_others is None:
            return
        squares = np.square(item.layer_others)
        self._rounds += 1
        self._with_gradient += bool(squares.any())
        self._squares += squares
        if item.noise_std:
            self._with_noise += 1
            self._signals += squares / item.noise_std**2

    def gauges(self, final: Final | None) -> Iterator[Gauge]:
        """Every gauge of training that has its inputs; `final` is the final model, once it was observed."""
        moves = None if final is None else final.layer_moves
        # Of a model whose layers are not known there is only to say that it stood still.
        if moves is not None and self._observed and (self._settings.layers or not moves.any()):
            yield _share(MOVED, moves > 0)
        # Without a model, rounds of canaries alone are a test of the mechanism, and no training.
        if self._with_gradient >= FEWEST_ROUNDS or (moves is not None and self._rounds >= FEWEST_ROUNDS):
            yield _share(GRADIENT, self._squares > 0)
            if moves is not None and len(moves) == len(self._squares) and moves.any() and self._squares.any():
                trained = (moves > 0) & (self._squares > 0)
                if not trained.any():
                    yield _share(TRAINED, trained)
        signals = self._layer_signals()
        if signals is not None:
            low = float(signals.min())
            yield Gauge(
                name=SIGNAL,
                smallest=low,
                largest=float(signals.max()),
                limits=(ALL_NOISE, math.inf),
                status="ok" if low >= ALL_NOISE else "warning",
                values=signals,
            )

    def notes(self, final: Final | None) -> list[str]:
        """What these gauges say of which layers; nothing where every layer was trained."""
        notes = []
        for gauge in self.gauges(final):
            if gauge.status == "ok":
                continue
            if gauge.name == MOVED:
                assert final is not None
                assert final.layer_moves is not None
                notes.append(f"training: {self._which(final.layer_moves == 0)} never moved{self._still(final)}")
            elif gauge.name == TRAINED:
                notes.append("training: no layer that received a gradient has moved")
            elif gauge.name == GRADIENT:
                which = self._which(self._squares == 0)
                notes.append(f"training: {which} received noise, but no gradient in {count_of(self._rounds, 'round')}")
            else:
                noisy = np.zeros(len(self._names), dtype=bool)
                noisy[self._squares > 0] = gauge.values < ALL_NOISE
                notes.append(
                    f"training: {self._which(noisy)} {'was' if noisy.sum() == 1 else 'were'} updated by noise alone: their "
                    f"gradients add up to less than {ALL_NOISE:g} standard deviations of it"
                )
        return notes

    def _layer_signals(self) -> Floats | None:
        """The signal of each layer that received a gradient, where fresh noise was stated in every round."""
        if self._settings.noise is not None or self._with_noise < max(self._rounds, 1):
            return None
        if self._with_gradient < FEWEST_ROUNDS:
            return None
        return np.sqrt(self._signals[self._squares > 0])

    def _which(self, chosen: npt.NDArray[np.bool_]) -> str:
        names = [name for name, picked in zip(self._names, chosen, strict=True) if picked]
        if len(names) == len(self._names):
            return f"all {len(names)} layers" if len(names) > 1 else names[0]
        return f"{len(names)} of {len(self._names)} layers ({listed(names)})"

    def _still(self, final: Final) -> str:
        if final.layer_moves is None or final.layer_moves.any():
            return ", though their updates were released"
        return ": the model is what it was before the first round"


def _share(name: str, layers: npt.NDArray[np.bool_]) -> Gauge:
    share = float(np.mean(layers))
    return Gauge(
        name=name,
        smallest=share,
        largest=share,
        limits=(1.0, 1.0),
        status="ok" if share == 1 else "warning",
        values=np.array([share]),
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
