# SPDX-License-Identifier: BSD-3-Clause
"""No test waits for ever: pytest's own limit ends the process that runs it, and with it the report of what it did."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import waits

_TESTS = Path(waits.__file__).parent

_RUNS = {"run", "call", "check_call", "check_output"}

_LASTING = ("clusters/kubernetes/container.py", "conformance/record.py", "soak/")
"""What runs programs for as long as they take: it stands in for a container's runtime, or is a command of its own."""


def unlimited(text: str) -> Iterator[int]:
    """Yield the lines of calls that wait for a program and name no limit."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        runs = call.func.attr in _RUNS and ast.unparse(call.func.value) == "subprocess"
        if (runs or call.func.attr == "communicate") and "timeout" not in {one.arg for one in call.keywords}:
            yield call.lineno


def test_every_program_has_a_limit() -> None:
    texts = {str(path.relative_to(_TESTS)): path.read_text() for path in _TESTS.rglob("*.py")}
    found = [
        f"{name}:{line}"
        for name, text in texts.items()
        if not name.startswith(_LASTING) and ("subprocess." in text or ".communicate(" in text)
        for line in unlimited(text)
    ]
    assert not found, "give them timeout=WITHIN (tests/waits.py)"


def test_waits_say_what_they_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits.until(lambda: 3, "three") == 3
    with pytest.raises(AssertionError, match=r"still waiting for Godot after 0.01 s"):
        waits.until(lambda: False, "Godot", 0.01, every=0.001)
    monkeypatch.setattr(waits, "WITHIN", 0.01)
    with pytest.raises(AssertionError, match=r"still waiting for Godot after 0.01 s"):
        asyncio.run(waits.until_async(lambda: False, "Godot"))
