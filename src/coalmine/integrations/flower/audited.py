"""The shortest way to an audit: a strategy in, an audited one out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Array
from flwr.serverapp.strategy import Strategy

from coalmine.audit.audit import Audit
from coalmine.integrations.flower.layout import Layout
from coalmine.integrations.flower.strategy import AuditedStrategy, Mode


def audited(
    strategy: Strategy,
    initial: Mapping[str, Array],
    mode: Mode = "client",
    *,
    canaries: int | range,
    seed: int | bytes,
    delta: float,
    directory: Path | str | None = None,
    **settings: Any,
) -> AuditedStrategy:
    """The strategy in an `AuditedStrategy`, whose audit is made for the model that training starts from.

    `canaries` is how many there are, or, in mode "client", the partition ids that are canaries in a simulation. In that
    mode all clients are told the seed: where canary nodes have it in a file, make the AuditedStrategy without it.
    `settings` are AuditedStrategy's own.
    """
    count = len(canaries) if isinstance(canaries, range) else canaries
    audit = Audit(Layout.of(initial).dim, canaries=count, seed=seed, delta=delta, directory=directory)
    if isinstance(canaries, range):
        settings["canary_partitions"] = canaries
    if mode == "client":
        settings["seed"] = seed
    return AuditedStrategy(strategy, audit, mode, **settings)
