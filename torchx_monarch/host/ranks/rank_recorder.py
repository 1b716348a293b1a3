# SPDX-License-Identifier: BSD-3-Clause
"""In a rank: give torch's flight recorders, the last collectives, to the host (see ``flight_recorders``).

``zygote_main`` runs this file in a rank that is forked. All private names of torch that ranks need for it are here.
When the program forms its first process group, this process connects to the host, and a thread, none of
``threading``'s, waits for requests. An answer takes the GIL, which a collective does not hold.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import functools
import json
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

HEAD = struct.Struct("!cQ")
"""The head of a message: its kind, and its size in bytes."""

DUMP, GROUPS = b"d", b"s"
"""The kinds of a request: for a dump of each recorder, and for the state of the collectives. The last message of the
answer has the same kind. That to a request for dumps is empty; the dumps are before it (``DUMPS``)."""

DUMPS = {b"g": "gloo", b"n": "nccl"}
"""The kinds of a message with a dump, and whose collectives the recorder has."""

FAILURE = b"f"
"""The kind of a message without a request, after the dumps: a program has failed; its exit code (``CODE``)."""

CODE = struct.Struct("!i")

MAX_GROUPS = 64
"""Process groups of which a rank tells the state: the first ones. One with several recorders counts several times."""

MAX_RECENT = 16
"""Last collectives of each group of which it tells."""

MAX_CALLS = 256
"""Last collectives of each group whose times it tells, if it is in few groups."""

_ALL_CALLS = 1024
"""The same of all groups together."""

_MAX_SIZES = 8
"""Shapes of one collective, and dimensions of each."""

_LAST_READ = 1.0
"""Seconds for which the end of the interpreter waits for an answer that is being made."""

_SEND_TIMEOUT = 5
"""Seconds for which a host that does not read delays the end of a program that has failed."""


def watch(path: str) -> Callable[[int], None]:
    """Connect to the host, by its socket file, when the program forms a process group.

    The result reports to the host that the program has failed, with an exit code, and sends a dump of each recorder;
    without a process group it does nothing.
    """
    connections: list[socket.socket] = []
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    recorders = _recorders(sys.modules.get("torch._C._distributed_c10d"))
    if not recorders or not hasattr(c10d, "_update_default_pg"):
        return lambda code: None
    update, own, groups = c10d._update_default_pg, os.getpid(), _RecordedGroups(recorders, c10d)
    reading, sending = _thread.allocate_lock(), _thread.allocate_lock()

    def send(messages: dict[bytes, bytes]) -> None:
        with sending:
            for kind, message in messages.items():
                connections[0].sendall(HEAD.pack(kind, len(message)) + message)

    def send_failure(code: int) -> None:
        with contextlib.suppress(Exception):  # of torch, too: the program fails by itself
            if connections and os.getpid() == own:
                send({**groups.dumps(), FAILURE: CODE.pack(code)})

    def serve() -> None:
        with contextlib.suppress(Exception):
            while request := connections[0].recv(1):
                with reading:
                    answer = {**groups.dumps(), DUMP: b""} if request == DUMP else {GROUPS: groups.to_json()}
                send(answer)

    @functools.wraps(update)
    def observed(group: Any) -> None:
        update(group)
        if group is not None and not connections and os.getpid() == own:
            with contextlib.suppress(Exception):
                connections.append(_connected(path))
                _thread.start_new_thread(serve, ())

    c10d._update_default_pg = observed
    # A thread that asks for the GIL in a function of torch while the interpreter ends is ended there: the process then
    # aborts ("terminate called without an active exception"). Registered first, this is called last.
    atexit.register(reading.acquire, timeout=_LAST_READ)
    return send_failure


def _connected(path: str) -> socket.socket:
    """Connect to the host, by a descriptor of a number that programs do not use."""
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(path)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
        limit = os.sysconf("SC_OPEN_MAX")
        number = (min(limit, 1024) if limit > 0 else 1024) - 2  # below that of ``rank_main`` for stacks
        return socket.socket(fileno=os.dup2(near.fileno(), number, inheritable=False))


def _recorders(binding: Any) -> dict[str, _Recorder]:
    """Return torch's flight recorders by the names of ``DUMPS``; those that this torch does not have are left out."""
    gloo = [binding._dump_fr_trace] if hasattr(binding, "_dump_fr_trace") else []
    nccl = [binding._dump_nccl_trace] if hasattr(binding, "_dump_nccl_trace") else []
    if gloo and "backend" in (gloo[0].__doc__ or ""):  # torch 2.15, where a variable chooses the implementation of NCCL
        nccl.append(functools.partial(gloo[0], backend="nccl2"))
    return {name: _Recorder(dumps) for name, dumps in (("gloo", gloo), ("nccl", nccl)) if dumps}


