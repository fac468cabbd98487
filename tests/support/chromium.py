"""A headless Chromium with one page, for tests of what a person sees: opened, looked at, moved over, zoomed.

It is driven over its debugging pipe, so that nothing but the browser is needed. Messages of the DevTools protocol are
JSON, ended by a zero byte; the browser reads them from descriptor 3 and writes answers and events to 4.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
]
LIMIT = 60.0
DRAWN = "requestAnimationFrame(() => requestAnimationFrame(() => done(1)))"


class Browser:
    """One browser with one page. `problems` are what its console has said of errors and warnings since `open`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        there, self._write = os.pipe()
        self._read, back = os.pipe()
        command = f'exec "$0" "$@" 3<&{there} 4>&{back}'
        flags = [*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *flags],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        self._buffer, self._number, self._session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._events: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._session = None
            self._call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        for descriptor in (self._read, self._write):
            os.close(descriptor)

    def show(self, width: int, height: int, dark: bool = False, touch: bool = False) -> None:
        """The size of the window in CSS pixels, and what kind of device it is."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self._call("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> float:
        """Go there; seconds until the page had loaded and had drawn what is on the screen."""
        self.problems.clear()
        self.requests.clear()
        self._events.clear()
        began = time.monotonic()
        self._call("Page.navigate", url=url)
        self._until(lambda: "Page.loadEventFired" in self._events)
        self.run(f"new Promise((done) => {DRAWN})")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 15.0) -> None:
        """Wait for a JavaScript expression to be true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.1)

    def mouse(self, kind: str, x: float, y: float, count: int = 1) -> None:
        """kind: mouseMoved, mousePressed, mouseReleased."""
        button = "none" if kind == "mouseMoved" else "left"
        held = 1 if kind != "mouseReleased" else 0
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=held, clickCount=count)

    def picture(self, path: Path, whole: bool = False) -> Path:
        """A screenshot as PNG, of the window or of the whole page."""
        if whole:  # what is off the screen is not drawn: make the screen as high as the page
            height = self.run("document.documentElement.scrollHeight")
            width = self.run("innerWidth")
            self._call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            self.run(f"new Promise((done) => setTimeout(() => {DRAWN}, 300))")
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
        return path

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        answers: list[dict[str, Any]] = []
        wanted = self._number

        def answered() -> bool:
            return bool(answers)

        self._until(answered, lambda got: answers.append(got) if got.get("id") == wanted else None)
        if "error" in answers[0]:
            raise AssertionError(f"{method}: {answers[0]['error']}")
        return answers[0]["result"]

    def _until(self, done: Any, see: Any = lambda got: None) -> None:
        deadline = time.monotonic() + LIMIT
        while not done():
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
                assert ready, "the browser says nothing"
                got = os.read(self._read, 2**20)
                assert got, "the browser has ended"
                self._buffer += got
            text, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(text)
            self._hear(message.get("method", ""), message.get("params", {}))
            see(message)

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
