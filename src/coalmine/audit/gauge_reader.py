"""Every gauge of a run: the noise's level, its law, and how rounds compare with each other."""

from collections.abc import Container
from dataclasses import replace

from coalmine.audit.block_gauges import BlockReader
from coalmine.audit.gauge import LEVEL, Gauge
from coalmine.audit.law_gauges import LawReader
from coalmine.audit.level_gauges import LevelReader
from coalmine.audit.sketch_gauges import SketchReader
from coalmine.audit.views import Look, read_log
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import RoundLog

WITHOUT_OTHERS = ("noise", "dilution", "difference")  # all other gauges look at what is left without `others`


def read_gauges(log: RoundLog, settings: Settings, compared: Container[int] | None = None) -> list[Gauge]:
    """Every gauge whose inputs were given; `compared` as for `GaugeReader`."""
    reader = GaugeReader(settings, len(log.numbers), compared)
    read_log(log, settings, reader)
    return reader.gauges()


class GaugeReader:
    """Takes one round after another, and computes every gauge of those so far; `rounds` is about how many there will be.

    Every round is compared with all before it, or only the rounds with the numbers `compared`: enough for a picture.
    """

    def __init__(self, settings: Settings, rounds: int, compared: Container[int] | None = None) -> None:
        self._level = LevelReader(settings)
        self._sketch = SketchReader(settings, rounds, compared)
        self._law = LawReader(settings)
        self._blocks = BlockReader(settings)

    def add(self, look: Look) -> None:
        """Take the next round."""
        self._level.add(look)
        self._sketch.add(look)
        self._law.add(look)
        self._blocks.add(look)

    def gauges(self, level: float = LEVEL, *, proofs_only: bool = False) -> list[Gauge]:
        """Every gauge whose inputs were given; an honest run sets one off with a probability of at most `level`.

        With `proofs_only`, gauges of the noise's law are left out that only bar a PASS.

        Gauges of the law say what share of the residual is still noise; how much noise that is, over the stated noise, the
        length of the residual says. If `others` is not what the rounds summed, nothing that rests on it proves anything.
        """
        blocks = list(self._blocks.gauges(level))
        lengths = [*self._level.gauges(level), *(gauge for gauge in blocks if gauge.name == "parts of blocks")]
        law = [*self._sketch.gauges(level), *self._law.gauges(level, proofs_only=proofs_only)]
        law += [gauge for gauge in blocks if gauge.name == "shared blocks"]
        longest = next((gauge.largest for gauge in lengths if gauge.name == "residual"), None)
        law = [_over_stated_noise(gauge, longest) for gauge in law]
        if any(gauge.name == "pooled residual" and gauge.status == "warning" for gauge in lengths):
            # The residual holds more than noise: what lies on a grid may be that.
            law = [_without_proof(gauge) if gauge.name == "grid" else gauge for gauge in law]
        found = lengths + law
        if any(gauge.name == "others" and gauge.status != "ok" for gauge in found):
            found = [gauge if gauge.name in WITHOUT_OTHERS else _without_proof(gauge) for gauge in found]
        return found


def _over_stated_noise(gauge: Gauge, longest: float | None) -> Gauge:
    if not gauge.noise_left:
        return gauge
    return replace(gauge, noise_left=None if longest is None else gauge.noise_left * longest)


def _without_proof(gauge: Gauge) -> Gauge:
    return replace(gauge, status="warning", noise_left=None) if gauge.status == "low" else gauge
