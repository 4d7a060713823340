"""The picture in docs/tutorial/first-audit.md: the top of the report of the tutorial's first run, as Chromium shows it.

coalmine run --out runs/honest
python -m docs.make_screenshot runs/honest
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PICTURE = Path(__file__).parent / "tutorial" / "first-report.png"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,760")


def main(run: Path) -> None:
    """Take the picture of a run's report."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("a screenshot needs Chromium (Debian: apt-get install chromium)")
    page = run / "report.html"
    if not page.exists():
        raise SystemExit(f"{page} must exist: run `coalmine run --out {run}` first")
    with tempfile.TemporaryDirectory() as profile:
        place = (f"--user-data-dir={profile}", f"--screenshot={PICTURE.absolute()}")
        subprocess.run([program, *FLAGS, *place, page.absolute().as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
