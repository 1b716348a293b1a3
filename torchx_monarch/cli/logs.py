# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch logs``: the logs of all replicas of a job, merged in the order of time."""

from __future__ import annotations

import argparse
import heapq
import math
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, TypeVar

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.snapshot import AppSnapshot, TimedLines
from torchx_monarch.cli.arguments import add_handle, count, rank_list, since
from torchx_monarch.cli.jobs import opened_job
from torchx_monarch.cli.output import print_record
from torchx_monarch.client.hosts import say
from torchx_monarch.command.rank_command import rank_command
from torchx_monarch.insight.log_lines import LogLines, ShownLines, is_coloured, is_terminal
from torchx_monarch.insight.stacks import rank_ranges
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.schedulers.log_display import parser_of
from torchx_monarch.system.line_output import LineOutput, lines_of
from torchx_monarch.system.processes import raise_file_limit
from torchx_monarch.system.untrusted_text import one_line

Source = tuple[str, int]
"""The name of a role, and the id of one of its replicas."""

PATIENCE = 0.5
"""Seconds that lines of other logs wait for a log that is followed and silent."""

_HELD = 1 << 24
"""Characters that are read ahead, of all logs together."""

_PAUSE = 0.001
"""Seconds between two looks of a thread whether there is room for more."""

_STATES = 1000
"""Lines beside those that ``-n`` asks for that are read of each log: the states of progress bars become one line."""

K = TypeVar("K")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("--rank", type=rank_list, metavar="RANKS", help="only these global ranks: 0,3-5")
    parser.add_argument("--role", default="", help="only this role of the app")
    parser.add_argument("--since", type=since, metavar="WHEN", help="only lines since then: 90s, 10m, 2h, or a time")
    parser.add_argument("-n", "--tail", type=count, metavar="LINES", help="only the last lines of all that remain")
    parser.add_argument("--timestamps", action="store_true", help="begin each line with its time")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more lines until the job has ended")


def run(args: argparse.Namespace) -> None:
    """Print the lines; Ctrl-C ends this command, and not the job."""
    began = time.time()
    raise_file_limit()  # each replica's log stays open, and its index
    with opened_job(args.handle, args.role) as job:
        app, status = job.read_app()
        roles = [role.spec.name for role in app.roles if args.role in ("", role.spec.name)]
        if args.rank is not None:
            _check_ranks(app, roles, args)

        def open_logs(tail: int, follow: bool) -> dict[Source, Iterator[TimedLines]]:
            query = {"since": args.since, "tail": tail, "ranks": args.rank or (), "follow": follow}
            places = [(replica.role, replica.id) for replica in app.replicas if replica.role in roles]
            return {place: _readable(job.scheduler.apps.replica_log(app, *place, **query)) for place in places}

        counted = _Printer(app, timestamps=True, as_json=True)
        logs = open_logs(_tail(open_logs, counted, args), follow := args.follow and not status.state.is_terminal)
        printer = _Printer(app, args.timestamps, args.json)
        held: deque[tuple[Source, LogLines]] | None = None if args.tail is None else deque(maxlen=args.tail)
        """The last lines of those that were written before this command began; None once they are shown."""

        def show_held() -> None:
            nonlocal held
            lines, held = held or (), None
            for source, line in lines:
                printer.show(source, line)

        merged = LogMerge(logs, follow, on_idle=show_held, on_wait=sys.stdout.buffer.flush)
        for source, lines in printer.parsed(merged, args.rank):
            if held is not None and lines.time <= began:
                held.extend((source, line) for line in lines.split())
            else:
                show_held()
                printer.show(source, lines)
        show_held()
    if args.rank is not None and not printer.has_chosen:
        hint = ". Lines name their rank with torchrun's --tee 3, which monarch.spmd sets"
        say(f"no line of this log is of these ranks{'' if printer.has_named_ranks else hint}")


