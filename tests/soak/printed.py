# SPDX-License-Identifier: BSD-3-Clause
"""Whether the logs of a job hold what its ranks have printed: each line once, whole, and in the order of its rank."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.soak.program import line
from torchx_monarch.insight import events

_LINE = re.compile(r"\b(out|err) (\d+) (\d+) (\d+)\b")


class Stream(NamedTuple):
    """What one rank prints to stdout (``out``) or stderr (``err``)."""

    name: str
    rank: int
    pid: int


class Log(NamedTuple):
    """The text of one log.

    Attributes:
        name: for messages.
        replica: whose ranks' lines stand there.
        streams: names of the streams whose lines stand there.
    """

    name: str
    replica: int
    streams: tuple[str, ...]
    text: str


def host_starts(path: Path, killed: Collection[int] = (), unwatched: bool = False) -> tuple[dict[int, int], set[int]]:
    """Which hosts an app's events tell of.

    Args:
        path: of the app's events.
        killed: pids of processes that were killed.
        unwatched: whether the supervisor was killed, so that no event tells of the hosts that were killed with it.

    Returns:
        The replica of each host's pid, and the pids of those that were killed: what their ranks have printed and they
        have not yet read is gone with them.
    """
    replicas: dict[int, int] = {}
    lost, running = set(killed), dict[int, int]()
    for event in events.read(path)[0]:
        if event["kind"] == "replica_started":
            running[event["replica"]] = event["pid"]
            replicas[event["pid"]] = event["replica"]
        elif event["kind"] == "replica_exited" and event["replica"] in running:
            pid = running.pop(event["replica"])
            lost.update([pid] * (event["exit_code"] == -signal.SIGKILL))
    return replicas, lost | set(running.values() if unwatched else ())


def check(folder: Path, replicas: Mapping[int, int], killed: Collection[int], logs: Iterable[Log]) -> list[str]:
    """What is wrong with the logs of an ended app, given its proofs' folder and its hosts (see ``host_starts``)."""
    host_of = {proof["pid"]: proof["host"] for proof in proofs(folder, "begin")}
    proven = {stream: count for stream, count in _proven(folder).items() if host_of[stream.pid] not in killed}
    wrong = []
    for log in logs:
        numbers, broken = _found(log.text)
        place = f"{log.name} of replica {log.replica}"
        wrong += [f"{place}: {text}" for text in _disorder(numbers)]

        def belongs(stream: Stream, log: Log = log) -> bool:
            return log.replica == replicas.get(host_of[stream.pid]) and stream.name in log.streams

        wrong += [f"{place}: lines of {stream} do not belong there" for stream in numbers if not belongs(stream)]
        for stream, count in proven.items():
            if belongs(stream):
                if (have := len(numbers.get(stream, ()))) < count:
                    wrong.append(f"{place}: {have} of {count} lines of {stream}")
                wrong += [f"{place}: broken: {text}" for number, text in broken.get(stream, ()) if number < count]
    return wrong


def _disorder(numbers: Mapping[Stream, list[int]]) -> list[str]:
    return [
        f"lines of {stream} are not in order, once each: {found}"
        for stream, found in numbers.items()
        if found != list(range(len(found)))
    ]


def proofs(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The proofs of one kind (``begin`` or ``end``) that ranks have left."""
    return [json.loads(path.read_text()) for path in folder.glob(f"{kind}-*[0-9]")]


def _proven(folder: Path) -> dict[Stream, int]:
    """How many lines each rank has proved to have printed."""
    found = {}
    for path in (*folder.glob("out-*"), *folder.glob("err-*")):
        name, rank, pid = path.name.split("-")
        found[Stream(name, int(rank), int(pid))] = path.read_bytes().count(b"\n")
    return found


def _found(text: str) -> tuple[dict[Stream, list[int]], dict[Stream, list[tuple[int, str]]]]:
    """The numbers of the whole lines in a log, and the broken ones with their beginnings."""
    numbers: dict[Stream, list[int]] = defaultdict(list)
    broken: dict[Stream, list[tuple[int, str]]] = defaultdict(list)
    for text_line in text.splitlines():
        if text_line.startswith("[monarch] "):  # it names the last line of a rank that has failed
            continue
        if match := _LINE.search(text_line):
            stream, number = Stream(match[1], int(match[2]), int(match[3])), int(match[4])
            if text_line[match.start() :] == line(*stream, number):
                numbers[stream].append(number)
            else:
                broken[stream].append((number, f"{text_line[:60]} ({len(text_line)} characters)"))
    return numbers, broken
