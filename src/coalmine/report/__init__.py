"""A run's result for people: as one HTML page, as Markdown, as plots, and live in the terminal.

Everything here shows an `AuditResult` and the rounds that it was derived from, and computes no result of its own:

- `write_report` writes a run, or several beside each other, into one file;
- `read_run` reads a run directory into a `Run`, as far as it can be read;
- `coalmine.report.plots` has the page's plots as functions that draw on a matplotlib Axes.
"""

from coalmine.report.document import write_report
from coalmine.report.stored_run import Run, read_run

__all__ = ["Run", "read_run", "write_report"]