class _Recorder:
    """A flight recorder of torch, which one of torch's functions ``dumps`` returns. The others return an empty one.

    It has the last 2000 collectives, which takes 20 ms to read, and with NCCL also what is sent and received.
    """

    def __init__(self, dumps: Sequence[Callable[..., bytes]]) -> None:
        self.last_call = 0.0
        self._dumps = dumps
        self._states: dict[str, dict[str, Any]] = {}

    def read(self) -> dict[str, Any]:
        # Without the stack of each collective: torch 2.13 imports torch._inductor for them, which takes seconds.
        found = [pickle.loads(dump(includeCollectives=True, includeStackTraces=False)) for dump in self._dumps]
        return max(found, key=lambda recorder: len(recorder.get("pg_status", ())))

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of the collectives of each group; one whose collectives it has lost keeps its own."""
        found: dict[str, tuple[str, list[dict[str, Any]]]] = {}
        self._states = {name: {**state, "calls": []} for name, state in self._states.items()}
        for entry in self.read().get("entries", ()):
            self.last_call = max(self.last_call, entry["time_created_ns"] / 1e9)
            if not entry.get("is_p2p"):
                name, key = entry["process_group"][0], str(entry["pg_id"])
                if found.get(name, ("",))[0] != key:  # the first, or those before belong to a group that was destroyed
                    found[name] = (key, [])
                found[name][1].append(entry)
        for name, (_, entries) in found.items():
            # With Gloo, entries that have completed still say "scheduled", and are retired; in a rank that runs on not
            # always in their order.
            retired = [place for place, entry in enumerate(entries) if entry.get("retired")]
            unfinished = entries[retired[-1] + 1 if retired else 0 :]
            waiting = unfinished[0] if unfinished else None
            enqueued = max(entry["collective_seq_id"] for entry in entries)
            calls = {entry["collective_seq_id"]: entry["time_created_ns"] / 1e9 for entry in entries[-MAX_CALLS:]}
            count = min(MAX_CALLS, max(MAX_RECENT, _ALL_CALLS // len(found)), len(calls))
            self._states[name] = {
                "enqueued": enqueued,
                "completed": enqueued if waiting is None else waiting["collective_seq_id"] - 1,
                "waiting": None if waiting is None else _collective(waiting),
                "recent": [_collective(entry) for entry in entries[-MAX_RECENT:]],
                "calls": [calls[number] for number in range(enqueued + 1 - count, enqueued + 1) if number in calls],
            }
        return self._states


class _RecordedGroups:
    """The process groups of this rank, and the recorders that have their collectives."""

    def __init__(self, recorders: dict[str, _Recorder], c10d: Any) -> None:
        self._recorders = recorders
        self._c10d = c10d

    def to_json(self) -> bytes:
        """Return a list of ``insight.group_calls.GroupStatus``."""
        try:
            states = {name: recorder.states() for name, recorder in self._recorders.items()}
            world, found = self._c10d._world, []
            for group, name in list(world.pg_names.items()):
                ranks, used = format_ranks(world.pg_group_ranks.get(group, ())), self._used_by(group)
                for backend in used:
                    # The collectives of each backend of a group have numbers of their own.
                    shown = str(name) if len(used) == 1 else f"{name} ({backend})"
                    state = states[backend].get(str(name), {"enqueued": 0, "completed": 0})
                    found.append(
                        {"name": shown, "ranks": ranks, **state, "last_call": self._recorders[backend].last_call}
                    )
            return json.dumps(found[:MAX_GROUPS]).encode()
        except Exception:  # of a torch whose recorder is another one
            return b"[]"

    def dumps(self) -> dict[bytes, bytes]:
        """Return the dumps of the recorders that are in use, by their kind; one may have no collectives yet."""
        used = {recorder for group in list(self._c10d._world.pg_names) for recorder in self._used_by(group)}
        dumps = {}
        for kind, name in DUMPS.items():
            dump = self._recorders[name].read() if name in self._recorders else {}
            if name in used or dump.get("entries"):
                dumps[kind] = pickle.dumps(self._with_group_names(dump), protocol=2)
        return dumps

    def _used_by(self, group: Any) -> list[str]:
        config = str(self._c10d._world.pg_backend_config.get(group, ""))  # such as "cpu:gloo,cuda:nccl"
        backends = [part.rpartition(":")[2] for part in config.split(",")]
        used = dict.fromkeys("nccl" if backend.startswith("nccl") else "gloo" for backend in backends)
        return [name for name in used if name in self._recorders]

    def _with_group_names(self, recorder: dict[str, Any]) -> dict[str, Any]:
        """Give its groups names: torch 2.13 leaves those of Gloo empty, and its analyser fails then."""
        groups, world = recorder.get("pg_config", {}), self._c10d._world
        if "" in groups:
            del groups[""]
            for group, name in world.pg_names.items():
                ranks = sorted(world.pg_group_ranks.get(group, ()))
                groups.setdefault(str(name), {"name": str(name), "desc": str(group.group_desc), "ranks": str(ranks)})
        return recorder


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ``insight.group_calls.parse_ranks`` reads them: ``0-4095``, ``0-56:8``, ``1,2,7``."""
    runs: list[list[int]] = []  # of each its first and last rank, and their distance
    for rank in sorted(ranks):
        last = runs[-1] if runs else [0, 0, -1]
        if last[2] == 0 or last[2] > 0 and rank == last[1] + last[2]:
            runs[-1] = [last[0], rank, last[2] or rank - last[1]]
        else:
            runs.append([rank, rank, 0])
    parts = []
    for first, end, step in runs:
        if end == first + step and step > 1:  # two ranks apart are no run
            parts += [str(first), str(end)]
        else:
            parts.append(str(first) if not step else f"{first}-{end}" if step == 1 else f"{first}-{end}:{step}")
    return ",".join(parts)


def _collective(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "number": entry["collective_seq_id"],
        "name": entry["profiling_name"],
        "sizes": [list(size[:_MAX_SIZES]) for size in entry.get("input_sizes", ())[:_MAX_SIZES]],
        "called": entry["time_created_ns"] / 1e9,
    }
