"""Headless Chromium over its debugging pipe: what a page logs, requests and measures, without a further package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """One page.

    Attributes:
        console: messages and errors.
        requests: URLs that were asked for.
    """

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._buffer, self._number, self._session = send, receive, b"", 0, None
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        """The result of a method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._buffer:
            part = os.read(self._receive, 2**16)
            assert part, "Chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.console.append(json.dumps(event["params"]))
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])
        self._last_event = event.get("method")
        return event

    def open(self, page: Path | str, width: int, scheme: str = "light") -> None:
        """Load a file, or a URL, in a window of `width` CSS pixels and wait until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        self.evaluate("document.fonts.ready.then(() => 1)")

    def evaluate(self, expression: str):
        """The value of a JavaScript expression, or of its promise."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as Enter, where the focus is."""
        codes = {"Enter": (13, "\r"), "Escape": (27, "")}
        code, text = codes[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, file: Path) -> None:
        """The whole page."""
        content = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(content))


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """A browser with a profile of its own, ended with the block."""
    to_browser, send = os.pipe()
    receive, from_browser = os.pipe()

    def pipes() -> None:  # the browser reads from 3 and writes to 4
        inherited = os.dup(to_browser), os.dup(from_browser)
        os.dup2(inherited[0], 3)
        os.dup2(inherited[1], 4)

    process = subprocess.Popen(
        [EXECUTABLE, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
         "--no-first-run", f"--user-data-dir={profile}", "about:blank"],
        preexec_fn=pipes, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Chromium(send, receive)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(send)
        os.close(receive)
