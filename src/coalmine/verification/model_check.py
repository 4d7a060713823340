"""Whether the final model has the stored cosines, and whether the rounds add up to its update."""

import os
import tokenize
from pathlib import Path
from typing import IO, Any

import numpy as np

from coalmine.argument_checks import Floats
from coalmine.canaries import BlockedCanaries, RotatedCanaries, SphereCanaries
from coalmine.log.commitment import Precommitment
from coalmine.log.files import open_regular
from coalmine.log.mapped_rounds import LogReader
from coalmine.log.model_file import FINAL, INITIAL
from coalmine.measure.round import Final
from coalmine.measure.vectors import layer_norms, model_sha256
from coalmine.verification.check import Check, Evidence

COSINE_TOLERANCE = 1e-5  # tolerance of a cosine in units of its null std: cosines are stored in single precision
SUM_TOLERANCE = 1e-3  # relative tolerance of the final update along all canaries against the sum of the rounds
LARGEST_SETTING = 1e100
LARGEST_NUMBER, LARGEST_HEADER = 16, 1 << 16  # bytes
UNREADABLE = (  # errors of numpy's reader for files with a strange header
    ArithmeticError, EOFError, LookupError, MemoryError, OSError, RecursionError, SyntaxError, TypeError, ValueError,
    tokenize.TokenError,
)  # fmt: skip


def initial_file(path: Path, statement: Precommitment, given: Path | None) -> Path | None:
    """The file of the initial model: the one that is given, or the directory's own, if the audit committed to it."""
    own = path / INITIAL
    return own if given is None and statement.initial_sha256 is not None and own.exists() else given


def final_file(path: Path, known: Evidence, given: Path | None) -> Path | None:
    """The file of the final model: the one that is given, or the directory's own, if the audit observed one."""
    own = path / FINAL
    return own if given is None and known.log.final is not None and own.exists() else given


def check_model(known: Evidence, model: Path | None, initial: Path | None) -> tuple[Check, Check]:
    """Whether the final model has the stored cosines, and whether the rounds add up to its update."""
    settings = known.settings
    canaries: RotatedCanaries | SphereCanaries | BlockedCanaries
    try:
        if settings.blocks:
            canaries = BlockedCanaries(settings.total, settings.blocks, seed=known.seed)
        else:
            kind = RotatedCanaries if settings.kind == "rotated" else SphereCanaries
            canaries = kind(settings.total, settings.dim, seed=known.seed)
    except ValueError as error:  # settings that were tampered with
        changed = f"the recorded settings allow no canaries ({error}), so they were changed"
        return Check("cosines", False, changed), Check("sum", False, changed)
    final = None if model is None else _read_model(model, settings.dim)
    first = None if initial is None else _read_model(initial, settings.dim)
    return _recomputed(known, canaries, final), _summed(known, canaries, final, first)


