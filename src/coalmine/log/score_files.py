"""Score files: .csv, .npy, .npz, .parquet or standard input. Files whose meaning is unclear are rejected.

A file is split into named columns; the names and the cells determine the role of each column. Nothing is unpickled.
"""

import csv
import io
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coalmine.argument_checks import Floats, finite_array, short_repr
from coalmine.log.files import check_archive, read_regular, read_stream

Role = Literal["observed", "unobserved"]
Cells = npt.NDArray[Any]  # numbers or text; None or "" for a missing cell
STDIN = "-"
NUMBER = 8  # bytes
LARGEST = 4 << 30  # bytes of a score file
LARGEST_UNPACKED = 1 << 30  # bytes of its numbers, if it is compressed
SCORE_NAMES = ("score", "scores", "cosine", "cosines")
INDEX_NAMES = ("canary", "index", "id", "", "unnamed: 0", "__index_level_0__")  # the last three are written by pandas
ROLES: tuple[Role, Role] = ("observed", "unobserved")
# In a column called "observed".
FLAGS = {"1": True, "0": False, "1.0": True, "0.0": False, "true": True, "false": False}
MAGIC = {b"\x93NUMPY": ".npy", b"PK": ".npz", b"PAR1": ".parquet"}
BOM = b"\xef\xbb\xbf"
PLAIN = b"0123456789+-.eE\r\n"  # bytes of a file with one number per line
CHUNK = 1 << 20  # bytes that are split into lines at a time
REMEDY = "name them score, observed, unobserved or canary, or give one column without a header"
ONE_EACH = "it must hold one score for each canary"


@dataclass(frozen=True)
class ScoreFile:
    """The observed and unobserved scores of one file; None if there are none."""

    observed: Floats | None = None
    unobserved: Floats | None = None


def read_scores(source: str, *, role: Role = "observed") -> ScoreFile:
    """The scores in the file `source`, "-" for standard input; scores without a label get `role`."""
    name, suffix, content = _opened(source)
    if not content.strip():
        raise ValueError(f"{name} is empty; {ONE_EACH}")
    scores = _by_role(name, READERS[suffix](name, content), role)
    if getattr(scores, role) is None:
        raise ValueError(f"{name} holds no {role} scores; {ONE_EACH}")
    return scores


def _opened(source: str) -> tuple[str, str, bytes]:
    """The name for messages, the kind as a file extension, and the bytes."""
    if source == STDIN:
        if sys.stdin is None:
            raise ValueError("standard input is closed: pipe scores into it, or name a file")
        content = read_stream("standard input", sys.stdin.buffer, most=LARGEST)
        suffix = next((suffix for magic, suffix in MAGIC.items() if content.startswith(magic)), ".csv")
        return "standard input", suffix, content
    suffix = Path(source).suffix.lower()
    if suffix not in READERS:
        raise ValueError(f"{source} must end in {', '.join(READERS)}, got {suffix or 'no extension'!r}")
    return source, suffix, read_regular(Path(source), most=LARGEST)


def _by_role(name: str, columns: Mapping[str, Cells], role: Role) -> ScoreFile:
    """The scores by role, from the names of the columns and the cells of a label column."""
    columns = {key: cells for key, cells in columns.items() if key not in INDEX_NAMES}
    if set(columns) == set(ROLES):
        return ScoreFile(*(_numbers(f"{name}, {key}", columns[key][_present(columns[key])]) for key in ROLES))
    if len(columns) == 1 and (only := next(iter(columns))) in ROLES:
        return ScoreFile(**{only: _numbers(name, columns[only])})
    labels = [mask for key in columns if (mask := _label(columns, key)) is not None]
    scores = [cells for key, cells in columns.items() if _label(columns, key) is None and _may_be_scores(key)]
    if len(scores) != 1 or len(labels) > 1 or len(scores) + len(labels) < len(columns):
        raise ValueError(f"{name} holds columns of unclear meaning ({_listed(columns)}): {REMEDY}")
    numbers = _numbers(name, scores[0])
    if not labels:
        return ScoreFile(**{role: numbers})
    return ScoreFile(*(part if part.size else None for part in (numbers[labels[0]], numbers[~labels[0]])))


