"""Run directories that somebody has edited, with a commitment and a log that open again."""

import dataclasses
import json
import shutil
import tomllib

import tomli_w

from coalmine import RunDirectory
from coalmine.log.commitment import Commitment
from coalmine.log.rounds_file import RoundLog


def edit_record(source, target, name, value, *, seed, config=None):
    """A copy whose statement has another fact (its path in dots), committed to and logged as if it had been there."""
    shutil.copytree(source, target)
    path = target / "config.toml"
    if config is not None:
        values = tomllib.loads(path.read_text())
        for section, changes in config.items():
            values[section] |= changes
        path.write_bytes(tomli_w.dumps(values).encode())
    home = RunDirectory(target)
    settings, _ = home.read_record()
    statement, result = home.read_statement(), json.loads((target / "result.json").read_text())
    facts = json.loads(json.dumps(statement.facts))
    if name is not None:
        *parents, last = name.split(".")
        place = facts
        for parent in parents:
            place = place[parent]
        place[last] = value
        if parents[:1] != ["audited_by_pipeline"]:
            result |= {key: facts[key] for key in facts if key in result}
    statement = dataclasses.replace(statement, facts=facts, config_sha256=home.config_sha256())
    record = json.loads((target / "audit" / "record.json").read_text())
    commitment = Commitment.to(seed, settings, statement, salt=record["commitment"]["salt"])
    record |= {"statement": vars(statement), "commitment": vars(commitment)}
    (target / "audit" / "record.json").write_text(json.dumps(record))
    (target / "result.json").write_text(json.dumps(result))
    return target


def rewrite_rounds(source, target, change):
    """A copy whose rounds state something else, with a valid chain of digests."""
    shutil.copytree(source, target)
    path = target / "audit" / "rounds.log"
    old = RoundLog(path, read_only=True)
    rounds, final, outcome = list(old.rounds()), old.final, old.outcome
    old.close()
    path.unlink()
    new = RoundLog(path)
    for item in rounds:
        new.append(dataclasses.replace(item, **change))
    new.finish(final)
    new.close_run(outcome)
    new.close()
    return target
