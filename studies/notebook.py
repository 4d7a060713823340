"""The tutorial's notebook, run from the first cell to the last: `python -m studies.notebook`.

It must find a PASS in the correct loop and a VIOLATION in the one with half the noise. Nothing is written; Jupyter
stores the outputs (`jupyter nbconvert --to notebook --execute --inplace docs/tutorial/notebook.ipynb`).
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial" / "notebook.ipynb"


def run_cells(notebook: Path = NOTEBOOK) -> dict[str, Any]:
    """Run the code cells in order, and return the names that they define."""
    mpl.use("agg", force=True)
    names: dict[str, Any] = {}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"], start=1):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    mpl.pyplot.close("all")
    return names


def main() -> int:
    """Run the notebook, and exit with 1 if its verdicts are not those that its text states."""
    names = run_cells()
    outcomes = [str(names[name].verdict.outcome) for name in ("result", "broken")]
    print(f"the notebook ran; its verdicts are {outcomes[0]} and {outcomes[1]}")
    return int(outcomes != ["PASS", "VIOLATION"])


if __name__ == "__main__":
    sys.exit(main())