def _may_be_scores(key: str) -> bool:
    return key in SCORE_NAMES or key.isdecimal()  # a column without a name is named by its number


def _label(columns: Mapping[str, Cells], key: str) -> npt.NDArray[np.bool_] | None:
    """True for each cell that says "observed"; None if the column is not a label."""
    known = {"observed": True, "unobserved": False}
    if key == "observed" and any(other in SCORE_NAMES for other in columns):
        known |= FLAGS
    if str(columns[key][0]).strip().lower() not in known:
        return None
    words = [str(cell).strip().lower() for cell in columns[key].tolist()]
    if not set(words) <= set(known):
        return None
    return np.array([known[word] for word in words])


def _present(cells: Cells) -> npt.NDArray[np.bool_]:
    """Which cells are present: columns of unequal length end in missing cells."""
    if cells.dtype.kind in "iuf":
        return np.ones(cells.size, dtype=bool)
    return np.array([cell is not None and cell != "" for cell in cells.tolist()], dtype=bool)


def _numbers(name: str, cells: Cells) -> Floats:
    if cells.dtype.kind in "iuf":
        return finite_array(f"the scores in {name}", cells)
    numbers = np.empty(cells.size)
    for row, cell in enumerate(cells.tolist()):
        try:
            numbers[row] = _number(cell)
        except (TypeError, ValueError):
            problem = "missing" if cell is None or cell == "" else f"{short_repr(cell)}, which is not a number"
            raise ValueError(f"score {row + 1} of {cells.size} in {name} is {problem}") from None
    return finite_array(f"the scores in {name}", numbers)


def _listed(columns: Mapping[str, Cells]) -> str:
    if not columns:
        return "only an index"
    names = [f"column {key}" if key.isdecimal() else repr(key) for key in columns]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _read_csv(name: str, content: bytes) -> dict[str, Cells]:
    """Columns of text; the first row is a header if none of its cells is a number."""
    plain = _read_plain(content)
    if plain is not None:
        return plain
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{name} must be text in UTF-8") from None
    kept = [(number, line) for number, line in enumerate(text.splitlines(), 1) if not line.lstrip().startswith("#")]
    filled = [number for number, line in kept if line.strip()]
    if not filled:
        raise ValueError(f"{name} is empty; {ONE_EACH}")
    for number, line in kept:
        if not line.strip() and filled[min(1, len(filled) - 1)] < number < filled[-1]:
            raise ValueError(f"line {number} of {name} is blank: a score is missing there; {ONE_EACH}")
    lines = [line for _, line in kept if line.strip()]
    separator = next((char for char in ",;\t" if char in lines[0]), ",")
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=separator)]
    except csv.Error as error:
        raise ValueError(f"{name} is not a table of comma-separated values: {error}") from None
    width = len(rows[0])
    for number, row in enumerate(rows, 1):
        if len(row) != width:
            raise ValueError(f"row {number} of {name} has {len(row)} columns, the first has {width}")
    header = not any(_is_number(cell) for cell in rows[0])
    names = [cell.lower() for cell in rows.pop(0)] if header else [str(number + 1) for number in range(width)]
    return _columns(name, names, [np.array(cells, dtype=object) for cells in zip(*rows, strict=True)])


def _read_plain(content: bytes) -> dict[str, Cells] | None:
    """The usual file, one number per line, perhaps below a header; None for any other file, or one with an error.

    It is read without an object for each cell, so 10^7 scores take seconds.
    """
    first, _, rest = content.removeprefix(BOM).partition(b"\n")
    rest = rest.rstrip(b"\r\n")
    if not rest or rest.translate(None, PLAIN) or rest.count(b"\r") != rest.count(b"\r\n"):
        return None
    if not first.strip() or not first.isascii():
        return None
    head = first.removesuffix(b"\r").decode()
    if not head.isprintable() or any(char in head for char in ',;"#'):  # tabs and line breaks are not printable
        return None
    head = head.strip()
    numbers = np.empty(rest.count(b"\n") + 1)
    filled = start = 0
    try:
        while start < len(rest):
            end = rest.find(b"\n", start + CHUNK)
            end = len(rest) if end < 0 else end
            part = rest[start:end].split(b"\n")
            numbers[filled : filled + len(part)] = list(map(float, part))
            filled, start = filled + len(part), end + 1
    except ValueError:
        return None  # the general reader reports what is wrong, and where
    return {"1": np.append(float(head), numbers)} if _is_number(head) else {head.lower(): numbers}


