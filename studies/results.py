"""What studies share: finished runs as lines of a file, the options of their commands, and tables in the documentation."""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scipy.stats import binom

from coalmine.canaries.rotation_numpy import stay_in_one_thread

Record = dict[str, Any]
CHANCE = 1e-3  # probability that a row at exactly its allowed share of errors fails its bar
EVERY = 10**6  # more seeds than a row has
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def read_records(path: Path, rows: Container[str], key: Callable[[Record], Any]) -> list[Record]:
    """The finished runs of existing rows; of runs with the same key the last one counts."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return list({key(record): record for record in lines if record["row"] in rows}.values())


def run_batches(
    path: Path, work: Callable[..., list[Record]], batches: Sequence[tuple[Any, ...]], processes: int
) -> None:
    """Run every batch and append its records to the file. Each process has one core, hence starts anew."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.environ |= dict.fromkeys(THREADS, "1")
    fresh = get_context("spawn")
    with ProcessPoolExecutor(processes, fresh, initializer=stay_in_one_thread) as pool, path.open("a") as out:
        waiting = [pool.submit(work, *batch) for batch in batches]
        for number, future in enumerate(as_completed(waiting), start=1):
            records = future.result()
            out.writelines(json.dumps(record) + "\n" for record in records)
            out.flush()
            print(f"{number} of {len(waiting)} batches: {records[0]['row']}", file=sys.stderr, flush=True)


def most_errors(runs: int, share: float) -> int:
    """The most errors that chance explains in so many runs, of which this share may be wrong."""
    return int(binom.isf(CHANCE, runs, share))


def markdown_table(lines: Iterable[Sequence[str]]) -> str:
    """The lines, of which the first is the heading, as a Markdown table."""
    heads, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *body])


def put_between_markers(text: str, name: str, table: str) -> str:
    """The page with this table between `<!-- name -->` and `<!-- end of name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page must hold {begin} and {end}")
    return f"{before}{begin}\n{table}\n{end}{after}"


def write_tables(page: Path, tables: dict[str, str]) -> None:
    """Write every table between its markers in a page."""
    text = page.read_text()
    for name, table in tables.items():
        text = put_between_markers(text, name, table)
    page.write_text(text)


def main_of(
    doc: str | None,
    *,
    results: Path,
    page: Path,
    rows: Iterable[str],
    run: Callable[[list[str], int, int], None],
    tables: Callable[[], dict[str, str]],
    failures: Callable[[list[str], int], list[str]],
    jobs: int = 2,
) -> int:
    """The command of a study whose rows have names and seeds; the exit code says whether a bar was missed."""
    options = _options(doc, page, jobs)
    if options.write_docs:
        write_tables(page, tables())
        return 0
    if options.fresh:
        results.unlink(missing_ok=True)
    names = [name for name in rows if re.search(options.only, name)]
    run(names, options.seeds, options.jobs)
    print("\n\n".join(tables().values()))
    bad = failures(names, options.seeds)
    print("\n".join(bad) if bad else "every bar met")
    return int(bool(bad))


def _options(doc: str | None, page: Path, jobs: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=EVERY, help="Largest number of seeds in each row.")
    parser.add_argument("--only", default="", help="Run only the rows whose name matches this regular expression.")
    parser.add_argument("--jobs", type=int, default=jobs, help="Number of processes.")
    parser.add_argument("--fresh", action="store_true", help="Discard all finished runs.")
    where = "/".join(page.parts[-3:])
    parser.add_argument("--write-docs", action="store_true", help=f"Write the tables into {where}.")
    return parser.parse_args()
