"""Canaries in files, for clients in any language: one for each canary, or one sum for each round; never the seed."""

import csv
import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from coalmine.argument_checks import one_of
from coalmine.integrations.files.audit import FileAudit
from coalmine.integrations.files.plan import read_plan
from coalmine.measure.arrays import numpy_vector

Format = Literal["npy", "safetensors", "parquet"]
SCHEDULE = "schedule.csv"
Rows = dict[str, Any]  # flat arrays by name
Row = list[Any]  # of the schedule
Job = tuple[str, list[int], float]  # the name of a file, its canaries, and their norm


def export_canaries(
    path: Path | str,
    out: Path | str,
    *,
    kind: Format = "npy",
    summed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the canaries that an audit.toml plans into the folder `out`, and return the table of who sends what when.

    Each canary is one file, as long as `scale` times the clip norm. With `summed`, each round has one file: the sum of its
    canaries, to be added to the clipped sum of the clients. Nothing in the folder leads to the seed. The run directory then
    holds the commitment to seed, settings and claim.
    """
    one_of("kind", kind, get_args(Format))
    folder, plan = Path(out), read_plan(Path(path))
    with FileAudit(plan) as audit:
        folder.mkdir(parents=True, exist_ok=True)
        jobs, table = _sums(audit) if summed else _singles(audit)
        ending = f".{kind}"
        if kind == "parquet":
            _write_parquet(audit, jobs, folder / "canaries.parquet", progress)
        else:
            for done, (name, indices, size) in enumerate(jobs, 1):
                _write_file(audit, indices, size, folder / (name + ending))
                if progress is not None:
                    progress(done, len(jobs))
        schedule = folder / SCHEDULE
        with _draft_of(schedule) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["round", "canaries" if summed else "canary", "clip_norm", "length", "file"])
            writer.writerows(
                (*row, "canaries.parquet" if kind == "parquet" else row_file + ending) for *row, row_file in table
            )
    return schedule


def _sums(audit: FileAudit) -> tuple[list[Job], list[Row]]:
    """A file for each round with canaries, and the rows of the schedule without the files' endings."""
    jobs: list[Job] = []
    table: list[Row] = []
    digits = len(str(audit.plan.rounds))
    for planned in audit.rounds:
        present, size = [int(index) for index in audit.present(planned)], audit.plan.scale * planned.clip_norm
        if present:
            jobs.append((f"round-{planned.number:0{digits}}", present, size))
            table.append([planned.number, len(present), planned.clip_norm, size, jobs[-1][0]])
    return jobs, table


def _singles(audit: FileAudit) -> tuple[list[Job], list[Row]]:
    """A file for each canary, and the rows of the schedule; without rounds, if only the pipeline knows them."""
    plan = audit.plan
    if len({planned.clip_norm for planned in audit.rounds} | {plan.clip_norm}) > 1:
        raise ValueError("the clip norm differs between rounds, so a canary would need a file for each: export sums")
    size, digits = plan.scale * plan.clip_norm, len(str(plan.canaries - 1))
    jobs: list[Job] = [(f"canary-{index:0{digits}}", [index], size) for index in range(plan.canaries)]
    present = [(planned.number, audit.present(planned)) for planned in audit.rounds] if plan.scheduled else []
    who = [(number, int(index)) for number, indices in present for index in indices]
    who = who or [("", index) for index in range(plan.canaries)]  # type: ignore[misc]
    return jobs, [[number, index, plan.clip_norm, size, jobs[index][0]] for number, index in who]


@contextmanager
def _draft_of(path: Path) -> Iterator[Path]:
    """A name beside `path` that takes its place once it is written whole."""
    draft = path.with_name(f".{path.name}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _fill(audit: FileAudit, indices: list[int], size: float, rows: Rows) -> None:
    """Write the sum of canaries into flat arrays; block by block, if the model is in blocks."""
    measurer = audit.core.measurer
    if hasattr(measurer, "write_canaries"):
        measurer.write_canaries(indices, size, rows)
        return
    for name, row in audit.tree.rows("updates", measurer.sum_of_canaries(indices, size)).items():
        rows[name][:] = numpy_vector(row)


def _write_file(audit: FileAudit, indices: list[int], size: float, path: Path) -> None:
    leaves = [leaf for leaf in audit.tree.leaves if leaf.audited]
    if path.suffix == ".npy" and len(leaves) > 1 and not audit.plan.layers:
        raise ValueError(f"a .npy file holds one array, and the model has {len(leaves)}: use safetensors or parquet")
    types = {leaf.name: _type_of(leaf.dtype) for leaf in leaves}
    with _draft_of(path) as draft:
        if path.suffix == ".npy":
            dtype = max(types.values(), key=lambda kind: kind.itemsize)
            shape = leaves[0].shape if len(leaves) == 1 else (audit.tree.dim,)
            whole = np.lib.format.open_memmap(draft, "w+", dtype, shape).reshape(-1)
            edges = np.cumsum([0, *(leaf.size for leaf in leaves)]).tolist()
            rows = {leaf.name: whole[a:b] for leaf, a, b in zip(leaves, edges, edges[1:], strict=False)}
        else:
            rows = _safetensors_rows(draft, {leaf.name: leaf.shape for leaf in leaves}, types)
        _fill(audit, indices, size, rows)


def _type_of(dtype: Any) -> "np.dtype[Any]":
    """Single precision, or double where the model has it."""
    return np.dtype("<f8" if "float64" in str(dtype) else "<f4")


def _safetensors_rows(path: Path, shapes: Mapping[str, tuple[int, ...]], types: Mapping[str, "np.dtype[Any]"]) -> Rows:
    """Flat arrays in a new .safetensors file of zeros."""
    header: dict[str, Any] = {}
    place = 0
    for name, shape in shapes.items():
        end = place + math.prod(shape) * types[name].itemsize
        header[name] = {"dtype": f"F{8 * types[name].itemsize}", "shape": shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + place)
    start = 8 + len(text)
    return {
        name: np.memmap(path, types[name], "r+", start + entry["data_offsets"][0], (math.prod(entry["shape"]),))
        if math.prod(entry["shape"])
        else np.zeros(0)
        for name, entry in header.items()
    }


def _write_parquet(audit: FileAudit, jobs: list[Job], path: Path, progress: Callable[[int, int], None] | None) -> None:
    """One row for each canary or round: its name, its length, and its numbers in the order of the model's arrays."""
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ImportError("parquet needs: pip install 'coalmine[parquet]'") from None
    leaves = [leaf for leaf in audit.tree.leaves if leaf.audited]
    schema = arrow.schema(
        [("name", arrow.string()), ("length", arrow.float64()), ("update", arrow.list_(arrow.float32()))]
    )
    with _draft_of(path) as draft, parquet.ParquetWriter(draft, schema) as writer:
        for done, (name, indices, size) in enumerate(jobs, 1):
            rows = {leaf.name: np.empty(leaf.size, np.float32) for leaf in leaves}
            _fill(audit, indices, size, rows)
            whole = np.concatenate(list(rows.values()))
            offsets = arrow.array([0, len(whole)], arrow.int32())
            update = arrow.ListArray.from_arrays(offsets, arrow.array(whole))
            writer.write_table(arrow.table([[name], [size], update], schema=schema))
            if progress is not None:
                progress(done, len(jobs))
