"""Scores of records by a model's outputs: higher if the model looks trained on a record."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.special import log_expit, log_softmax

from coalmine.argument_checks import Floats, finite_array, one_of, short_repr, whole_number

Named = Literal["margin", "loss", "likelihood", "min-k"]
Score = Named | Callable[[Any, Any, Any], Any]
Reference = Any
CLASSES, TOKENS = ("margin", "loss"), ("likelihood", "min-k")
USUAL_BATCH = {CLASSES: 256, TOKENS: 16}  # rows whose logits are in memory at a time
LOWEST = 0.2  # share of the tokens that min-k averages
IGNORED = -100  # label of a token that is not predicted
WITHOUT_ADAPTER = "without adapter"
Array = npt.NDArray[Any]


def checked_score(score: Score | None, labels: Array) -> Score:
    """The score, by default the margin of a class or the likelihood of tokens; ValueError if it does not fit the labels."""
    known = TOKENS if labels.ndim == 2 else CLASSES
    if score is None:
        return known[0]  # type: ignore[return-value]
    if not callable(score):
        one_of("score", score, known)
    return score


def model_scores(
    model: Any,
    inputs: Array,
    labels: Array,
    score: Score | None,
    *,
    reference: Reference = None,
    batch_size: int | None = None,
) -> Floats:
    """A number for each record, less what the reference's number predicts of it."""
    size = USUAL_BATCH[TOKENS if labels.ndim == 2 else CLASSES]
    size = size if batch_size is None else whole_number("batch_size", batch_size, minimum=1)
    kept = checked_score(score, labels)
    own = _scores(model, inputs, labels, kept, size)
    if reference is None:
        return own
    if isinstance(reference, str):
        one_of("reference", reference, (WITHOUT_ADAPTER,))
        return _beyond(own, without_adapter(model, lambda: _scores(model, inputs, labels, kept, size)))
    if hasattr(reference, "parameters") or callable(reference):
        return _beyond(own, _scores(reference, inputs, labels, kept, size))
    earlier = finite_array("reference", reference)
    if earlier.shape != own.shape:
        raise ValueError(f"reference must hold one score for each of {own.size} records, got shape {earlier.shape}")
    return _beyond(own, earlier)


def _beyond(own: Floats, earlier: Floats) -> Floats:
    """What least squares over all records cannot predict of a score from the reference's.

    A plain difference adds the reference's own spread where training forgets it. The line is fitted without the coins.
    """
    centred = earlier - earlier.mean()
    spread = float(centred @ centred)
    return own if spread == 0 else np.asarray(own - centred * float(centred @ own) / spread)


def without_adapter(model: Any, scored: Callable[[], Floats]) -> Floats:
    """What `scored` returns while the adapter of a peft model is off."""
    inner = getattr(model, "_module", model)
    if not hasattr(inner, "disable_adapter"):
        raise TypeError(f"{WITHOUT_ADAPTER!r} needs a model of peft, got {short_repr(type(inner).__name__)}")
    with inner.disable_adapter():
        return scored()


def _scores(model: Any, inputs: Array, labels: Array, score: Score, size: int) -> Floats:
    parts: list[Floats] = []
    named = isinstance(score, str) or hasattr(model, "parameters")
    forwards: AbstractContextManager[Any] = evaluated(model) if named else nullcontext()
    with forwards as forward:
        for start in range(0, len(inputs), size):
            batch = slice(start, start + size)
            if not isinstance(score, str):
                value: Any = score(model, inputs[batch], labels[batch])
                value = value.detach().cpu() if hasattr(value, "detach") else value
                parts.append(np.asarray(value, dtype=np.float64).ravel())
            elif score in CLASSES:
                parts.append(_by_class(_numpy(forward(inputs[batch])), labels[batch], score))
            else:
                parts.append(_by_tokens(forward(inputs[batch]), labels[batch], score))
    found = np.concatenate(parts)
    if found.shape != (len(inputs),):
        raise ValueError(f"score must return one number for each of {len(inputs)} records, got {found.size}")
    return finite_array("the scores of records", found)


