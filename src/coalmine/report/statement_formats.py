"""A privacy statement as Markdown, JSON, a record of the OpenDP registry, and a section of a Hugging Face model card."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from coalmine.log.files import json_ready
from coalmine.report.markdown import escape_markdown
from coalmine.report.sentences import percent
from coalmine.report.statement import MISSING_PART, PARTS, PRIORS, PrivacyStatement, finite
from coalmine.report.statement_item import NOT_STATED, Item
from coalmine.result.words import format_number
from coalmine.version import __version__

Format = Literal["md", "html", "json", "yaml", "card"]
VARIANTS = {  # their names in the registry
    "approximate DP": "Approximate DP",
    "pure DP": "Pure DP",
    "zero-concentrated DP": "Zero-concentrated DP",
    "Rényi DP": "Renyi DP",
    "Gaussian DP": "Custom",
}
MODELS = {"central": "Central", "local": "Local", "distributed": "Federated"}
REQUIRED = {  # facts that the registry requires, and its names for them
    "name": "name",
    "curators": "data_curators",
    "description": "description",
    "intended_use": "intended_use",
    "region": "data_product_region",
    "publication_date": "publication_date",
}
SECOND_TIER = {
    "dp_variant": ("variant_name",),
    "privacy_loss": ("privacy_unit", "privacy_parameters"),
    "deployment_model": ("model_name", "release_type", "data_source_type", "access_type"),
}
THIRD_TIER = {
    "dp_variant": ("data_domain", "unprotected_quantities"),
    "privacy_loss": ("privacy_unit_details",),
    "deployment_model": ("actors",),
    "accounting": ("post_processing", "composition"),
    "implementation": ("preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"),
}


def statement_text(statement: PrivacyStatement, kind: Format) -> str:
    """The statement in one of the formats. "yaml" raises ValueError without the facts that the registry requires."""
    if kind == "html":
        from coalmine.report.statement_page import statement_page  # imported on use: jinja2 is slow to import

        return statement_page(statement)
    if kind == "json":
        return json.dumps(json_ready(statement.to_dict()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if kind == "yaml":
        return yaml_text(registry_record(statement))
    return card(statement) if kind == "card" else markdown_statement(statement)


def markdown_statement(statement: PrivacyStatement, *, level: int = 1) -> str:
    """The statement as Markdown, with its title as a heading of this level."""
    head, below = "#" * level, "#" * (level + 1)
    parts = [
        f"{head} Privacy statement: {escape_markdown(statement.title)}",
        *map(escape_markdown, (statement.for_signers, *statement.summary)),
    ]
    parts.append(f"{below} {escape_markdown(statement.meaning_title)}")
    parts.append(escape_markdown(statement.meaning))
    if statement.meanings:
        heads = ["ε", "", *(f"{percent(prior)} becomes" for prior in PRIORS)]
        rows = [[format_number(each.epsilon), each.name, *map(percent, each.posteriors)] for each in statement.meanings]
        parts.append("How much a suspicion that somebody took part can grow:")
        parts.append(_table(heads, rows))
        parts.append(escape_markdown(statement.guess_sentence))
    for place, (name, title) in enumerate(PARTS.items(), 1):
        rows = [[item.label, _cell(item), item.basis] for item in statement.parts[name]]
        parts += [f"{below} {place}. {title}", _table(["item", "statement", "how it is known"], rows)]
    parts.append(f"{below} {len(PARTS) + 1}. {MISSING_PART}")
    missing = [
        f"- {escape_markdown(item.label)} ({PARTS[item.key.partition('.')[0]].lower()})"
        for item in statement.not_stated
    ]
    parts.append("\n".join(missing) or "Every item is stated.")
    parts.append(escape_markdown(statement.made_by))
    return "\n\n".join(parts) + "\n"


def _cell(item: Item) -> str:
    return f"{item.text} ({item.detail})" if item.detail else item.text


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def registry_record(statement: PrivacyStatement) -> dict[str, Any]:
    """A record for the OpenDP deployments registry. Optional fields that are not stated are omitted and listed in its notes.

    The registry's fields of fixed values have no "not stated", and it has no field for μ.
    """
    facts = statement.facts.deployment
    missing = [f"deployment.{name}" for name in REQUIRED if getattr(facts, name) is None]
    if missing:
        raise ValueError(
            f"the registry needs {', '.join(missing)}: state them in the facts file (`coalmine statement --template` prints "
            "one to fill in)"
        )
    assert facts.name is not None
    assert facts.publication_date is not None
    basic = {field: getattr(facts, name) for name, field in REQUIRED.items()}
    basic |= {
        "publication_date": facts.publication_date.isoformat(),
        "data_product_type": "Machine learning model",
        "data_product_sector": facts.sector,
    }
    deployment = {
        "basic": basic,
        "dp_variant": _variant(statement),
        "privacy_loss": _privacy_loss(statement),
        "deployment_model": {
            "model_name": MODELS.get(statement.items["guarantee.trust_model"].value or ""),
            "model_name_details": _stated(statement, "guarantee.trust_model"),
            "actors": facts.actors,
            "release_type": facts.release_type,
            "release_type_details": facts.release_details,
            "data_source_type": facts.data_source,
            "access_type": facts.access,
        },
        "accounting": {
            "post_processing": facts.post_processing,
            "composition": _sentences(
                statement, "accountant", "accountant_version", "sampling", "participations", "composition"
            ),
        },
        "implementation": {
            "preprocessing_and_hyperparameter_tuning": _sentences(
                statement, "tuning", "pretraining", "evaluation", part="guarantee"
            ),
            "mechanisms": "; ".join(
                f"{item.label}: {item.text}" for item in statement.parts["mechanism"] if item.stated
            ),
            "justification": facts.justification,
        },
        "administrative": {
            "sources": facts.sources,
            "notes": " ".join(filter(None, [facts.notes, *_notes(statement)])),
            "registry_authors": facts.authors or facts.curators,
        },
    }
    deployment = {name: _drop_empty(values) for name, values in deployment.items()}
    return {
        "url_slug": facts.url_slug or _slug(facts.name),
        "status": "Draft",
        "tier": _tier(deployment),
        "deployment": {name: values for name, values in deployment.items() if values},
    }


def _variant(statement: PrivacyStatement) -> dict[str, Any]:
    return {
        "variant_name": VARIANTS.get(statement.items["guarantee.variant"].value or ""),
        "data_domain": statement.facts.deployment.data_domain,
        "unprotected_quantities": _stated(statement, "mechanism.also_released"),
    }


def _privacy_loss(statement: PrivacyStatement) -> dict[str, Any]:
    items = statement.items
    numbers = {name: items[f"guarantee.{name}"].value for name in ("epsilon", "delta")}
    details = [f"{items['guarantee.mu'].label}: {items['guarantee.mu'].text}"] if items["guarantee.mu"].stated else []
    details += [f"{items[key].label}: {items[key].text}" for key in ("evidence.measured_epsilon",) if items[key].stated]
    details += [f"participations: {often}"] if (often := _stated(statement, "accounting.participations")) else []
    details += [statement.more_exposed] if statement.more_exposed else []
    unit = [_stated(statement, key) for key in ("guarantee.unit_details", "guarantee.adjacency")]
    return {
        "privacy_unit": _stated(statement, "guarantee.unit"),
        "privacy_unit_details": ". ".join(text.rstrip(".") for text in unit if text),
        "privacy_parameters": {name: value for name, value in numbers.items() if finite(value)},
        "privacy_parameters_details": "; ".join(details),
    }


def _notes(statement: PrivacyStatement) -> Iterator[str]:
    yield f"Audited by coalmine: {statement.items['evidence.verdict'].text}."
    missing = ", ".join(item.label for item in statement.not_stated)
    if missing:
        yield f"Not stated: {missing}."
    yield statement.made_by


def _stated(statement: PrivacyStatement, key: str) -> str | None:
    item = statement.items[key]
    return item.text if item.stated else None


def _sentences(statement: PrivacyStatement, *names: str, part: str = "accounting") -> str:
    """The stated items in one line, each after its label."""
    items = [statement.items[f"{part}.{name}"] for name in names]
    return "; ".join(f"{item.label}: {item.text}" for item in items if item.stated)


def _drop_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, "", {}, [])}


def _tier(deployment: Mapping[str, Mapping[str, Any]]) -> int:
    """The registry's tier of the record: how complete it is."""

    def has(tier: Mapping[str, tuple[str, ...]]) -> bool:
        return all(field in deployment[section] for section, fields in tier.items() for field in fields)

    return (3 if has(THIRD_TIER) else 2) if has(SECOND_TIER) else 1


