# SPDX-License-Identifier: BSD-3-Clause
"""The functions that a loaded library imports are found and replaced."""

from __future__ import annotations

import _ctypes
import ctypes
import platform
from pathlib import Path

import pytest

from torchx_monarch.monarch_adapter import library_imports
from torchx_monarch.monarch_adapter.library_imports import ImportsUnknown

_LIBRARY = getattr(_ctypes, "__file__", "")

pytestmark = pytest.mark.skipif(not _LIBRARY, reason="this Python has its modules built in")


def called(name: str) -> set[int]:
    """What the library calls under a name."""
    found = library_imports.entries(_LIBRARY, (name,))
    return {ctypes.c_size_t.from_address(entry).value for _, entry in found}


def address_of(name: str) -> int | None:
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value


def test_finds_where_a_library_keeps_the_functions_it_calls() -> None:
    found = list(library_imports.entries(_LIBRARY, ("dlopen", "dlsym", "no_such_function")))
    assert {name for name, _ in found} == {"dlopen", "dlsym"}
    for name in ("dlopen", "dlsym"):
        assert called(name) == {address_of(name)}


def test_replaces_a_function() -> None:
    another = address_of("dlerror")
    assert another
    own = address_of("dlclose")
    assert own
    library_imports.redirect(_LIBRARY, {"dlclose": another, "no_such_function": 0})
    try:
        assert called("dlclose") == {another}
    finally:
        library_imports.redirect(_LIBRARY, {"dlclose": own})
    assert called("dlclose") == {own}


def test_says_why_it_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportsUnknown, match="calls none of accept4, accept"):
        library_imports.redirect(_LIBRARY, {"accept4": 0, "accept": 0})
    with pytest.raises(ImportsUnknown, match="nosuch"):
        library_imports.redirect(f"{tmp_path}/nosuch.so", {"accept4": 0})
    monkeypatch.setattr(platform, "machine", lambda: "i686")
    with pytest.raises(ImportsUnknown, match="not known how on i686, only on x86_64 and aarch64"):
        library_imports.redirect(_LIBRARY, {"dlclose": 0})
