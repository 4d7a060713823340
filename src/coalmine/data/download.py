"""Downloads a file over HTTP with pooch. It gets its name only once it is complete and has the published checksum."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coalmine.data.catalogue import Download
from coalmine.version import __version__

Progress = Callable[[int, int | None], None]  # bytes so far, and in total if known

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without data
ATTEMPTS = 4
WAIT = 1.0  # seconds before the second attempt; doubled before each later one
TRY_AGAIN = (408, 429)  # client errors that may be temporary; all other 4xx are final


def download(file: Download, target: Path, *, progress: Progress = lambda done, total: None) -> str:
    """Download a file to `target` and return its SHA-256; an existing file with that checksum is kept.

    After a broken connection or a server error the download starts again. A file whose size or checksum differs from the
    published one is a ValueError and is not kept. Proxies come from the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY).
    """
    try:
        import pooch
        import requests
    except ImportError as error:
        raise ImportError("downloading data needs: pip install 'coalmine[simulation]'") from error
    pooch.get_logger().setLevel(logging.WARNING)

    def check(response: Any, **_: Any) -> None:
        if problem := _problem(file, response):
            response.close()
            raise problem

    downloader = pooch.HTTPDownloader(
        progressbar=_ProgressBar(progress),
        chunk_size=CHUNK,
        timeout=TIMEOUT,
        headers={"User-Agent": f"coalmine/{__version__}", "Accept-Encoding": "identity"},
        hooks={"response": check},
    )
    for attempt in range(1, ATTEMPTS + 1):
        try:
            pooch.retrieve(file.url, file.known_hash, target.name, target.parent, downloader=downloader)
            return str(pooch.file_hash(str(target)))
        except (requests.RequestException, ConnectionError) as error:
            if attempt == ATTEMPTS:
                raise ConnectionError(
                    f"{file.url} cannot be fetched: {_cause(error)} (tried {ATTEMPTS} times; set a proxy with "
                    "HTTPS_PROXY or HTTP_PROXY)"
                ) from None
        time.sleep(WAIT * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _problem(file: Download, response: Any) -> Exception | None:
    """The error for a bad answer, if it is one: ValueError if it is final, ConnectionError if another attempt may help.

    A size that differs from the published one is final. So is a redirect from HTTPS to HTTP, which anybody on the way
    could alter.
    """
    location = response.headers.get("Location", "")
    if response.is_redirect and response.url.startswith("https:") and location.startswith("http:"):
        return ValueError(f"{file.url} cannot be fetched: the server redirects to {location}, without HTTPS")
    if response.status_code >= 400:
        answer = f"the server answers {response.status_code} {response.reason}"
        if response.status_code < 500 and response.status_code not in TRY_AGAIN:
            return ValueError(f"{file.url} cannot be fetched: {answer}")
        return ConnectionError(answer)
    length = response.headers.get("Content-Length", "")
    if not response.is_redirect and length.isdigit() and file.size not in (None, int(length)):
        return ValueError(
            f"{file.url} has {int(length):,} bytes now, the published file has {file.size:,}; not downloaded"
        )
    return None


def _cause(error: BaseException) -> str:
    """The original error, which requests wraps several times."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


class _ProgressBar:
    """The progress bar interface of pooch."""

    total = 0

    def __init__(self, progress: Progress) -> None:
        self._progress, self._done = progress, 0

    def update(self, count: int) -> None:
        self._done += count
        self._progress(min(self._done, self.total) if self.total else self._done, self.total or None)

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        pass
