"""The shortest way to an audit: a strategy in, an audited one out."""

from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from coalmine.audit.audit import Audit
from coalmine.integrations.flower.layout import Layout, as_record
from coalmine.integrations.flower.strategy import AuditedStrategy, Mode
from coalmine.storage.seed_file import read_seed


def audited(
    strategy: Strategy,
    initial: Any,
    mode: Mode = "client",
    *,
    canaries: int | range,
    seed: int | bytes | None = None,
    seed_file: Path | str | None = None,
    delta: float,
    directory: Path | str | None = None,
    **settings: Any,
) -> AuditedStrategy:
    """The strategy in an `AuditedStrategy`, with an audit made for the model that training starts from.

    `initial` is that model: an ArrayRecord, a torch Module or a state_dict. Each of its floating-point arrays gets a noise
    gauge of its own. `canaries` is how many there are, or, in mode "client", the partition ids that are canaries in a
    simulation. Give either `seed` or `seed_file`. In mode "client" a `seed` is announced to all clients. The seed in a
    `seed_file` is announced to nobody: each canary node reads its own copy, `coalmine-seed-file` in its node config.
    `settings` are those of AuditedStrategy.
    """
    if (seed is None) == (seed_file is None):
        raise ValueError(
            f"exactly one of seed and seed_file must be given, got {'neither' if seed is None else 'both'}"
        )
    secret = read_seed(Path(seed_file)) if seed_file is not None else seed
    assert secret is not None
    layout = Layout.of(as_record(initial))
    count = len(canaries) if isinstance(canaries, range) else canaries
    audit = Audit(layout.dim, canaries=count, seed=secret, delta=delta, layers=layout.layers, directory=directory)
    if isinstance(canaries, range):
        settings["canary_partitions"] = canaries
    if mode == "client" and seed is not None:
        settings["seed"] = seed
    return AuditedStrategy(strategy, audit, mode, **settings)
