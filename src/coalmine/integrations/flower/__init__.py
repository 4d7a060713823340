"""Audit Flower (message API): canaries on clients or on the server, every new global model observed.

| canaries | clients | the server | also audits |
|---|---|---|---|
| are clients | `mods=[..., canary_mod]` | `audited(..., mode="client")`, `Observer` | clip and noise of clients |
| replace clients' replies | unchanged | `audited(..., mode="replace")` | |
| are additional replies | unchanged | `audited(..., mode="extra")` | |
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("auditing Flower needs: pip install 'coalmine[flower]'") from error

from coalmine.integrations.flower.canary_clients import Announcement, canary_mod
from coalmine.integrations.flower.observer import Observer
from coalmine.integrations.flower.setup import audited
from coalmine.integrations.flower.strategy import AuditedStrategy

__all__ = ["Announcement", "AuditedStrategy", "Observer", "audited", "canary_mod"]
