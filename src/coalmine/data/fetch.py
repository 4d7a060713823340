"""Fetching a data set: download, check and unpack each file, and record its origin in the folder."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from coalmine.data.catalogue import Dataset, Download
from coalmine.data.download import download
from coalmine.data.unpack import unpack

RECORD = "coalmine-data.json"


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A file of a data set. `checked` names the checksum it was compared with; empty if none is published."""

    name: str
    size: int
    here_before: bool = False
    url: str = ""
    sha256: str = ""  # of the downloaded file, before unpacking
    checked: str = ""


class Follower(Protocol):
    """Called with a task and a file name, it returns a function of the bytes so far and, if known, in total."""

    def __call__(self, doing: str, name: str, /) -> Callable[[int, int | None], None]: ...


def ignore(doing: str, name: str) -> Callable[[int, int | None], None]:
    """A follower that shows nothing."""
    return lambda done, total: None


def fetch(dataset: Dataset, data_dir: Path, *, follow: Follower = ignore) -> list[Fetched]:
    """Put a data set's files where its task looks for them, under `data_dir`; existing files are not changed."""
    if not dataset.downloads:
        here = ", where it is already" if dataset.is_in(data_dir) else ""
        raise ValueError(f"{dataset.name} cannot be fetched: {dataset.note} ({data_dir / dataset.folder}{here})")
    folder = data_dir / dataset.folder
    fetched = []
    for file in dataset.downloads:
        if all((folder / name).is_file() for name in file.results):
            fetched += [_here(folder, name) for name in file.results]
        else:
            fetched += _get(file, folder, follow)
    return fetched


def _here(folder: Path, name: str) -> Fetched:
    return Fetched(name=name, size=(folder / name).stat().st_size, here_before=True)


def _get(file: Download, folder: Path, follow: Follower) -> list[Fetched]:
    packed = folder / file.name
    try:
        sha256 = download(file, packed, progress=follow("downloading", file.name))
        if file.unpacked:
            _unpack(file, packed, follow("unpacking", file.name))
    except OSError as error:
        if error.errno is None:  # its message is complete
            raise
        raise OSError(f"writing {folder} failed: {error.strerror}; choose another folder with --data-dir") from None
    fetched = [
        Fetched(
            name=name,
            size=(folder / name).stat().st_size,
            url=file.url,
            sha256=sha256,
            checked=file.checked,
        )
        for name in file.results
    ]
    _record(folder, fetched)
    return fetched


def _unpack(file: Download, packed: Path, tell: Callable[[int, int | None], None]) -> None:
    limit = file.unpacked_limit
    try:
        unpack(packed, packed.parent, wanted=file.unpacked, limit=limit, progress=lambda done: tell(done, None))
    except ValueError:
        packed.unlink()  # damaged, so that the next call downloads it again
        raise
    packed.unlink()


def _record(folder: Path, fetched: list[Fetched]) -> None:
    """Record in the folder the origin and SHA-256 of each file, whether or not a checksum is published."""
    path = folder / RECORD
    known: dict[str, Any] = {}
    if path.exists():
        try:
            known = {entry["name"]: entry for entry in json.loads(path.read_text(encoding="utf-8"))["files"]}
        except (ValueError, KeyError, TypeError):
            known = {}  # unreadable: write a new one
    for file in fetched:
        known[file.name] = {name: value for name, value in asdict(file).items() if name != "here_before"}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"files": list(known.values())}, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
