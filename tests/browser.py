"""A headless Chromium that a test clicks in, through the DevTools protocol over a pipe: nothing listens anywhere."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"Enter": ("Enter", 13, "\r"), "ArrowLeft": ("ArrowLeft", 37, ""), "ArrowRight": ("ArrowRight", 39, "")}


class Browser:
    """One page at a time. `errors` are the page's uncaught exceptions and console errors, `requests` what it loaded."""

    def __init__(self, home: Path) -> None:
        assert CHROMIUM is not None
        command_read, self._out = os.pipe()
        self._in, answer_write = os.pipe()

        def three_and_four() -> None:  # where Chromium reads commands and writes answers
            a, b = os.dup(command_read), os.dup(answer_write)
            for source, target in ((a, 3), (b, 4)):
                os.dup2(source, target)

        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            f"--user-data-dir={home / 'profile'}",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *options, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=three_and_four,
            close_fds=False,
            env={**os.environ, "HOME": str(home)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_read)
        os.close(answer_write)
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; what happens meanwhile is noted."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self, seconds: float = 60) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], seconds)[0], "Chromium does not answer"
            self._buffer += os.read(self._in, 1 << 20)
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(event["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def open(self, path: Path, fragment: str = "") -> None:
        """Load a file and wait until its own script has shown all of it."""
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=path.as_uri() + fragment)
        self.wait("document.readyState === 'complete' && !document.getElementById('status')")

    def wait(self, condition: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.js(condition):
            status = self.js("document.getElementById('status')?.textContent")
            assert time.monotonic() < end, f"never came true: {condition}; status: {status}; errors: {self.errors}"

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.js(f"[...document.querySelectorAll({json.dumps(selector)})].map(n => n.textContent)")
        return found

    def text(self, selector: str) -> str:
        return self.texts(selector)[0]

    def click(self, selector: str) -> None:
        """A mouse click in the middle of an element, as a person does it."""
        where = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{where}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({where}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key, on whatever has the focus."""
        name, code, text = _KEYS.get(key, (key, ord(key.upper()[0]), key))
        common = {"key": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def put(self, selector: str, value: str) -> None:
        """Set a field and tell the page, as typing or choosing does."""
        where = f"document.querySelector({json.dumps(selector)})"
        events = "['input', 'change'].forEach(kind => n.dispatchEvent(new Event(kind, {bubbles: true})))"
        self.js(f"(n => {{ n.value = {json.dumps(value)}; {events}; }})({where})")

    def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        """As a person quits it, so that nothing of it still writes into its profile."""
        self._session = ""
        try:
            self.call("Browser.close")
            self._process.wait(timeout=20)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._in)
            os.close(self._out)
