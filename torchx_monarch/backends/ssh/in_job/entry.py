# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a client's orders on a machine: one JSON object a line on stdin, an answer a line on stdout.

The entry ends when its connection does. What it has started of an app that the client has not confirmed then goes as
well, so a submission that is killed leaves nothing.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from torchx_monarch.backends.core.snapshot import Outcome
from torchx_monarch.backends.core.state_files import DamagedFileError
from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.ssh.in_job import replicas
from torchx_monarch.backends.ssh.in_job.wire import READY
from torchx_monarch.model import codec
from torchx_monarch.supervisor import log_reader

_MAX_LINES = 500
"""Lines of a log in one answer."""


class OrderServer:
    """The orders, each a method of the same name."""

    def __init__(self) -> None:
        self._unconfirmed: list[str] = []
        self._code = replicas.Code()

    def hello(self) -> Any:
        """Describe the machine."""
        return {"hostname": os.uname().nodename, "address": replicas.address(), "python": sys.executable}

    def expect_code(self, tree: str) -> Any:
        """Prepare to receive a workspace; return which contents are not here."""
        return self._code.expect(base64.b64decode(tree))

    def take_code(self, piece: str) -> Any:
        """Receive a piece of the archive of these contents."""
        self._code.take(base64.b64decode(piece))

    def start(self, replica: dict[str, Any], app: Any) -> Any:
        """Start a replica; ``confirm`` keeps it."""
        self._unconfirmed.append(replica["name"])
        replicas.start(**replica, app=app, code=self._code)

    def confirm(self) -> Any:
        """Keep what was started. The client may keep the connection, so what only it needs goes now."""
        self._unconfirmed.clear()
        self._code.cancel_transfer()

    def give_up(self) -> Any:
        """Remove what was started and not confirmed."""
        self.remove(self._unconfirmed)
        self.confirm()

    def read(self, names: list[str], brief: bool) -> Any:
        """Return what replicas exist of some."""
        return [asdict(found) for name in names if (found := replicas.find(name, brief))]

    def read_all(self) -> Any:
        """Return all replicas on this machine, and which files are damaged."""
        found, damaged = [], []
        for name in replicas.names():
            try:
                found += self.read([name], True)
            except DamagedFileError as error:
                damaged.append(str(error))
        return {"replicas": found, "damaged": damaged}

    def stop(self, names: list[str], outcome: Any, grace: float | None) -> Any:
        """Begin to end replicas."""
        for name in names:
            replicas.stop(name, codec.decode(Outcome, outcome), grace)

    def remove(self, names: list[str]) -> Any:
        """End replicas that still run, and remove what is stored of them."""
        for name in names:
            replicas.remove(name)

    def log(self, name: str, role: str, replica: int, stream: str, start: int, wait: float, **query: Any) -> Any:
        """Return the next lines of a replica's log, and whether these are all.

        Args:
            start: where they begin, the ``end`` of a line that was read before; 0 for the first ones of the query.
            wait: seconds to wait for a line; more may then come.
        """
        paths = replicas.paths_of(name)
        batch: list[TimedLine] = []
        until = time.monotonic() + wait

        def pause() -> bool:
            if batch or time.monotonic() > until:
                raise _PauseError
            return False

        lines = log_reader.lines(
            paths.replica_logs(role, replica),
            stream,
            since=_time(query["since"]),
            until=_time(query["until"]),
            tail=query["tail"],
            start=start,
            ended=pause,
            follow=wait > 0,
            below=paths.trusted,
        )
        try:
            for line in itertools.islice(lines, _MAX_LINES):
                batch.append(line)
        except _PauseError:
            return batch, False
        return batch, len(batch) < _MAX_LINES


class _PauseError(Exception):
    """Raised to leave a log that may have more lines later."""


def _time(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, timezone.utc)


def main() -> None:
    """Answer until the end of the input."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What is started must not write to the connection.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = OrderServer()
    try:
        print(READY, file=out, flush=True)
        for line in sys.stdin.buffer:
            order = json.loads(line)
            try:
                text = json.dumps({"answer": getattr(server, order.pop("order"))(**order)})
            except Exception as error:
                text = json.dumps({"refused": " ".join(str(error).split()) or repr(error)})
            print(text, file=out, flush=True)
    except OSError:  # the client is gone
        pass
    finally:
        server.give_up()
        os._exit(0)
