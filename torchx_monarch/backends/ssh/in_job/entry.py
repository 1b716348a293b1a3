# SPDX-License-Identifier: BSD-3-Clause
"""Carry out a client's orders on a machine: one JSON object a line on stdin, an answer a line on stdout.

The entry ends when its connection does. What it has started of an app that the client has not confirmed then goes as
well, so a submission that is killed leaves nothing.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from torchx_monarch.backends.core.timed_line import TimedLine
from torchx_monarch.backends.ssh.in_job import replicas
from torchx_monarch.backends.ssh.in_job.replicas import Code
from torchx_monarch.backends.ssh.in_job.wire import READY
from torchx_monarch.supervisor import log_reader


class OrderServer:
    """The orders, each a method of the same name."""

    def __init__(self) -> None:
        self._unconfirmed: list[str] = []
        self._code = Code()

    def hello(self) -> Any:
        """Describe the machine."""
        return {"hostname": os.uname().nodename, "address": address(), "python": sys.executable}

    def expect_code(self, tree: str) -> Any:
        """Prepare to receive a workspace; return which contents are not here."""
        return self._code.expect(base64.b64decode(tree))

    def take_code(self, piece: str) -> Any:
        """Receive a piece of the archive of these contents."""
        self._code.take(base64.b64decode(piece))

    def start(
        self,
        names: list[str],
        requests: list[Any],
        places: list[Any],
        gpus: list[int],
        workspaces: list[str],
        app: Any,
    ) -> Any:
        """Start replicas; ``confirm`` keeps them."""
        for name, request, place, count, workspace in zip(names, requests, places, gpus, workspaces, strict=True):
            self._unconfirmed.append(name)
            replicas.start(name, request, place, count, app, self._code, workspace)

    def confirm(self) -> Any:
        """Keep what was started. The client may keep the connection, so what only it needs goes now."""
        self._unconfirmed.clear()
        self._code.close()

    def give_up(self) -> Any:
        """Remove what was started and not confirmed."""
        for name in self._unconfirmed:
            replicas.remove(name)
        self._unconfirmed.clear()
        self._code.close()

    def read(self, names: list[str] | None = None, brief: bool = True) -> Any:
        """Return the places and records of replicas; of all without names."""
        chosen = replicas.names() if names is None else names
        return {"hostname": os.uname().nodename, "replicas": [replicas.read(name, brief) for name in chosen]}

    def stop(self, names: list[str], ending: Any, grace: float | None) -> Any:
        """Begin to end replicas."""
        for name in names:
            replicas.stop(name, ending, grace)

    def remove(self, names: list[str]) -> Any:
        """End replicas that still run, and remove what is stored of them."""
        for name in names:
            replicas.remove(name)

    def log(self, name: str, role: str, replica: int, stream: str, **query: Any) -> Iterator[Any]:
        """Yield lines of a replica's log in batches; with ``follow`` until it has ended, and so has the app."""
        follow = bool(query.pop("follow"))
        over = threading.Event()
        if follow:
            threading.Thread(target=_wait_for_word, args=[over], daemon=True).start()
        since, until = (_time(query[key]) for key in ("since", "until"))
        paths = replicas.paths_of(name)
        batch: list[TimedLine] = []
        for line in log_reader.lines(
            paths.replica_logs(role, replica),
            stream,
            since=since,
            until=until,
            tail=query["tail"],
            start=query["start"],
            ended=over.is_set,
            follow=follow,
            below=paths.trusted,
        ):
            batch.append(line)
            if follow or len(batch) >= 500:
                yield batch
                batch = []
        yield batch


def _time(value: float | None) -> datetime | None:
    return None if value is None else datetime.fromtimestamp(value, timezone.utc)


def _wait_for_word(over: threading.Event) -> None:
    """Wait for the client's word that the app has ended; exit with the connection."""
    if not sys.stdin.buffer.readline():
        os._exit(0)
    over.set()
    if not sys.stdin.buffer.readline():
        os._exit(0)


def address() -> str:
    """Return the address by which the client has reached this machine; its name where it is the client's own."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    own = words[2] if len(words) == 4 else ""
    return own if own and not own.startswith("127.") and own != "::1" else os.uname().nodename


def main() -> None:
    """Answer until the end of the input."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What is started must not write to the connection.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    entry = OrderServer()
    try:
        print(READY, file=out, flush=True)
        for line in sys.stdin.buffer:
            order = json.loads(line)
            try:
                answer = getattr(entry, order.pop("order"))(**order)
                if isinstance(answer, Iterator):
                    for part in answer:
                        print(json.dumps({"answer": part}), file=out, flush=True)
                    answer = None
                text = json.dumps({"answer": answer})
            except Exception as error:
                text = json.dumps({"refused": " ".join(str(error).split()) or repr(error)})
            print(text, file=out, flush=True)
    except OSError:  # the client is gone
        pass
    finally:
        entry.give_up()
        os._exit(0)
