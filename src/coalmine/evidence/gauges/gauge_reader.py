"""All gauges of a run."""

from collections.abc import Container

from coalmine.evidence.gauges.gauge import LEVEL, GaugeResult, Results, all_gauges
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.gauges.others import Others
from coalmine.evidence.views import RoundViews, read_log
from coalmine.log.recorded import RecordedRounds
from coalmine.measure.round import Final
from coalmine.measure.settings import Settings


def read_gauges(log: RecordedRounds, settings: Settings, compared: Container[int] | None = None) -> list[GaugeResult]:
    """All statistics whose inputs the log has. `compared` is that of `GaugedRounds`."""
    reader = GaugeReader(settings, len(log.numbers), compared, final=log.final)
    read_log(log, settings, reader)
    return reader.results()


class GaugeReader:
    """Reads the rounds in order and computes all gauges from the rounds so far.

    The arguments are those of `GaugedRounds`. With `proofs_only`, gauges are left out that cannot refute a claim during
    training.
    """

    def __init__(
        self,
        settings: Settings,
        rounds: int,
        compared: Container[int] | None = None,
        *,
        final: Final | None = None,
        proofs_only: bool = False,
    ) -> None:
        self.rounds = GaugedRounds(settings, rounds, compared=compared, final=final, proofs_only=proofs_only)
        self._gauges = [gauge(self.rounds) for gauge in all_gauges() if gauge.in_alarm or not proofs_only]

    def add(self, look: RoundViews) -> None:
        """Read the next round."""
        self.rounds.add(look)
        for gauge in self._gauges:
            gauge.add(look)

    def results(self, level: float = LEVEL) -> list[GaugeResult]:
        """All statistics whose inputs were given. An honest run sets one off with a probability of at most `level`.

        A gauge that does not measure lengths gives the share of the residual that is still noise. Multiplied by the length
        of the residual, it becomes a share of the stated noise. If `others` is not the sum that the rounds used, statistics
        of the residual prove nothing.
        """
        read = Results([result for gauge in self._gauges for result in gauge.results(level)])
        residual, others_wrong = read.of(Length.RESIDUAL), read.outside(Others.OTHERS) is not None
        longest = None if residual is None else residual.largest
        settled = (result.gauge.settled(result.relative_to(longest), read) for result in read.all)
        return [each.as_warning() if others_wrong and each.statistic.needs_others else each for each in settled]

    def notes(self) -> list[str]:
        """What the gauges say beside their statistics."""
        return [note for gauge in self._gauges for note in gauge.notes()]
