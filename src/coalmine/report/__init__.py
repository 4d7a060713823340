"""Reports for people: one HTML page, Markdown, plots, and a live view in the terminal.

A report shows an `AuditResult` and the rounds behind it. It computes no result of its own.

- `write_report` writes one run, or several side by side, to one file.
- `read_run` reads as much of a run directory as it can into a `Run`.
- `coalmine.report.plots` has the page's plots as functions that draw on a matplotlib Axes.
"""

from coalmine.report.document import write_report
from coalmine.report.stored_run import Run, read_run

__all__ = ["Run", "read_run", "write_report"]
