"""The option `--sampling`, for commands about epsilons amplified by sampling."""

import dataclasses
from typing import Any

import click

from coalmine.argument_checks import hint_of
from coalmine.estimators.sampling import FixedSize, Poisson, RandomAllocation, Sampling, Shuffled

SCHEMES: dict[str, type[Sampling]] = {
    "poisson": Poisson,
    "random-allocation": RandomAllocation,
    "shuffled": Shuffled,
    "fixed-size": FixedSize,
}


class SchemeType(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3
    """A sampling scheme with its settings, such as poisson,probability=0.1,rounds=100."""

    name = "scheme"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Sampling:
        kind, *pairs = (part.strip() for part in str(value).split(","))
        if kind not in SCHEMES:
            self.fail(f"must be one of {', '.join(SCHEMES)}, got {kind!r}", param, ctx)
        fields = _settings(kind)
        settings: dict[str, Any] = {}
        for pair in pairs:
            name, _, text = pair.partition("=")
            if name not in fields:
                self.fail(f"{kind} has {', '.join(fields)}, got {pair!r}{hint_of(name, fields)}", param, ctx)
            try:
                settings[name] = float(text) if fields[name].type is float else int(text)
            except ValueError:
                self.fail(f"{name} must be a number, got {text!r}", param, ctx)
        missing = [f"{name}=" for name in _required(kind) if name not in settings]
        if missing:
            self.fail(f"{kind} needs {' and '.join(missing)}", param, ctx)
        return SCHEMES[kind](**settings)


def _settings(kind: str) -> "dict[str, dataclasses.Field[Any]]":
    """The numbers that describe a scheme, by name."""
    return {field.name: field for field in dataclasses.fields(SCHEMES[kind]) if field.type in (int, float)}


def _required(kind: str) -> list[str]:
    return [name for name, field in _settings(kind).items() if field.default is dataclasses.MISSING]


EXAMPLES = "; ".join(f"{kind} ({', '.join(f'{name}=' for name in _required(kind))})" for kind in SCHEMES)
SAMPLING = click.option(
    "--sampling",
    type=SchemeType(),
    metavar="SCHEME",
    help=f"Sampling scheme of the clients, with its settings, as in poisson,probability=0.1,rounds=100. The schemes are "
    f"{EXAMPLES}; epochs= is the number of epochs.",
)
