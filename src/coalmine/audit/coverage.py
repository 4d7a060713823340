"""What an audit looked at, item by item: checked, not checked, or impossible to check.

A verdict speaks only of what was checked, so every result carries this list and every view shows it.
"""

from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["checked", "not checked", "cannot be checked"]
ITEMS = (
    "noise level",
    "noise law",
    "clipping",
    "weights",
    "tensors",
    "sampler",
    "participations",
    "others",
)


@dataclass(frozen=True)
class AuditedItem:
    """One item of the list: its name from `ITEMS`, its status, and one sentence that says why."""

    name: str
    status: Status
    detail: str

    def __post_init__(self) -> None:
        if self.name not in ITEMS:
            raise ValueError(f"an audited item must be one of {', '.join(ITEMS)}, got {self.name!r}")
        if self.status not in ("checked", "not checked", "cannot be checked"):
            raise ValueError(f"status must be 'checked', 'not checked' or 'cannot be checked', got {self.status!r}")

    def to_dict(self) -> dict[str, Any]:
        return {"status": self.status, "detail": self.detail}
