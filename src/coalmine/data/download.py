"""One file over HTTP, by pooch: it gets its name only when it is whole and has the published checksum."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coalmine.data.catalogue import Download
from coalmine.version import __version__

Progress = Callable[[int, int | None], None]  # bytes so far, and in total where known

CHUNK = 1 << 20
TIMEOUT = 60.0  # seconds without a byte
ATTEMPTS = 4
WAIT = 1.0  # seconds before the second attempt; doubled before each later one
TRY_AGAIN = (408, 429)  # client errors that may pass; all other 4xx are final


def download(file: Download, target: Path, *, progress: Progress = lambda done, total: None) -> str:
    """Download a file to `target` and return its SHA-256; a file that is there and has the checksum is kept.

    Broken connections and server errors are tried again, from the first byte. A file with another size or checksum than
    the published one is a ValueError and is not kept. Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY,
    NO_PROXY).
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
                    f"{file.url} cannot be fetched: {_cause(error)} (tried {ATTEMPTS} times; a proxy is named by "
                    "HTTPS_PROXY or HTTP_PROXY)"
                ) from None
        time.sleep(WAIT * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _problem(file: Download, response: Any) -> Exception | None:
    """What is wrong with an answer: ValueError where it is final, ConnectionError where another attempt may help.

    Final is also another size than the published one, and a redirect from HTTPS to HTTP, which anybody on the way could
    change.
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
    """What went wrong in the first place: requests wraps it several times."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__


class _ProgressBar:
    """What pooch expects of a progress bar."""

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
