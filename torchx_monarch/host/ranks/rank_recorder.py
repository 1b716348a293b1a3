# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""In a rank: give torch's flight recorder, the last collectives, to the host (see ``recorder_dumps``).

``zygote_main`` runs this file in a rank that is forked. All private names of torch that ranks need for it are here.

When the program forms its first process group, this process connects to the host, and a thread waits for requests. The
thread uses no time until then, and is none of ``threading``'s. A dump takes the GIL, which a collective does not hold.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

SIZE = struct.Struct("!Q")
"""The head of a dump: its size in bytes."""


_SEND_TIMEOUT = 5
"""Seconds for which a host that does not read delays the end of a program that has failed."""


def watch(path: str) -> Callable[[], None]:
    """Connect to the host when the program forms a process group.

    Args:
        path: socket file of the host.

    Returns:
        A function that sends a dump; it does nothing without a process group.
    """
    connections: list[socket.socket] = []
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    read = _reader()
    if read is None or not hasattr(c10d, "_update_default_pg"):
        return lambda: None
    update, own, sending = c10d._update_default_pg, os.getpid(), _thread.allocate_lock()

    def send() -> None:
        with contextlib.suppress(Exception):  # of torch, too: the program goes on, or fails, by itself
            if connections and os.getpid() == own:
                dump = _with_group_names(read(), c10d)
                with sending:
                    connections[0].sendall(SIZE.pack(len(dump)) + dump)

    def serve() -> None:
        with contextlib.suppress(Exception):
            while connections[0].recv(1):
                send()

    @functools.wraps(update)
    def observed(group: Any) -> None:
        update(group)
        if group is not None and not connections and os.getpid() == own:
            with contextlib.suppress(Exception):
                connections.append(_connected(path))
                _thread.start_new_thread(serve, ())

    c10d._update_default_pg = observed
    return send


def _reader() -> Callable[[], bytes] | None:
    """Return torch's function that returns the content of the recorder, pickled; None if torch has none."""
    binding = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(binding, "_dump_fr_trace", None) or getattr(binding, "_dump_nccl_trace", None)
    # Without the stack of each collective: torch 2.13 imports torch._inductor for them, which takes seconds.
    return None if dump is None else lambda: dump(includeCollectives=True, includeStackTraces=False)


def _connected(path: str) -> socket.socket:
    """Connect to the host, by a descriptor of a number that programs do not use."""
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(path)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT, 0))
        limit = os.sysconf("SC_OPEN_MAX")
        number = (min(limit, 1024) if limit > 0 else 1024) - 2  # below that of ``rank_main`` for stacks
        return socket.socket(fileno=os.dup2(near.fileno(), number, inheritable=False))


def _with_group_names(dump: bytes, c10d: Any) -> bytes:
    """Return a dump whose groups have names: torch 2.13 leaves those of Gloo empty, and its analyser fails then."""
    found = pickle.loads(dump)
    groups = found.get("pg_config", {})
    if "" not in groups:
        return dump
    del groups[""]
    for group, name in c10d._world.pg_names.items():
        ranks = sorted(c10d._world.pg_group_ranks.get(group, ()))
        groups.setdefault(str(name), {"name": str(name), "desc": str(group.group_desc), "ranks": str(ranks)})
    return pickle.dumps(found, protocol=2)
