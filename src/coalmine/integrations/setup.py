"""Setup shared by all integrations: check the settings, then make an audit or take the user's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from coalmine.argument_checks import hint_of, one_number, short_repr
from coalmine.audit import Audit, OnViolation, Seed
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.integrations.follower import Dashboards, Progress
from coalmine.log.commitment import TOLERANCE
from coalmine.log.seed_file import read_seed
from coalmine.verdict.claim import LONGEST_UNIT, Claim, is_word

CLIP_SCALE = 10.0  # length of a canary in clip norms, before a clip


class AuditSettings(TypedDict, total=False):
    """Keywords of every `audited`: those of `Audit`, a seed or a seed file, or an audit of your own."""

    canaries: int | None
    unobserved: int | None
    seed: Seed | None
    seed_file: Path | str | None
    delta: float | None
    directory: Path | str | None
    claim: Claim | float | str | None
    on_violation: OnViolation | None
    deferred: bool | None
    unit: str | None
    audit: Audit | None
    save_model: bool
    progress: Progress
    log_to: Dashboards


FOLLOWED = ("progress", "log_to", "unit")  # settings that are not the audit's
LEFT_OUT = (*FOLLOWED, "save_model")


def set_up_audit(
    layers: Sequence[tuple[str, int]] | None,
    *,
    usual_unit: str | None = None,
    adjacency: str | None = None,
    **settings: Unpack[AuditSettings],
) -> Audit:
    """The user's own audit, or a new one with a noise gauge for each layer.

    `layers` are pairs of name and size. It may be None if the audit is the user's own. A finished audit is rejected before
    anything is written. `usual_unit` and `adjacency` are those of the pipeline, for a claim that states none.
    """
    if settings.get("audit") is None:
        keywords = new_audit_settings(layers is not None, usual_unit=usual_unit, adjacency=adjacency, **settings)
        assert layers is not None
        return Audit(sum(size for _, size in layers), layers=layers, **keywords)
    audit = own_audit(**settings)
    dim = audit.settings.dim if layers is None else sum(size for _, size in layers)
    if audit.settings.dim != dim:
        raise ValueError(f"the audit must have dim = {dim}, the number of the model's parameters, got {audit!r}")
    refuse_finished(audit)
    return audit


def new_audit_settings(
    has_model: bool, *, usual_unit: str | None = None, adjacency: str | None = None, **settings: Unpack[AuditSettings]
) -> dict[str, Any]:
    """Keywords of a new `Audit`, seed included. Rejects missing settings, and a directory that holds a result.

    A claim is completed by `full_claim`. It may also give the delta.
    """
    keywords = _provided_settings(**settings)
    claim, unit = Claim.of(keywords.pop("claim", None)), checked_unit(settings.get("unit"))
    if claim is not None and claim.delta is not None:
        keywords.setdefault("delta", claim.delta)
    if not {"canaries", "delta"} <= keywords.keys():
        raise TypeError("audited() needs canaries and delta, or an audit of your own: audit=")
    if not has_model:
        raise TypeError("audited() needs the model that is trained, or an audit of your own: audit=")
    seed = read_secret(keywords.pop("seed", None), keywords.pop("seed_file", None))
    if "directory" in keywords:
        refuse_result(keywords["directory"])
    if claim is None:
        keywords.pop("on_violation", None)  # `watch_noise` sets it later, with the noise multiplier as the claim
    else:
        keywords["claim"] = full_claim(
            claim, delta=keywords["delta"], unit=unit, usual_unit=usual_unit, adjacency=adjacency
        )
    return keywords | {"seed": seed}


def full_claim(
    claim: Claim,
    *,
    delta: float,
    unit: str | None = None,
    usual_unit: str | None = None,
    adjacency: str | None = None,
) -> Claim:
    """The claim with the delta, unit and adjacency of the pipeline where it states none; ValueError for another delta.

    `unit` is the one that the user named. A claim must not state another.

    The adjacency of a claim that has its own sampling scheme is that of the scheme's accountant.
    """
    delta = one_number("delta", delta)
    check_delta(claim, delta)
    check_unit(claim, unit)
    if adjacency is not None and claim.sampling is not None:
        adjacency = claim.sampling.adjacency
    stated: dict[str, Any] = {"delta": delta, "unit": unit or usual_unit, "adjacency": adjacency}
    return replace(claim, **{name: value for name, value in stated.items() if getattr(claim, name) is None})


def check_delta(claim: Claim, delta: float) -> None:
    """Reject a claim at another delta than the audit's."""
    if claim.delta is not None and not math.isclose(claim.delta, delta, rel_tol=TOLERANCE):
        raise ValueError(f"the claim must be at the audit's delta, {delta:g}, got one at delta {claim.delta:g}")


