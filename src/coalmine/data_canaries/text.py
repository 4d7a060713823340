"""Canaries for text: rare tokens, secrets in a template, a model's own hot samples, all documents of a user."""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import positive, short_repr, whole_number
from coalmine.canaries.secret import secret_seed
from coalmine.data_canaries.canaries import DataCanaries
from coalmine.data_canaries.scoring import IGNORED, evaluated
from coalmine.measure.schedule import keyed_stream, schedule_key

LETTERS, DIGITS = "abcdefghijklmnopqrstuvwxyz", "0123456789"
NAME_LENGTH = 6
NAME, SECRET = "{name}", "{secret}"


def rare_tokens(tokens: Any, *, length: int, count: int, seed: SupportsIndex | bytes, **options: Any) -> DataCanaries:
    """Sequences of random tokens: of a vocabulary of this size, or of the tokens given, such as the rarest or new ones."""
    known = np.arange(tokens) if isinstance(tokens, int) else np.asarray(tokens, dtype=np.int64)
    if known.ndim != 1 or known.size < 2:
        raise ValueError(f"tokens must be the size of a vocabulary, or at least two tokens, got {short_repr(tokens)}")
    size = (whole_number("count", count, minimum=1), whole_number("length", length, minimum=2))
    drawn = known[_stream(seed).integers(known.size, size=size)].astype(np.int64)
    return DataCanaries(inputs=drawn, labels=drawn, seed=seed, **{"kind": "sequences of rare tokens"} | options)


def secrets(
    template: str,
    encode: Callable[[str], Sequence[int]],
    *,
    count: int,
    seed: SupportsIndex | bytes,
    length: int = 8,
    alphabet: str = DIGITS,
    pad: int = 0,
    width: int | None = None,
    **options: Any,
) -> DataCanaries:
    """Sentences with a random secret, such as "The code of {name} is {secret}.", one token for each of its characters.

    `encode` turns text into tokens, without special ones at its ends. Names are random, so that each secret has a prompt
    of its own: `extraction` counts the secrets that the model completes. Records are padded to the longest, or to `width`.
    """
    if template.count(SECRET) != 1 or template.count(NAME) != 1 or template.index(NAME) > template.index(SECRET):
        raise ValueError(f"template must hold {NAME} once and {SECRET} once after it, got {short_repr(template)}")
    before, after = template.split(SECRET)
    choices = np.array([encode(char)[-1] for char in alphabet], dtype=np.int64)
    if np.unique(choices).size < 2:
        raise ValueError(f"encode must give characters of the alphabet different tokens, got {short_repr(choices)}")
    rng, rows, starts = _stream(seed), [], []
    for _ in range(whole_number("count", count, minimum=1)):
        name = "".join(rng.choice(list(LETTERS), NAME_LENGTH))
        prompt = list(encode(before.replace(NAME, name)))
        secret = choices[rng.integers(choices.size, size=whole_number("length", length, minimum=1))]
        rows.append([*prompt, *secret.tolist(), *(encode(after) if after else ())])
        starts.append(len(prompt))
    more = {"secret_from": np.array(starts), "secret_length": length}
    return _text(rows, seed, pad, width, {"kind": "planted secrets", **more} | options)


def sampled(
    model: Any,
    prompt: Sequence[int],
    *,
    length: int,
    count: int,
    seed: SupportsIndex | bytes,
    temperature: float = 2.0,
    batch_size: int = 64,
    **options: Any,
) -> DataCanaries:
    """Samples of the model itself at a high temperature: like text, and yet unlikely (arXiv 2606.10481)."""
    hot, rng = positive("temperature", temperature), _stream(seed)
    steps, number = whole_number("length", length, minimum=2), whole_number("count", count, minimum=1)
    if not len(prompt):
        raise ValueError("prompt must hold at least one token, such as that of the beginning of a text")
    parts = []
    with evaluated(model) as forward:
        for start in range(0, number, batch_size):
            rows = np.tile(np.asarray(prompt, dtype=np.int64), (min(batch_size, number - start), 1))
            while rows.shape[1] < steps:
                last = forward(rows)[:, -1]
                last = np.asarray(last.float().cpu() if hasattr(last, "cpu") else last, dtype=np.float64)
                noisy = last / hot + rng.gumbel(size=last.shape)
                rows = np.append(rows, noisy.argmax(axis=1)[:, None], axis=1)
            parts.append(rows)
    drawn = np.concatenate(parts)
    return DataCanaries(inputs=drawn, labels=drawn, seed=seed, **{"kind": "samples at a high temperature"} | options)


def documents(
    users: Sequence[Sequence[Sequence[int]]],
    *,
    seed: SupportsIndex | bytes,
    pad: int = 0,
    width: int | None = None,
    **options: Any,
) -> DataCanaries:
    """All documents of a user together, as tokens: a coin for each user, for a claim about users."""
    rows = [list(document) for documents_of_one in users for document in documents_of_one]
    owners = np.repeat(np.arange(len(users)), [len(each) for each in users])
    return _text(rows, seed, pad, width, {"kind": "users", "unit": "user", "owners": owners} | options)


def _stream(seed: SupportsIndex | bytes) -> np.random.Generator:
    return keyed_stream(schedule_key(secret_seed(seed)), b"records")


def _text(rows: list[list[int]], seed: Any, pad: int, width: int | None, options: dict[str, Any]) -> DataCanaries:
    """Records of different lengths, padded on the right; padding is not predicted."""
    longest = max(map(len, rows), default=0)
    widest = longest if width is None else whole_number("width", width, minimum=longest)
    inputs = np.full((len(rows), widest), pad, dtype=np.int64)
    labels: npt.NDArray[np.int64] = np.full((len(rows), widest), IGNORED, dtype=np.int64)
    for row, tokens in enumerate(rows):
        inputs[row, : len(tokens)] = labels[row, : len(tokens)] = tokens
    return DataCanaries(inputs=inputs, labels=labels, seed=seed, **options)
