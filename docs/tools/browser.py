# SPDX-License-Identifier: BSD-3-Clause
"""Open a page in a headless Chromium: what it requests, what it complains of, and how it looks.

Chromium is driven by its DevTools protocol over a pair of pipes (``--remote-debugging-pipe``): JSON messages that end
with a NUL.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_TIMEOUT = 60.0
"""Seconds within which the browser must answer."""


def find() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """A running Chromium with one tab.

    Attributes:
        events: the events of the tab so far, the oldest first.

    Args:
        requests: file descriptor to which requests are written.
        answers: file descriptor from which answers and events are read.
    """

    def __init__(self, requests: int, answers: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._requests, self._answers = requests, answers
        self._buffer, self._number, self._session = b"", 0, ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, page: Path | str, width: int, height: int, dark: bool = False) -> None:
        """Open a file or an address and wait until it has loaded.

        Args:
            page: the file, or the address.
            width: width of the window in CSS pixels.
            height: its height.
            dark: whether its user prefers dark colours.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self._ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        until = time.monotonic() + _TIMEOUT
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive(until)

    @property
    def requests(self) -> list[str]:
        """The addresses that the page has requested."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [str(message["request"]["url"]) for message in sent]

    @property
    def complaints(self) -> list[Mapping[str, Any]]:
        """The entries of its console, and its exceptions."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event["params"] for event in self.events if event["method"] in kinds]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """Return the window as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"])

    def _ask(self, method: str, **params: object) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + _TIMEOUT
        while True:
            answer = self._receive(until)
            if answer is not None and answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, until: float) -> dict[str, Any] | None:
        """Return the next answer; note an event, and return None."""
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "id" in message:
            return message
        self.events.append(message)
        return None


@contextlib.contextmanager
def started(path: str) -> Iterator[Browser]:
    """Start a Chromium with a profile of its own; end it afterwards.

    Args:
        path: its path.
    """
    theirs, requests = os.pipe()
    answers, their_answers = os.pipe()
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        # It reads requests from descriptor 3 and writes answers to 4.
        start = f'exec "$@" 3<&{theirs} 4>&{their_answers}'
        process = subprocess.Popen(
            ["bash", "-c", start, "bash", path, *options, "--disable-dev-shm-usage", "--remote-debugging-pipe"],
            pass_fds=(theirs, their_answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(their_answers)
        try:
            yield Browser(requests, answers)
        finally:
            os.close(requests)  # it ends then
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            os.close(answers)