def check_unit(claim: Claim | None, unit: str | None) -> None:
    """Reject a claim that states another unit of privacy than the one that `audited` was given."""
    if claim is not None and unit is not None and claim.unit not in (None, unit):
        raise ValueError(
            f"unit must be the one that the claim states, {claim.unit!r}, got {unit!r}: omit one of the two"
        )


def checked_unit(unit: Any) -> str | None:
    """The unit of privacy that `audited` was given, stripped; ValueError if it cannot stand in a sentence."""
    if unit is None:
        return None
    if not is_word(unit):
        raise ValueError(
            "unit must name what is protected, such as 'document' or 'user', in at most "
            f"{LONGEST_UNIT} printable characters, got {short_repr(unit)}"
        )
    return str(unit).strip()


def own_audit(**settings: Unpack[AuditSettings]) -> Audit:
    """The user's own audit. Rejects any other setting, because the audit has its own."""
    others = _provided_settings(**settings)
    audit = others.pop("audit")
    if not isinstance(audit, Audit):
        raise TypeError(f"audit must be a coalmine.Audit, got {short_repr(audit)}")
    if others:
        raise ValueError(f"audit= is an audit with settings of its own, so omit {', '.join(others)}")
    check_unit(audit.claim, checked_unit(settings.get("unit")))
    return audit


def _provided_settings(**settings: Unpack[AuditSettings]) -> dict[str, Any]:
    provided: dict[str, Any] = {
        name: value for name, value in settings.items() if value is not None and name not in LEFT_OUT
    }
    unknown = provided.keys() - AuditSettings.__annotations__.keys()
    if unknown:
        name = min(unknown)
        hint = hint_of(name, (*AuditSettings.__annotations__, "sampling_probability"))
        raise TypeError(f"audited() got an unexpected keyword argument {name!r}{hint}")
    return provided


def watch_noise(audit: Audit, on_violation: OnViolation | None, noise_multiplier: float | None) -> None:
    """If `on_violation` is set and there is no claim, watch the rounds against the noise multiplier."""
    if on_violation is None or audit.claim is not None:
        return
    if not noise_multiplier:
        raise ValueError(
            "on_violation needs a claim or a noise multiplier to test the rounds against: give one of them"
        )
    epsilon = float(mechanism_epsilon(noise_multiplier, delta=audit.settings.delta))
    audit.watch.start(on_violation, Claim(epsilon, participations=1))


def read_secret(seed: Seed | None, seed_file: Path | str | None) -> Seed:
    """The seed itself, or the one in the file. Exactly one of the two must be given."""
    if seed is not None and seed_file is None:
        return seed
    if seed_file is None or seed is not None:
        raise ValueError(f"exactly one of seed and seed_file must be given, got {'both' if seed_file else 'neither'}")
    return read_seed(seed_file)


def followed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say what a person sees while the run trains."""
    return {name: settings.get(name) for name in FOLLOWED}


def refuse_finished(audit: Audit) -> None:
    """Reject a finished audit now: otherwise its next round would fail in the middle of training."""
    if audit.directory is not None:
        refuse_result(audit.directory.path)
    elif audit.log.final is not None:
        raise ValueError("this audit has observed its final model: make a new one, or rewind_to an earlier round")


def refuse_result(directory: Path | str) -> None:
    """Reject a directory that holds a result: the result would not cover further rounds."""
    if (Path(directory) / "result.json").exists():
        raise ValueError(f"{directory} holds a finished audit: name another directory, or remove it")
