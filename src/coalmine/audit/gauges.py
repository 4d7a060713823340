"""Every gauge of a run: the noise's level, its law, and how rounds compare with each other."""

from dataclasses import replace

from coalmine.audit.gauge import Gauge
from coalmine.audit.law_gauges import law_gauges, sketch_gauges
from coalmine.audit.level_gauges import level_gauges
from coalmine.storage.record import Settings
from coalmine.storage.rounds_file import RoundLog

WITHOUT_OTHERS = ("noise", "dilution", "difference")  # all other gauges look at what is left without `others`


def read_gauges(log: RoundLog, settings: Settings) -> list[Gauge]:
    """Every gauge whose inputs were given.

    Gauges of the law say what share of the residual is still noise; how much noise that is, over the stated noise, the
    length of the residual says. If `others` is not what the rounds summed, nothing that rests on it proves anything.
    """
    level = list(level_gauges(log, settings))
    law = [*sketch_gauges(log, settings), *law_gauges(log, settings)]
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
