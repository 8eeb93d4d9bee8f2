"""A headless Chromium for tests of pages, driven over a pipe by the Chrome DevTools Protocol."""

import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe",
]  # fmt: skip


def executable() -> str:
    """The browser's path; skips the test where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium or Chrome on this machine")


class Browser:
    """One tab. Whatever it says on its console, throws, or asks the network for is kept."""

    def __init__(self, deadline: float = 120.0) -> None:
        path = executable()
        self.console: list[str] = []
        self.requests: list[str] = []
        self._ends = time.monotonic() + deadline
        self._profile = tempfile.mkdtemp(prefix="browser-")
        self._buffer = b""
        self._next = 0
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Away from 3 and 4, which the browser reads and writes, before they are put there.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)
        actions = [
            (os.POSIX_SPAWN_DUP2, high[0], 3),
            (os.POSIX_SPAWN_DUP2, high[1], 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        arguments = [path, *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._pid = os.posix_spawn(path, arguments, dict(os.environ), file_actions=actions, setpgroup=0)
        for end in high:
            os.close(end)
        self._session = ""

    def __enter__(self) -> "Browser":
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        """One protocol command; events that arrive meanwhile are noted."""
        self._next += 1
        message: dict[str, object] = {"id": self._next, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            reply = self._message()
            if reply.get("id") == self._next:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return dict(reply["result"])
            self._note(reply)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, self._ends - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError("the browser does not answer")
            self._buffer += chunk
        first, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(first))

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(one.get("value", one)) for one in details["args"]))
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
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        while not self.value(expression):
            if time.monotonic() > self._ends:
                raise TimeoutError(f"never became true: {expression}")
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
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def media(self, scheme: str = "light", kind: str = "screen") -> None:
        """Pretend to be in light or dark mode, on screen or on paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)
