"""The code that trains: the commit of its repository, digests of its source files and of its libraries, and versions."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = (
    "coalmine",
    "opacus",
    "jax_privacy",
    "flwr",
    "pfl",
    "nvflare",
    "dp_accounting",
)  # their code makes the guarantee
PACKAGES = ("numpy", "scipy", "torch", "jax", "optax", "opacus", "jax-privacy", "flwr", "pfl", "nvflare", "transformers",
            "peft", "dp-accounting", "coalmine")  # fmt: skip
MOST_FILES, LARGEST_FILE, SECONDS = 2_000, 1 << 24, 5.0


def code_facts() -> dict[str, Any]:
    """What ran, as far as this process can tell: it is committed to before round 1.

    `files` are the SHA-256 of the training script and of the modules beside and below it that it had imported. `libraries`
    have one digest each, of the modules that were imported. `git` is the commit, and whether the tree differed from it.
    """
    home, sources = _home(), _sources()
    own = {} if home is None else {name: path for name, path in _inside(home, sources) if not _is_installed(path)}
    files = {name: _sha256(path) for name, path in sorted(own.items())[:MOST_FILES]}
    libraries = {name: digest for name in LIBRARIES if (digest := _library(name, sources))}
    facts = {"files": files, "libraries": libraries, "environment": environment()}
    if home is not None and (state := _git(home)):
        facts["git"] = state
    return facts


def environment() -> dict[str, str]:
    """Versions of Python, of the system, and of the packages that training uses."""
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in PACKAGES:
        if name.replace("-", "_") in sys.modules:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return versions


def _home() -> str | None:
    """The folder of the training script; None in an interactive interpreter."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if script is None or not Path(script).exists() else str(Path(script).resolve().parent)


def _sources() -> list[str]:
    """The source files of all modules that are imported."""
    named = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return [name for name in named if isinstance(name, str) and name.endswith(".py")]


def _inside(folder: str, sources: list[str]) -> list[tuple[str, str]]:
    """The files in a folder, each by its name there."""
    start = folder.rstrip(os.sep) + os.sep
    return [(path.removeprefix(start).replace(os.sep, "/"), path) for path in sources if path.startswith(start)]


def _is_installed(path: str) -> bool:
    return any(f"{os.sep}{name}{os.sep}" in path for name in ("site-packages", "dist-packages"))


def _library(name: str, sources: list[str]) -> str | None:
    """A digest of the imported modules of a package: of their names and digests, in order."""
    root = getattr(sys.modules.get(name), "__file__", None)
    if root is None:
        return None
    lines = "".join(f"{_sha256(path)}  {inside}\n" for inside, path in sorted(_inside(str(Path(root).parent), sources)))
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: str) -> str:
    try:
        facts = Path(path).stat()
    except OSError:
        return "missing"
    return _sha256_of(path, facts.st_size, facts.st_mtime_ns)


@cache
def _sha256_of(path: str, size: int, changed: int) -> str:
    """The digest of a file of this size, last changed at this time."""
    del changed
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if size <= LARGEST_FILE else "too large"


@cache
def _git(home: str) -> dict[str, Any] | None:
    """The commit of the repository that holds a folder, and whether its files differ from it, when first asked."""
    answers = list(_asked(home, ["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]))
    if len(answers) < 2:
        return None
    return {"commit": answers[0].strip(), "dirty": bool(answers[1].strip())}


def _asked(home: str, *questions: list[str]) -> Iterator[str]:
    for question in questions:
        command = ["git", "-C", home, *question]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode:
            return
        yield done.stdout
