"""Gauge of the training itself: did the weights move, did gradients reach every layer, is an update more than noise?

A run whose weights never move is private, and no training. So this never proves a VIOLATION. It prevents a PASS only if
nothing was trained at all; otherwise it names the layers, and the verdict on privacy stands.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, count_of
from coalmine.evidence.gauges.gauge import LEVEL, Gauge, GaugeResult, Statistic
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.views import RoundViews
from coalmine.measure.round import Final

FEWEST_ROUNDS = 5  # with gradients, before a layer without one is named: LoRA's A has none until B has moved
ALL_NOISE = 0.01  # standard deviations: an update that nobody can tell from noise by more than this
NAMED = 5  # layers in a note
NEVER_MOVED = (
    "Some weights did not change during training. Check that the optimizer holds the parameters of this model, that "
    "they require gradients, and that the learning rate is above 0."
)


class Training(Gauge):
    """Was every layer trained, by more than noise?

    A layer's *signal* is √Σ_t ‖o_t‖²/σ_t², with o_t everybody's sum in that layer and σ_t the noise's standard deviation. By
    so many standard deviations an observer who knows every o_t can tell the layer's updates from noise alone, and nobody
    can tell them better. It does not depend on the size of the layer, or on how many of its coordinates have a gradient.
    """

    name = "training"
    order = 110
    item = ""
    in_alarm = False
    concerns_law = False
    MOVED = Statistic(
        name="layers moved",
        meaning="share of the layers whose weights differ from those before training",
        law="1",
        advice=NEVER_MOVED,
    )
    GRADIENT = Statistic(
        name="layers with a gradient",
        meaning="share of the layers that received a gradient in any round",
        law="1",
        advice="Some layers received noise but no gradient. Check that the loss depends on them. To keep them fixed, "
        "freeze them before the training is made private.",
    )
    TRAINED = Statistic(
        name="layers trained",
        meaning="share of the layers that received a gradient and moved",
        law="above 0; measured only if no layer moved that received a gradient",
        advice=NEVER_MOVED,
    )
    SIGNAL = Statistic(
        name="signal by layer",
        meaning="standard deviations by which a layer's updates differ from noise alone",
        law="at least 0.01",
        advice="Some layers were updated by noise alone. Check that their gradients do not vanish, and that the clip "
        "norm is not far above the gradients' lengths.",
    )

    def __init__(self, rounds: GaugedRounds) -> None:
        super().__init__(rounds)
        self._names = [name for name, _ in self.settings.layers] or ["the model"]
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

    def results(self, level: float) -> Iterator[GaugeResult]:
        """Every statistic that has its inputs; those of the final model only if it was observed."""
        final = self.rounds.final
        moves = None if final is None else final.layer_moves
        # Of a model whose layers are not known there is only to say that it stood still.
        if moves is not None and self._observed and (self.settings.layers or not moves.any()):
            yield _share(self.MOVED, moves > 0)
        # Without a model, rounds of canaries alone are a test of the mechanism, and no training.
        if self._with_gradient >= FEWEST_ROUNDS or (moves is not None and self._rounds >= FEWEST_ROUNDS):
            yield _share(self.GRADIENT, self._squares > 0)
            if moves is not None and len(moves) == len(self._squares) and moves.any() and self._squares.any():
                trained = (moves > 0) & (self._squares > 0)
                if not trained.any():
                    yield _share(self.TRAINED, trained)
        signals = self._layer_signals()
        if signals is not None:
            low, high = float(signals.min()), float(signals.max())
            yield self.SIGNAL.result(low, high, limits=(ALL_NOISE, math.inf), failed=low < ALL_NOISE, values=signals)

    @classmethod
    def bars_pass(cls, result: GaugeResult) -> bool:
        """Only if no layer at all moved, or had a gradient."""
        return result.status != "ok" and result.statistic is not cls.SIGNAL and result.largest == 0

    def notes(self) -> list[str]:
        """What these gauges say of which layers; nothing where every layer was trained."""
        notes, final = [], self.rounds.final
        for result in self.results(LEVEL):
            if result.status == "ok":
                continue
            if result.statistic is self.MOVED:
                assert final is not None
                assert final.layer_moves is not None
                notes.append(f"training: {self._which(final.layer_moves == 0)} never moved{self._still(final)}")
            elif result.statistic is self.TRAINED:
                notes.append("training: no layer that received a gradient has moved")
            elif result.statistic is self.GRADIENT:
                which = self._which(self._squares == 0)
                notes.append(f"training: {which} received noise, but no gradient in {count_of(self._rounds, 'round')}")
            else:
                noisy = np.zeros(len(self._names), dtype=bool)
                noisy[self._squares > 0] = result.values < ALL_NOISE
                notes.append(
                    f"training: {self._which(noisy)} {'was' if noisy.sum() == 1 else 'were'} updated by noise alone: their "
                    f"gradients add up to less than {ALL_NOISE:g} standard deviations of it"
                )
        return notes

    def _layer_signals(self) -> Floats | None:
        """The signal of each layer that received a gradient, where fresh noise was stated in every round."""
        if self.settings.noise is not None or self._with_noise < max(self._rounds, 1):
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


def _share(statistic: Statistic, layers: npt.NDArray[np.bool_]) -> GaugeResult:
    share = float(np.mean(layers))
    return statistic.result(share, limits=(1.0, 1.0), failed=share < 1)


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
