# SPDX-License-Identifier: BSD-3-Clause
"""The end of the interpreter of a Monarch client."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import sys, threading, time
{first}
from torchx_monarch.monarch_adapter import monarch_api
monarch_api.prepare_import()

def monarch():  # as one of its threads that has not ended within Monarch's second
    with open(f"/proc/self/task/{{threading.get_native_id()}}/comm", "w") as name:
        name.write("monarch-pytokio")
    named.set()
    time.sleep({seconds})
    print("ended", flush=True)

named = threading.Event()
threading.Thread(target=monarch, daemon=True).start()
named.wait()
"""


@pytest.mark.parametrize(
    ("first", "seconds", "printed"),
    [("", 0.5, "ended\n"), ("sys.modules['monarch._rust_bindings'] = sys", 1000, "")],
    ids=["Monarch is imported later", "Monarch was imported before, and its threads are told to end last"],
)
def test_it_waits_for_monarchs_threads(first: str, seconds: float, printed: str) -> None:
    command = [sys.executable, "-c", _PROGRAM.format(first=first, seconds=seconds)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
