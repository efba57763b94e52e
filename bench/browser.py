"""Headless Chromium, driven through its DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # it has none for root, and loads nothing but our page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-pipe",
)


class BrowserError(AssertionError):
    """What the page or the protocol said."""


class Page:
    """One tab. `log` has what its console printed and what its content policy refused."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._numbers = to, back, itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.log: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._hear(answer)

    def look(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """As large as that, in CSS pixels, and in that colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression. Raises `BrowserError` for what it throws."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise BrowserError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def until(self, expression: str, limit_s: float = 30.0) -> Any:
        """Its value, once that is true."""
        deadline_s = time.monotonic() + limit_s
        while not (value := self.value(expression)):
            if time.monotonic() > deadline_s:
                raise BrowserError(f"never: {expression}; {self.log}")
            time.sleep(0.02)
        return value

    def press(self, key: str, code: int, *, modifiers: int = 0) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
            )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """`whole`: beyond the window, too."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._back, 1 << 16)
            if not more:
                raise BrowserError("the browser is gone")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _hear(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.log.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.log.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


@contextmanager
def browsing() -> Iterator[Page]:
    """A browser of its own, with nothing remembered."""
    assert CHROMIUM is not None
    (read_to, to), (back, write_back) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(prefix="cbatch-browser-") as profile:
        # Chromium reads commands from descriptor 3 and answers on 4.
        command = ["bash", "-c", f'exec "$@" 3<&{read_to} 4>&{write_back}', "bash", CHROMIUM]
        command += [*_FLAGS, f"--user-data-dir={profile}"]
        process = subprocess.Popen(
            command,
            pass_fds=(read_to, write_back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_to)
        os.close(write_back)
        try:
            yield Page(to, back)
        finally:
            os.close(to)  # with that it ends
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(back)
