"""Write requirements.lock: every version of constraints.txt with the SHA-256 of all its wheels, for pip's --require-hashes.

    python .ci/lock.py        # reads the package index that pip is configured to use

Torch is left out: its CPU wheels come from an index of its own. A package without wheels is locked by its source archive.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
APART = ("torch",)
PYTHONS = re.compile(r"-(cp31[123]|cp3\d?-abi3|cp3\d+-abi3|py3|py2\.py3|py3\d*)(-|\.)")
HEADER = "# Made by .ci/lock.py. Install: pip install --no-deps --require-hashes --requirement requirements.lock\n"


def index() -> str:
    """The address of the package index."""
    found = os.environ.get("PIP_INDEX_URL")
    if not found:
        asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return (found or "https://pypi.org/simple").rstrip("/")


def hashes(name: str, version: str) -> list[str]:
    """The digests of a version's wheels for the supported versions of Python; those of its sdist if it has none."""
    page = re.sub(r"[-_.]+", "-", name).lower()
    request = urllib.request.Request(f"{index()}/{page}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        body, kind = answer.read().decode(), answer.headers.get("Content-Type", "")
    if "json" in kind:
        files = [(file["filename"], file["hashes"].get("sha256")) for file in json.loads(body)["files"]]
    else:
        files = re.findall(r'href="[^"]*?/([^/"#]+)#sha256=([0-9a-f]{64})', body)
    own = [(file, digest) for file, digest in files if digest and version_of(file) == version]
    wheels = [digest for file, digest in own if file.endswith(".whl") and PYTHONS.search(file)]
    return sorted(wheels or [digest for file, digest in own if file.endswith((".tar.gz", ".zip"))])


def version_of(file: str) -> str:
    """The version in the name of a distribution."""
    if file.endswith(".whl"):
        return file.split("-")[1]
    return re.sub(r"\.(tar\.gz|zip)$", "", file).rsplit("-", 1)[-1]


def main() -> None:
    """Write the file; an error if a version has no file on the index."""
    lines = [line.split("#")[0].strip() for line in (HERE / "constraints.txt").read_text().splitlines()]
    pins = [tuple(line.split("==")) for line in lines if "==" in line]
    pins = [(name, version) for name, version in pins if name not in APART]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda pin: hashes(*pin), pins))
    missing = [f"{name}=={version}" for (name, version), digests in zip(pins, found, strict=True) if not digests]
    if missing:
        sys.exit(f"no file of {', '.join(missing)} on the index")
    text = HEADER
    for (name, version), digests in zip(pins, found, strict=True):
        text += f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{digest}" for digest in digests) + "\n"
    (HERE / "requirements.lock").write_text(text)


if __name__ == "__main__":
    main()
