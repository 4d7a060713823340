"""Audit a pipeline that runs elsewhere, in any language, from the files that it leaves.

    coalmine canaries export audit.toml canaries/     # before training: the vectors that canary clients send
    coalmine audit audit.toml                         # after it, or from time to time: rounds, result and verdict

`audit.toml` says what the pipeline did; docs/how-to/audit-files.md lists its entries. The two functions here are what the
commands call.
"""

from coalmine.integrations.files.audit import audit_files
from coalmine.integrations.files.export import export_canaries

__all__ = ["audit_files", "export_canaries"]
