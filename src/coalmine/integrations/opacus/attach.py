"""`audited` puts canaries into the steps of an optimizer, and `unaudited` takes them out."""

from collections.abc import Mapping
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from opacus.optimizers import DPOptimizer

from coalmine.argument_checks import short_repr, whole_number
from coalmine.audit import Audit
from coalmine.data_canaries import DataCanaries
from coalmine.integrations.opacus.audit import OpacusAudit
from coalmine.integrations.opacus.options import (
    CanaryOptions,
    ThroughClip,
    check_optimizer,
    checked_claim,
    loader_rate,
    row_count,
)
from coalmine.integrations.opacus.parameters import named_layers
from coalmine.integrations.opacus.ranks import gradients_of, on_every_rank
from coalmine.integrations.opacus.replay import Loss, checked_replay
from coalmine.integrations.opacus.selection import RowSelection, SeedSelection, Selection
from coalmine.integrations.records import checked_canaries
from coalmine.integrations.row_pairing import USUAL_CANARIES
from coalmine.integrations.setup import AuditSettings, followed, watch_noise
from coalmine.measure.ranks import Reduce

Optimizer = TypeVar("Optimizer", bound=DPOptimizer)


def audited(
    optimizer: Optimizer,
    model: "torch.nn.Module | Mapping[str, torch.Tensor] | None" = None,
    *,
    data_loader: "torch.utils.data.DataLoader[Any] | None" = None,
    sampling_probability: float | None = None,
    scale: float | None = None,
    through_clip: ThroughClip = None,
    rng: np.random.Generator | None = None,
    reduce: Reduce | None = None,
    steps: int | None = None,
    replay: bool | Loss = True,
    data_canaries: "DataCanaries | None" = None,
    **settings: Unpack[AuditSettings],
) -> Optimizer:
    """The same optimizer with canaries in its steps, and its audit as `optimizer.audit`.

    `model` is the model that the optimizer trains, a dict of its named parameters, or its `state_dict`. Each parameter gets
    its own noise gauge. `settings` are `canaries`, `unobserved`, `delta`, `directory`, `claim`, `on_violation` and
    `deferred` as in `Audit`, and either `seed` or `seed_file`. An `audit` of your own replaces all of these settings;
    `named_layers` returns its layers.

    `claim` is the epsilon to judge, and is committed to before step 1. Without one nothing can pass. A number means what
    Opacus's accountant quotes for one row of the data set over the whole run, with sampling counted, for the steps that
    ran. `Claim.mechanism(10.0, participations=20)` is an epsilon without sampling. An accountant whose history is a plan is
    a claim too. The run's own accountant is not: it knows its epsilon only afterwards. `steps` is the number of planned
    steps. With a claim that counts sampling, `on_violation` needs it; without a claim, `on_violation` watches the noise
    multiplier.

    `data_loader` is the loader that `make_private` returned. The loop must use it, directly or in a `BatchMemoryManager`.
    Each canary is paired with one row of its data set, and is in a step exactly when the loader's sampler picks that row.
    There can be at most as many canaries as rows; the default is 1,000. Without `data_loader` the sampler is not observed:
    each canary is in a step with `sampling_probability`, that of an example, drawn from the audit's seed or from `rng`.

    With `through_clip`, four canaries of each step are rows of `grad_sample` that the optimizer clips, `scale` (10) times
    longer than the clip norm, so the audit checks the clip too. The seed draws them, and the others join the clipped sum at
    the clip norm. `through_clip="all"` sends all through the clip, and finds its faults sooner (docs/evidence/clip.md).
    Both need per-example gradients and one clip norm (hooks mode, flat or adaptive clipping). Otherwise all canaries join
    the clipped sum, which works in every mode. By default, canaries go through a flat clip if a step's canaries hold at
    most `MOST_THROUGH_CLIP` numbers. An adaptive clip would count them as clipped examples, so it needs `through_clip=True`.
    The accountant's step hook is still called.

    A step is measured by a thread, on one core at most, during the next step; `deferred=False` measures it at once. With
    `on_violation` it is recorded before the next step's noise. `optimizer.state_dict()` first writes all steps to disk.

    A few steps are replayed: run again without one row, before their clip, with the same random numbers. This measures how
    far a real row moves the sum, which no canary sees. By default the rows' gradients are those of the step, so the loss is
    taken as a sum over rows; `replay=lambda model, batch: loss` tests the loss too, and is needed if the model computes it.
    At most 1 % of the passes of the planned `steps` are replayed, or at least 4 rows of one step; `replay=False` replays
    none.

    `data_canaries`, records that `coalmine.data_canaries` made and inserted into the data set, are scored before training
    and at the end: the result then says what the model's outputs tell about them. They need one process and the module as
    `model`.

    In several processes (DDP, FSDP2) every rank calls `audited` with the same arguments, and `finish` at the end. Rank 0 has
    the directory and the result. `reduce` sums over the ranks, by default `torch_distributed.reduce_over()`.

    `unit` names what a row holds, such as "document" or "user": every sentence, table and plot then says so. The directory
    gets the model before and after training, for `coalmine verify`; `save_model=False` keeps the digests alone.

    `optimizer.audit` is an `OpacusAudit`, whose `finish` returns the result.

    If no weight has moved after ten steps, a RuntimeWarning says so early. A step that the audit does not see, because its
    hook or its optimizer was replaced, is a RuntimeError.
    """
    check_optimizer(optimizer, through_clip)
    if isinstance(getattr(optimizer, "audit", None), OpacusAudit):
        raise ValueError("this optimizer is audited already: unaudited(optimizer) removes the first audit")
    gradients = gradients_of(optimizer, model, reduce)
    most, layers = gradients.most_canaries, None if model is None else named_layers(optimizer, model)

    def check_options() -> CanaryOptions:
        if steps is not None:
            whole_number("steps", steps, minimum=1)
        checked_replay(replay, model, data_loader)
        if checked_canaries(data_canaries) is not None and gradients.ranks.several:
            raise ValueError("data_canaries need one process: score the final model with DataCanaries.score instead")
        if data_canaries is not None and not isinstance(model, torch.nn.Module):
            raise TypeError(f"data_canaries need the module that is trained as model, got {short_repr(model)}")
        rate, rows = sampling_probability, None
        if data_loader is not None:
            rate = loader_rate(data_loader, rate, rng, every_rank=gradients.ranks.several)
            rows = row_count(data_loader)
            if settings.get("audit") is None and settings.get("canaries") is None:
                settings["canaries"] = min(USUAL_CANARIES, rows, most)
        elif rate is None:
            raise TypeError("audited() needs data_loader, or the sampling_probability of an example")
        elif rng is not None and gradients.ranks.several:
            raise ValueError("rng may differ from rank to rank, so omit it: the audit's seed is used")
        own, count = settings.get("audit"), settings.get("canaries")
        expected = own.settings.canaries if isinstance(own, Audit) else count if isinstance(count, int) else 0
        if rows is not None and expected > rows:
            raise ValueError(
                f"canaries must be at most the {rows} rows of the data set, one row for each, got {expected}"
            )
        checked = CanaryOptions.checked(optimizer, expected, rate, through_clip, scale)
        settings["claim"] = checked_claim(optimizer, checked.probability, steps, **settings)
        return checked

    options = on_every_rank(gradients.ranks, check_options)
    audit = gradients.set_up_audit(layers, **settings)
    dim = sum(p.numel() for p in optimizer.params)
    if dim != audit.settings.dim:
        raise ValueError(f"the audit must have dim = {dim}, the number of the optimizer's parameters, got {audit!r}")
    watch_noise(audit, settings.get("on_violation"), optimizer.noise_multiplier)
    selection: Selection
    if data_loader is None:
        selection = SeedSelection(audit, options.probability, rng)
    else:
        selection = RowSelection(audit, gradients, optimizer, data_loader)
    planned = audit.settings.rounds if steps is None else steps
    optimizer.audit = OpacusAudit(
        audit,
        optimizer,
        gradients,
        selection,
        options,
        data_canaries=data_canaries,
        model=model,
        planned=planned,
        replay=replay,
        save_model=settings.get("save_model", True),
    )
    optimizer.audit.watch_records(lambda: model)
    if gradients.ranks.rank == 0:
        optimizer.audit.follow(planned, **followed(settings))
    return optimizer


def unaudited(optimizer: Optimizer) -> Optimizer:
    """The same optimizer without its audit; the accountant's hook stays. Without an audit, nothing changes."""
    if not isinstance(optimizer, DPOptimizer):
        raise TypeError(f"optimizer must be the one that make_private returned, got {short_repr(optimizer)}")
    if isinstance(getattr(optimizer, "audit", None), OpacusAudit):
        optimizer.audit.detach()
        del optimizer.audit
    return optimizer
