# SPDX-License-Identifier: BSD-3-Clause
"""Receive the output and the result of a run on a live allocation."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TextIO

from torchx_monarch.client.connection import Connection
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.result import RankOutput, RunResult, rank_result
from torchx_monarch.client.run_options import Output, check_output
from torchx_monarch.exceptions import AllocationError, RefusedError, SPMDError, UnreachableError
from torchx_monarch.insight import events
from torchx_monarch.insight.log_lines import LogLines, ShownLines, is_coloured, is_terminal
from torchx_monarch.model.codec import decode
from torchx_monarch.model.job_result import RankExit
from torchx_monarch.system.line_output import LineOutput, lines_of
from torchx_monarch.system.termination import closed_terminal_is_null, signal_of, termination

_RECONNECT_FOR = 120.0
"""Seconds for which a broken connection is retried. After that the client gives up; the run itself continues."""

_SIGNALS_INTERVAL_S = 0.5
"""Seconds after which a main thread that waits checks for signals. The kernel can deliver a signal to another thread,
such as the second of two that come at once, and that does not interrupt the wait for a lock."""


class Records:
    """Iterate over the records of a run, from the first one; reconnect if the connection breaks.

    The greeting of the connection was ``run`` or ``follow``. With ``wait`` False, there are only the records so far.
    """

    def __init__(self, hosts: Hosts, link: Connection, wait: bool) -> None:
        self._hosts = hosts
        self._link = link
        self._wait = wait
        self._seen = 0
        self._closed = False
        self.run = 0

    @classmethod
    def request(cls, hosts: Hosts, greeting: dict[str, Any]) -> Records:
        """Start or follow a run, after waiting for hosts that have not started yet."""
        link = hosts.open(greeting)
        try:
            records = cls(hosts, link, greeting.get("wait") is not False)
            if before := records._accepted():
                say(f"run {records.run} waits for its turn on {hosts.handle}; runs before it: {before}")
        except BaseException:
            link.close()
            raise
        return records

    def _accepted(self) -> int:
        """Read the answer to the greeting; return how many runs are before this one."""
        try:
            answer = self._link.receive()
        except TimeoutError:
            answer = None
        if answer is None or answer.get("type") != "accepted":
            self._hosts.check_alive()
            raise UnreachableError(f"{self._hosts.target.address}: no answer")
        self.run = answer["run"]
        return int(answer["before"])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the records up to the last one, ``result``. Stop early if ``close`` is called.

        Raises:
            UnreachableError: the connection broke and could not be restored, or the hosts no longer know the run.
        """
        while not self._closed:
            record = self._link.receive(None)
            if record is None:
                if self._closed or not self._wait:
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
        raise UnreachableError(f"run {self.run} lost its connection: {why}")

    def close(self) -> None:
        """Stop receiving records; the run continues."""
        self._closed = True
        self._link.close()


