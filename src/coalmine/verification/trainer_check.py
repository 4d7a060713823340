"""Whether the trainer's own entries of a result are those of the log, of the config, and of what was committed to."""

import math
from typing import Any

from coalmine.argument_checks import short_repr
from coalmine.estimators.mechanism import mechanism_epsilon
from coalmine.evidence.ladder import usual_presentations
from coalmine.log.commitment import json_equal
from coalmine.log.result_file import PIPELINE_ITEMS, logged_entries
from coalmine.verification.check import Check, Evidence

UNCOMMITTED = ("analytical_epsilon", "population", "noise_multiplier")  # numbers that a trainer knows before round 1
STATED = 1e-6  # relative difference of a noise multiplier from the rounds' own statements


def check_trainer(known: Evidence) -> Check:
    """Whether the trainer's own entries are those at the end of the log, and its config the committed one."""
    if known.statement.config_sha256 is not None and known.config_sha256 != known.statement.config_sha256:
        return Check("trainer", False, "config.toml is not the one that was committed to before round 1")
    stored, noted = known.stored, known.log.outcome
    facts, entries = dict(known.statement.facts), logged_entries(stored, stored)
    items = facts.pop(PIPELINE_ITEMS, None)
    early = [name for name, value in facts.items() if not json_equal(entries.get(name), value)]
    if isinstance(items, dict):
        now = entries[PIPELINE_ITEMS]
        decided = _decided_by_audit(stored)  # the audit itself may have tested the sampler since
        early += [name for name in {*items, *now} - decided if not json_equal(items.get(name), now.get(name))]
    if early:
        return Check(
            "trainer", False, f"result.json differs in {', '.join(early)} from what was committed to before round 1"
        )
    if noted is None:
        return Check("trainer", None, "the log does not end with the trainer's own entries, such as the accuracy")
    changed = [name for name, value in noted.items() if name not in entries or not json_equal(entries[name], value)]
    if changed:
        return Check("trainer", False, f"result.json differs in {', '.join(changed)} from what the log ended with")
    if known.statement.config_sha256 is None and known.config_sha256 is not None:
        return Check(
            "trainer", None, "config.toml was not committed to before round 1: anyone could have written it since"
        )
    privacy = (known.config or {}).get("privacy")
    if isinstance(privacy, dict) and "noise_multiplier" in privacy:
        noise, configured = stored.get("noise_multiplier"), privacy["noise_multiplier"]
        if noise is not None and not json_equal(noise, configured):
            differs = (
                f"the noise multiplier is {short_repr(noise)} in the result, {short_repr(configured)} in the config"
            )
            changed_later = "trainer" in (known.config or {}) and _stated_in_rounds(known, noise)
            return Check("trainer", None if changed_later else False, differs + "; the rounds state it" * changed_later)
    if not json_equal(stored.get("log_digest"), known.log.digest):
        return Check("trainer", False, "result.json holds a log digest that differs from the log's")
    late = [name for name in UNCOMMITTED if stored.get(name) is not None and name not in facts]
    late = [name for name in late if not _follows(known, name)]
    if late:
        return Check(
            "trainer", None, f"{', '.join(late)}: not committed to before round 1, so this is the auditor's word"
        )
    return Check(
        "trainer",
        True,
        "entries of the trainer are those that the log ended with, and those known before round 1 the committed ones",
    )


def _decided_by_audit(stored: dict[str, Any]) -> set[str]:
    """The sampler, if the audit itself tested it: then the pipeline's own item is replaced."""
    items = stored.get("audited")
    sampler = items.get("sampler") if isinstance(items, dict) else None
    tested = isinstance(sampler, dict) and sampler.get("source") == "audit" and sampler.get("status") == "checked"
    return {"sampler"} if tested else set()


def _follows(known: Evidence, name: str) -> bool:
    """Whether a number follows from the committed config and from the rounds."""
    stored = known.stored
    noise = stored.get("noise_multiplier")
    if name == "noise_multiplier":
        privacy = (known.config or {}).get("privacy")
        return isinstance(privacy, dict) and json_equal(privacy.get(name), noise)
    if name != "analytical_epsilon" or not isinstance(noise, int | float) or not 0 < noise < math.inf:
        return False
    times = usual_presentations(known.log, known.settings)
    epsilon = float(mechanism_epsilon(noise, delta=known.settings.delta, participations=times))
    return json_equal(stored.get("presentations"), times) and json_equal(stored.get(name), epsilon)


def _stated_in_rounds(known: Evidence, noise: Any) -> bool:
    """Whether this is the least noise multiplier that the rounds state."""
    stated = [entry.multiplier for entry in known.log.observed if entry.multiplier is not None]
    return isinstance(noise, int | float) and bool(stated) and math.isclose(min(stated), noise, rel_tol=STATED)
