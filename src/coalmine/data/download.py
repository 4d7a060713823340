"""One file over HTTP: resumed where it stopped, checked, and at its place only when it is whole and right."""

import hashlib
import http.client
import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coalmine.data.catalogue import Download
from coalmine.version import __version__

Progress = Callable[[int, int | None], None]  # bytes so far, and in all where known

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 4  # that bring nothing, one after the other
WAIT = 1.0  # seconds before the second attempt, twice as long before each next one
LARGEST = 100 * 10**9  # of a file whose size nobody published


@dataclass(frozen=True)
class Checksums:
    """What a file that was fetched is."""

    size: int
    sha256: str
    checked: str  # against what


def download(file: Download, target: Path, *, progress: Progress = lambda done, total: None) -> Checksums:
    """Fetch a file to `target`, which is whole and checked or not there; what came before a failure is kept beside it.

    Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY).
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with _alone(part):
        _fetch(file, part, progress)
        try:
            found = checksums(file, part)
        except ValueError as error:
            part.unlink()
            _validator_path(part).unlink(missing_ok=True)
            raise ValueError(f"{error}; it was deleted, run it again") from None
        part.replace(target)
        _validator_path(part).unlink(missing_ok=True)
    return found


def _fetch(file: Download, part: Path, progress: Progress) -> None:
    failures = 0
    while True:
        before = part.stat().st_size
        try:
            if _receive(file, part, progress):
                return
            problem = "the connection ended too early"
        except urllib.error.HTTPError as error:
            problem = f"the server answers {error.code} {error.reason}"
            error.close()
            if error.code < 500 and error.code not in (408, 429):
                raise ValueError(f"{file.url} cannot be fetched: {problem}") from None
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            reason = getattr(error, "reason", error)
            problem = str(reason) or type(reason).__name__
        failures = 1 if part.stat().st_size > before else failures + 1
        if failures >= ATTEMPTS:
            kept = part.stat().st_size
            goes_on = f"; the {kept:,} bytes that came are kept, run it again to go on" if kept else ""
            raise ConnectionError(
                f"{file.url} cannot be fetched: {problem} (tried {ATTEMPTS} times; a proxy is named by HTTPS_PROXY or "
                f"HTTP_PROXY){goes_on}"
            )
        time.sleep(WAIT * 2 ** (failures - 1))


def _receive(file: Download, part: Path, progress: Progress) -> bool:
    """One request for what is missing; whether the file is whole now."""
    have, validator = part.stat().st_size, _validator(part, file.url)
    if have and not validator and not (file.sha256 or file.md5):
        have = 0  # nothing would tell whether the rest belongs to the same file
    headers = {"User-Agent": f"coalmine/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator:
            headers["If-Range"] = validator
    try:
        response = _opener().open(urllib.request.Request(file.url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        if have == (file.size or _total(error.headers.get("Content-Range"))):
            return True
        os.truncate(part, 0)  # it is longer than the file is: another one
        return False
    with response:
        if response.status != http.client.PARTIAL_CONTENT:
            have = 0
        elif _first(response.headers.get("Content-Range")) != have or (
            validator and _version(response) not in (None, validator)
        ):
            os.truncate(part, 0)  # not what was asked for, or of another version than what is there
            return False
        total = _length(response, have)
        _expect(file, part, total, have)
        _remember(part, file.url, response)
        return _copy(file, part, response, have, total, progress)


def _copy(file: Download, part: Path, response: Any, have: int, total: int | None, progress: Progress) -> bool:
    limit = file.size or total or LARGEST
    with part.open("r+b") as output:
        output.truncate(have)
        output.seek(have)
        progress(have, total)
        while chunk := response.read(CHUNK):
            have += len(chunk)
            if have > limit:
                output.truncate(0)
                raise ValueError(f"{file.url} sends more than the {limit:,} bytes it should have")
            output.write(chunk)
            progress(have, total)
        output.flush()
        os.fsync(output.fileno())
    return total is None or have == total


def _expect(file: Download, part: Path, total: int | None, have: int) -> None:
    """Refuse a file of another size than the published one, and one that would fill the disk."""
    if file.size is not None and total is not None and total != file.size:
        raise ValueError(
            f"{file.url} has {total:,} bytes now, {file.size:,} are published: it has changed, so it is not taken"
        )
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - have > free:
        raise OSError(f"{file.name} needs {total - have:,} more bytes in {part.parent}, where {free:,} are free")


def checksums(file: Download, path: Path) -> Checksums:
    """What the file at `path` is, refused unless it has the size and the checksum that are published."""
    hashes = {"sha256": hashlib.sha256(), "md5": hashlib.md5(usedforsecurity=False)}
    with path.open("rb") as content:
        while chunk := content.read(CHUNK):
            for digest in hashes.values():
                digest.update(chunk)
    size = path.stat().st_size
    for kind, expected in (("sha256", file.sha256), ("md5", file.md5)):
        found = hashes[kind].hexdigest()
        if expected is not None and found != expected:
            raise ValueError(
                f"{file.name} has {kind} {found}, published is {expected}: damaged on its way or changed at its source"
            )
    if file.size is not None and size != file.size:
        raise ValueError(f"{file.name} has {size:,} bytes, published are {file.size:,}")
    kind = "sha256" if file.sha256 else "md5" if file.md5 else ""
    return Checksums(size, hashes["sha256"].hexdigest(), f"{kind} of {file.checksum_from}" if kind else "")


class _NoDowngrade(urllib.request.HTTPRedirectHandler):
    """Redirects are followed, but never from HTTPS to something that anybody on the way could change."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.full_url.startswith("https:") and not newurl.startswith("https:"):
            raise urllib.error.HTTPError(req.full_url, 400, f"and redirects to {newurl}, without HTTPS", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoDowngrade)


def _length(response: Any, have: int) -> int | None:
    length = response.headers.get("Content-Length")
    return have + int(length) if length is not None and length.isdigit() else None


def _first(content_range: str | None) -> int | None:
    """1000 of "bytes 1000-1999/5000"."""
    words = (content_range or "").removeprefix("bytes ").partition("-")[0]
    return int(words) if words.isdigit() else None


def _total(content_range: str | None) -> int | None:
    """5000 of "bytes 1000-1999/5000"."""
    words = (content_range or "").rpartition("/")[2]
    return int(words) if words.isdigit() else None


def _validator_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.json")


def _remember(part: Path, url: str, response: Any) -> None:
    """Note which version of the file this is, so that the rest of another is never put behind it."""
    _validator_path(part).write_text(json.dumps({"url": url, "validator": _version(response)}), encoding="utf-8")


def _version(response: Any) -> str | None:
    """A strong ETag, else a date, else nothing."""
    etag: str | None = response.headers.get("ETag")
    strong = etag if etag and not etag.startswith("W/") else None
    return strong or response.headers.get("Last-Modified")


def _validator(part: Path, url: str) -> str | None:
    try:
        noted = json.loads(_validator_path(part).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = noted.get("validator") if isinstance(noted, dict) and noted.get("url") == url else None
    return found if isinstance(found, str) else None


@contextmanager
def _alone(part: Path) -> Iterator[None]:
    """Hold the partial file, so that two processes do not write it at once."""
    with part.open("ab") as held:
        try:
            import fcntl
        except ImportError:  # not to be had on Windows
            yield
            return
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{part} is being downloaded by another process; wait for it") from None
        try:
            yield
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()
