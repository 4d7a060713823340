"""record.json: the settings and the statement fixed before the first round, and the commitment to them."""

import hashlib
import json
import math
import re
import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsIndex

import msgspec

from coalmine.canaries.seeds import is_guessable, seed_bytes
from coalmine.measure.settings import Settings

SCHEMA_VERSION = 1
COMMITMENT_VERSION = 4  # version 1 had the settings alone, 2 no sampling, 3 no lengths, alarm, initial model or facts
UNSTATED = ("rounds", "code")  # entries of a statement that have no part in its digest while nobody states them
SALT = re.compile("[0-9a-f]{32}")
TOLERANCE = 1e-9  # relative, of numbers that are computed again


@dataclass(frozen=True, kw_only=True)
class Precommitment:
    """The statement that an audit commits to before round 1, besides seed and settings.

    `claim` holds the fields of the claim; None if nothing was claimed in advance. `config_sha256` is that of the trainer's
    config.toml, if it was written before. `demonstration` means that the seed can be guessed, so the audit proves nothing
    to anyone else. `watched` means that the alarm is checked during training. `initial_sha256` is that of the initial
    model's numbers (`model_sha256`), `rounds` the number of rounds that the trainer has planned, and `facts` are entries of
    the result that the trainer knows in advance. `code` are digests of the code that trains (`provenance.code_facts`).
    """

    claim: dict[str, Any] | None = None
    config_sha256: str | None = None
    demonstration: bool = False
    watched: bool = False
    initial_sha256: str | None = None
    rounds: int | None = None
    code: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Commitment:
    """Salted digests, published before round 1: they bind the auditor and reveal nothing.

    `sha256` is of seed and settings, which a node that makes canaries can check. `statement_sha256` includes the statement.
    """

    salt: str
    sha256: str
    statement_sha256: str = ""
    version: int = COMMITMENT_VERSION

    @classmethod
    def to(
        cls,
        seed: SupportsIndex | bytes,
        settings: Settings,
        statement: Precommitment | None = None,
        *,
        salt: str | None = None,
    ) -> "Commitment":
        salt = secrets.token_hex(16) if salt is None else salt
        stated = asdict(statement or Precommitment(demonstration=is_guessable(seed)))
        stated = {name: value for name, value in stated.items() if value is not None or name not in UNSTATED}
        everything = {"version": COMMITMENT_VERSION, "settings": settings.to_dict(), "statement": stated}
        return cls(salt, salted_digest(salt, settings.to_dict(), seed), salted_digest(salt, everything, seed))

    @classmethod
    def from_dict(cls, values: Any) -> "Commitment":
        """The commitment from its form in a file; ValueError for anything else."""
        commitment = msgspec.convert(values, cls)
        if not SALT.fullmatch(commitment.salt):
            raise ValueError("the salt must be 32 hexadecimal digits")
        return commitment

    @property
    def other_version(self) -> str:
        """A description of an audit that another version of coalmine started."""
        return (
            f"an audit that another version of coalmine started (commitment version {self.version}, this one makes "
            f"{COMMITMENT_VERSION})"
        )

    def opens_to(self, seed: SupportsIndex | bytes, settings: Settings, statement: Precommitment | None = None) -> bool:
        """Whether seed and settings are those committed to, and the statement too if it is given."""
        opened = Commitment.to(seed, settings, statement, salt=self.salt)
        pairs = [(opened.sha256, self.sha256)]
        if statement is not None:
            pairs.append((opened.statement_sha256, self.statement_sha256))
        same = [secrets.compare_digest(ours.encode(), theirs.encode()) for ours, theirs in pairs]
        return all(same) and self.version == COMMITMENT_VERSION


def salted_digest(salt: str, content: dict[str, Any], seed: SupportsIndex | bytes) -> str:
    """A digest of all three. Each is preceded by its length, so that no other three have the same bytes."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256()
    for part in (salt.encode(), text.encode(), seed_bytes(seed)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def json_equal(one: Any, two: Any, *, abs_tol: float = 0.0) -> bool:
    """Whether two values of JSON are the same, numbers up to the last digits, in which processors and libraries differ."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, int | float) and isinstance(two, int | float):
        if one == two:
            return True
        try:
            return math.isclose(one, two, rel_tol=TOLERANCE, abs_tol=abs_tol)
        except OverflowError:  # a whole number beyond the range of a float
            return False
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(json_equal(one[name], two[name], abs_tol=abs_tol) for name in one)
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(json_equal(a, b, abs_tol=abs_tol) for a, b in zip(one, two, strict=True))
    return bool(one == two)
