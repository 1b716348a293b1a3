# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""A loaded library's calls can be led elsewhere. Who is refused then: tests/local/test_other_users.py."""

from __future__ import annotations

import _ctypes
import _socket
import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from torchx_monarch.monarch_adapter import socket_guard

_LIBRARY = getattr(_ctypes, "__file__", "")

pytestmark = pytest.mark.skipif(not _LIBRARY, reason="this Python has its modules built in")

_ACCEPTS = """
import _socket, socket, tempfile, threading
from torchx_monarch.monarch_adapter import socket_guard
socket_guard.guard(_socket.__file__)
for family, where in ((socket.AF_UNIX, b""), (socket.AF_INET, ("127.0.0.1", 0))):
    with socket.socket(family) as listener:
        listener.bind(where)
        listener.listen()
        listener.setblocking(False)
        for _ in range(3):
            try:
                listener.accept()
                print("accepted nobody")
            except BlockingIOError:
                pass
        with socket.create_connection(listener.getsockname()) if where else socket.socket(family) as client:
            if not where:
                client.connect(listener.getsockname())
            listener.setblocking(True)
            accepted = []
            thread = threading.Thread(target=lambda: accepted.append(listener.accept()[0]))
            thread.start()
            thread.join(60)
            accepted[0].sendall(b"ok")
            print(client.recv(2).decode())
            accepted[0].close()
slots = list(socket_guard.slots(_socket.__file__, ("accept4", "accept")))
import ctypes
real = {name: ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value for name, _ in slots}
print(all(ctypes.c_size_t.from_address(slot).value != real[name] for name, slot in slots) and bool(slots))
"""


def test_finds_where_a_library_keeps_the_functions_it_calls() -> None:
    found = list(socket_guard.slots(_LIBRARY, ("dlopen", "dlsym", "no_such_function")))
    assert {name for name, _ in found} == {"dlopen", "dlsym"}
    process = ctypes.CDLL(None)
    for name, slot in found:
        function = ctypes.cast(getattr(process, name), ctypes.c_void_p).value
        assert ctypes.c_size_t.from_address(slot).value == function


@pytest.mark.skipif(not hasattr(_socket, "__file__"), reason="_socket is part of this interpreter, and no library")
def test_a_guarded_library_accepts_our_own_connections() -> None:
    done = subprocess.run([sys.executable, "-c", _ACCEPTS], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["ok", "ok", "True"], done.stderr


def test_says_why_a_library_cannot_be_guarded(tmp_path: Path) -> None:
    with pytest.raises(socket_guard.NotGuarded, match="calls none of accept4, accept"):
        socket_guard.guard(_LIBRARY)
    with pytest.raises(socket_guard.NotGuarded, match="nosuch"):
        socket_guard.guard(f"{tmp_path}/nosuch.so")
