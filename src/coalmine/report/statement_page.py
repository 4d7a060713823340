"""A privacy statement as one HTML page without scripts or network access, also for phones, printers and text browsers."""

import functools
from importlib import resources

from coalmine.report.sentences import percent
from coalmine.report.statement import CROWD, MISSING_PART, PARTS, PRIORS, PrivacyStatement
from coalmine.report.templating import Markup, new_environment
from coalmine.result.words import format_number, plural

ACROSS, STEP = 10, 12


def statement_page(statement: PrivacyStatement) -> str:
    """The page of a statement."""
    style = resources.files("coalmine.report").joinpath("page.css").read_text(encoding="utf-8")
    own = resources.files("coalmine.report").joinpath("statement.css").read_text(encoding="utf-8")
    context = statement_context(statement)
    return _environment().get_template("statement.html").render(style=style + own, **context)


def statement_context(statement: PrivacyStatement) -> dict[str, object]:
    """The values that the templates show of a statement."""
    picture = Markup("") if not statement.meanings else people_picture(statement)
    return {
        "statement": statement,
        "part_titles": PARTS,
        "missing_title": MISSING_PART,
        "priors": [percent(prior) for prior in PRIORS],
        "meaning_rows": [
            (format_number(each.epsilon), each.name, [percent(value) for value in each.posteriors])
            for each in statement.meanings
        ],
        "people": picture,
    }


def people_picture(statement: PrivacyStatement) -> Markup:
    """Two crowds of 100. Marked are those about whom a guess is right, and those about whom an attacker can be."""
    size, gap = ACROSS * STEP, 40
    crowd = f"Two crowds of {CROWD} {plural(statement.subject)}"
    text = f"{crowd}. {CROWD // 2} are marked in the first, {statement.guesses} in the second."
    crowds = [
        _crowd(CROWD // 2, 0, f"guessing: {CROWD // 2} of {CROWD}"),
        _crowd(statement.right_guesses, size + gap, f"with the model: {statement.guesses}"),
    ]
    return Markup(
        '<svg class="people" role="img" viewBox="0 0 {} {}" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(2 * size + gap, size + 18, text, text, Markup("\n").join(crowds))


def _crowd(marked: int, left: int, name: str) -> Markup:
    dots = [
        Markup('<circle class="{}" cx="{}" cy="{}" r="4"/>').format(
            "right" if place < marked else "wrong",
            left + STEP // 2 + STEP * (place % ACROSS),
            STEP // 2 + STEP * (place // ACROSS),
        )
        for place in range(CROWD)
    ]
    middle, below = left + ACROSS * STEP // 2, ACROSS * STEP + 12
    label = Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(middle, below, name)
    return Markup("").join([*dots, label])


_environment = functools.cache(new_environment)