def _check_ranks(app: AppSnapshot, roles: Sequence[str], args: argparse.Namespace) -> None:
    """Check that a role can have the ranks in the arguments; only hosts know it of ``--nproc auto`` and of runs."""
    written = {role.name: role for role in app.app.roles} if app.app is not None else {}
    most = 0
    for spec in (role.spec for role in app.roles if role.spec.name in roles and role.spec.runs_hosts):
        command = rank_command(written[spec.name]) if spec.name in written else None
        if command is None or command.ranks_per_host is None or spec.workload is WorkloadKind.ALLOCATION:
            return
        most = max(most, (spec.replicas - spec.spares) * command.ranks_per_host)
    if 0 < most <= (last := max(ranks[-1] for ranks in args.rank)):
        raise UserError(f"{args.handle} has no rank {last}; it has {rank_ranges(range(most))}")


def _tail(
    open_logs: Callable[[int, bool], Mapping[Source, Iterator[TimedLines]]], printer: _Printer, args: argparse.Namespace
) -> int:
    """Return how many of the last lines of each log to read for ``-n``; 0 for all.

    Most backends do not know which lines are of the chosen ranks: more are read until there are enough of these.
    """
    tail = args.tail + _STATES if args.tail is not None else 0
    sizes = Counter[Source]()

    def counted(logs: Mapping[Source, Iterable[TimedLines]]) -> Iterator[tuple[Source, TimedLines]]:
        for source, lines in LogMerge(logs, follow=False):
            sizes[source] += len(lines_of(lines.text))
            yield source, lines

    while tail and args.rank is not None:
        sizes.clear()
        parsed = printer.parsed(counted(open_logs(tail, False)), args.rank)
        chosen = sum(len(lines_of(lines.text)) for _, lines in parsed)
        if chosen >= args.tail or max(sizes.values(), default=0) < tail:
            break
        tail *= 16
    return tail


def _readable(log: Iterable[TimedLines]) -> Iterator[TimedLines]:
    """Yield the lines of a log; say it if a log does not exist any more, and go on with those of the other replicas."""
    try:
        yield from log
    except UserError as error:
        say(one_line(str(error)))


class _Printer:
    """Parses lines and shows them; remembers whether one has named its rank, and whether one was chosen."""

    def __init__(self, app: AppSnapshot, timestamps: bool, as_json: bool) -> None:
        self.has_named_ranks = self.has_chosen = False
        self._timestamps = timestamps
        self._as_json = as_json
        self._several_roles = len(app.roles) > 1
        self._several = len(app.replicas) > 1
        self._is_terminal, self._is_coloured = is_terminal(sys.stdout), is_coloured(sys.stdout)
        self._output = LineOutput()
        self._unfinished: set[Source] = set()
        # On a terminal a progress bar moves, unless its states had a time each.
        live = self._is_terminal and not timestamps and not as_json
        parsers = {role.spec.name: parser_of(app, role.spec.name) for role in app.roles}
        self._shown = {
            (replica.role, replica.id): ShownLines(parsers[replica.role].parse, live) for replica in app.replicas
        }

    def parsed(
        self, merged: Iterable[tuple[Source, TimedLines]], ranks: Sequence[range] | None
    ) -> Iterator[tuple[Source, LogLines]]:
        """Parse lines; yield those of some ranks, or all if that is None."""
        fed = ((source, self._shown[source].feed(lines.text, lines.time)) for source, lines in merged)
        for source, found in chain(fed, ((source, shown.rest()) for source, shown in self._shown.items())):
            for lines in found:
                self.has_named_ranks = self.has_named_ranks or lines.rank is not None
                if ranks is None or any(lines.rank in rank_range for rank_range in ranks):
                    self.has_chosen = True
                    yield source, lines

    def show(self, source: Source, lines: LogLines) -> None:
        """Print lines: with their rank, and with their replica if they have no rank and there are several replicas."""
        role, replica = source
        if self._as_json:
            place = {"time": lines.time or None, "role": role, "replica": replica, "rank": lines.rank}
            for line in lines.split():
                print_record({**place, "text": line.text.rstrip("\n")})
            return
        shown = lines if self._timestamps else lines._replace(time=0.0)
        if source in self._unfinished:
            shown = LogLines(lines.text)
        elif self._several_roles or (self._several and lines.rank is None):
            shown = shown._replace(prefix=f"{one_line(role)}/{replica} {lines.prefix}")
        (self._unfinished.discard if lines.text.endswith("\n") else self._unfinished.add)(source)
        text = shown.on_terminal(self._is_coloured) if self._is_terminal else shown.plain()
        placed = self._output.place(source, text.encode(errors="surrogateescape"))
        sys.stdout.buffer.write(placed)


