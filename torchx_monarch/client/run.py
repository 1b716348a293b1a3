# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""One run on a live allocation, as its user sees it: what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.result import RankOutput, RunResult
from torchx_monarch.exceptions import AllocationError, RefusedError, SPMDError, UnreachableError
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.system.line_output import LineOutput

Output = Literal["stream", "store", "none"] | Callable[[int, str, str], None]
"""What happens to the ranks' output: it goes to ``sys.stdout`` and ``sys.stderr``, or into ``RunResult.output``, or
nowhere; or a function is called with rank, ``stdout`` or ``stderr``, and text."""

_RECONNECT_FOR = 30.0
"""Seconds in which a broken connection is made again, before a run is given up: it may go on without us."""


class Records:
    """The records of a run, from its first; a connection that breaks is made again.

    Args:
        hosts: of the allocation.
        link: has been told ``run`` or ``follow``.
    """

    def __init__(self, hosts: Hosts, link: Connection) -> None:
        self._hosts = hosts
        self._link = link
        self._seen = 0
        self._closed = False
        self.run = 0

    @classmethod
    def of(cls, hosts: Hosts, greeting: dict[str, Any]) -> Records:
        """Begin or follow a run; hosts that are not there yet are waited for.

        Raises:
            AllocationError: the hosts have ended, or are not there in time.
            UnreachableError: the allocation cannot be reached.
            RefusedError: it refuses.
        """
        link = hosts.open(greeting, ready=greeting["type"] == "run")
        try:
            records = cls(hosts, link)
            records._accepted()
        except BaseException:
            link.close()
            raise
        return records

    def _accepted(self) -> None:
        try:
            answer = self._link.receive()
        except TimeoutError:
            answer = None
        if answer is None or answer.get("type") != "accepted":
            self._hosts.check_alive()
            raise UnreachableError(f"{self._hosts.target.address}: no answer")
        self.run = answer["run"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The records to the last one, ``result``.

        Raises:
            UnreachableError: the connection is broken and cannot be made again, or the hosts no longer know the run.
        """
        while not self._closed:
            record = self._link.receive(None)
            if record is None:
                if self._closed:
                    return
                self._again()
                continue
            self._seen += 1
            yield record
            if record["type"] == "result":
                return

    def _again(self) -> None:
        until, why = time.monotonic() + _RECONNECT_FOR, "the connection broke"
        while time.monotonic() < until and not self._closed:
            self._link.close()
            try:
                self._link = self._hosts.open({"type": "follow", "run": self.run}, wait=False)
                self._accepted()
                for _ in range(self._seen):
                    self._link.receive()
                return
            except (RefusedError, AllocationError) as error:
                why = str(error)
                break
            except (UnreachableError, TimeoutError) as error:
                why = str(error)
                time.sleep(0.5)
        raise UnreachableError(f"run {self.run} was lost from sight: {why}")

    def close(self) -> None:
        """Look no longer; the run goes on."""
        self._closed = True
        self._link.close()


class Collector:
    """Takes a run's records: shows or stores its output, and makes its result.

    Args:
        output: what happens to the ranks' output.
        on_phase: called with each line about the run itself; None for nothing.
    """

    def __init__(self, output: Output, on_phase: Callable[[str], None] | None = None) -> None:
        if not callable(output) and output not in ("stream", "store", "none"):
            raise ValueError(f"output={output!r}: use 'stream', 'store', 'none' or a function of rank, stream and text")
        self._output = output
        self._on_phase = on_phase
        self._exits: dict[int, RankExit] = {}
        self._attempts = 0
        self._texts: dict[int, dict[str, list[str]]] = {}
        self._lines = {"stdout": LineOutput(), "stderr": LineOutput()}

    def collect(self, records: Records) -> RunResult:
        """Take all of them; the result.

        Raises:
            UnreachableError: they ended before the result.
        """
        for record in records:
            kind = record["type"]
            if kind == "output":
                self._show(record["rank"], record["stream"], record["text"])
            elif kind == "phase" and self._on_phase is not None:
                self._on_phase(record["text"])
            elif kind == "exit":
                exit = RankExit.from_json(record["exit"])
                self._exits[exit.rank] = exit
            elif kind == "attempts":
                self._attempts = record["count"]
            elif kind == "result":
                texts = {
                    rank: RankOutput("".join(one["stdout"]), "".join(one["stderr"]))
                    for rank, one in sorted(self._texts.items())
                }
                return RunResult.of(record, self._exits, self._attempts, texts)
        raise UnreachableError(f"run {records.run} is looked at no longer")

    def _show(self, rank: int, stream: str, text: str) -> None:
        if callable(self._output):
            self._output(rank, stream, text)
        elif self._output == "store":
            self._texts.setdefault(rank, {"stdout": [], "stderr": []})[stream].append(text)
        elif self._output == "stream":
            placed = self._lines[stream].place(rank, text.encode(errors="surrogateescape"))
            show(stream, placed.decode(errors="surrogateescape"))


def interruptibly(hosts: Hosts, records: Records, collector: Collector, say: Callable[[str], None]) -> RunResult:
    """Take all records; Ctrl-C stops the run, another kills it, and only a third leaves it alone.

    Args:
        hosts: of the allocation.
        records: of the run.
        collector: takes them.
        say: called with a line for a person.

    Raises:
        KeyboardInterrupt: there was a Ctrl-C, and the run has ended, or it was the third.
    """
    interrupts = 0
    while True:
        try:
            result = collector.collect(records)
            break
        except KeyboardInterrupt:
            interrupts += 1
            if interrupts > 2:
                raise
            kill = interrupts == 2
            say(f"{'killing' if kill else 'stopping'} run {records.run}{'' if kill else '; Ctrl-C again kills it'}")
            with contextlib.suppress(RefusedError, AllocationError):
                hosts.ask({"type": "end-run", "run": records.run, "kill": kill}, wait=False)
    if interrupts:
        raise KeyboardInterrupt
    return result


def show(stream: str, text: str) -> None:
    """Print what a rank has printed, to ``sys.stdout`` or ``sys.stderr``, byte for byte where that is possible."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    buffer = getattr(file, "buffer", None)
    if buffer is not None:
        file.flush()
        buffer.write(text.encode(errors="surrogateescape"))
        buffer.flush()
    else:  # a notebook's
        file.write(text.encode(errors="surrogateescape").decode(errors="replace"))
        file.flush()


class RunHandle:
    """A run that goes on while its user does something else; like ``concurrent.futures.Future``.

    Attributes:
        run: its number on its allocation.

    Args:
        hosts: of the allocation.
        records: of the run.
        collector: takes them.
        check: whether a failure is an exception.
    """

    def __init__(self, hosts: Hosts, records: Records, collector: Collector, check: bool) -> None:
        self.run = records.run
        self._hosts = hosts
        self._records = records
        self._collector = collector
        self._check = check
        self._cancelled = False
        self._future: Future[RunResult] = Future()
        self._future.set_running_or_notify_cancel()
        threading.Thread(target=self._collect, name=f"run-{self.run}", daemon=True).start()

    def _collect(self) -> None:
        try:
            result = self._collector.collect(self._records)
            if self._check and result.exit_code != 0:
                self._future.set_exception(SPMDError(result))
            else:
                self._future.set_result(result)
        except BaseException as error:
            self._future.set_exception(error)
        finally:
            self._records.close()

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def running(self) -> bool:
        """Whether it has not."""
        return not self._future.done()

    def result(self, timeout: float | None = None) -> RunResult:
        """Wait for it.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds; it goes on.
            SPMDError: it has failed.
            UnreachableError: it was lost from sight; the message says whether its hosts have ended.
        """
        return self._future.result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for it; what ``result`` would raise.

        Raises:
            TimeoutError: it has not ended within ``timeout`` seconds.
        """
        return self._future.exception(timeout)

    def add_done_callback(self, function: Callable[[RunHandle], object]) -> None:
        """Call a function with this handle when it has ended."""
        self._future.add_done_callback(lambda _: function(self))

    def cancel(self, kill: bool = False) -> bool:
        """Stop the run, and keep the hosts; whether it had not ended yet. ``result`` then raises ``SPMDError``.

        Args:
            kill: do not wait for the ranks' grace.
        """
        if self._future.done():
            return False
        with contextlib.suppress(RefusedError, AllocationError):
            self._hosts.ask({"type": "end-run", "run": self.run, "kill": kill}, wait=False)
            self._cancelled = True
        return self._cancelled

    def cancelled(self) -> bool:
        """Whether it has ended because it was cancelled here."""
        return self._cancelled and self._future.done()

    def __repr__(self) -> str:
        return f"<run {self.run}: {'done' if self.done() else 'running'}>"
