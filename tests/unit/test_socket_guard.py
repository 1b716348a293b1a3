# SPDX-License-Identifier: BSD-3-Clause
"""The functions that a loaded library imports are found and replaced; when that guards Monarch's sockets.

Python's own socket library stands for Monarch's. Who is refused then: tests/local/test_private_files.py.
"""

from __future__ import annotations

import _ctypes
import ctypes
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchx_monarch.monarch_adapter import socket_guard
from torchx_monarch.monarch_adapter.socket_guard import ImportsUnknown

_PREPARED = """
import _ctypes, _socket, ctypes
from torchx_monarch.monarch_adapter import socket_guard
from torchx_monarch.monarch_adapter.socket_guard import TESTED, protect

# Debian's Python has the module in its executable, which the dynamic linker knows by no name.
LIBRARY = getattr(_socket, "__file__", None)

def warn(text):
    print("off:", text)

def values():
    # What each of the library's entries leads to: the function or, while no call has had the linker find it, a stub.
    found = socket_guard.entries(LIBRARY, ("accept4", "accept"))
    return {entry: ctypes.c_size_t.from_address(entry).value for name, entry in found}

BEFORE = values()

def guarded():
    # Whether none of them leads where it led before.
    return bool(BEFORE) and not BEFORE.items() & values().items()
"""


def said(program: str) -> list[str]:
    """What a program prints that may use the above."""
    done = subprocess.run([sys.executable, "-c", _PREPARED + program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", ["99.1", ""])
def test_is_on_with_an_unknown_version_and_says_that_it_may_not_hold(version: str) -> None:
    text, guarded = said(2 * f'protect(LIBRARY, "{version}", warn)\n' + "print(guarded())")
    assert text == (
        f"off: the guard of Monarch's sockets is not tested with Monarch {version or 'of unknown version'}, which may "
        "go around it. Other users of this machine might connect to Monarch and run code here"
    )
    assert guarded == "True"


def test_is_off_when_the_library_does_not_import_the_function() -> None:
    (text,) = said(2 * "protect(_ctypes.__file__, TESTED[0], warn)\n")
    assert text.startswith(f"off: the guard of Monarch's sockets is off (Monarch {socket_guard.TESTED[0]}): ")
    assert "calls none of accept4, accept by a name that can be led elsewhere. Other users of this machine" in text


def test_a_local_build_of_a_tested_version_is_tested() -> None:
    assert said('protect(LIBRARY, TESTED[0] + "+cu130", warn)\nprint(guarded())') == ["True"]


def test_the_version_of_the_tests_is_among_the_tested_ones() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text()
    pinned = re.search(r"^torchmonarch==(\S+)$", constraints, re.MULTILINE)
    assert pinned and pinned[1] in socket_guard.TESTED


_LIBRARY = getattr(_ctypes, "__file__", "")

has_library = pytest.mark.skipif(not _LIBRARY, reason="this Python has its modules built in")


def called(name: str) -> set[int]:
    """What the library calls under a name."""
    found = socket_guard.entries(_LIBRARY, (name,))
    return {ctypes.c_size_t.from_address(entry).value for _, entry in found}


def address_of(name: str) -> int | None:
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value


@has_library
def test_finds_where_a_library_keeps_the_functions_it_calls() -> None:
    found = list(socket_guard.entries(_LIBRARY, ("dlopen", "dlsym", "no_such_function")))
    assert {name for name, _ in found} == {"dlopen", "dlsym"}
    for name in ("dlopen", "dlsym"):
        assert called(name) == {address_of(name)}


@has_library
def test_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportsUnknown, match="calls none of accept4, accept"):
        socket_guard.redirect(_LIBRARY, {"accept4": 0, "accept": 0})
    with pytest.raises(ImportsUnknown, match="nosuch"):
        socket_guard.redirect(f"{tmp_path}/nosuch.so", {"accept4": 0})
    monkeypatch.setattr(platform, "machine", lambda: "i686")
    with pytest.raises(ImportsUnknown, match="not known how on i686, only on x86_64 and aarch64"):
        socket_guard.redirect(_LIBRARY, {"dlclose": 0})
