"""A headless Chromium, driven over its DevTools pipe; tests skip where there is none."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
_SECONDS = 60.0


class Chromium:
    """One page. As a context manager it ends the browser.

    Args:
        folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path):
        read_commands, self.commands = os.pipe()
        self.replies, write_replies = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                 "--remote-debugging-pipe",
                 "--no-first-run", f"--user-data-dir={folder}", "about:blank"]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_replies}', "bash", str(CHROMIUM), *flags],
            pass_fds=(read_commands, write_replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands), os.close(write_replies)
        self.buffer, self.count, self.session, self.events = b"", 0, None, list[dict[str, Any]]()
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.commands), os.close(self.replies)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A DevTools command and its result; events that arrive meanwhile are kept in `events`."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        os.write(
            self.commands, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        while True:
            found = self._next()
            if found.get("id") == self.count:
                assert "error" not in found, found
                return found["result"]
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self.buffer:
            assert select.select([self.replies], [], [], max(0, until - time.monotonic()))[0], "Chromium does not reply"
            self.buffer += os.read(self.replies, 2**16)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def size(self, width: int, height: int) -> None:
        """Show the page in a window of this size."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, address: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression holds."""
        until = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def problems(self) -> list[str]:
        """Exceptions of scripts, and errors and warnings of the console so far."""
        found = [str(event["params"]) for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        return found + [str(entry) for entry in entries if entry["level"] in ("error", "warning")]

    def requested(self) -> list[str]:
        """The addresses that the page has requested."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [parameters["request"]["url"] for parameters in sent]

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
