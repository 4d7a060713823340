"""The coverage of an audit, item by item: checked, failed, not checked, impossible to check, or not applicable.

A verdict covers only the checked items, so every result carries this list and every view shows it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from coalmine.argument_checks import count_of, one_of, short_repr
from coalmine.evidence.gauges.gauge import GaugeResult, Results, all_gauges
from coalmine.evidence.gauges.gauged_rounds import GaugedRounds
from coalmine.evidence.gauges.gaussian import Gaussian
from coalmine.evidence.gauges.grid import Grid
from coalmine.evidence.gauges.layers import Layers
from coalmine.evidence.gauges.length import Length
from coalmine.evidence.gauges.others import Others
from coalmine.evidence.gauges.shared_draws import SharedDraws
from coalmine.evidence.views import RoundViews
from coalmine.measure.settings import Settings
from coalmine.verdict.findings.amplified import PickFacts
from coalmine.verdict.replayed_rows import UNTESTED, ReplayedRows
from coalmine.verdict.scored_records import ScoredRecords
from coalmine.verdict.verdict import Verdict

Status = Literal["checked", "failed", "not checked", "cannot be checked", "does not apply"]
Source = Literal["audit", "pipeline"]
ITEMS = (
    "noise level",
    "noise law",
    "clipping",
    "weights",
    "tensors",
    "sampler",
    "participations",
    "others",
    "rows",
    "records",
)
NAMED = 12  # most tensors that a sentence names


@dataclass(frozen=True)
class AuditedItem:
    """One item of the list: its name from `ITEMS`, its status, and the reason in one sentence.

    An integration states "failed" if it saw that the item is not as claimed: then there is no PASS. `source` is where the
    statement comes from: the audit itself, or its pipeline. `replayed` holds the replayed steps of the item "rows", `scored`
    the scores of the item "records", which only audits with data canaries have.
    """

    name: str
    status: Status
    detail: str
    source: Source = "pipeline"
    replayed: ReplayedRows | None = None
    scored: ScoredRecords | None = None

    def __post_init__(self) -> None:
        one_of("an audited item", self.name, ITEMS)
        one_of("status", self.status, get_args(Status))
        if self.source not in ("audit", "pipeline"):
            raise ValueError(f"source must be 'audit' or 'pipeline', got {self.source!r}")

    @property
    def is_open(self) -> bool:
        """Whether a verdict says nothing about the item, although it matters."""
        return self.status not in ("checked", "does not apply")

    def to_dict(self) -> dict[str, Any]:
        values = {"status": self.status, "detail": self.detail, "source": self.source}
        held = {"replayed": self.replayed, "scored": self.scored}
        return values | {name: part.to_dict() for name, part in held.items() if part is not None}

    @classmethod
    def of_rows(cls, replayed: ReplayedRows) -> "AuditedItem":
        """The item "rows": what replayed steps showed."""
        if not replayed.shown:
            return cls("rows", "not checked", replayed.sentence(), replayed=replayed)
        return cls("rows", "checked" if replayed.holds else "failed", replayed.sentence(), replayed=replayed)

    @classmethod
    def of_records(cls, scored: ScoredRecords) -> "AuditedItem":
        """The item "records": what outputs of the model tell about inserted records."""
        return cls("records", "checked", scored.sentence(), scored=scored)


class CoverageReader:
    """Takes one round after another, and counts those with `others` and with a stated noise."""

    def __init__(self) -> None:
        self.rounds = self.with_others = self.with_noise = 0
        self.scale = float("inf")  # the smallest scale of the canaries

    def add(self, look: RoundViews) -> None:
        """Take the next round."""
        item = look.item
        self.rounds += 1
        self.with_others += item.residual_cosines is not None
        self.with_noise += item.noise_std is not None
        self.scale = min(self.scale, item.scale) if item.present.size else self.scale


def checked_items(audited: Iterable[AuditedItem]) -> tuple[AuditedItem, ...]:
    """The items that a pipeline states about itself; ValueError for anything else."""
    items = tuple(audited) if isinstance(audited, Iterable) else (audited,)
    for item in items:
        if not isinstance(item, AuditedItem) or item.name not in ITEMS:
            raise ValueError(f"audited must list AuditedItems named as in ITEMS, got {short_repr(item)}")
    return items


def audited_items(
    facts: CoverageReader,
    rounds: GaugedRounds,
    gauges: Sequence[GaugeResult],
    *,
    unobserved: int,
    participations: int | None,
    planned: int | None,
    presentations: int,
    sampling: Verdict | None = None,
    given: Iterable[AuditedItem] = (),
) -> tuple[AuditedItem, ...]:
    """The whole list, in the order of `ITEMS`; the pipeline's items replace the audit's own.

    `unobserved` is the number of rounds that the audit did not observe, `sampling` the sampling leg of an amplified claim.
    """
    results = Results(gauges)
    own = [
        _level(facts, results, unobserved),
        _law(results, rounds),
        _clipping(facts),
        AuditedItem("weights", "not checked", "the canaries weigh what the pipeline gave them"),
        _tensors(results, rounds.settings),
        _sampler(sampling),
        _participations(participations, planned, presentations, sampling),
        _others(facts, results),
        AuditedItem("rows", "not checked", f"no step was run again without one row: {UNTESTED}"),
    ]
    items = {item.name: replace(item, source="audit") for item in own}
    tested = items["sampler"].status == "checked"
    items |= {item.name: item for item in given if item.name != "sampler" or not tested or item.status == "failed"}
    return tuple(items[name] for name in ITEMS if name in items)


def _level(facts: CoverageReader, results: Results, unobserved: int) -> AuditedItem:
    if results.of(Length.RESIDUAL) and facts.with_noise == facts.rounds == facts.with_others:
        detail = "the residual of every observed round was compared with the stated noise"
        if unobserved:
            detail += f"; {unobserved} rounds were not observed, and nothing is known of them"
        return AuditedItem("noise level", "checked", detail)
    if results.of(Length.RESIDUAL):
        some = (
            f"only {min(facts.with_noise, facts.with_others)} of {facts.rounds} rounds had both `others` and noise_std"
        )
        return AuditedItem("noise level", "not checked", some)
    if results.of(Length.NOISE):
        detail = "only that the rounds are not shorter than the stated noise; pass `others` to check its level"
        return AuditedItem("noise level", "not checked", detail)
    detail = "pass `others` and noise_std in every round; without them, only the canaries' scores measure it"
    return AuditedItem("noise level", "not checked", detail)


def _law(results: Results, rounds: GaugedRounds) -> AuditedItem:
    if not results.of(Gaussian.KURTOSIS) or not results.of(SharedDraws.SPECTRUM):
        return AuditedItem("noise law", "not checked", "pass `others`: the law is that of the residual")
    if results.outside(Grid.ROUNDING):
        return AuditedItem(
            "noise law", "cannot be checked", "the release is rounded too coarsely; pass it before rounding"
        )
    covered = [gauge.coverage(results.statistics, rounds) for gauge in all_gauges()]
    seen, unseen = (", ".join(text for each in texts for text in each) for texts in zip(*covered, strict=True))
    detail = f"seen: {seen}" + (f"; not seen: {unseen}" if unseen else "") + _sampled(rounds.settings)
    return AuditedItem("noise law", "checked", detail)


def _clipping(facts: CoverageReader) -> AuditedItem:
    if 1 < facts.scale < float("inf"):
        return AuditedItem("clipping", "checked", f"canaries entered the clip {facts.scale:g} times too long")
    detail = "canaries were no longer than the clip norm, or did not pass the clip; send them with scale=10 through it"
    return AuditedItem("clipping", "not checked", detail)


def _tensors(results: Results, settings: Settings) -> AuditedItem:
    if not settings.layers:
        return AuditedItem("tensors", "not checked", "name the layers (`layers=`) so that each has its own gauge")
    if not results.parts(Layers.LAYER):
        return AuditedItem("tensors", "not checked", "gauges by layer need `others` and noise_std")
    listed = [name for name, _ in settings.layers]
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return AuditedItem(
        "tensors",
        "checked",
        f"each by itself: {', '.join(listed[:NAMED])}{more}{_sampled(settings) if settings.replicated else ''}",
    )


def _sampled(settings: Settings) -> str:
    """The number of measured coordinates, if not all are measured."""
    return f" (on {settings.law_dim:,} of {settings.dim:,} coordinates)" if settings.law_dim < settings.dim else ""


def _sampler(sampling: Verdict | None) -> AuditedItem:
    if sampling is None or not isinstance(sampling.finding, PickFacts):
        return AuditedItem("sampler", "not checked", "the pipeline's sampler did not choose the canaries' rounds")
    detail = f"it picked canaries {sampling.finding.picks} times, and those picks were tested"
    sizes = (
        "cohort sizes too"
        if sampling.finding.cohorts_known
        else "cohort sizes were not given, so fixed ones cannot be excluded"
    )
    return AuditedItem("sampler", "checked", f"{detail}; {sizes}")


def _participations(
    claimed: int | None, planned: int | None, presentations: int, sampling: Verdict | None
) -> AuditedItem:
    if sampling is not None and isinstance(sampling.finding, PickFacts):
        return AuditedItem("participations", "checked", "how often the sampler picks canaries was tested")
    if planned is not None and claimed in (None, planned):
        detail = f"the canaries took part in at most {count_of(planned, 'round')}, by the audit's own schedule"
        return AuditedItem("participations", "checked", detail)
    if claimed is not None:
        seen = f"canaries took part in at most {count_of(presentations, 'round')}"
        detail = f"the claim states {claimed}; {seen}; how often clients do is not seen"
        return AuditedItem("participations", "not checked", detail)
    return AuditedItem("participations", "not checked", "nobody stated how often a client takes part")


def _others(facts: CoverageReader, results: Results) -> AuditedItem:
    if not facts.with_others:
        return AuditedItem("others", "not checked", "`others` was not given, so known-others is left out")
    if results.of(Others.OTHERS) is None:
        return AuditedItem("others", "cannot be checked", "`others` is zero in every round")
    return AuditedItem("others", "checked", "the residual is uncorrelated with `others`")
