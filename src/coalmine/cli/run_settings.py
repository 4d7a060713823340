"""The options of `coalmine run` that set keys of its config, and `--set` for all other keys."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from coalmine.argument_checks import short_repr
from coalmine.cli.options import Decorated
from coalmine.verdict.claim import MECHANISM


class Setting(click.Option):
    """An option for one key of a run's config. Its help names the choices and the default of the config.

    `choices` is the name of the tuple of choices in `coalmine.simulation.config`. `unset` describes a default that depends
    on other settings.
    """

    def __init__(self, *declarations: Any, key: str, choices: str = "", unset: str = "", **attributes: Any) -> None:
        super().__init__(*declarations, default=None, **attributes)
        self.key, self.choices, self.unset = key, choices, unset

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(ctx)
        if record is None:
            return None
        choices, default = _from_config(self.key, self.choices)
        text = record[1] + (f" One of {', '.join(choices)}." if choices else "")
        default = self.unset or default
        return record[0], text + (f"  [default: {default}]" if default else "")


def setting(key: str, *declarations: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """An option that sets the config's `key`, such as privacy.delta."""
    return click.option(*declarations, cls=Setting, key=key, **attributes)


SET = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Any setting of docs/reference/config.md, for example privacy.clip_norm=0.3; repeatable.",
)


def changes_of(
    options: Mapping[str, Any], params: Sequence[click.Parameter], assignments: Sequence[str]
) -> dict[str, Any]:
    """The given options as a TOML file would hold them; `--set` comes last."""
    changes: dict[str, Any] = {}
    for param in params:
        value = options.get(param.name or "") if isinstance(param, Setting) else None
        if value is None:
            continue
        assert isinstance(param, Setting)
        if param.key == "claim":
            changes.setdefault("claim", {}).update(_claim(value))
        else:
            _assign(changes, param.key, str(value.absolute()) if isinstance(value, Path) else value)
    for text in assignments:
        _assign(changes, *_assignment(text))
    return changes


def _claim(text: str) -> dict[str, Any]:
    if text in ("analytical", "accountant"):
        return {text: True}
    number = text.removeprefix(MECHANISM)
    try:
        return {"epsilon": float(number)} | ({"mechanism": True} if number != text else {})
    except ValueError:
        raise click.BadParameter(
            f"must be a number, `mechanism:E`, `analytical` or `accountant`, got {text!r}", param_hint="--claim"
        ) from None


def _assign(changes: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    part = changes.setdefault(section, {}) if section else changes
    if not isinstance(part, dict):
        raise click.BadParameter(f"{section} is a section, got {section}={short_repr(part)}", param_hint="--set")
    part[name] = value


def _assignment(text: str) -> tuple[str, Any]:
    """The key and its value, which is TOML, or a text without quotation marks."""
    from coalmine.simulation.config_sources import PATHS

    key, sign, word = text.partition("=")
    parts = key.strip().split(".")
    if not sign or len(parts) > 2 or not all(part.isidentifier() for part in parts):
        raise click.BadParameter(f"must be like privacy.clip_norm=0.3, got {short_repr(text)}", param_hint="--set")
    try:
        values = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        values = {}
    value = values.get("value") if len(values) == 1 else None
    if not isinstance(value, str | int | float | list):
        value = word.strip()
    if tuple(parts) in PATHS and isinstance(value, str):
        value = str(Path(value).absolute())
    return ".".join(parts), value


def _from_config(key: str, choices: str) -> tuple[Sequence[str], str]:
    """The choices and the default of a key; nothing without the packages of the simulation."""
    try:
        from coalmine.simulation import config, config_sources
    except ImportError:
        return (), ""
    section, _, name = key.rpartition(".")
    defaults: dict[str, Any] = config_sources.task_defaults("digits")
    if section:
        defaults = config.RunConfig().to_dict()[section] | defaults[section]
    value = defaults.get(name)
    default = "" if value is None or isinstance(value, dict | bool) else str(value)
    return getattr(config, choices) if choices else (), default
