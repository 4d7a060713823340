"""A finding: the reason of a verdict, with the facts that its sentence needs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self

from msgspec import ValidationError, convert

from coalmine.argument_checks import short_repr
from coalmine.verdict.outcome import PASS, UNDERPOWERED, VIOLATION, Outcome

MOST_DIGITS = 15  # of a number that is compared with a close one
MOST_NAMED = 4  # most gauges and rungs that a reason lists
CLOSE = 10.0  # a p-value this many times below its level is close to it


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The reason of a verdict. Each subclass with a `code` is one reason, and its fields are the facts of that reason.

    `code` is the reason in one word, for programs. Several classes may share it, if their outcomes or their facts differ.
    Its row in the documentation is the first paragraph of its docstring, which says what it means, and `remedy`, what to do.
    `rung` is set if only that rung can decide so.
    """

    code: ClassVar[str]
    outcome: ClassVar[Outcome]
    remedy: ClassVar[str]
    rung: ClassVar[str | None] = None

    def sentence(self) -> str:
        """The reason in one sentence."""
        raise NotImplementedError

    def plain(self) -> str:
        """The reason without statistics and without coalmine's own names, for the first lines that a person reads."""
        return self.sentence()

    def advice(self) -> str:
        """What to do next, in one or two sentences."""
        return f"{self.remedy[0].upper()}{self.remedy[1:]}."

    def ending(self, evidence: Sequence[str]) -> str:
        """The end of the sentence; it names other rungs and gauges with the same outcome."""
        return ""

    @classmethod
    def meaning(cls) -> str:
        """What the finding means: the first paragraph of its docstring, as one line."""
        return " ".join((cls.__doc__ or "").partition("\n\n")[0].split())

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that are known, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """The finding of this class with these facts."""
        return convert(facts, cls)

    @classmethod
    def fits(cls, facts: Mapping[str, Any], rung: str | None) -> bool:
        """Whether these are the facts of this class: all that it needs, and no others."""
        known = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        return needed <= facts.keys() <= known and cls.rung in (None, rung)


@dataclass(frozen=True, kw_only=True)
class Support(Finding):
    """A finding that supports the claim, or a part of it."""

    outcome = PASS
    remedy = "nothing"

    def advice(self) -> str:
        return "Keep this report with the model."


@dataclass(frozen=True, kw_only=True)
class Refutation(Finding):
    """A finding that refutes the claim."""

    outcome = VIOLATION

    def advice(self) -> str:
        return "Check that every update is clipped before averaging, and that the full noise is added, fresh in every round."

    def ending(self, evidence: Sequence[str]) -> str:
        also = f"; also {listed(evidence)}" if evidence else ""
        return also + self.caution()

    def caution(self) -> str:
        """Advice if p is close to its level, as in the rare honest runs that are called VIOLATION."""
        if not isinstance(self, Significance) or not self.level / CLOSE <= self.p_value < self.level:
            return ""
        return f". p lies just under its level of {self.level:.1g}: repeat with another seed to exclude chance"


@dataclass(frozen=True, kw_only=True)
class Doubt(Finding):
    """A finding that keeps the audit from deciding. `headline` says so after "nothing refutes the claim, but"."""

    headline: ClassVar[str] = "this audit cannot confirm it"
    outcome = UNDERPOWERED


@dataclass(frozen=True, kw_only=True)
class Significance:
    """The p-value of a test, and the level at which it refutes a claim."""

    p_value: float
    level: float

    @property
    def chance(self) -> str:
        """The p-value as sentences print it; none is 0."""
        return "p < 1e-99" if self.p_value < 1e-99 else f"p = {self.p_value:.1g}"


def all_findings() -> list[type[Finding]]:
    """The classes of all findings, in the order of their definition."""
    return list(_with_code(Finding))


def _with_code(base: type[Finding]) -> Iterator[type[Finding]]:
    for each in base.__subclasses__():
        if "code" in vars(each):
            yield each
        yield from _with_code(each)


def read_finding(outcome: Outcome, code: str, facts: Mapping[str, Any], rung: str | None) -> Finding:
    """The finding with this outcome, code and facts; ValueError if there is none."""
    classes = [each for each in all_findings() if each.outcome == outcome and each.code == code]
    fitting = sorted((each for each in classes if each.fits(facts, rung)), key=lambda each: each.rung is None)
    if not fitting:
        known = "do not fit its sentence" if classes else f"fit no {outcome} that this version knows"
        raise ValueError(f"the facts of a verdict of code {short_repr(code)} {known}")
    try:
        finding = fitting[0].of_facts(facts)
        finding.sentence()
    except (ValidationError, LookupError, TypeError, ValueError):
        raise ValueError(f"the facts of a verdict of code {short_repr(code)} do not fit its sentence") from None
    return finding


def listed(names: Sequence[str]) -> str:
    """At most four of the names, and the number of the others."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


def times_of(number: int) -> str:
    """How often, in words."""
    return "once" if number == 1 else f"{number} times"


def rounded_count(number: float) -> str:
    """A large number, without more digits than it has."""
    return f"{number:,.0f}" if number < 1e6 else f"{number:.0e}".replace("e+", "e")


def detectable(epsilon: float, power: float) -> str:
    """The epsilon that would have been detected, in words."""
    return f"an epsilon of {epsilon:.3g} or more would have been detected with probability {power:.0%}"


def compared(one: float, other: float, digits: tuple[int, int] = (3, 3), form: str = "g") -> tuple[str, str]:
    """Two numbers that a sentence compares, with as many digits, and more where these do not show which is larger."""
    for more in range(MOST_DIGITS):
        texts = f"{one:.{digits[0] + more}{form}}", f"{other:.{digits[1] + more}{form}}"
        first, second = (float(text) for text in texts)
        if one == other or (first != second and (first > second) == (one > other)):
            break
    return texts


def at_least(value: float, digits: int = 3, *, above: float = -math.inf) -> str:
    """A number rounded down, with more digits where these do not show that it lies above another of four digits."""
    printed = float(f"{above:.4g}")
    return _rounded(value, digits, math.floor, lambda text: text > printed or value <= printed)


def at_most(value: float, digits: int = 3, *, below: float = math.inf) -> str:
    """A number rounded up, with more digits where these do not show that it lies below another."""
    return _rounded(value, digits, math.ceil, lambda text: text < below or value >= below)


def _rounded(value: float, digits: int, towards: Callable[[float], int], enough: Callable[[float], bool]) -> str:
    if not 0 < abs(value) < math.inf:
        return f"{value:.{digits}g}"
    for more in range(digits, MOST_DIGITS):
        places = more - 1 - math.floor(math.log10(abs(value)))
        near = round(value * 10.0**places)  # a number that has so few digits keeps them
        exact = math.isclose(value * 10.0**places, near, rel_tol=1e-12)
        text = f"{(near if exact else towards(value * 10.0**places)) / 10.0**places:.{more}g}"
        if enough(float(text)):
            break
    return text


def is_close(low: float, high: float) -> bool:
    """Whether two ends of a range of epsilon are practically equal."""
    return math.isclose(low, high, rel_tol=0.05)
