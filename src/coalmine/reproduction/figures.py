"""An experiment's picture, drawn from its numbers alone."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from coalmine.report.pictures import STYLE, needs_matplotlib
from coalmine.reproduction.experiment import Experiment, Found
from coalmine.storage.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(path: Path, experiment: Experiment, found: Found) -> None:
    """The picture as a PNG, whole or not at all, the same bytes for the same numbers."""
    needs_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    assert experiment.draw is not None
    with mpl.rc_context(STYLE | {"savefig.facecolor": "white"}):
        figure = Figure(figsize=experiment.size, layout="constrained")
        experiment.draw(figure, found)
        _plain_numbers(figure)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=90, metadata={"Software": None})
    write_atomically(path, content.getvalue())


def _plain_numbers(figure: "Figure") -> None:
    """1,000 instead of 10³ on logarithmic axes."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            if axis.get_scale() == "log":
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
                axis.set_minor_formatter(NullFormatter())
