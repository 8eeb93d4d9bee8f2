"""A headless Chromium for tests of pages, driven over a pipe by the Chrome DevTools Protocol."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
]
# The browser reads commands from descriptor 3 and writes to 4.
START = 'exec "$0" "$@" 3<&0 4>&1 </dev/null >/dev/null 2>&1'


class Browser:
    """One tab. Whatever it says on its console, throws, or asks the network for is kept.

    The test is skipped where there is no browser. After ``deadline`` seconds the browser is killed.
    """

    def __init__(self, deadline: float = 120.0) -> None:
        names = ("chromium", "chromium-browser", "google-chrome", "chrome")
        path = next(filter(None, map(shutil.which, names)), None)
        if path is None:
            pytest.skip("no Chromium or Chrome on this machine")
        self.console: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        arguments = [path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            ["sh", "-c", START, *arguments],
            stdin=pipe,
            stdout=pipe,
            bufsize=0,
            start_new_session=True,
        )
        self._timer = threading.Timer(deadline, os.killpg, (self._process.pid, signal.SIGKILL))
        self._timer.start()
        self._buffer = b""
        self._next = 0
        self._session = ""

    def __enter__(self) -> "Browser":
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._profile.cleanup()

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One protocol command; events that arrive meanwhile are noted."""
        self._next += 1
        message: dict[str, object] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        while (reply := self._message()).get("id") != self._next:
            self._note(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        return dict(reply["result"])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = self._process.stdout.read(1 << 20)
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        first, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(first))

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(
                " ".join(str(argument.get("value", argument)) for argument in details["args"])
            )
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(details["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(f"{details['entry']['level']}: {details['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    def open(self, path: Path) -> None:
        """Load a file and wait until it is complete."""
        self.call("Page.navigate", url=path.as_uri())
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        while not self.value(expression):
            time.sleep(0.05)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        keys = {"key": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **keys)
        self.call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def size(self, width: int, height: int) -> None:
        """Set the window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """Pretend to be in light or dark mode, on screen or on paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)