def _slug(name: str) -> str:
    """A name as part of a URL."""
    return re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-") or "model"


def card(statement: PrivacyStatement) -> str:
    """Metadata and a section for a Hugging Face model card. It is a card of its own, or can be merged into one."""
    items = statement.items

    def value(key: str) -> Any:
        item = items[key]
        return item.value if item.stated else NOT_STATED

    metadata = {
        "tags": ["differential-privacy"],
        "differential_privacy": {
            name: value(f"guarantee.{name}")
            for name in ("variant", "epsilon", "delta", "mu", "unit", "adjacency", "trust_model", "releases")
        }
        | {"sampling": value("accounting.sampling"), "participations": value("accounting.participations")}
        | {
            name: value(f"mechanism.{name}") for name in ("clip_norm", "noise_multiplier", "library", "library_version")
        },
        "privacy_audit": {
            "tool": f"coalmine {__version__}",
            **{
                name: value(f"evidence.{name}")
                for name in (
                    *("verdict", "measured_epsilon", "interval", "lower_bound", "lower_bound_gaussian"),
                    *("commitment", "log_digest"),
                )
            },
            "not_stated": [item.key for item in statement.not_stated],
        },
    }
    return f"---\n{yaml_text(metadata)}---\n\n{markdown_statement(statement, level=2)}"


def yaml_text(values: Mapping[str, Any]) -> str:
    """Mappings, lists, strings and numbers as YAML that means the same in versions 1.1 and 1.2: every string is quoted.

    >>> print(yaml_text({"delta": 1e-6, "name": "no: 'yes'", "list": [1, None]}), end="")
    delta: 1.0e-06
    name: "no: 'yes'"
    list:
      - 1
      - null
    """
    return "".join(f"{line}\n" for line in _yaml_lines(values))


def _yaml_lines(value: Any, indent: str = "") -> Iterator[str]:
    pairs = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for name, item in pairs:
        start = f"{indent}- " if name is None else f"{indent}{name}: "
        if isinstance(item, Mapping | list) and item:
            yield start.rstrip()
            yield from _yaml_lines(item, indent + "  ")
        else:
            yield start + _scalar(item)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value.replace("<", "&lt;").replace(">", "&gt;"), ensure_ascii=False)  # rendered as Markdown
    if isinstance(value, float):
        if not finite(value):
            return json.dumps(json_ready(value))
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text  # YAML 1.1 reads 1e-06 as a string
    return json.dumps(json_ready(value))
