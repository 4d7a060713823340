"""A minimal driver for a headless Chromium, over its debugging pipe."""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def require_chromium() -> str:
    """The path of Chromium; without it the test is skipped, or fails if COALMINE_FORBID_SKIPS is set."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        reason = "needs Chromium (Debian: apt-get install chromium)"
        if os.environ.get("COALMINE_FORBID_SKIPS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return program


def _start(command: list[str]) -> tuple[subprocess.Popen, int, int]:
    """The process and the pipes from and to it: Chromium reads from file descriptor 3 and writes to 4."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]  # keep 3 and 4 free

    def arrange() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    process = subprocess.Popen(
        command, pass_fds=(3, 4), preexec_fn=arrange, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    return process, ours_in, ours_out


class Chromium:
    """A browser with one page. `events` holds all events since the page was opened."""

    def __init__(self) -> None:
        program = require_chromium()
        self._profile = tempfile.mkdtemp(prefix="coalmine-chromium-")
        self._process, self._in, self._out = _start(
            [program, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        )
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> "Chromium":
        """Open a file from disk and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events = []
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())
        self.evaluate("0")
        return self

    def evaluate(self, script: str):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def hover(self, selector: str) -> None:
        """Scroll an element into view, wait until the page has been told of it, and move the mouse to its first line."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = self.evaluate(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getClientRects()[0])"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Escape": 27, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"])

    @property
    def complaints(self) -> list[str]:
        """Console errors and warnings, exceptions, and violations of the page's content security policy."""
        complaints = []
        for event in self.events:
            parameters = event["params"]
            if event["method"] == "Runtime.consoleAPICalled" and parameters["type"] not in ("error", "warning"):
                continue
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                complaints.append(str(parameters))
        return complaints

    @property
    def requests(self) -> list[str]:
        """Addresses that the page requested, including its own."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def _receive(self) -> dict:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 20)
            assert part, "Chromium ended"
            self._rest += part
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
