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

A later Monarch may accept connections in another way. With a version that is not among ``TESTED`` the guard therefore
stays on only if it proves itself: it connects to the sockets of this process and must see each of its own connections
being accepted.

The guard can go when Monarch can serve without abstract sockets, or checks its peers itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from torchx_monarch.monarch_adapter.library_imports import ImportsUnknown, redirect

TESTED = ("0.7.0",)
"""Versions of Monarch with which tests/local/test_other_users.py has passed."""

_FUNCTIONS = ("accept4", "accept")

_SOCKET_TIMEOUT = 30.0
"""Seconds for Monarch to open its first abstract socket, where the guard must prove itself. 0.7 takes under one."""

_PROOF_TIMEOUT = 5.0
"""Seconds for Monarch to accept a connection of the proof."""

_CREDENTIALS = struct.Struct("=3i")

# Keeps the callbacks alive: the library calls them until the process ends.
_callbacks: list[Any] = []

_proofs: dict[bytes, threading.Event] = {}
"""The connections of the proof by the name of their own end; the event is set when the guard has seen one."""

_called = False


class GuardOff(Exception):
    """The guard cannot prove itself; the message says why."""


def protect(library: str, version: str, warn: Callable[[str], None]) -> None:
    """Install the guard in this process. Only the first call has an effect.

    Args:
        library: path of the file of Monarch's library, which is loaded.
        version: version of Monarch; empty if it is not known.
        warn: called at most once, possibly from another thread and some seconds later, with a line for the log if the
            guard is off: Monarch's version, the reason, and what it means.
    """
    global _called
    if _called:
        return
    _called = True

    def off(reason: Exception) -> None:
        warn(
            f"the guard of Monarch's sockets is off (Monarch {version or 'of unknown version'}): {reason}. Other users "
            "of this machine might connect to Monarch and run code here"
        )

    def prove() -> None:
        try:
            prove_guard()
        except GuardOff as error:
            undo()
            off(error)

    try:
        undo = install(library)
    except ImportsUnknown as error:
        off(error)
        return
    if version.partition("+")[0] not in TESTED:
        threading.Thread(target=prove, name="monarch-guard-proof", daemon=True).start()


def install(library: str) -> Callable[[], None]:
    """Have a loaded library reject connections over unix sockets from users other than this one and root.

    A rejected peer reads the end of the connection. The library gets ECONNABORTED, as if the peer had closed the
    connection before it was accepted. Sockets of other families are not affected.

    Returns:
        A function that undoes it.

    Raises:
        ImportsUnknown: the library cannot be changed; the message says why.
    """
    return redirect(library, {name: _replacement(name) for name in _FUNCTIONS})


def prove_guard() -> None:
    """Connect to this process's abstract sockets, and check that the guard sees the connections.

    The sockets that Monarch opens first stand for those that it opens later.

    Raises:
        GuardOff: a connection failed or was not seen, or no socket was opened in time.
    """
    deadline = time.monotonic() + _SOCKET_TIMEOUT
    while not (names := abstract_sockets()):
        if time.monotonic() > deadline:
            raise GuardOff(
                f"it is not tested with this version, and had no socket to be tried on within {_SOCKET_TIMEOUT:g} s"
            )
        time.sleep(0.05)
    for name in names:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PROOF_TIMEOUT)
            connection.bind("")  # the kernel chooses a name
            seen = _proofs[connection.getsockname()] = threading.Event()
            try:
                connection.connect(b"\0" + name)
                if not seen.wait(_PROOF_TIMEOUT):
                    raise GuardOff("it is not tested with this version, and did not see a connection that it tried")
            except OSError as error:
                raise GuardOff(f"it is not tested with this version, and could not be tried: {error}") from error
            finally:
                del _proofs[connection.getsockname()]


def abstract_sockets() -> set[bytes]:
    """Return the names, without the leading NUL, of the abstract unix sockets on which this process listens."""
    inodes = set()
    for descriptor in os.listdir(b"/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(b"/proc/self/fd/" + descriptor))
    with open("/proc/net/unix", "rb") as table:
        rows = [line.split() for line in table]
    # Columns: Num RefCount Protocol Flags Type St Inode Path. The flag is the kernel's __SO_ACCEPTCON.
    return {
        row[7][1:]
        for row in rows
        if len(row) > 7 and row[7].startswith(b"@") and row[3] == b"00010000" and b"socket:[%s]" % row[6] in inodes
    }


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
            if _proofs and (seen := _proofs.get(peer.getpeername())):
                seen.set()
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return _CREDENTIALS.unpack(credentials)[1] in (ours, 0)
        finally:
            peer.detach()
    except Exception:  # the caller is C code: nothing could handle an exception
        return False