def _number(cell: Any) -> float:
    """The number in a cell; underscores, which Python allows, are rejected."""
    if isinstance(cell, str) and "_" in cell:
        raise ValueError
    return float(cell)


def _is_number(cell: str) -> bool:
    try:
        _number(cell)
    except ValueError:
        return False
    return True


def _columns(name: str, names: list[str], cells: list[Cells]) -> dict[str, Cells]:
    if len(set(names)) < len(names):
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"{name} has more than one column named {twice!r}")
    if not cells or not cells[0].size:
        raise ValueError(f"{name} holds no scores; {ONE_EACH}")
    return dict(zip(names, cells, strict=True))


def _read_numpy(name: str, content: bytes) -> dict[str, Cells]:
    """The arrays of an .npz by name, or the columns of an .npy."""
    if content.startswith(b"PK"):
        _check_unpacked(name, content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about headers that another version wrote
            loaded = np.load(io.BytesIO(content), allow_pickle=False)
            named = not isinstance(loaded, np.ndarray)
            arrays = {key.lower(): loaded[key] for key in loaded.files} if named else {"1": loaded}
    except Exception:  # a damaged file raises almost anything: zlib.error, BadZipFile, MemoryError, even TokenError
        raise ValueError(
            f"{name} is damaged, is not a NumPy file, or holds Python objects, which are never loaded; "
            "save an array of floats with numpy.save or numpy.savez"
        ) from None
    if "observed" in arrays:
        arrays = {key: array for key, array in arrays.items() if key in ROLES}
    if len(arrays) != 1 and set(arrays) != set(ROLES):
        raise ValueError(
            f"{name} must hold one array, or arrays named observed and unobserved, got {_listed(arrays) or 'none'}"
        )
    for key, array in arrays.items():
        _check_array(name if len(arrays) == 1 else f"{name}, {key}", array)
    return {key if key in ROLES else "1": array.ravel() for key, array in arrays.items()}


def _check_unpacked(name: str, content: bytes) -> None:
    try:
        check_archive(name, io.BytesIO(content), most=LARGEST_UNPACKED)
    except (zipfile.BadZipFile, NotImplementedError, struct.error):
        return  # numpy says what is wrong with it


def _check_array(name: str, array: Cells) -> None:
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} must hold real numbers, got an array of type {array.dtype}")
    if array.size != max(array.shape, default=0):  # a row or a column may have further axes of length 1
        raise ValueError(f"{name} must hold one row of scores, got shape {array.shape}")
    if not array.size:
        raise ValueError(f"{name} is empty; {ONE_EACH}")


def _read_parquet(name: str, content: bytes) -> dict[str, Cells]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("reading .parquet needs: pip install 'coalmine[parquet]'") from error
    try:
        facts = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).metadata
        unpacked = max(
            sum(facts.row_group(i).total_byte_size for i in range(facts.num_row_groups)),
            NUMBER * facts.num_rows * facts.num_columns,
        )
        if unpacked <= LARGEST_UNPACKED:
            table = pyarrow.parquet.read_table(pyarrow.BufferReader(content))
    except (pyarrow.ArrowException, OSError):
        raise ValueError(f"{name} is damaged, or is not a parquet file") from None
    if unpacked > LARGEST_UNPACKED:
        raise ValueError(f"{name} must unpack to at most {LARGEST_UNPACKED:,} bytes, got {unpacked:,}")
    names = [key.strip().lower() for key in table.column_names]
    return _columns(name, names, [_parquet_cells(column) for column in table.columns])


def _parquet_cells(column: Any) -> Cells:
    cells: Cells = column.to_numpy()
    if column.null_count or cells.dtype.kind not in "iuf":
        cells = np.array([*column.to_pylist(), None], dtype=object)[:-1]  # None keeps numpy from making rows of lists
    return cells


READERS: dict[str, Callable[[str, bytes], dict[str, Cells]]] = {
    ".csv": _read_csv,
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".parquet": _read_parquet,
}