class LogMerge(Generic[K]):
    """Reads logs in threads and yields their lines in the order of time.

    The threads are daemons: they end with their logs, or with this process.

    Args:
        logs: the lines of each log, in order. Those without a time (0) come directly after the ones before them.
        follow: whether the logs are still written, so that their next lines are not waited for long.
        on_idle: called when all lines so far were yielded, and no more have come for a while.
        on_wait: called before lines are waited for.
    """

    def __init__(
        self,
        logs: Mapping[K, Iterable[TimedLines]],
        follow: bool,
        on_idle: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._keys = list(logs)
        self._follow = follow
        self._on_idle, self._on_wait = on_idle, on_wait
        # What the threads have read of which log, and at its end None, or why it cannot be read.
        self._come = queue.SimpleQueue[tuple[int, TimedLines | Exception | None]]()
        self._held: list[deque[TimedLines | Exception | None]] = [deque() for _ in self._keys]
        self._open = set(range(len(self._keys)))
        self._latest = [0.0] * len(self._keys)
        self._room = _HELD // max(1, len(self._keys))
        # How many characters of each log were read, and how many of them were yielded.
        self._read_sizes, self._yielded_sizes = [0] * len(self._keys), [0] * len(self._keys)
        self._heap: list[tuple[float, int]] = []
        # Open logs of which no line was held, with the time since when, in that order.
        self._silent = dict.fromkeys(self._open, time.monotonic())
        for index, log in enumerate(logs.values()):
            threading.Thread(target=self._read, args=(index, log), name="log", daemon=True).start()

    def _read(self, index: int, log: Iterable[TimedLines]) -> None:
        failure = None
        try:
            for lines in log:
                while self._read_sizes[index] - self._yielded_sizes[index] >= self._room:
                    time.sleep(_PAUSE)
                self._read_sizes[index] += len(lines.text)
                self._come.put((index, lines))
        except Exception as error:
            failure = error
        self._come.put((index, failure))

    def __iter__(self) -> Iterator[tuple[K, TimedLines]]:
        while self._heap or self._open:
            if self._silent and self._take(self._timeout()):
                continue
            if self._heap:
                yield self._pop()
            else:
                self._on_idle()

    def _timeout(self) -> float:
        """Return for how many seconds to wait for a silent log."""
        if not self._follow:
            return math.inf
        if not self._heap:
            return PATIENCE
        last = next(reversed(self._silent.values()))
        return max(0.0, last + PATIENCE - time.monotonic())

    def _take(self, timeout: float) -> bool:
        """Take what has come of any log; return False if nothing has in time."""
        if timeout and self._come.empty():
            self._on_wait()
        try:
            index, item = self._come.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            return False
        self._held[index].append(item)
        if index in self._silent:
            self._next(index)
        return True

    def _next(self, index: int) -> None:
        """Enter the next line of a log in the order of time, or its end."""
        self._silent.pop(index, None)
        if not (held := self._held[index]):
            self._silent[index] = time.monotonic()
        elif isinstance(first := held[0], Exception):
            raise first
        elif first is None:
            self._open.discard(index)
        else:
            self._latest[index] = max(self._latest[index], first.time)
            heapq.heappush(self._heap, (self._latest[index], index))

    def _pop(self) -> tuple[K, TimedLines]:
        latest, index = heapq.heappop(self._heap)
        lines = self._held[index].popleft()
        assert isinstance(lines, TimedLines)
        self._yielded_sizes[index] += len(lines.text)
        self._next(index)
        return self._keys[index], lines if lines.time == latest else lines._replace(time=latest)
