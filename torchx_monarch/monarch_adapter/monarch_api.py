# SPDX-License-Identifier: BSD-3-Clause
"""The adapter to Monarch 0.7: its names, environment variables and behaviour.

``start_worker`` imports Monarch (0.15 s, without torch). Monarch reads its environment variables at that import.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.exceptions import ClientError
from torchx_monarch.model.env_names import keep_monarch_log_private
from torchx_monarch.monarch_adapter import socket_guard
from torchx_monarch.monarch_adapter.attachment import CA, attach, without_noise
from torchx_monarch.system import process_status

if TYPE_CHECKING:
    from monarch import actor
    from monarch.job import JobTrait

_TUNING = {
    # Environment variable only, no configure() key. By default a dead process stays unnoticed for 10 s.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_PROC_STOP_MAX_IDLE": "5s",
}

_BEYOND_LEASE = 15.0
"""Seconds beyond the lease after which Monarch itself gives up a silent process. Hosts detect it earlier by their own
leases and name the host; Monarch's error only names a mesh, a rank and a time-out."""

_TLS_VARIABLES = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")

_THREAD = "monarch-pytokio"
"""Name of Monarch's threads that take the GIL."""

_THREADS_END_WITHIN = 10.0

_ATTACH_TIMEOUT = 60.0
"""Seconds for a client to connect to the hosts of a mesh, all of which have joined."""

_STOP_TIMEOUT = 5.0
"""Seconds to stop a client's mesh before the hosts end."""


@functools.cache
def prepare_import() -> None:
    """Import Monarch such that it logs to this program's stderr, and that its threads end before the interpreter.

    If Monarch is imported already, it has opened its log file, and goes on with that.
    """
    keep_monarch_log_private(os.environ)
    if "monarch._rust_bindings" not in sys.modules:
        atexit.register(_wait_for_threads)
        with without_noise():
            import monarch._rust_bindings  # noqa: F401


def _wait_for_threads() -> None:
    """Wait until Monarch's threads have ended: one that takes the GIL later aborts the process (upstream.md).

    Monarch's functions at exit, registered later, run before this one, and wait for the threads for one second.
    """
    until = time.monotonic() + _THREADS_END_WITHIN
    while time.monotonic() < until:
        found = (process_status.status(os.getpid(), thread) for thread in process_status.threads(os.getpid()))
        if not any(status is not None and status.name.startswith(_THREAD) for status in found):
            break
        time.sleep(0.01)


def start_worker(
    client_url: str,
    serve_address: str,
    tls: tuple[str, str, str] | None,
    on_fault: Callable[[str], None],
    warn: Callable[[str], None],
    lease: float,
    on_shutdown: Callable[[], None],
) -> None:
    """Import Monarch and start its worker loop in this process.

    Args:
        client_url: URL on which this process listens as a client; Monarch needs it before any other call.
        serve_address: service id of this host, ``@``, and the URL on which the worker loop listens;
            ``tls://NAME:fdN`` for a socket that is bound already.
        tls: for ``tls://``: files with this host's certificate, its key, and the authority that it trusts.
        on_fault: called with the text of each unhandled fault, from a thread of Monarch, and possibly several times for
            one failure. (Monarch's default interrupts the main thread.)
        warn: called with a line for the job's log if Monarch's sockets may be unguarded (``socket_guard.protect``).
        lease: seconds for which a host may be silent until it counts as lost.
        on_shutdown: called, from a thread, when a client has shut the host mesh down.
    """
    keep_monarch_log_private(os.environ)  # to stderr, which the host process copies to its own
    for name, value in {**_TUNING, **_patience(lease)}.items():
        os.environ.setdefault(name, value)
    if tls is not None:
        os.environ.update(zip(_TLS_VARIABLES, tls, strict=True))

    from monarch import actor

    _guard(warn)
    actor.unhandled_fault_hook = lambda failure: on_fault(str(failure))
    actor.enable_transport(client_url)

    def serve() -> None:
        try:
            actor.run_worker_loop_until_shutdown(ca=CA, address=serve_address)
        except Exception as error:
            on_fault(f"the worker loop failed: {error}")
        on_shutdown()

    threading.Thread(target=serve, name="monarch-worker-loop", daemon=True).start()


