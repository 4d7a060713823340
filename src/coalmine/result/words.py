"""Numbers and words for people: digits that the error bar carries, and the user's own unit and step."""

import math
import re
from dataclasses import dataclass

from coalmine.result.audit_result import AuditResult

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
MOST_DIGITS = 3  # of a number whose error is not known
UNIT, STEP = "client", "round"  # in the sentences of findings and items
IN_STEPS = ("opacus", "jax_privacy")  # integrations whose users count steps
SAID = re.compile(rf"(?<![-`\w])(?P<article>[Aa]n? )?(?P<word>{UNIT}|{STEP})(?P<many>s?)\b(?![-=`])")


def format_number(value: float | None, digits: int = MOST_DIGITS) -> str:
    """A number as people read it.

    >>> format_number(4.8926), format_number(1e-6), format_number(8.2e-7), format_number(12345.6), format_number(math.inf)
    ('4.89', '10⁻⁶', '8.2 · 10⁻⁷', '12,346', '∞')
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= 1000:
        return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        factor = f"{float(mantissa):g}"
        return ("" if factor == "1" else f"{factor} · ") + "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return "0" if value == 0 else f"{value:.{digits}g}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """An interval as tables show it."""
    return "none" if interval is None else f"{format_number(interval[0])} … {format_number(interval[1])}"


def format_measured(value: float, interval: tuple[float, float] | None) -> tuple[str, str]:
    """A measured number and its interval, without a digit that the interval makes meaningless.

    >>> format_measured(5.4321, (4.912, 6.021)), format_measured(0.98321, (0.97, 0.9967)), format_measured(97.3, None)
    (('5.4', '4.9 … 6.0'), ('0.98', '0.97 … 1.00'), ('97', ''))
    """
    if interval is None or not all(map(math.isfinite, (value, *interval))) or interval[0] >= interval[1]:
        ends = "" if interval is None else f"{format_number(interval[0], 2)} … {format_number(interval[1], 2)}"
        return format_number(value, 2), ends
    decimals = max(-math.floor(math.log10((interval[1] - interval[0]) / 2)), 0)
    texts = [f"{number:,.{decimals}f}" for number in (value, *interval)]
    return texts[0], f"{texts[1]} … {texts[2]}"


def format_bound(bound: float | None) -> str:
    """A lower bound with two digits, or three from 10 on, never rounded up.

    >>> format_bound(10.67), format_bound(3.19), format_bound(0.0519), format_bound(7.0), format_bound(None)
    ('10.6', '3.1', '0.051', '7.0', '–')
    """
    if bound is None or bound <= 0 or not math.isfinite(bound):
        return format_number(bound if bound is None else max(bound, 0.0))
    size = math.floor(math.log10(bound))
    digits = 3 if size > 0 else 2
    unit = 10.0 ** (size - digits + 1)
    return f"{math.floor(bound / unit + 1e-9) * unit:,.{max(digits - 1 - size, 0)}f}"


def format_rounds(count: int, step: str = STEP) -> str:
    """A number of rounds with its noun.

    >>> format_rounds(1), format_rounds(1500)
    ('1 round', '1,500 rounds')
    """
    return f"{count:,} {step}{'' if count == 1 else 's'}"


def short_power(value: float) -> str:
    """A small number as people type it.

    >>> short_power(1e-5), short_power(1.2e-4), short_power(0.01)
    ('1e-5', '1.2e-4', '0.01')
    """
    if not 0 < value < 1e-3:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def plural(noun: str) -> str:
    """The plural of a regular noun, and of "person"."""
    if noun == "person":
        return "people"
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeiou" else f"{noun}s"


@dataclass(frozen=True)
class Words:
    """The user's words for one unit of privacy and for one step of training.

    >>> Words("document", "step").say("a client takes part in 3 rounds of known-round")
    'a document takes part in 3 steps of known-round'
    """

    unit: str = UNIT
    step: str = STEP

    @classmethod
    def of(cls, result: AuditResult) -> "Words":
        """The words of a result: the unit that its claim or its trainer names, and the step of its framework."""
        trainer, claimed = result.trainer, None if result.claim is None else result.claim.unit
        if trainer.check is not None:
            return cls(claimed or UNIT, "call")
        in_steps = trainer.name in IN_STEPS or trainer.level == "example"
        row = "row" if trainer.name in IN_STEPS else "example"
        unit = trainer.named_unit or claimed or (row if trainer.unit == "example" else UNIT)
        return cls(unit, "step" if in_steps else STEP)

    def say(self, text: str) -> str:
        """A sentence about clients and rounds, in these words."""

        def word(found: re.Match[str]) -> str:
            noun = self.unit if found["word"] == UNIT else self.step
            article = "" if not found["article"] else f"{found['article'][0]}{'n' * _starts_with_vowel(noun)} "
            return article + (plural(noun) if found["many"] else noun)

        return text if (self.unit, self.step) == (UNIT, STEP) else SAID.sub(word, text)

    def steps(self, count: int) -> str:
        """A number of steps with its noun."""
        return format_rounds(count, self.step)


def _starts_with_vowel(noun: str) -> bool:
    return noun[:1].lower() in "aeio"  # "a user", "a unit"
