"""Run directories with edited, damaged, swapped or missing files, read by every command that reads them."""

import atexit
import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
import tomllib
from functools import cache
from pathlib import Path

import tomli_w

from coalmine import Claim, RunDirectory
from coalmine.log.files import json_ready
from coalmine.log.rounds_file import DIGEST, LENGTHS, MAGIC, TAG
from coalmine.result.derivation import derive_result
from fuzz.cases import SECONDS, Case, FaultError, check_command
from fuzz.values import damaged, edited, plain_value, text

STORED = Path(__file__).parents[1] / "tests" / "golden" / "stored"
NAMES = sorted(path.name for path in STORED.iterdir() if path.is_dir())
FILES = ("result.json", "result.json", "audit/record.json", "audit/rounds.log", "config.toml", "metrics.jsonl")
METRICS = b"".join(
    json.dumps({"schema_version": 1, "round": t, "accuracy": t / 100, "seconds": 0.1 * t, "clip_norm": 0.5}).encode()
    + b"\n"
    for t in range(1, 12)
)


@cache
def whole_runs() -> list[Path]:
    """The stored runs with the results that follow from their logs; every command must be able to read them."""
    home = Path(tempfile.mkdtemp(prefix="coalmine-fuzz-runs-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    for name in NAMES:
        run = Path(shutil.copytree(STORED / name, home / name))
        stored = json.loads((run / "result.json").read_text())
        settings, _ = RunDirectory(run).read_record()
        claim = Claim(epsilon=stored["claimed_epsilon"])
        found = derive_result(RunDirectory(run).read_log(), settings, claim=claim, clients=stored["clients"])
        (run / "result.json").write_text(json.dumps(json_ready(stored | found.to_dict())))
        (run / "metrics.jsonl").write_bytes(METRICS)
        for command in ("compare", "verdict"):
            if check_command(command, str(run)).code == 2:
                raise FaultError(f"`coalmine {command}` cannot read {name} as it was stored")
    return [home / name for name in NAMES]


def make_case(rng: random.Random, folder: Path) -> Case:
    """A copy of a stored run with one or two faults, and a command that reads it."""
    name = text(rng) if rng.random() < 0.15 else "run"
    usable = name not in ("", "/", "-", "~", "*", "../..", "--json", "--", "-x") and len(name) < 200
    run = folder / (name if usable and "/" not in name else "run")
    shutil.copytree(rng.choice(whole_runs()), run)
    said = [spoil(run, rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    (folder / "seed").write_text("7\n")
    arguments = _command(str(run), folder, rng)
    seconds = 60.0 if "--out" in arguments else SECONDS
    return Case(f"{' '.join(arguments)}; {run.name!r}; {'; '.join(said)}", lambda: _check(arguments, folder), seconds)


def _check(arguments: list[str], folder: Path) -> None:
    check_command(*arguments)
    for page in folder.glob("*.html"):
        content = page.read_text(encoding="utf-8", errors="replace")
        if "<script>alert(1)" in content:
            raise FaultError("the page holds a script from the run's files")


def _command(run: str, folder: Path, rng: random.Random) -> list[str]:
    commands = [
        ["verdict", run],
        ["verdict", run, "--json"],
        ["compare", run],
        ["compare", run, "--json"],
        ["compare", run, "--csv"],
        ["compare", run, str(whole_runs()[0])],
        ["report", run, "--format", "md"],
        ["report", run, "--format", "json"],
        ["watch", run],
        ["verify", run, "--seed-file", str(folder / "seed")],
        ["verify", run, "--seed-file", str(folder / "seed"), "--json"],
    ]
    if rng.random() < 0.02:  # pages are slow
        return ["report", run, "--out", str(folder / "page.html")]
    if rng.random() < 0.1:
        return ["verdict", str(folder)]
    return rng.choice(commands)


def spoil(run: Path, rng: random.Random) -> str:
    """Change one file of a run and return a description."""
    name = rng.choice(FILES)
    path = run / name
    kind = rng.randrange(10)
    if not path.is_file():
        return "nothing"
    if kind == 0:
        path.unlink()
        if rng.random() < 0.5:
            return f"{name} removed"
        if rng.random() < 0.5:
            os.mkfifo(path)
            return f"{name} is a FIFO"
        path.symlink_to(rng.choice(("/dev/zero", "/dev/null", "/nowhere", path.name)))
        return f"{name} is a link to a device, to nothing or to itself"
    if kind == 1:
        path.unlink()
        path.mkdir()
        return f"{name} is a directory"
    if kind == 2:
        other = rng.choice(whole_runs()) / name
        if other.is_file():
            shutil.copy(other, path)
            return f"{name} of {other.parents[name.count('/')].name}"
    if kind == 3:
        other = run / rng.choice(FILES)
        if other.is_file():
            path.write_bytes(other.read_bytes())
            return f"{name} replaced by {other.name}"
    if kind == 4:
        path.write_bytes(damaged(path.read_bytes(), rng))
        return f"{name} damaged"
    return _edit(path, name, rng)


def _edit(path: Path, name: str, rng: random.Random) -> str:
    try:
        if name.endswith(".json"):
            values = json.loads(path.read_text())
            for _ in range(rng.choice((1, 1, 2, 4))):
                values = edited(values, rng)
            path.write_text(json.dumps(values))
        elif name == "config.toml":
            path.write_text(tomli_w.dumps(edited(tomllib.loads(path.read_text()), rng)))
        elif name == "metrics.jsonl":
            lines = path.read_text().splitlines()
            place = rng.randrange(len(lines))
            lines[place] = json.dumps(edited(json.loads(lines[place]), rng))
            path.write_text("\n".join(lines) + "\n")
        else:
            path.write_bytes(edited_log(path.read_bytes(), rng))
    except (ValueError, TypeError, RecursionError, AttributeError, OverflowError, struct.error):
        path.write_text(json.dumps(plain_value(rng), default=str))
    return f"{name} edited"


def edited_log(data: bytes, rng: random.Random) -> bytes:
    """A log with a changed header or length in one record and valid digests."""
    records = split_records(data[len(MAGIC) :])
    place = rng.randrange(len(records))
    head, body = records[place]
    kind = rng.randrange(6)
    if kind == 0:
        records[place] = head, body[: rng.randrange(len(body) + 1)] if body else rng.randbytes(8)
    elif kind == 1:
        records.insert(place, records[rng.randrange(len(records))])
    elif kind == 2 and len(records) > 1:
        del records[place]
    elif kind == 3:
        records[place] = head, rng.choice((bytes(len(body)), b"\xff" * len(body), rng.randbytes(len(body))))
    else:
        records[place] = json.dumps(edited(json.loads(head), rng)).encode(), body
    return MAGIC + chained(records)


def chained(records: list[tuple[bytes, bytes]]) -> bytes:
    """Records in the format of a log, each digest chained to the previous one."""
    pieces, digest = [], b""
    for head, body in records:
        digest = hashlib.blake2b(digest + head + body, digest_size=DIGEST).digest()
        pieces.append(TAG + LENGTHS.pack(len(head), len(body)) + head + body + digest)
    return b"".join(pieces)


def split_records(data: bytes) -> list[tuple[bytes, bytes]]:
    """Header and body of each record; the bytes must contain only records."""
    records, place = [], 0
    while place < len(data):
        first = place + len(TAG) + LENGTHS.size
        head, body = LENGTHS.unpack(data[first - LENGTHS.size : first])
        records.append((data[first : first + head], data[first + head : first + head + body]))
        place = first + head + body + DIGEST
    return records
