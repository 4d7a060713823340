"""Plots as inline SVG with the colours of the report's page, or as files."""

import io
import math
import re
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coalmine.log.files import write_atomically
from coalmine.report import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.4  # inches: 389 SVG units, about the width of a phone in pixels
LETTER, LINE, EDGE = 0.075, 0.19, 0.06  # inches: width of a letter and height of a line at 9 points, and the margin
INK, GRID = "#1b2430", "#d4dae2"
VARIABLES = {
    INK: "ink", GRID: "grid", plots.OBSERVED: "observed", plots.FITTED: "fitted", plots.NULL: "null",
    plots.BOUND: "bound", plots.ANALYTICAL: "analytical", plots.CLAIM: "claim", plots.FLOOR: "floor",
    plots.ALARM: "alarm", plots.SERIES[5]: "teal", plots.SERIES[6]: "olive",
}  # fmt: skip
STYLE: Any = {
    "font.size": 10, "font.family": ["DejaVu Sans"], "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
    "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titley": 1.0,
    "axes.grid": True, "axes.grid.axis": "both", "grid.color": GRID,
    "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 9, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "svg.fonttype": "none", "svg.hashsalt": "coalmine", "text.parse_math": False,
    "path.simplify": True, "axes.unicode_minus": True, "text.usetex": False,
}  # fmt: skip


def needs_matplotlib() -> None:
    """Raise ImportError with the name of the extra if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("the report's pictures need: pip install 'coalmine[report]'") from error


def draw(paint: "Callable[[Figure], None]", *, height: float) -> str:
    """A figure as SVG with a transparent background."""
    needs_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)  # the browser has the glyph
        figure = Figure(figsize=(WIDTH, height))
        paint(figure)
        set_layout(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()


def set_layout(figure: "Figure") -> None:
    """Position the figure's axes so that their labels and the legend below fit.

    matplotlib's constrained layout measures every label several times, which takes as long as drawing.
    """
    width, height = figure.get_size_inches()
    grid: dict[tuple[int, int], Axes] = {}
    for ax in figure.axes:
        spec: Any = ax.get_subplotspec()
        grid[spec.rowspan.start, spec.colspan.start] = ax
    rows, columns = (1 + max(cell[axis] for cell in grid) for axis in (0, 1))
    ticks = [max(_left_room(ax) for cell, ax in grid.items() if cell[1] == column) for column in range(columns)]
    lefts = [
        room + LINE * any(ax.get_ylabel() for cell, ax in grid.items() if cell[1] == column)
        for column, room in enumerate(ticks)
    ]
    bottoms = [max(_bottom_room(ax) for cell, ax in grid.items() if cell[0] == row) for row in range(rows)]
    legend = sum(LINE * math.ceil(len(each.get_texts()) / each._ncols) + EDGE for each in figure.legends)  # type: ignore[attr-defined]
    above = LINE + EDGE if any(ax.get_title(loc="left") for ax in figure.axes) else 2 * EDGE
    w = (width - 2 * EDGE - sum(lefts)) / columns - 2 * EDGE
    h = (height - EDGE - legend - sum(bottoms)) / rows - above
    for (row, column), ax in grid.items():
        left = sum(lefts[: column + 1]) + EDGE + column * (w + 2 * EDGE)
        top = height - (row + 1) * above - row * h - sum(bottoms[:row])
        ax.set_position((left / width, (top - h) / height, w / width, h / height))
        ax.xaxis.set_label_coords(0.5, -(LINE + EDGE) / h)
        ax.yaxis.set_label_coords(-ticks[column] / w, 0.5)


def _left_room(ax: "Axes") -> float:
    """Inches that the tick labels of the y axis take."""
    longest = max((len(label.get_text()) for label in ax.get_yticklabels()), default=0)
    return EDGE + LETTER * (
        longest + bool(longest)
    )  # one spare letter: once positioned, an axis may choose longer numbers


def _bottom_room(ax: "Axes") -> float:
    """Inches that the tick labels and the label of the x axis take."""
    return (LINE + EDGE if ax.xaxis.get_tick_params()["labelbottom"] else EDGE) + (LINE if ax.get_xlabel() else 0.0)


def themed(svg: str, name: str, alt: str) -> str:
    """The bare SVG element for a page: CSS variables as colours, unique ids, no fixed size, and `alt` as its label."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    head, rest = body.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    for colour, variable in VARIABLES.items():
        rest = rest.replace(colour, f"var(--{variable})")
    rest = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", rest)  # only markers and clip paths are referenced
    rest = re.sub(r'( id="|url\(#|href="#)', rf"\1{name}-", rest)
    rest = rest.replace("'DejaVu Sans'", "system-ui, sans-serif")
    return f'<svg {box[0] if box else ""} role="img" aria-label="{escape(alt)}">{rest.rstrip()}'


def one_axes(plot: Callable[..., Any], *arguments: Any, legend: int = 0, **named: Any) -> "Callable[[Figure], None]":
    """A function that draws one plot on a figure, with a legend of `legend` columns below it."""

    def paint(figure: "Figure") -> None:
        plot(figure.add_subplot(), *arguments, **named)
        if legend:
            figure.legend(loc="lower center", ncols=legend)

    return paint


def save_plot(path: Path, plot: Callable[..., Any], *arguments: Any, legend: int = 3, **named: Any) -> None:
    """Save one plot to a PNG, SVG or PDF file. `arguments` are the plot's arguments after its Axes."""
    needs_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE | {"savefig.facecolor": "white", "savefig.dpi": 150}):
        figure = Figure(figsize=(WIDTH, 3.8))
        one_axes(plot, *arguments, legend=legend, **named)(figure)
        set_layout(figure)
        if path.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"{path} must end in .png, .svg or .pdf")
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix.lower()[1:])
        write_atomically(path, content.getvalue())
