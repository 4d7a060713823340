"""Every gauge of a run: the noise's level, its law, and how rounds compare with each other."""

from dataclasses import replace

from coalmine.audit.gauge import Gauge
from coalmine.audit.law_gauges import LawReader
from coalmine.audit.level_gauges import LevelReader
from coalmine.audit.sketch_gauges import SketchReader
from coalmine.audit.views import Look, read_log
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import RoundLog

WITHOUT_OTHERS = ("noise", "dilution", "difference")  # all other gauges look at what is left without `others`


def read_gauges(log: RoundLog, settings: Settings) -> list[Gauge]:
    """Every gauge whose inputs were given."""
    reader = GaugeReader(log, settings)
    read_log(log, settings, reader)
    return reader.gauges()


class GaugeReader:
    """Takes one round after another, and has every gauge at the end."""

    def __init__(self, log: RoundLog, settings: Settings) -> None:
        self._level = LevelReader(settings)
        self._sketch = SketchReader(settings, len(log.numbers))
        self._law = LawReader(settings)

    def add(self, look: Look) -> None:
        """Take the next round."""
        self._level.add(look)
        self._sketch.add(look)
        self._law.add(look)

    def gauges(self) -> list[Gauge]:
        """Every gauge whose inputs were given.

        Gauges of the law say what share of the residual is still noise; how much noise that is, over the stated noise, the
        length of the residual says. If `others` is not what the rounds summed, nothing that rests on it proves anything.
        """
        level = list(self._level.gauges())
        law = [*self._sketch.gauges(), *self._law.gauges()]
        longest = next((gauge.largest for gauge in level if gauge.name == "residual"), None)
        law = [_over_stated_noise(gauge, longest) for gauge in law]
        if any(gauge.name == "pooled residual" and gauge.status == "warning" for gauge in level):
            # The residual holds more than noise: what lies on a grid may be that.
            law = [_without_proof(gauge) if gauge.name == "grid" else gauge for gauge in law]
        found = level + law
        if any(gauge.name == "others" and gauge.status != "ok" for gauge in found):
            found = [gauge if gauge.name in WITHOUT_OTHERS else _without_proof(gauge) for gauge in found]
        return found


def _over_stated_noise(gauge: Gauge, longest: float | None) -> Gauge:
    if not gauge.noise_left:
        return gauge
    return replace(gauge, noise_left=None if longest is None else gauge.noise_left * longest)


def _without_proof(gauge: Gauge) -> Gauge:
    return replace(gauge, status="warning", noise_left=None) if gauge.status == "low" else gauge
