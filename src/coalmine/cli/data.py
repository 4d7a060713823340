"""`coalmine data`: list the data sets, and download one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn

from coalmine.cli.options import DATA_DIR, JSON, Command, Verbosity, argument
from coalmine.cli.output import PlainColumn, bar, print_json, print_line, print_table
from coalmine.data import DATASETS, Dataset, Fetched, data_folder, fetch
from coalmine.data.fetch import Follower

logger = logging.getLogger("coalmine")


@click.command(cls=Command)
@argument(
    "name",
    type=click.Choice(list(DATASETS)),
    required=False,
    metavar="NAME",
    help="Data set to download; without it, all data sets are listed.",
)
@DATA_DIR
@JSON
@click.pass_obj
def data(verbosity: Verbosity, name: str | None, data_dir: Path | None, as_json: bool) -> None:
    """List the data sets, or download one.

    The list has size, licence and availability. A download is checked against its checksum and unpacked. HTTPS_PROXY,
    HTTP_PROXY and NO_PROXY name the proxies.
    """
    folder = data_folder(data_dir)
    if name is None:
        _print_list(folder, as_json=as_json)
        return
    if as_json:
        raise click.UsageError("--json is for the list: omit it, or the name of the data set")
    _download(name, folder, quiet=verbosity.quiet)


def _print_list(folder: Path, *, as_json: bool) -> None:
    if as_json:
        print_json([_entry(dataset, folder) for dataset in DATASETS.values()])
        return
    rows = [
        [
            dataset.name,
            dataset.what,
            "-" if dataset.users is None else f"{dataset.users:,}",
            _size(dataset),
            dataset.licence,
            "yes" if dataset.is_in(folder) else "no",
        ]
        for dataset in DATASETS.values()
    ]
    title = f"Data sets in {folder}"
    print_table(["name", "content", "users", "download", "licence", "present"], rows, title=title, left=(0, 1, 4))


def _download(name: str, folder: Path, *, quiet: bool) -> None:
    with _progress(hidden=quiet) as follow:
        fetched = fetch(DATASETS[name], folder, follow=follow)
    for file in fetched:
        print_line(f"{folder / DATASETS[name].folder / file.name}: {_description(file)}")


def _description(file: Fetched) -> str:
    if file.here_before:
        return f"{file.size:,} bytes, already present"
    if file.checked:
        return f"{file.size:,} bytes, verified against the {file.checked}"
    return f"{file.size:,} bytes, not verified: no checksum is published; sha256 {file.sha256}"


def _size(dataset: Dataset) -> str:
    if not dataset.downloads:
        return "none"
    return "unknown" if dataset.size is None else f"{dataset.size / 1e6:,.1f} MB"


def _entry(dataset: Dataset, folder: Path) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "task": dataset.task,
        "title": dataset.title,
        "what": dataset.what,
        "users": dataset.users,
        "examples": dataset.examples,
        "download_bytes": dataset.size,
        "can_be_fetched": bool(dataset.downloads),
        "urls": [file.url for file in dataset.downloads],
        "licence": dataset.licence,
        "source": dataset.source,
        "note": dataset.note,
        "folder": str(folder / dataset.folder),
        "here": dataset.is_in(folder),
    }


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Follower]:
    """Progress bars on stderr, one per file; shown in a terminal only."""
    columns = (BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with bar(PlainColumn("{task.description}"), *columns, hidden=hidden) as bars:

        def follow(doing: str, name: str) -> Callable[[int, int | None], None]:
            logger.info("%s %s", doing, name)
            task = bars.add_task(f"{doing} {name}", total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield follow
