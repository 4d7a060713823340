"""`coalmine data`: which data sets there are, and fetching one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from coalmine.cli.output import Commands, print_json, print_table, shows_bars

if TYPE_CHECKING:
    from coalmine.data import Dataset
    from coalmine.data.fetch import Follower

logger = logging.getLogger("coalmine")
FOLDER = click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the data sets are; else COALMINE_DATA_DIR.",
)


@click.group(cls=Commands)
def data() -> None:
    """Which data sets there are, and fetching one."""


@data.command("list")
@FOLDER
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table.")
def list_datasets(data_dir: Path | None, as_json: bool) -> None:
    """The data sets: users, size of the download, licence, and whether each is here."""
    from coalmine.data import DATASETS, data_folder

    folder = data_folder(data_dir)
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
    title = f"data sets, and whether they are in {folder}"
    print_table(["name", "what", "users", "download", "licence", "here"], rows, title=title, left=(0, 1, 4))


@data.command()
@click.argument("name")
@FOLDER
@click.pass_obj
def get(settings: dict[str, bool], name: str, data_dir: Path | None) -> None:
    """Fetch the data set NAME, check it and unpack it.

    Proxies are those that HTTPS_PROXY, HTTP_PROXY and NO_PROXY name.
    """
    from coalmine.data import DATASETS, data_folder, fetch

    if name not in DATASETS:
        raise click.BadParameter(f"must be one of {', '.join(DATASETS)}, got {name!r}", param_hint="NAME")
    folder = data_folder(data_dir)
    with _progress(hidden=settings["quiet"]) as follow:
        fetched = fetch(DATASETS[name], folder, follow=follow)
    for file in fetched:
        click.echo(f"{folder / DATASETS[name].folder / file.name}: {_said(file)}")


def _said(file: Any) -> str:
    if file.here_before:
        return f"{file.size:,} bytes, was here before and was left alone"
    if file.checked:
        return f"{file.size:,} bytes, the download has the {file.checked}"
    return f"{file.size:,} bytes; no checksum is published, the download had sha256 {file.sha256}"


def _size(dataset: "Dataset") -> str:
    if not dataset.downloads:
        return "none"
    return "unknown" if dataset.size is None else f"{dataset.size / 1e6:,.1f} MB"


def _entry(dataset: "Dataset", folder: Path) -> dict[str, Any]:
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
def _progress(*, hidden: bool) -> Iterator["Follower"]:
    """Bars on stderr, one for each file; shown in a terminal only."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=hidden or not shows_bars(console)) as bars:

        def follow(doing: str, name: str) -> Callable[[int, int | None], None]:
            logger.info("%s %s", doing, name)
            bar = bars.add_task(f"{doing} {name}", total=None)
            return lambda done, total: bars.update(bar, completed=done, total=total)

        yield follow
