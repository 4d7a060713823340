"""Sets up the audit of a strategy: `audited`."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from flwr.serverapp.strategy import Strategy

from coalmine.argument_checks import short_repr
from coalmine.audit import Audit, OnViolation
from coalmine.integrations.flower.arrays import RecordLayout, as_record
from coalmine.integrations.flower.canary_clients import refuse_guessable
from coalmine.integrations.flower.claims import read_claim
from coalmine.integrations.flower.modes import Mode
from coalmine.integrations.flower.strategy import AuditedStrategy
from coalmine.integrations.flower.views import Views
from coalmine.integrations.follower import Dashboards, Progress
from coalmine.integrations.setup import CLIP_SCALE, AuditSettings, set_up_audit, watch_noise
from coalmine.log.seed_file import read_seed
from coalmine.verdict.claim import Claim


def audited(
    strategy: Strategy,
    model: Any = None,
    *,
    mode: Mode = "client",
    canaries: int | range | None = None,
    unobserved: int | None = None,
    seed: int | bytes | None = None,
    seed_file: Path | str | None = None,
    delta: float | None = None,
    directory: Path | str | None = None,
    claim: Any = None,
    on_violation: OnViolation | None = None,
    audit: Audit | None = None,
    scale: float | None = None,
    progress: Progress = None,
    log_to: Dashboards = None,
    unit: str | None = None,
    views: Iterable[str] | Mapping[str, Claim | float | None] = (),
    client_noise: float | None = None,
    **settings: Any,
) -> AuditedStrategy:
    """The strategy wrapped in an `AuditedStrategy`, with an `audit` for the model that training starts from.

    `model` is that model: an ArrayRecord, a torch Module or a state_dict. Each of its floating-point arrays gets its own
    noise gauge. `canaries` is their number or, in mode "client", the partition ids that are canaries in a simulation.

    Give either `seed` or `seed_file`. In mode "client" a `seed` is announced to all clients. The seed in a `seed_file` is
    never announced: each canary node reads its own copy, `coalmine-seed-file` in its node config. In a deployment or in a
    seed file, a seed that can be guessed is rejected: a number below 2^64, or fewer than 8 bytes.

    `unobserved`, `delta`, `directory`, `claim` and `on_violation` are those of `Audit`. Without a claim, `on_violation`
    watches the noise multiplier. An `audit` of your own replaces all of these settings and the model. You may give its
    `seed` too, to announce it. `mode`, `scale` and `settings` are those of AuditedStrategy.

    A bare number as `claim` is the epsilon of one client over the whole run: of the node that took part most often, and
    with the largest weight, as the server saw it. A PrivacyConfig of Flower, or an accountant with one, claims its
    `max_epsilon`. `unit` names what is protected ("client" by default). `progress` and `log_to` are those of every
    integration (docs/how-to/alarm.md).

    `views` audits what others than the public see, each with a claim and a verdict of its own: "server" sees every reply by
    itself, "coalition(5)" the sum of all replies without the shares of the last five canaries' nodes. A mapping gives
    claims, as in {"server": 50.0}: the epsilon of one client over the whole run. `client_noise` is the standard deviation
    of the noise that a client adds to its own update, over the clip norm; no view passes without it. With views, clients
    are taken to clip: `scale` is 10 by default.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"strategy must be a strategy of flwr.serverapp, got {short_repr(strategy)}")
    if isinstance(canaries, range):
        settings["canary_partitions"] = canaries
        canaries = len(canaries)
    layers = None if model is None else RecordLayout.of(as_record(model)).layers
    audit_settings: AuditSettings = {
        "canaries": canaries,
        "unobserved": unobserved,
        "delta": delta,
        "directory": directory,
    }
    audit_settings |= {"seed": seed if audit is None else None, "seed_file": seed_file, "audit": audit}
    audit_settings |= {"claim": read_claim(claim, delta), "on_violation": on_violation, "unit": unit}
    scale = CLIP_SCALE if views and scale is None else scale
    announced = seed if mode == "client" or audit is not None else None
    if seed_file is not None and seed is None and audit is None:
        refuse_guessable(read_seed(seed_file), f"seed file {seed_file}", f"make one with: coalmine seed {seed_file}")
    made = AuditedStrategy(
        strategy, set_up_audit(layers, **audit_settings), mode, seed=announced, scale=scale, **settings
    )
    watch_noise(made.audit.core, on_violation, made.noise_multiplier)
    if views:

        def make(folder: Path | None, stated: Claim | None) -> Audit:
            own: AuditSettings = {"directory": folder, "claim": stated, "on_violation": None}
            return set_up_audit(layers, **(audit_settings | own))

        wanted = Views.of(views, make, noise=client_noise, delta=delta, directory=directory)
        made.audit.add_views(wanted, own_audit=audit is not None)
    made.audit.on_begin = partial(made.audit.follow, progress=progress, log_to=log_to, unit=unit)
    return made
