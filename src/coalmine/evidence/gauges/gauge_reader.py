"""All gauges of a run: the level of the noise, its law, and comparisons between rounds."""

from collections.abc import Container
from dataclasses import replace

from coalmine.evidence.gauges.block_gauges import BlockReader
from coalmine.evidence.gauges.coordinate_gauge import CoordinateReader
from coalmine.evidence.gauges.gauge import LEVEL, Gauge
from coalmine.evidence.gauges.law_gauges import LawReader
from coalmine.evidence.gauges.level_gauges import LevelReader
from coalmine.evidence.gauges.sketch_gauges import SketchReader
from coalmine.evidence.views import RoundViews, read_log
from coalmine.log.rounds_file import RoundLog
from coalmine.measure.round import Final
from coalmine.measure.settings import Settings

WITHOUT_OTHERS = ("noise", "dilution", "difference")  # all other gauges measure the residual


def read_gauges(log: RoundLog, settings: Settings, compared: Container[int] | None = None) -> list[Gauge]:
    """All gauges whose inputs the log has. `compared` is that of `GaugeReader`."""
    reader = GaugeReader(settings, len(log.numbers), compared, final=log.final)
    read_log(log, settings, reader)
    return reader.gauges()


class GaugeReader:
    """Reads the rounds in order and computes all gauges from the rounds so far.

    `rounds` is the approximate number of rounds to come. Every round is compared with all earlier ones, or, if `compared`
    is given, only the rounds with these numbers are, which is enough for a picture. `final` is the record of the final
    model, which may have the last reading of the sums that follow each coordinate.
    """

    def __init__(
        self, settings: Settings, rounds: int, compared: Container[int] | None = None, *, final: Final | None = None
    ) -> None:
        self._level = LevelReader(settings)
        self._sketch = SketchReader(settings, rounds, compared)
        self._law = LawReader(settings)
        self._blocks = BlockReader(settings)
        self._coordinates = CoordinateReader(settings, final)

    def add(self, look: RoundViews) -> None:
        """Read the next round."""
        self._level.add(look)
        self._sketch.add(look)
        self._law.add(look)
        self._blocks.add(look)
        self._coordinates.add(look)

    def gauges(self, level: float = LEVEL, *, proofs_only: bool = False) -> list[Gauge]:
        """All gauges whose inputs were given. An honest run sets one off with a probability of at most `level`.

        With `proofs_only`, gauges of the noise's law that can only prevent a PASS are left out, and those of coordinates,
        whose level is for one look at the end.

        A gauge of the law gives the share of the residual that is still noise. Multiplied by the length of the residual,
        it becomes a share of the stated noise. If `others` is not the sum that the rounds used, gauges of the residual prove
        nothing.
        """
        blocks = list(self._blocks.gauges(level))
        lengths = [*self._level.gauges(level), *(gauge for gauge in blocks if gauge.name == "parts of blocks")]
        law = [*self._sketch.gauges(level), *self._law.gauges(level, proofs_only=proofs_only)]
        law += [gauge for gauge in blocks if gauge.name == "shared blocks"]
        if not proofs_only:
            law += self._coordinates.gauges(level)
        longest = next((gauge.largest for gauge in lengths if gauge.name == "residual"), None)
        law = [_relative_to_stated_noise(gauge, longest) for gauge in law]
        if any(gauge.name == "pooled residual" and gauge.status == "warning" for gauge in lengths):
            # The residual contains more than noise, and that part may be what lies on a grid.
            law = [_downgrade_to_warning(gauge) if gauge.name == "grid" else gauge for gauge in law]
        gauges = lengths + law
        if any(gauge.name == "others" and gauge.status != "ok" for gauge in gauges):
            gauges = [gauge if gauge.name in WITHOUT_OTHERS else _downgrade_to_warning(gauge) for gauge in gauges]
        return gauges

    def notes(self) -> list[str]:
        """Notes on the coordinates that were followed over the rounds, and on those with too little noise."""
        return self._coordinates.notes()


def _relative_to_stated_noise(gauge: Gauge, longest: float | None) -> Gauge:
    if not gauge.noise_left:
        return gauge
    return replace(gauge, noise_left=None if longest is None else gauge.noise_left * longest)


def _downgrade_to_warning(gauge: Gauge) -> Gauge:
    return replace(gauge, status="warning", noise_left=None) if gauge.status == "low" else gauge
