"""Text as rows of symbols, by the rules of TensorFlow Federated's baselines.

Symbol 0 is padding, and 1 to V are the words or characters of the vocabulary. Then come one symbol for everything else,
one for the beginning and one for the end. A row of length + 1 symbols gives `length` inputs and, one position later, their
labels.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import short_repr

Symbols = npt.NDArray[np.int16]

PADDING = 0
SENTENCE = 20  # words of a sentence that are used; the rest is cut off
SNIPPET = 80  # characters per row of a speech
VOCABULARY = 10_000
CHARACTERS = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"


@dataclass(frozen=True)
class Vocabulary:
    """The words that have their own symbol; the first word is symbol 1."""

    words: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not self.words:
            raise ValueError("a vocabulary must have at least one word")
        if len(self.words) + 4 > np.iinfo(np.int16).max:
            raise ValueError(f"a vocabulary must have at most 32,763 words, got {len(self.words):,}")
        if len(self.numbers) < len(self.words):
            repeated = Counter(self.words).most_common(1)[0][0]
            raise ValueError(f"a vocabulary must list each word once, got {short_repr(repeated)} twice")

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The symbol of each word."""
        return {word: number for number, word in enumerate(self.words, start=1)}

    @property
    def unknown(self) -> int:
        """The symbol of every word that is not in the vocabulary."""
        return len(self.words) + 1

    @property
    def beginning(self) -> int:
        return len(self.words) + 2

    @property
    def end(self) -> int:
        return len(self.words) + 3

    @property
    def unscored(self) -> tuple[int, ...]:
        """Labels that accuracy ignores: padding, unknown words, the end of a sentence."""
        return (PADDING, self.unknown, self.end)


def sentence_rows(sentences: Sequence[bytes], vocabulary: Vocabulary, *, length: int = SENTENCE) -> Symbols:
    """One row for each sentence: the beginning, its first `length` words, and the end if it has fewer words.

    Words are separated by single spaces.
    """
    number_of, unknown, end = vocabulary.numbers.get, vocabulary.unknown, vocabulary.end
    flat: list[int] = []
    sizes = np.empty(len(sentences), dtype=np.int64)
    for index, sentence in enumerate(sentences):
        before = len(flat)
        flat.extend(map(number_of, sentence.split(b" ", length)[:length], repeat(unknown)))
        if len(flat) - before < length:
            flat.append(end)
        sizes[index] = len(flat) - before
    rows = np.zeros((len(sentences), length + 1), dtype=np.int16)
    rows[:, 0] = vocabulary.beginning
    rows[:, 1:][np.arange(length) < sizes[:, None]] = flat
    return rows


CHARACTER_VOCABULARY = Vocabulary(tuple(character.encode() for character in CHARACTERS))
_SYMBOL_OF_BYTE = np.full(256, CHARACTER_VOCABULARY.unknown, dtype=np.int16)
for _character, _number in CHARACTER_VOCABULARY.numbers.items():
    _SYMBOL_OF_BYTE[_character[0]] = _number


def snippet_rows(snippet: bytes, *, length: int = SNIPPET) -> Symbols:
    """A snippet in rows of length + 1 symbols: the beginning, its bytes and the end; the last row is padded."""
    vocabulary = CHARACTER_VOCABULARY
    rows = -(-(len(snippet) + 2) // (length + 1))
    symbols = np.zeros(rows * (length + 1), dtype=np.int16)
    symbols[0] = vocabulary.beginning
    symbols[1 : len(snippet) + 1] = _SYMBOL_OF_BYTE[np.frombuffer(snippet, dtype=np.uint8)]
    symbols[len(snippet) + 1] = vocabulary.end
    return symbols.reshape(rows, length + 1)


def most_used_words(users: Iterable[Iterable[bytes]], *, size: int = VOCABULARY) -> Vocabulary:
    """The `size` words that most users use, ties in alphabetical order. Each user is an iterable of sentences."""
    counts: Counter[bytes] = Counter()
    for sentences in users:
        counts.update({word for sentence in sentences for word in sentence.split(b" ")})
    return Vocabulary(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]))


def read_word_counts(path: Path, *, size: int = VOCABULARY) -> Vocabulary:
    """The vocabulary of the first `size` words in a file with lines "word count"."""
    words = []
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, size), start=1):
            parts = line.split()
            if len(parts) != 2 or not parts[1].isdigit():
                raise ValueError(
                    f"{path}, line {number} must be a word and a count, got {short_repr(line.decode('latin-1'))}"
                )
            words.append(parts[0])
    if not words:
        raise ValueError(f"{path} is empty: it must have a word and a count in each line")
    return Vocabulary(tuple(words))
