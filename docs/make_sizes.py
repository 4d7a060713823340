"""The table in docs/tutorial/install.md: how much an installation downloads, and how much it takes on disk.

`python -m docs.make_sizes [NAME …]` downloads the wheels of each set with pip into a temporary folder, and adds up their
sizes, packed and unpacked. Compiled Python files come on top. `--find-links FOLDER` takes wheels from a folder first:
that is how the rows with a torch for CPUs are measured.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETS = {
    "core": ["."],
    "cli": [".[cli]"],
    "report": [".[cli,report]"],
    "parquet": [".[parquet]"],
    "jax": [".[jax]"],
    "flower": [".[flower]", "scikit-learn"],
    "simulation": [".[simulation,report]"],
    "opacus": [".[simulation,report,opacus]"],
}


def sizes(requirements: list[str], find_links: str | None) -> tuple[int, int, int]:
    """Number of wheels, their bytes, and their bytes when unpacked."""
    with tempfile.TemporaryDirectory() as folder:
        links = ["--find-links", find_links] if find_links else []
        pins = ["--constraint", str(ROOT / "constraints.txt")]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, *links, *pins, *requirements]
        subprocess.run(command, cwd=ROOT, check=True)
        wheels = list(Path(folder).glob("*.whl"))
        packed = sum(wheel.stat().st_size for wheel in wheels)
        unpacked = sum(part.file_size for wheel in wheels for part in zipfile.ZipFile(wheel).infolist())
        return len(wheels), packed, unpacked


def main() -> None:
    """Print a row for each set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"Sets to measure: {', '.join(SETS)}.")
    parser.add_argument("--find-links", help="Folder with wheels that are preferred.")
    given = parser.parse_args()
    for name in given.names or SETS:
        count, packed, unpacked = sizes(SETS[name], given.find_links)
        print(
            f"{name:12} {count:3} wheels, download {packed / 1e6:7,.0f} MB, on disk {unpacked / 1e6:7,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