def _patience(lease: float) -> dict[str, str]:
    """Return Monarch's time-outs for silent processes, all longer than the lease."""
    silent = lease + _BEYOND_LEASE
    return {
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": f"{silent:.0f}s",
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": f"{silent:.0f}s",
        # Default 30 s, counted from the last message that was not acknowledged.
        "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": f"{silent:.0f}s",
        # Must be longer than the sum of the polls above.
        "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": f"{4 * silent:.0f}s",
    }


def _guard(warn: Callable[[str], None]) -> None:
    from importlib import metadata  # Monarch has imported it

    from monarch import _rust_bindings

    try:
        version = metadata.version("torchmonarch")
    except metadata.PackageNotFoundError:  # a build of the user's own
        version = ""
    socket_guard.protect(_rust_bindings.__file__, version, warn)


# -- a user's process as a client of hosts that wait for actors --------------------------------------------------------


def become_client(url: str, tls: Sequence[str], warn: Callable[[str], None], gateway: str = "") -> None:
    """Have this process listen as Monarch's client on a URL that the hosts can reach, or connect through a gateway.

    Args:
        url: URL to listen on; empty for Monarch's default, which only hosts on this machine can reach.
        tls: for ``tls://``: files with the client's certificate, its key, and the authority that it trusts; else empty.
            Monarch reads the files again for every connection, so they may be replaced.
        warn: called with a line if Monarch's sockets may be unguarded (``socket_guard.protect``).
        gateway: address of the host through which all messages pass, so that no host dials this process; empty for
            none. A process cannot change its gateway.
    """
    from monarch import actor

    _guard(warn)
    if tls:
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

        os.environ.update(zip(_TLS_VARIABLES, tls, strict=True))
        reload_config_from_env()  # Monarch read its environment when it was imported
    try:
        if gateway:
            actor.attach(gateway.partition("@")[2])
        elif url:
            actor.enable_transport(url)
    except RuntimeError as error:
        if gateway:
            raise ClientError(f"Monarch cannot go through {gateway} in this process: {error}") from None
        raise ClientError(
            f"Monarch already runs in this process and listens where these hosts cannot reach it: they need {url}. "
            f"Call state() of the job before anything else of Monarch's (this_host, spawn_procs, another job). {error}"
        ) from None


def host_mesh(name: str, addresses: Sequence[str]) -> actor.HostMesh:
    """Return the hosts of these addresses as one mesh with the dimension ``hosts``."""
    from monarch._src.actor.sync_state import fake_sync_state

    try:
        with fake_sync_state():  # as JobTrait does: state() is also called from within asyncio
            return attach(name, addresses, _ATTACH_TIMEOUT)
    except Exception as error:
        raise ClientError(
            f"the hosts of mesh {name!r} cannot be reached ({', '.join(addresses)}): {error!r}"
        ) from error


def stop_mesh(mesh: actor.HostMesh) -> None:
    """Stop the procs that were started on a mesh, so that they do not fail when the hosts end."""
    from monarch._src.actor.sync_state import fake_sync_state

    with fake_sync_state():
        mesh.stop().get(timeout=_STOP_TIMEOUT)


def forbid(mesh: actor.HostMesh, why: str) -> None:
    """Have each further use of a mesh raise a ``ClientError`` with this text. Monarch's own has a backtrace of Rust."""
    from monarch import actor

    class Forbidden(actor.HostMesh):  # type: ignore[misc]
        @property
        def _inner_host_mesh(self) -> Any:
            raise ClientError(why)

    mesh.__class__ = Forbidden


def batch_job(job: JobTrait) -> JobTrait:
    """Return the job that ``apply(client_script=...)`` hands to the script. It represents the job around the script."""
    from monarch._src.job.job import BatchJob

    return BatchJob(job)