def _read_model(file: Path, dim: int) -> Floats:
    """A model from a file; ValueError unless it is one row of `dim` numbers."""
    advice = f"{file} must hold a model as one .npy row of {dim} numbers"
    try:
        with os.fdopen(open_regular(file), "rb") as content:  # a pipe would wait for ever
            if content.read(2) == b"PK":
                raise ValueError(f"{advice}, got an archive of several arrays")
            content.seek(0, os.SEEK_END)
            if content.tell() > LARGEST_NUMBER * dim + LARGEST_HEADER:  # or a header could ask for any amount of memory
                raise ValueError(f"{advice}, got a file of {content.tell():,} bytes")
            content.seek(0)
            header = _header(content)
            if header is not None and header[0] != (dim,):
                raise ValueError(f"{advice}, got {header[1]} of shape {header[0]}")
            content.seek(0)
            vector = np.lib.format.read_array(content, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{advice}, but the file does not exist") from None
    except UNREADABLE as error:
        reason = str(error) if str(error).startswith(advice) else f"{advice}, got another file"
        raise ValueError(reason) from None
    if vector.shape != (dim,) or vector.dtype.kind not in "fiu":
        raise ValueError(f"{advice}, got {vector.dtype} of shape {vector.shape}")
    if not np.isfinite(vector).all():
        raise ValueError(f"{advice}, got NaN or infinity in {(~np.isfinite(vector)).sum()} of them")
    return np.asarray(vector, np.float64)


def _header(content: IO[bytes]) -> tuple[tuple[int, ...], Any] | None:
    """Shape and type that a header states, before memory is taken for them; None for a rare version of the format."""
    if np.lib.format.read_magic(content) != (1, 0):
        return None
    shape, _, kind = np.lib.format.read_array_header_1_0(content)
    return shape, kind


def _recomputed(known: Evidence, canaries: Any, vector: Floats | None) -> Check:
    final = known.log.final
    if final is None or vector is None:
        missing = (
            "the audit observed no final model, so there are no cosines to recompute"
            if final is None
            else "give the final model (--model FILE.npy) to recompute its cosines with the canaries"
        )
        return Check("cosines", None, missing)
    off = _largest_difference(canaries, vector, final.cosines)
    if isinstance(off, str):
        return Check("cosines", False, off)
    compared = (
        f"the cosines of the given model differ from the stored ones by at most {off:.2g} null standard deviations"
    )
    if off < _rounding(len(vector)):
        detail = f"{compared}, which is rounding"
        if final.sha256 is None:
            return Check("cosines", None, f"{detail}, but the log lacks the digest of the final model")
        if final.sha256 != _digest(known, vector):
            return Check("cosines", False, f"{detail}, but its numbers are not those that the audit observed")
        return Check("cosines", True, detail)
    return Check(
        "cosines",
        False,
        f"{compared}, more than by rounding: this is another model or another seed, or the stored cosines were changed",
    )


def _digest(known: Evidence, model: Floats) -> str:
    return model_sha256(model, [sum(sizes) for sizes in known.settings.shards])


def _rounding(dim: int) -> float:
    return COSINE_TOLERANCE * dim**0.5 + 1e-4


def _largest_difference(canaries: Any, vector: Floats, stored: Any) -> float | str:
    """By how many null standard deviations stored cosines differ from those of a vector at most; or why they cannot fit."""
    cosines = np.asarray(canaries.cosines(vector))
    if cosines.shape != stored.shape:
        return f"{stored.size} cosines are stored but the settings say {cosines.size} canaries: one was changed"
    return float(np.abs(cosines - stored).max()) * len(vector) ** 0.5


def _summed(known: Evidence, canaries: Any, model: Floats | None, initial: Floats | None) -> Check:
    """Whether the rounds add up to the final model's update along the canaries, as they do if the server is linear."""
    final = known.log.final
    if final is not None and final.layer_moves is not None and not final.layer_moves.any():
        return Check("sum", None, "the final model is the initial one, so there is nothing to add up")
    if final is None or final.update_cosines is None or final.update_norm is None:
        return Check("sum", None, "the audit does not know the initial model, so the rounds cannot be added up")
    server = _section(known, "server")
    if other := _not_linear(known):
        detail = f"the optimizer ({other}) is not linear, so nobody can add up the rounds"
        tied = _tied_to_model(known, canaries, final, model, initial, detail)
        return tied if tied.held is False else Check("sum", None, detail, possible=False)
    momentum = _server_number(server or _section(known, "optimizer"), "momentum")
    rate = _server_number(server, "learning_rate")
    if momentum is not None and not 0 <= momentum <= 1:
        return Check("sum", False, f"the config's server.momentum must lie in [0, 1], got {momentum:g}: it was changed")
    update = np.asarray(final.update_cosines, np.float64) * final.update_norm
    total = _weighted_sum(known.log, momentum=momentum or 0.0)
    if total is None or total.shape != update.shape:
        return Check("sum", False, "the rounds' cosines do not fit the final model's: one of them was changed")
    if rate is None:
        rate = float(total @ update) / max(float(total @ total), 1e-300)
        rate = (
            rate if server is None else max(rate, 0.0)
        )  # a framework's release may be a gradient, which is subtracted
    off = float(np.linalg.norm(update - rate * total)) / max(float(np.linalg.norm(update)), 1e-300)
    if off < SUM_TOLERANCE:
        detail = f"the rounds add up to the final update, to {off:.1g} of its length"
        return _tied_to_model(known, canaries, final, model, initial, detail)
    detail = f"the rounds do not add up to the final update: {off:.2g} of its length is missing or too much"
    if server is None:
        return Check(
            "sum",
            None,
            f"{detail}. Where the server is linear (no Adam, no decay) and its learning rate constant, they must; nobody "
            "committed to that",
        )
    return Check("sum", False, f"{detail}: rounds were replaced, dropped or changed, or the model was")


def _section(known: Evidence, name: str) -> dict[str, Any] | None:
    """A table of the committed config; None if it has none."""
    section = (known.config or {}).get(name)
    return section if isinstance(section, dict) else None


def _not_linear(known: Evidence) -> str | None:
    """The committed optimizer, if it is not linear: that of the server, or the one that the framework trains with."""
    server, optimizer = _section(known, "server"), _section(known, "optimizer")
    if server is not None and server.get("optimizer", "sgd") != "sgd":
        return str(server["optimizer"])
    return str(optimizer.get("name")) if optimizer is not None and optimizer.get("linear") is False else None


def _server_number(server: dict[str, Any] | None, name: str) -> float | None:
    """A number of the config's server; None if it has none that is usable."""
    value = (server or {}).get(name)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST_SETTING
    return float(value) if usable and value is not None else None


def _tied_to_model(
    known: Evidence, canaries: Any, final: Final, model: Floats | None, initial: Floats | None, detail: str
) -> Check:
    """Whether the update to which the rounds add up leads from the initial model to the final one."""
    if model is None or initial is None:
        missing = " and ".join(
            text
            for text, vector in (("final model (--model)", model), ("initial one (--initial-model)", initial))
            if vector is None
        )
        return Check("sum", None, f"{detail}; give the {missing} to check that it is that of the model")
    committed = known.statement.initial_sha256
    if committed is not None and _digest(known, initial) != committed:
        return Check("sum", False, "the initial model is not the one that was committed to before round 1")
    moved = model - initial
    length = float(np.linalg.norm(moved))
    assert final.update_norm is not None
    if not length or abs(length / final.update_norm - 1) > SUM_TOLERANCE:
        return Check(
            "sum", False, f"the models differ by a vector of length {length:.4g}, the log says {final.update_norm:.4g}"
        )
    off = _largest_difference(canaries, moved, final.update_cosines)
    sizes = [size for _, size in known.settings.layers] or [len(moved)]
    if final.layer_moves is None:
        return Check("sum", False, "the log lacks the lengths of the layers' updates: it was changed")
    in_order = not known.settings.shards  # otherwise a layer is in several places of the vector
    if in_order and not np.allclose(layer_norms(moved, sizes), final.layer_moves, rtol=SUM_TOLERANCE, atol=0):
        return Check("sum", False, "the lengths of the layers' updates in the log are not those of the models")
    if isinstance(off, str) or off > _rounding(len(moved)):
        return Check(
            "sum", False, "the update to which the rounds add up is not the one from the initial to the final model"
        )
    return Check("sum", True, f"{detail}, which leads from the initial to the final model")


def _weighted_sum(log: LogReader, momentum: float) -> Floats | None:
    """The sum of the rounds along all canaries; a server with momentum adds each round again with decreasing weight."""
    last = max(log.numbers, default=0)
    total: Floats | None = None
    for item in log.rounds():
        left = last - item.number + 1
        weight = float(left) if momentum == 1 else (1 - momentum**left) / (1 - momentum)
        along = weight * item.norm * np.asarray(item.cosines, np.float64)
        if total is not None and along.shape != total.shape:
            return None
        total = along if total is None else total + along
    return total
