"""A finished audit as text, plots, HTML; computes nothing that the result or the log does not hold."""

from coalmine.report.document import write_report
from coalmine.report.findings import Finding, Findings
from coalmine.report.stored_run import Run, read_run

__all__ = ["Finding", "Findings", "Run", "read_run", "write_report"]
