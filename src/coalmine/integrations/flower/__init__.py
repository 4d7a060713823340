"""Audit Flower (message API): canaries on clients or on the server, every new global model observed.

| canaries | clients | the server | audits also |
|---|---|---|---|
| are clients | `mods=[..., canary_mod]` | `AuditedStrategy(mode="client")`, `observer` | clip and noise of clients |
| take the place of clients' replies | as ever | `AuditedStrategy(mode="replace")` | |
| come beside them | as ever | `AuditedStrategy(mode="extra")` | |
"""

try:
    import flwr  # noqa: F401
except ImportError as error:
    raise ImportError("auditing Flower needs: pip install 'coalmine[flower]'") from error

from coalmine.audit.audit import Audit
from coalmine.integrations.flower.announcement import Announcement
from coalmine.integrations.flower.audited import audited
from coalmine.integrations.flower.mod import canary_mod
from coalmine.integrations.flower.observer import Observer, observer
from coalmine.integrations.flower.strategy import AuditedStrategy

__all__ = ["Announcement", "Audit", "AuditedStrategy", "Observer", "audited", "canary_mod", "observer"]
