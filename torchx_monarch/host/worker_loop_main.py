# SPDX-License-Identifier: BSD-3-Clause
"""The process of a Monarch worker loop beside ranks: ``python -m torchx_monarch.host.worker_loop_main DESCRIPTOR``.

It reads a JSON line from stdin (see ``worker_loops``) and writes JSON lines to the descriptor: ``address``, once the
loop listens; ``line``, for the job's log; ``reason`` and ``shut_down``, why the loop has ended, and whether its client
did that. It ends when its stdin does, with all processes of actors.
"""

from __future__ import annotations

import os
import sys

# As in ``host.__main__``: a module of the user's must not shadow those that this process imports.
if __name__ == "__main__" and sys.path[0] == os.getcwd() and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from torchx_monarch.monarch_adapter.worker_loop import WorkerLoop  # noqa: E402
from torchx_monarch.system import processes  # noqa: E402
from torchx_monarch.transport.local_addresses import NetworkOptions  # noqa: E402

_MAX_TEXT = 8000
"""Characters of a report: a line of ``messages`` has a limit, and JSON can use six bytes for each."""


def main(reports: int) -> NoReturn:
    """Run a worker loop to its end.

    Args:
        reports: descriptor of the pipe for reports.
    """
    os.set_inheritable(reports, False)
    processes.become_subreaper()
    # Ctrl-C reaches all processes of the terminal: the host decides what ends. A function, because what a process
    # ignores its children ignore, too.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    lifeline, shut_down = os.dup(0), False
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    with open(lifeline, "rb", 0) as stdin:
        spec = json.loads(stdin.readline())
        try:
            shut_down = asyncio.run(_run(spec, stdin.fileno(), reports))
            reason = "was shut down by its client" if shut_down else ""
        except ImportError as error:
            reason = f"cannot start: {error}. Install torchmonarch on all hosts"
        except Exception as error:
            reason = f"cannot start: {error}"
    processes.kill_until_gone(lambda: processes.descendants(os.getpid(), spec["marker"]))
    _report(reports, {"reason": reason, "shut_down": shut_down})
    os._exit(0)  # Monarch's threads take seconds to join


async def _run(spec: dict[str, Any], lifeline: int, reports: int) -> bool:
    """Run the loop until its client shuts it down or the lifeline is closed; return whether it was shut down."""
    options = NetworkOptions(**spec["network"])
    worker = WorkerLoop.reserve(spec["scheme"], spec["advertised"], options, spec["folder"])
    ended, is_shut_down = asyncio.Event(), False

    def shut_down() -> None:
        nonlocal is_shut_down
        is_shut_down = True
        ended.set()

    asyncio.get_running_loop().add_reader(lifeline, ended.set)
    await worker.start(
        spec["tls"],
        lambda text: _report(reports, {"line": text}),
        lambda text: _report(reports, {"line": f"INSECURE: {text}"}),
        spec["lease"],
        shut_down,
    )
    _report(reports, {"address": worker.address})
    await ended.wait()
    return is_shut_down


def _report(reports: int, report: dict[str, Any]) -> None:
    shown = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in report.items()}
    with contextlib.suppress(BrokenPipeError):  # the host has ended
        os.write(reports, json.dumps(shown).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