class Collector:
    """Process the records of a run: show or store its output, and build its result.

    Attributes:
        values: what ranks have written for a function that they ran (``torchx_monarch.function``), by rank.

    Args:
        takes_values: whether to collect these; other clients that follow the run have no use for them.
        events_path: that of the events of the job whose process this is, which gets those of the run. Its log has the
            lines of ranks as those of hosts have them. None for other processes.
    """

    def __init__(
        self,
        output: Output,
        on_phase: Callable[[str], None] | None = None,
        takes_values: bool = False,
        events_path: str | None = None,
    ) -> None:
        check_output(output)
        self._output = output
        self._on_phase = on_phase
        self._events_path = events_path
        self._takes_values = takes_values
        self._exits: dict[int, RankExit] = {}
        self._attempts = 0
        self.values: dict[int, bytearray] = {}
        self._texts: dict[int, dict[str, list[str]]] = {}
        streams, is_log = {"stdout": sys.stdout, "stderr": sys.stderr}, events_path is not None
        self._streams = {name: _RankLines(stream, is_log) for name, stream in streams.items()}

    def collect(self, records: Records) -> RunResult:
        """Process all records, and return the result of the run; raise UnreachableError if they lack it."""
        for record in records:
            kind = record["type"]
            if kind == "output":
                self._show(record)
            elif kind == "value" and self._takes_values:
                self.values.setdefault(record["rank"], bytearray()).extend(base64.b64decode(record["part"]))
            elif kind == "phase" and self._on_phase is not None:
                self._on_phase(record["text"])
            elif kind == "event" and self._events_path is not None:
                message, seconds = record["message"], record["seconds"]
                events.append(self._events_path, record["kind"], message, seconds=seconds, **record["fields"])
            elif kind == "exit":
                exit = decode(RankExit, record["exit"], "the exit")
                self._exits[exit.rank] = exit
            elif kind == "attempts":
                self._attempts = record["count"]
            elif kind == "result":
                for name, lines in self._streams.items():
                    if rest := lines.rest():
                        show(name, rest)
                texts = {
                    rank: RankOutput("".join(streams["stdout"]), "".join(streams["stderr"]))
                    for rank, streams in sorted(self._texts.items())
                }
                ranks = {rank: rank_result(exit) for rank, exit in sorted(self._exits.items())}
                result = decode(RunResult, record, "the result")
                return dataclasses.replace(result, ranks=ranks, attempts=self._attempts, output=texts)
        raise UnreachableError(f"run {records.run} is not followed any more")

    def _show(self, record: dict[str, Any]) -> None:
        rank, stream, text = record["rank"], record["stream"], record["text"]
        if callable(self._output):
            self._output(rank, stream, text)
        elif self._output == "store":
            self._texts.setdefault(rank, {"stdout": [], "stderr": []})[stream].append(text)
        elif self._output == "stream":
            show(stream, self._streams[stream].place(rank, text, len(record.get("prefix", ""))))


class _RankLines:
    """Decide how the output of the ranks looks on one stream.

    torchrun's prefix is shown as ``[3] ``, in the log of a job as it is. On a terminal all lines have that prefix, also
    those of ranks without ``--tee`` and those with a prefix of the user's; in a file or a pipe these lines are as the
    host has sent them, and of progress bars the last states. The cell of a notebook shows how a bar moves, as a
    terminal does.
    """

    def __init__(self, stream: TextIO | None, is_log: bool) -> None:
        self._is_log = is_log
        self._is_terminal = is_terminal(stream)
        self._is_coloured = is_coloured(stream)
        self._has_last_states = isinstance(stream, io.TextIOWrapper) and not self._is_terminal
        self._placed = LineOutput()
        self._lines: dict[int, ShownLines] = {}

    def place(self, rank: int, text: str, prefix: int) -> str:
        """Return what to write for lines, or a piece of a line, of a rank; each has a prefix of a length."""
        mark = f"[{rank}] " if prefix or self._is_terminal else ""

        def parse(piece: str) -> list[LogLines]:
            return [LogLines(piece[prefix:], piece[:prefix] if self._is_log else mark, rank)]

        lines = self._lines.setdefault(rank, ShownLines(parse, live=not self._has_last_states))
        shown = "".join(self._line(found) for piece in lines_of(text) for found in lines.feed(piece))
        if self._has_last_states:
            return shown
        lead = self._line(LogLines("", mark, rank)) if self._is_terminal else ""
        placed = self._placed.place(rank, shown.encode(errors="surrogateescape"), lead.encode())
        return placed.decode(errors="surrogateescape")

    def rest(self) -> str:
        """Return what to write at the end of the run for bars, and lines that have not ended."""
        return "".join(found.plain() for lines in self._lines.values() for found in lines.rest())

    def _line(self, line: LogLines) -> str:
        return line.on_terminal(self._is_coloured) if self._is_terminal else line.plain()


def show(stream: str, text: str) -> None:
    """Write a rank's output to ``sys.stdout`` or ``sys.stderr``, byte for byte if the stream has a buffer."""
    file = sys.stdout if stream == "stdout" else sys.stderr
    buffer = getattr(file, "buffer", None)
    with closed_terminal_is_null():
        if buffer is not None:
            file.flush()
            buffer.write(text.encode(errors="surrogateescape"))
            buffer.flush()
        else:  # the streams of a notebook take text only
            file.write(text.encode(errors="surrogateescape").decode(errors="replace"))
            file.flush()


