"""Facts that an operator states about a deployment: a TOML file, validated and read into structs."""

import datetime
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from coalmine.argument_checks import short_repr
from coalmine.log.files import read_regular

LARGEST_FILE = 1 << 18  # bytes
LONGEST_TEXT = 4_000  # characters
LARGEST_NUMBER = 1e100

Positive = Annotated[float, Meta(gt=0, le=LARGEST_NUMBER)]
Share = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=1, le=10**12)]
Text = Annotated[str, Meta(min_length=1, max_length=LONGEST_TEXT)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=100)]
Variant = Literal["approximate DP", "pure DP", "zero-concentrated DP", "Rényi DP", "Gaussian DP"]
Unit = Literal["client", "document", "example"]
Adjacency = Literal["add/remove", "replace", "zero-out"]
TrustModel = Literal["central", "local", "distributed"]
Releases = Literal["final model", "all checkpoints"]
Scheme = Literal["none", "poisson", "random_allocation", "shuffled", "fixed_size"]
Sector = Literal["Technology", "Healthcare", "Education", "Government", "Energy", "Finance"]


class Part(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One table of the file. All entries are optional."""


class GuaranteeFacts(Part, frozen=True):
    """The table [guarantee]."""

    variant: Variant | None = None
    epsilon: Positive | None = None
    delta: Share | None = None
    unit: Unit | None = None
    unit_details: Text | None = None
    adjacency: Adjacency | None = None
    trust_model: TrustModel | None = None
    releases: Releases | None = None
    tuning: Text | None = None
    pretraining: Text | None = None
    evaluation: Text | None = None


class AccountingFacts(Part, frozen=True):
    """The table [accounting]: the accountant, and the operator's statements on its assumptions."""

    accountant: Text | None = None
    accountant_version: Text | None = None
    sampling: Scheme | None = None
    participations: Count | None = None
    composition: Text | None = None
    noise_level: Text | None = None
    noise_law: Text | None = None
    clipping: Text | None = None
    weights: Text | None = None
    tensors: Text | None = None


class MechanismFacts(Part, frozen=True):
    """The table [mechanism]."""

    clip_norm: Positive | None = None
    noise_multiplier: Positive | None = None
    noise_scheme: Text | None = None
    library: Text | None = None
    library_version: Text | None = None
    generator: Text | None = None
    precision: Text | None = None
    also_released: Text | None = None


class DeploymentFacts(Part, frozen=True):
    """The table [deployment]: facts about the product for the OpenDP registry."""

    name: Text | None = None
    url_slug: Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]*$", max_length=100)] | None = None
    curators: Texts | None = None
    description: Text | None = None
    intended_use: Text | None = None
    region: Text | None = None
    publication_date: datetime.date | None = None
    sector: Sector | None = None
    data_domain: Text | None = None
    actors: Text | None = None
    release_type: Literal["One release", "Many releases"] | None = None
    release_details: Text | None = None
    data_source: Literal["Static", "Dynamic"] | None = None
    access: Literal["Interactive", "Non-interactive"] | None = None
    post_processing: Text | None = None
    justification: Text | None = None
    sources: Text | None = None
    notes: Text | None = None
    authors: Texts | None = None


class Facts(Part, frozen=True):
    """All facts of a facts file."""

    guarantee: GuaranteeFacts = GuaranteeFacts()
    accounting: AccountingFacts = AccountingFacts()
    mechanism: MechanismFacts = MechanismFacts()
    deployment: DeploymentFacts = DeploymentFacts()

    def to_dict(self) -> dict[str, Any]:
        """The facts that are stated, by table, for JSON."""
        tables: dict[str, Any] = msgspec.to_builtins(self)
        return {name: values for name, values in tables.items() if values}


NO_FACTS = Facts()


def template() -> str:
    """A facts file with every fact commented out, each with an example or its options."""
    return resources.files("coalmine.report").joinpath("templates", "facts.toml").read_text(encoding="utf-8")


def read_facts(path: Path | str) -> Facts:
    """The facts in a TOML file. Raises ValueError with a one-line message if they are not valid."""
    try:
        text = read_regular(Path(path), most=LARGEST_FILE).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path} must be TOML in UTF-8, got other bytes") from None
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        raise ValueError(f"{path} must be TOML: {error}") from None
    try:
        return facts_from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def facts_from_dict(values: Any) -> Facts:
    """The facts in a dict from a facts file or a statement. Raises ValueError if they are not valid."""
    try:
        facts = msgspec.convert(_normalise(values, "the file"), Facts)
    except msgspec.ValidationError as error:
        raise ValueError(_error_message(str(error), values)) from None
    except (OverflowError, RecursionError):
        raise ValueError("a number is too large, or tables are nested too deeply") from None
    return facts


def _normalise(value: Any, name: str) -> Any:
    """The value with single spaces as white space. Raises ValueError for hidden characters and infinite numbers."""
    if isinstance(value, Mapping):
        return {key: _normalise(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_normalise(item, name) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{short_repr(name)} must be a finite number, got {value}")
    if isinstance(value, str):
        text = " ".join(value.split())
        hidden = next((character for character in text if not character.isprintable()), None)
        if hidden is not None:
            raise ValueError(
                f"{short_repr(name)} must be printable text, got the hidden character {short_repr(hidden)}"
            )
        return text
    return value


def _error_message(message: str, values: Any) -> str:
    """An error of msgspec as "NAME must be REQUIREMENT, got VALUE"."""
    reason, _, path = message.partition(" - at `")
    name = path.rstrip("`").removeprefix("$").lstrip(".")
    if "unknown field" in reason:
        return f"{short_repr(reason.split('`')[1])} is not a fact; `coalmine statement --template` lists all facts"
    table, _, field = name.partition(".")
    value = values.get(table, {}) if isinstance(values, Mapping) else values
    if field and isinstance(value, Mapping):
        value = value.get(field.partition("[")[0])
    got = f"got {short_repr(value)}"
    if reason.startswith("Invalid enum value"):
        return f"{name} must be one of {', '.join(_options(name))}, {got}"
    if field.startswith("publication_date"):
        return f"{name} must be a date such as 2026-11-16, {got}"
    if not reason.startswith("Expected "):
        return f"{name} must be a number of ordinary size, {got}"
    required = reason.removeprefix("Expected ").partition(", got")[0].replace("`", "").replace(" | null", "")
    return f"{name or 'the file'} must be {_type_words(required)}, {got}"


def _type_words(required: str) -> str:
    """A type from a msgspec error in words, with its limits."""
    kind, _, limits = required.partition(" ")
    words = {"object": "a table", "array": "a list", "str": "text", "float": "a number", "int": "a whole number"}
    limits = limits.replace(">=", "of at least").replace("<=", "of at most").replace(">", "above").replace("<", "below")
    limits = limits.replace("of length of", "of a length of").replace("matching regex", "like")
    return f"{words.get(kind, kind)} {limits}".strip()


def _options(name: str) -> Iterator[str]:
    """The allowed values of a fact."""
    table, _, field = name.partition(".")
    kind = typing.get_type_hints(typing.get_type_hints(Facts)[table])[field]
    for option in typing.get_args(kind):
        if option is not types.NoneType:
            yield from (f'"{value}"' for value in typing.get_args(option))
