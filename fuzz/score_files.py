"""Score files of every kind, good and bad, for `coalmine estimate`."""

import io
import json
import random
from pathlib import Path

import numpy as np

from fuzz.cases import Case, FaultError, check_command
from fuzz.values import NUMBERS, damaged, number_text, text

TYPES = (np.float64, np.float32, np.float16, np.int8, np.complex128, np.bool_, "U10")
SMALL = (5e-324, 1e-308, 1e-200, 1e-100, 1e-30, 1e-12)


def make_case(rng: random.Random, folder: Path) -> Case:
    """A score file and options that mostly fit it."""
    suffix = rng.choice((".csv", ".csv", ".csv", ".npy", ".npz", ".parquet", ".txt", ""))
    scores, null = _scores(rng)
    content, said = _content(suffix, scores, null, rng)
    if rng.random() < 0.25:
        content, said = damaged(content, rng), said + ", damaged"
    path = folder / f"scores{suffix}"
    path.write_bytes(content)
    arguments = ["estimate", str(path), "--delta", rng.choice(("1e-6", "1e-5", "0.1", number_text(rng)))]
    stdin = b""
    if rng.random() < 0.1:
        arguments[1], stdin = "-", content
    arguments += rng.choice(
        ([], ["--dim", "1000"], ["--null-std", "1"], ["--null-std", number_text(rng)], ["--dim", number_text(rng)])
    )
    options = (
        ["--json"],
        ["--claim", number_text(rng)],
        ["--known-others"],
        ["--variance", rng.choice(("null", "fitted", "auto"))],
        ["--confidence", rng.choice(("0.9", "0.99", number_text(rng)))],
        ["--null-dof", number_text(rng)],
        ["--method", rng.choice(("simultaneous", "clopper-pearson", "paper"))],
    )
    for option in options:
        if rng.random() < 0.2:
            arguments += option
    if rng.random() < 0.02:
        arguments.append("--all")
    return Case(f"{' '.join(arguments)} ({said})", lambda: _check(arguments, stdin))


def _check(arguments: list[str], stdin: bytes) -> None:
    found = check_command(*arguments, stdin=stdin)
    if "--json" in arguments and found.code != 2:
        check_interval(json.loads(found.out))


def check_interval(values: dict) -> None:
    """Check that the estimate of a model lies in the interval of the same model."""
    if values["interval"] is None:
        return
    low, high = (float(end) for end in values["interval"])
    epsilon = float(values["epsilon"])
    if not low - 1e-6 * max(1, abs(low)) <= epsilon <= high + 1e-6 * max(1, abs(high)):
        raise FaultError(f"the estimate {epsilon:g} lies outside of its interval {low:g} … {high:g}")


def _scores(rng: random.Random) -> tuple[list[float], list[float]]:
    numpy_rng = np.random.default_rng(rng.randrange(1 << 30))
    size = rng.choice((0, 1, 9, 10, 30, 100, 300))
    scale = rng.choice((1.0, 1.0, 1.0, 0.03, *SMALL, 1e30, 1e100, 1e200, 1e300))
    shift = rng.choice((0.0, 1.0, 3.0, -2.0, 40.0, 1e9))
    if rng.random() < 0.15:
        return [scale * shift] * size, list(numpy_rng.normal(size=size) * scale)
    spread = rng.choice((1.0, 1.0, 0.3, 3.0))
    shift = 0.0 if scale > 1e290 else shift
    return list((numpy_rng.normal(size=size) * spread + shift) * scale), list(
        numpy_rng.normal(size=max(size, 10)) * scale
    )


def _content(suffix: str, scores: list[float], null: list[float], rng: random.Random) -> tuple[bytes, str]:
    if suffix == ".npy":
        with np.errstate(all="ignore"):
            array = np.array(scores).astype(rng.choice(TYPES) if rng.random() < 0.3 else float)
        if rng.random() < 0.2 and array.size:
            array = rng.choice(
                (array.reshape(1, -1), array.reshape(-1, 1), array[:1].reshape(()), np.stack([array, array]))
            )
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue(), f"{array.dtype} {array.shape}"
    if suffix == ".npz":
        buffer = io.BytesIO()
        names = rng.choice(
            (("observed", "unobserved"), ("observed",), ("a", "b"), ("scores",), ("Observed", "UNOBSERVED"))
        )
        np.savez(buffer, **dict(zip(names, (scores, null), strict=False)))
        return buffer.getvalue(), f"npz {names}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        columns: dict = {
            rng.choice(("score", "observed", "x", "cosine")): [*scores, *([None] if rng.random() < 0.2 else [])]
        }
        if rng.random() < 0.2:
            columns = {"score": [[value] for value in scores]}
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), sink)
        return sink.getvalue(), f"parquet {list(columns)}"
    return _csv(scores, null, rng)


def _csv(scores: list[float], null: list[float], rng: random.Random) -> tuple[bytes, str]:
    separator = rng.choice((",", ",", ";", "\t", " "))
    kind = rng.randrange(5)
    rows = [[repr(score)] for score in scores]
    if kind == 0:
        rows = [["score"], *rows]
    elif kind == 1:
        rows = [["score", "observed"]] + [[repr(s), "1"] for s in scores] + [[repr(s), "0"] for s in null]
    elif kind == 2:
        rows = [["observed", "unobserved"]] + [[repr(s), repr(n)] for s, n in zip(scores, null, strict=False)]
    elif kind == 3:
        rows = [["canary", "cosine"], *([str(place), repr(s)] for place, s in enumerate(scores))]
    if rows and rng.random() < 0.4:
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = rng.choice((rng.choice(NUMBERS), text(rng)))
    content = "\n".join(separator.join(row) for row in rows)
    return content.encode(rng.choice(("utf-8", "utf-8", "utf-8-sig", "utf-16")), "replace"), f"csv {kind}"
