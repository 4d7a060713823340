"""The tutorial's notebook, run from the first cell to the last: `python -m studies.notebook [--write]`.

It must find a PASS in the correct loop and a VIOLATION in the one with half the noise. `--write` stores what the cells
print and draw, as Jupyter would.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial" / "notebook.ipynb"


def run_cells(notebook: Path = NOTEBOOK) -> tuple[dict[str, Any], list[list[dict[str, Any]]]]:
    """Run the code cells in order, and return the names that they define and the outputs of each cell."""
    mpl.use("agg", force=True)
    plt.close("all")  # a figure that somebody left open is no output of a cell
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [_run("".join(cell["source"]), number, names) for number, cell in enumerate(cells, start=1)]
    plt.close("all")
    return names, outputs


def _run(source: str, number: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of one cell: its text, the value of its last line, and its pictures."""
    body, printed = ast.parse(source, f"cell {number}"), io.StringIO()
    last = body.body.pop() if isinstance(body.body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    with contextlib.redirect_stdout(printed):
        exec(compile(body, f"cell {number}", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(True)
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    for figure in map(plt.figure, plt.get_fignums()):
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=80)
        shown = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown})
    plt.close("all")
    return outputs


def main() -> int:
    """Run the notebook, and exit with 1 if its verdicts are not those that its text states."""
    names, outputs = run_cells()
    if "--write" in sys.argv:
        notebook = json.loads(NOTEBOOK.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for number, (cell, made) in enumerate(zip(code, outputs, strict=True), start=1):
            cell |= {"execution_count": number, "outputs": made}
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    outcomes = [str(names[name].verdict.outcome) for name in ("result", "broken")]
    print(f"the notebook ran; its verdicts are {outcomes[0]} and {outcomes[1]}")
    return int(outcomes != ["PASS", "VIOLATION"])


if __name__ == "__main__":
    sys.exit(main())