class RunHandle(futures.Future[RunResult]):
    """A run that executes in the background, as a future of its result.

    ``SPMDJob.run_spmd_async`` and ``SPMDJob.follow`` return it. A daemon thread receives the output. It is also done
    when the connection to the run was lost, but the run continues then.

    ``result`` and ``exception`` raise ``concurrent.futures.TimeoutError`` if the run has not ended in time; it
    continues. The exception of a run is ``SPMDError`` if it failed or was stopped and ``check`` was True, or
    ``UnreachableError`` if the connection was lost; its message says whether the hosts have ended.

    Attributes:
        run: number of the run on its allocation.

    Args:
        check: whether ``result`` raises ``SPMDError`` if the run failed.
    """

    def __init__(self, hosts: Hosts, records: Records, collector: Collector, check: bool) -> None:
        super().__init__()
        self.run = records.run
        self._hosts = hosts
        self._records = records
        self._collector = collector
        self._check = check
        self._cancelled = False
        self.set_running_or_notify_cancel()
        threading.Thread(target=self._collect, name=f"run-{self.run}", daemon=True).start()

    def _collect(self) -> None:
        try:
            result = self._collector.collect(self._records)
            if self._check and result.exit_code != 0:
                self.set_exception(SPMDError(result))
            else:
                self.set_result(result)
        except BaseException as error:
            self.set_exception(error)
        finally:
            self._records.close()

    def cancel(self, kill: bool = False) -> bool:
        """Stop the run, and keep the hosts. Does not wait for the end of the run; ``result`` then raises ``SPMDError``.

        Args:
            kill: whether to send the ranks SIGKILL immediately, instead of SIGTERM and SIGKILL after the grace period.

        Returns:
            Whether the run was asked to stop; False if it has ended already.
        """
        if self.done() and isinstance(self.exception(), (SPMDError, type(None))):
            return False  # any other exception, as of a terminal that is closed, ends the reading only
        with contextlib.suppress(RefusedError, AllocationError):
            self._hosts.ask({"type": "end-run", "run": self.run, "kill": kill}, wait=False)
            self._cancelled = True
        return self._cancelled

    def cancelled(self) -> bool:
        """Whether the run has ended after ``cancel`` was called on this handle."""
        return self._cancelled and self.done()

    def __repr__(self) -> str:
        return f"<run {self.run}: {'done' if self.done() else 'running'}>"


def collect_with_interrupts(hosts: Hosts, records: Records, collector: Collector) -> RunResult:
    """Wait for the result of a run. The first Ctrl-C stops the run, the second kills it, the third leaves it alone.

    A signal that the caller held back or has a handler for (``termination``) stops the run as the first Ctrl-C does.
    Another thread processes the records: Ctrl-C in the middle of one would lose its output.

    Raises:
        KeyboardInterrupt: the run has ended after a Ctrl-C or a signal, or the user pressed Ctrl-C a third time. It is
            the first one (``signal_of``).
    """
    run, interrupts = RunHandle(hosts, records, collector, check=False), list[KeyboardInterrupt]()
    while True:
        # The request is inside the block: the next Ctrl-C may come while it is announced or sent.
        try:
            termination.release()
            if interrupts:
                number, kill = signal_of(interrupts[-1]), len(interrupts) == 2
                name = "" if number == signal.SIGINT else f" ({signal.Signals(number).name})"
                hint = "" if kill else "; Ctrl-C again kills it"
                with contextlib.suppress(BrokenPipeError):  # Ctrl-C also ends a `tee` that reads this
                    say(f"{'killing' if kill else 'stopping'} run {run.run}{name}{hint}")
                run.cancel(kill)
            while not run.done():
                futures.wait([run], _SIGNALS_INTERVAL_S)
            result = run.result()
            break
        except KeyboardInterrupt as error:
            interrupts.append(error.with_traceback(None))
            if len(interrupts) > 2:
                break
    if interrupts:
        raise interrupts[0]
    return result