def _by_class(logits: Array, labels: Array, score: str) -> Floats:
    """The log likelihood of the label, or its logit less the largest other one; minus the squared error of a number."""
    if labels.dtype.kind == "f":
        return -((logits.reshape(len(labels), -1) - labels.reshape(len(labels), -1).astype(np.float64)) ** 2).mean(
            axis=1
        )
    if logits.ndim == 1 or logits.shape[-1] == 1:  # one logit for two classes
        signed = (2 * labels.astype(np.float64) - 1) * logits.reshape(len(labels))
        return np.asarray(log_expit(signed) if score == "loss" else signed)
    rows, own = np.arange(len(labels)), labels.astype(np.int64)
    if own.max(initial=0) >= logits.shape[-1] or own.min(initial=0) < 0:
        raise ValueError(f"labels must be classes below {logits.shape[-1]}, the number of logits, got {own.max()}")
    if score == "loss":
        return np.asarray(log_softmax(logits, axis=-1)[rows, own])
    others = logits.copy()
    others[rows, own] = -np.inf
    return np.asarray(logits[rows, own] - others.max(axis=-1))


def _by_tokens(logits: Array, labels: Array, score: str) -> Floats:
    """The mean log likelihood of the tokens, or the mean of the lowest standardised ones (Min-K%++, arXiv 2404.02936)."""
    found, mean, spread, used = _tokenwise(logits, labels)
    if score == "likelihood":
        return np.asarray((found * used).sum(axis=1) / np.maximum(used.sum(axis=1), 1))
    standard = np.where(used, (found - mean) / np.maximum(spread, 1e-6), np.inf)
    standard.sort(axis=1)
    count = np.maximum((LOWEST * used.sum(axis=1)).astype(int), 1)
    return np.array([row[:most].mean() for row, most in zip(standard, count, strict=True)])


def _tokenwise(logits: Any, labels: Array) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
    """Log likelihood of each next token, mean and std of the log likelihood of all tokens there, and which count.

    Logits of torch stay on their device: those of a vocabulary are many.
    """
    nexts = labels[:, 1:].astype(np.int64)
    used = nexts != IGNORED
    places = np.where(used, nexts, 0)[..., None]
    if hasattr(logits, "log_softmax"):
        tables = logits[:, :-1].float().log_softmax(-1)
        found = tables.gather(-1, tables.new_tensor(places).long())
    else:
        tables = np.asarray(log_softmax(np.asarray(logits)[:, :-1], axis=-1))
        found = np.take_along_axis(tables, places, axis=-1)
    weights = tables.exp() if hasattr(tables, "exp") else np.exp(tables)
    mean, square = _numpy((weights * tables).sum(-1)), _numpy((weights * tables**2).sum(-1))
    return _numpy(found)[..., 0], mean, np.sqrt(np.maximum(square - mean**2, 0.0)), used


def _numpy(array: Any) -> Floats:
    return np.asarray(array.float().cpu() if hasattr(array, "cpu") else array, dtype=np.float64)


def token_likelihoods(model: Any, tokens: Any, *, batch_size: int = 16) -> Floats:
    """The log likelihood of every token but the first of each row, for a score of your own."""
    rows = np.asarray(tokens)
    with evaluated(model) as forward:
        parts = [
            _tokenwise(forward(rows[start : start + batch_size]), rows[start : start + batch_size])[0]
            for start in range(0, len(rows), batch_size)
        ]
    return np.concatenate(parts)


@contextmanager
def evaluated(model: Any) -> Iterator[Callable[[Array], Any]]:
    """A function from a batch of inputs to logits; a torch model computes it without dropout, and is left as it was."""
    if not hasattr(model, "parameters"):
        if not callable(model):
            raise TypeError(f"model must be a torch module or a function of inputs, got {short_repr(model)}")
        yield lambda inputs: np.asarray(model(inputs), dtype=np.float64)
        return
    import torch

    inner = getattr(model, "_module", model)  # of Opacus: without the hooks
    modes = [(module, module.training) for module in inner.modules()]
    first = next((each for each in inner.parameters() if each.is_floating_point()), torch.zeros(0))

    def forward(inputs: Array) -> Any:
        batch = torch.as_tensor(inputs, device=first.device)
        batch = batch.to(first.dtype) if batch.is_floating_point() else batch.long()
        found = inner(batch)
        found = getattr(found, "logits", found)
        return found[0] if isinstance(found, tuple | list) else found

    inner.eval()
    try:
        with torch.no_grad():
            yield forward
    finally:
        for module, training in modes:
            module.training = training
