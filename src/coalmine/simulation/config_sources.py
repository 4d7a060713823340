"""Where a run's settings come from: a TOML file, options, and the defaults of the task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coalmine.argument_checks import one_of
from coalmine.log.files import read_toml
from coalmine.simulation.config import LEVELS, RunConfig
from coalmine.simulation.tasks import TASKS

PATHS = (("canaries", "seed_file"), ("participation", "rounds_file"), ("task", "data_dir"))


def task_defaults(name: str, level: str = "client") -> dict[str, Any]:
    """The default config of a task, as plain values."""
    one_of("task.name", name, TASKS)
    one_of("task.level", level, LEVELS)
    changes: dict[str, Any] = {"task": {"name": name, "level": level}}
    if level == "example":
        changes |= _EXAMPLE_LEVEL
    elif name in _TASK_DEFAULTS:
        changes |= _TASK_DEFAULTS[name]
    defaults = merged(RunConfig().to_dict(), changes)
    del defaults["canaries"]["count"]  # otherwise a config with a fraction would have both
    return defaults


# The paper's runs (Section 5): EMNIST for five epochs of its writers, 34 a round; Stack Overflow for one epoch of its users,
# 167 a round; noise 0.16 and 0.2317 are the smallest and the largest of its tables. MNIST by writer trains as EMNIST does,
# Stack Exchange and Shakespeare as Stack Overflow does, for five epochs.
_WORDS: dict[str, Any] = {
    "client": {"learning_rate": 1.0, "epochs": 1},
    "server": {"learning_rate": 0.56, "momentum": 0.9},
    "privacy": {"noise_multiplier": 0.2317, "clipping": "adaptive", "clip_norm": 0.1},
}
_CHARACTERS: dict[str, Any] = {
    "participation": {"clients_per_round": 34},
    "client": {"learning_rate": 0.031, "epochs": 1},
    "server": {"momentum": 0.9},
    "privacy": {"noise_multiplier": 0.16, "clipping": "adaptive", "clip_norm": 0.1},
}
_TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "mnist-by-writer": {"rounds": 80} | _CHARACTERS,
    "emnist": {"rounds": 500} | _CHARACTERS,
    "emnist-digits": {"rounds": 500} | _CHARACTERS,
    "stackoverflow": {"rounds": 2048, "participation": {"clients_per_round": 167}} | _WORDS,
    "stackexchange": {"rounds": 155, "participation": {"clients_per_round": 167}} | _WORDS,
    "shakespeare": {"rounds": 115, "participation": {"clients_per_round": 50}} | _WORDS,
    "fashion-mnist": {"participation": {"clients_per_round": 60}, "client": {"learning_rate": 0.05, "epochs": 1}},
}
_EXAMPLE_LEVEL: dict[str, Any] = {
    "participation": {"kind": "poisson", "clients_per_round": 250},
    "server": {"learning_rate": 0.5},
}


# Settings that exclude each other, as (section, key): setting the first drops the others from a config file or the defaults.
CONFLICTS = {
    ("claim", "epsilon"): [("claim", "analytical"), ("claim", "accountant")],
    ("claim", "analytical"): [("claim", "epsilon"), ("claim", "accountant"), ("claim", "amplified")],
    ("claim", "accountant"): [("claim", "epsilon"), ("claim", "analytical"), ("claim", "amplified")],
    ("canaries", "count"): [("canaries", "replace_fraction")],
    ("canaries", "replace_fraction"): [("canaries", "count")],
    ("participation", "kind"): [("participation", "rounds_file"), ("participation", "separation")],
    ("server", "optimizer"): [("server", "momentum")],
    ("privacy", "noise"): [("privacy", "bands"), ("privacy", "restart")],
}


def config_with(settings: Mapping[str, Any], path: Path | None = None) -> RunConfig:
    """The config with these settings; the TOML file at `path` and the task's defaults fill in the others."""
    changes = merged(_without_conflicts(read_config(path) if path else {}, settings), settings)
    return RunConfig.from_dict(merged(_without_conflicts(defaults_of(changes), changes), changes))


def defaults_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The default config of the task that `changes` name.

    A claim that relies on sampling needs canaries that are sampled like clients, so the default pattern is then "clients".
    """
    task, claim, canaries = (
        part if isinstance(part := changes.get(name, {}), Mapping) else {}  # RunConfig.from_dict rejects others
        for name in ("task", "claim", "canaries")
    )
    defaults = task_defaults(task.get("name", "digits"), task.get("level", "client"))
    sampled = claim.get("accountant") is True or claim.get("amplified") is True
    if sampled and not {"pattern", "presentations", "replace_fraction"} & canaries.keys():
        defaults = merged(defaults, {"canaries": {"pattern": "clients"}})
    return defaults


def _without_conflicts(values: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without the settings that conflict with `new` ones; a setting that repeats `values` drops none."""
    kept = {name: dict(part) if isinstance(part, dict) else part for name, part in values.items()}

    def lookup(setting: tuple[str, str], source: Mapping[str, Any]) -> Any:
        section = source.get(setting[0])
        return section.get(setting[1]) if isinstance(section, dict) else None

    for setting, conflicts in CONFLICTS.items():
        if lookup(setting, new) not in (None, lookup(setting, values)):
            for section, key in conflicts:
                if isinstance(kept.get(section), dict):
                    kept[section].pop(key, None)
    return kept


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` updated with `changes`, section by section."""
    result = dict(values)
    for name, change in changes.items():
        old = result.get(name)
        result[name] = merged(old, change) if isinstance(change, Mapping) and isinstance(old, Mapping) else change
    return result


def read_config(path: Path) -> dict[str, Any]:
    """The content of a TOML file; RunConfig.from_dict validates it. Paths in it are relative to the file's folder."""
    values = read_toml(path)
    for section, name in PATHS:
        part = values.get(section)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            part[name] = str(path.absolute().parent / part[name])
    return values
