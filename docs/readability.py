"""How easy the pages are to read: `python -m docs.readability` prints words, longest sentence and Flesch ease of each.

Only prose counts. Code, tables, headings, pictures and the targets of links are left out, and a name in backticks
counts as one short word. Flesch reading ease is a number to look at: 60 is plain English, 30 is hard to read.
"""

import argparse
import re
import sys
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
MOST_WORDS = 40  # of a sentence; tests/test_documentation.py holds every page to it
EASY = 50
NAME = "name"  # stands for anything in backticks
SENTENCE_END = re.compile(r"(?<=[.!?])[\"”)*_]*\s+")
WORD = re.compile(r"\w[^\s]*")


def pages() -> list[Path]:
    """Every page of the documentation, and the pages that the repository shows beside it."""
    beside = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    return [*beside, *sorted((ROOT / "docs").rglob("*.md"))]


def prose(markdown: str) -> list[str]:
    """The paragraphs and list items of a page as plain text."""
    paragraphs, table, heading = [], False, False
    for token in MarkdownIt("commonmark").enable("table").parse(markdown):
        if token.type in ("table_open", "table_close"):
            table = token.type == "table_open"
        elif token.type in ("heading_open", "heading_close"):
            heading = token.type == "heading_open"
        elif token.type == "inline" and not table and not heading:
            parts = {"text": None, "code_inline": NAME, "softbreak": " ", "hardbreak": " "}
            text = "".join(
                child.content if child.type == "text" else parts[child.type]
                for child in token.children or []
                if child.type in parts
            )
            if text.strip() and not text.startswith(":::"):
                paragraphs.append(re.sub(r"\s+", " ", text).strip())
    return paragraphs


def sentences(markdown: str) -> list[str]:
    """The sentences of a page. A paragraph or a list item ends a sentence too."""
    return [sentence for text in prose(markdown) for sentence in SENTENCE_END.split(text) if WORD.search(sentence)]


def count_words(text: str) -> int:
    """Words, numbers and symbols between spaces; lone punctuation does not count."""
    return len(WORD.findall(text))


def long_sentences(markdown: str) -> list[str]:
    """The sentences of a page with more words than a sentence may have."""
    return [sentence for sentence in sentences(markdown) if count_words(sentence) > MOST_WORDS]


def flesch(markdown: str) -> float:
    """Flesch reading ease of a page's prose, by textstat."""
    import textstat

    ended = [text if text.endswith((".", "!", "?")) else text.rstrip(":;,") + "." for text in prose(markdown)]
    text = re.sub(r"(?<=\w)\.(?=\w)", "", " ".join(ended))  # textstat would end a sentence within 1.5 or result.json
    return float(textstat.flesch_reading_ease(text))


def main() -> int:
    """Print the table; with --long also every sentence that is too long. Exit with 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="Pages to measure instead of all.")
    parser.add_argument("--long", action="store_true", help=f"Print sentences of more than {MOST_WORDS} words.")
    given = parser.parse_args()
    print(f"{'page':42} {'words':>6} {'longest sentence':>17} {'Flesch':>7}")
    too_long = False
    for page in given.pages or pages():
        text = page.read_text()
        lengths = [count_words(sentence) for sentence in sentences(text)]
        if not lengths:
            continue
        ease = flesch(text)
        name = page.resolve().relative_to(ROOT) if page.resolve().is_relative_to(ROOT) else page
        mark = "" if ease >= EASY else f"  below {EASY}"
        print(f"{name!s:42} {sum(lengths):6,} {max(lengths):17} {ease:7.1f}{mark}")
        for sentence in long_sentences(text):
            too_long = True
            if given.long:
                print(f"    {count_words(sentence)} words: {sentence}")
    return int(too_long)


if __name__ == "__main__":
    sys.exit(main())
