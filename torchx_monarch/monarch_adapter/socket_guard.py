# SPDX-License-Identifier: BSD-3-Clause
"""A guard that restricts Monarch's abstract unix sockets to connections from this user and root.

Monarch 0.7 listens on *abstract* unix sockets in the process of its worker loop (``ChannelTransport::Unix``), whatever
address it serves. Such a socket has a name in ``/proc/net/unix`` and no file mode: every user in the same network
namespace can connect, and a client can run any code in this process. No option turns these sockets off, and Monarch
dials them itself, so they must stay open. The guard therefore rejects connections by the peer's user id, which the
kernel provides (SO_PEERCRED).

The guard replaces the ``accept4`` that Monarch's library imports (``library_imports``) by a Python function. The
function holds the interpreter lock for some microseconds per connection, so no thread may wait for the accepting thread
while it holds that lock.

A later Monarch may accept connections in another way: with a version that is not among ``TESTED``, hosts say so.

The guard can go when Monarch can serve without abstract sockets, or checks its peers itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from torchx_monarch.monarch_adapter.library_imports import ImportsUnknown, redirect

TESTED = ("0.7.0",)
"""Versions of Monarch with which tests/local/test_other_users.py has passed."""

_FUNCTIONS = ("accept4", "accept")

_CREDENTIALS = struct.Struct("=3i")

# Keeps the callbacks alive: the library calls them until the process ends.
_callbacks: list[Any] = []

_called = False


def protect(library: str, version: str, warn: Callable[[str], None]) -> None:
    """Install the guard in this process. Only the first call has an effect.

    From then on the library rejects connections over unix sockets from users other than this one and root. A rejected
    peer reads the end of the connection. The library gets ECONNABORTED, as if the peer had closed the connection before
    it was accepted. Sockets of other families are not affected.

    Args:
        library: path of the file of Monarch's library, which is loaded.
        version: version of Monarch; empty if it is not known.
        warn: called at most once, with a line for the log if the guard is off, or not tested with this version.
    """
    global _called
    if _called:
        return
    _called = True
    risk = "Other users of this machine might connect to Monarch and run code here"
    shown = version or "of unknown version"
    try:
        redirect(library, {name: _replacement(name) for name in _FUNCTIONS})
    except ImportsUnknown as error:
        warn(f"the guard of Monarch's sockets is off (Monarch {shown}): {error}. {risk}")
        return
    if version.partition("+")[0] not in TESTED:
        warn(f"the guard of Monarch's sockets is not tested with Monarch {shown}, which may go around it. {risk}")


def _replacement(name: str) -> int:
    """Return the address of a C function that replaces ``accept`` or ``accept4``."""
    flags = [ctypes.c_int] if name == "accept4" else []
    # use_errno: the caller gets the errno that ctypes keeps for this thread, set by the real function or ``set_errno``.
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *flags, use_errno=True)
    real: Callable[..., int] = prototype((name, ctypes.CDLL(None, use_errno=True)))
    ours = os.geteuid()

    def accept(*arguments: Any) -> int:
        connection = real(*arguments)
        if connection < 0 or _allowed(connection, ours):
            return connection
        with contextlib.suppress(OSError):
            os.close(connection)
        ctypes.set_errno(errno.ECONNABORTED)
        return -1

    callback = prototype(accept)
    _callbacks.append(callback)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    return address


def _allowed(connection: int, ours: int) -> bool:
    try:
        peer = socket.socket(fileno=connection)
        try:
            if peer.family != socket.AF_UNIX:
                return True
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _CREDENTIALS.unpack(credentials)[1] in (ours, 0)
        finally:
            peer.detach()
    except Exception:  # the caller is C code: nothing could handle an exception
        return False
