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
import secrets  # noqa: E402
import signal  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from torchx_monarch.system import processes  # noqa: E402
from torchx_monarch.transport import local_addresses  # noqa: E402

_MAX_TEXT = 8000
"""Characters of a report: a line of ``messages`` has a limit, and JSON can use six bytes for each."""

_DIGITS = "23456789abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
"""The digits of base 58 but for zero, which is ``1``: Monarch does not print an id's leading zeros, so an id with some
would not be recognized in its messages (``attachment``)."""


def main(reports: int) -> NoReturn:
    """Run a worker loop to its end; ``reports`` is the descriptor of the pipe for reports."""
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
    processes.kill_until_gone(lambda: processes.descendants(os.getpid(), os.environ.get(processes.MARKER, "")))
    _report(reports, {"reason": reason, "shut_down": shut_down})
    os._exit(0)  # Monarch's threads take seconds to join


async def _run(spec: dict[str, Any], lifeline: int, reports: int) -> bool:
    """Run the loop until its client shuts it down or the lifeline is closed; return whether it was shut down."""
    loop, ended, is_shut_down = asyncio.get_running_loop(), asyncio.Event(), False

    def shut_down() -> None:  # in a thread of Monarch
        nonlocal is_shut_down
        is_shut_down = True
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(ended.set)

    def start() -> str:
        from torchx_monarch.monarch_adapter import monarch_api

        client_url, address, serve_address = _addresses(spec)
        monarch_api.start_worker(
            client_url,
            serve_address,
            spec["tls"],
            lambda text: _report(reports, {"line": text}),
            lambda text: _report(reports, {"line": f"INSECURE: {text}"}),
            spec["lease"],
            shut_down,
        )
        return address

    loop.add_reader(lifeline, ended.set)
    _report(reports, {"address": await loop.run_in_executor(None, start)})
    await ended.wait()
    return is_shut_down


def _addresses(spec: dict[str, Any]) -> tuple[str, str, str]:
    """Open the ports of the loop; return this process's URL as Monarch's client, the address with which a client
    attaches, and the one on which the loop listens: service id, ``@``, and URL."""
    service = new_service_id()
    if spec["scheme"] == "ipc":
        client, worker = (f"ipc://{os.path.join(spec['folder'], name)}" for name in ("client", "worker"))
        return client, f"{service}@{worker}", f"{service}@{worker}"
    url = f"{spec['scheme']}://{spec['advertised']}"
    client_socket, worker_socket = (local_addresses.bind_port(spec["bind"], spec["ports"]) for _ in range(2))
    address = f"{service}@{url}:{worker_socket.getsockname()[1]}"
    return f"{url}:fd{client_socket.detach()}", address, f"{service}@{url}:fd{worker_socket.detach()}"


def new_service_id() -> str:
    """Return a random service id of a worker loop.

    A host with a service id is identified by that id, and not by the address that it believes it serves. An id of
    Monarch's own is a number of 64 bits in base 58. Ten digits of that base fit into 64 bits whatever they are.
    """
    return f"service<{''.join(secrets.choice(_DIGITS) for _ in range(10))}>"


def _report(reports: int, report: dict[str, Any]) -> None:
    shown = {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in report.items()}
    with contextlib.suppress(BrokenPipeError):  # the host has ended
        os.write(reports, json.dumps(shown).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
