"""Arrays in files, mapped rather than read: .npy, .npz, .safetensors and torch checkpoints, on disk or behind a URL."""

import importlib
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from coalmine.argument_checks import one_line, short_repr
from coalmine.measure.arrays import numpy_vector
from coalmine.measure.leaves import kind_of

PIECE = 1 << 18  # numbers subtracted at a time
LARGEST_HEADER = 1 << 27  # bytes of the header of a .safetensors file
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<i2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
Arrays = Any  # an array, or arrays by name


def read_arrays(what: str, name: str, scratch: Path) -> Arrays:
    """The arrays in a file, or behind a URL of fsspec. Nothing of an array is read before it is used.

    `what` says in an error what the file is. Archives and downloads are unpacked in the folder `scratch`.
    """
    kind = Path(name.partition("?")[0]).suffix.lower()
    if kind not in READERS:
        raise ValueError(f"{what} must be a file in {', '.join(READERS)}, got {name}")
    try:
        path = _downloaded(name, scratch / f"download{kind}") if "://" in name else Path(name)
        with path.open("rb"):  # a missing file, or one that may not be read
            pass
        return READERS[kind](path, scratch)
    except FileNotFoundError:
        raise ValueError(f"{what} is missing: {name} does not exist; write it, or name another file") from None
    except ImportError:
        raise
    except OSError as error:
        raise ValueError(f"{what} cannot be read: {name}: {error.strerror or one_line(str(error))}") from None
    except Exception as error:  # whatever a reader raises on a torn file
        said = one_line(str(error)) or type(error).__name__
        raise ValueError(f"{what} is damaged: {name} is no whole {kind} file ({said}); write it again") from None


def _downloaded(url: str, target: Path) -> Path:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        raise ImportError(f"{url} needs: pip install fsspec, and its package for this kind of URL") from None
    with fsspec.open(url, "rb") as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy, 1 << 24)
    return target


def _npy(path: Path, scratch: Path) -> Arrays:
    del scratch
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        array = np.load(path, allow_pickle=False)  # an empty array cannot be mapped
        if array.size:
            raise
        return array


def _npz(path: Path, scratch: Path) -> Arrays:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for number, name in enumerate(archive.namelist()):
            unpacked = scratch / f"{path.stem}-{number}.npy"
            with archive.open(name) as source, unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
            arrays[name.removesuffix(".npy")] = _npy(unpacked, scratch)
    return arrays


def _safetensors(path: Path, scratch: Path) -> Arrays:
    del scratch
    size = path.stat().st_size
    with path.open("rb") as file:
        start = 8 + int.from_bytes(_exactly(file, 8), "little")
        if start > min(size, LARGEST_HEADER):
            raise ValueError("its header is longer than the file")
        header = json.loads(_exactly(file, start - 8))
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        kind = entry["dtype"]
        if kind not in TYPES:
            raise ValueError(f"{name} holds {kind}, which is not among {', '.join(TYPES)}")
        numbers = math.prod(entry["shape"])
        if last - first != numbers * np.dtype(TYPES[kind]).itemsize or not 0 <= start + first <= start + last <= size:
            raise ValueError(f"{name} is cut off")
        arrays[name] = _mapped(path, TYPES[kind], start + first, tuple(entry["shape"]), bfloat16=kind == "BF16")
    return arrays


def _exactly(file: IO[bytes], count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise ValueError("it ends in its header")
    return found


def _mapped(path: Path, dtype: str, offset: int, shape: tuple[int, ...], *, bfloat16: bool) -> Any:
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    array = np.memmap(path, dtype, "c" if bfloat16 else "r", offset, shape)
    if not bfloat16:
        return array
    torch = importlib.import_module("torch")
    return torch.from_numpy(array).view(torch.bfloat16)


def _checkpoint(path: Path, scratch: Path) -> Arrays:
    del scratch
    torch = importlib.import_module("torch")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # checkpoints of old versions cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


READERS: dict[str, Callable[[Path, Path], Arrays]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".safetensors": _safetensors,
    ".pt": _checkpoint,
    ".pth": _checkpoint,
}


def cut(array: Any, layers: Mapping[str, int], what: str) -> Arrays:
    """One vector as views of its layers, by name; anything else, and without layers, unchanged."""
    if not layers:
        return array
    if kind_of(array) is None:
        raise ValueError(f"{what} must be one vector, which layers divides, got {short_repr(type(array).__name__)}")
    flat, total = array.reshape(-1), sum(layers.values())
    if len(flat) != total:
        raise ValueError(f"{what} must hold the {total:,} numbers of layers, got {len(flat):,}")
    edges = np.cumsum([0, *layers.values()]).tolist()
    return {name: flat[start:stop] for name, start, stop in zip(layers, edges, edges[1:], strict=False)}


def subtracted(model: Arrays, previous: Arrays, scratch: Path) -> Arrays:
    """The difference of two models, written into the folder `scratch` piece by piece. Integers stay the model's own."""
    if not isinstance(model, Mapping):
        return _differences({"": model}, {"": previous}, scratch)[""]
    if not isinstance(previous, Mapping) or previous.keys() != model.keys():
        names = sorted(model.keys() ^ (previous.keys() if isinstance(previous, Mapping) else set()))
        raise ValueError(f"the models of two rounds must have the same arrays, but {short_repr(names[:1])} is in one")
    return _differences(model, previous, scratch)


def _differences(model: Mapping[str, Any], previous: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    found = {}
    for number, (name, array) in enumerate(model.items()):
        before = previous[name]
        if tuple(array.shape) != tuple(before.shape):
            shapes = f"{tuple(array.shape)} and {tuple(before.shape)}"
            raise ValueError(f"the models of two rounds must have one shape at {name}, got {shapes}")
        if "float" not in str(array.dtype):
            found[name] = array
            continue
        dtype = np.float64 if "float64" in str(array.dtype) else np.float32
        out = np.lib.format.open_memmap(scratch / f"difference-{number}.npy", "w+", dtype, tuple(array.shape) or (1,))
        rows, now, then = out.reshape(-1), array.reshape(-1), before.reshape(-1)
        for start in range(0, len(rows), PIECE):
            part = slice(start, start + PIECE)
            rows[part] = numpy_vector(now[part]) - numpy_vector(then[part])
        found[name] = out.reshape(tuple(array.shape))
    return found
