# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one module that knows how Monarch is driven: 0.7's names, environment variables and habits.

Monarch is imported by ``start_worker`` (0.15 s, nothing of torch): it reads its environment when that happens.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.exceptions import ClientError
from torchx_monarch.monarch_adapter import socket_guard

if TYPE_CHECKING:
    from monarch import actor
    from monarch.job import JobTrait

_TUNING = {
    # Env only, no configure() key; the default of 10 s is how long a dead process stays unnoticed.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_PROC_STOP_MAX_IDLE": "5s",
}

LOG_TO_STDERR = {
    # Monarch's log would go to /tmp/USER/monarch_log.log, a name that anybody can foresee, for all jobs of the user
    # together: another user who makes that folder first can put a symbolic link or a FIFO there. There is no option for
    # another file; but when the file cannot be made, and no file can have so long a name, the log goes to stderr.
    "MONARCH_LOG_SUFFIX": "to-stderr" * 32,
    "MONARCH_FILE_LOG": "error",
}
"""Variables for every process that imports Monarch, which reads them at that moment; they keep its log out of ``/tmp``.
A host process has pointed its stderr into the job's own folder."""

_BEYOND_LEASE = 15.0
"""Seconds beyond the lease after which Monarch itself gives up a process that is silent. Hosts find it by their own
leases, and say which one it is; what Monarch says of it is a mesh, a rank and a time-out of its own."""

_TLS_VARIABLES = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")

_CA = "trust_all_connections"
"""The only value that 0.7 accepts. It says nothing: an ipc:// address is protected by its folder's mode, a tls:// one
by certificates, which Monarch demands of both ends, and the abstract sockets, which it opens unasked in the process of
the worker loop, by ``same_user``."""


def log_to_stderr() -> None:
    """Have Monarch write its log to this process's stderr; call it before Monarch is imported, it is too late after."""
    for name, value in LOG_TO_STDERR.items():
        os.environ.setdefault(name, value)


def start_worker(
    client_url: str,
    serve_url: str,
    dial_url: str,
    tls: tuple[str, str, str] | None,
    on_fault: Callable[[str], None],
    warn: Callable[[str], None],
    lease: float,
    on_shutdown: Callable[[], None] | None = None,
) -> str:
    """Import Monarch and start its worker loop in this process.

    Args:
        client_url: where this process listens as a client; must be given before Monarch does anything.
        serve_url: where the worker loop listens; ``tls://NAME:fdN`` for a socket that is bound already.
        dial_url: how others reach that.
        tls: for ``tls://``: files with this host's certificate, its key, and the authority that it trusts.
        on_fault: called, from a thread of Monarch's, with the text of each fault that no one handles; several times
            for one failure. (Monarch's default interrupts the main thread.)
        warn: called with a line for the job's log when other users of this machine can connect to Monarch.
        lease: seconds for which a host or an agent may be silent until it counts as lost.
        on_shutdown: called, from a thread, when a client has shut the host mesh down. Without it that is the end of
            this process, at once and with exit code 0.

    Returns:
        the address by which a controller attaches to it.
    """
    log_to_stderr()
    for name, value in {**_TUNING, **_patience(lease)}.items():
        os.environ.setdefault(name, value)
    if tls is not None:
        os.environ.update(zip(_TLS_VARIABLES, tls, strict=True))

    from monarch import actor

    _guard(warn)
    actor.unhandled_fault_hook = lambda failure: on_fault(str(failure))
    actor.enable_transport(client_url)
    # With a service id the host is known by that, and not by the address it believes it serves. These two lines are
    # monarch.job's new_service_proc_id and service_proc_addr, whose import costs as much as monarch.actor's.
    service = actor.ProcId(actor.Uid.instance("service"))
    if on_shutdown is None:
        actor.start_worker_loop_forever(ca=_CA, address=f"{service}@{serve_url}")
    else:
        _serve_until_shutdown(f"{service}@{serve_url}", on_fault, on_shutdown)
    return f"{service}@{dial_url}"


def _patience(lease: float) -> dict[str, str]:
    """Monarch's time-outs for processes that do not answer, longer than the lease."""
    silent = lease + _BEYOND_LEASE
    return {
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": f"{silent:.0f}s",
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": f"{silent:.0f}s",
        # 30 s by default, counted from the last message that was not acknowledged.
        "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": f"{silent:.0f}s",
        # Monarch wants it to be longer than the sum of its polls.
        "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": f"{4 * silent:.0f}s",
    }


def _guard(warn: Callable[[str], None]) -> None:
    from monarch import _rust_bindings

    try:
        socket_guard.guard(_rust_bindings.__file__)
    except socket_guard.NotGuarded as error:
        warn(f"other users of this machine can connect to Monarch and run code here: {error}")


def _serve_until_shutdown(address: str, on_fault: Callable[[str], None], on_shutdown: Callable[[], None]) -> None:
    from monarch import actor

    def serve() -> None:
        try:
            actor.run_worker_loop_until_shutdown(ca=_CA, address=address)
        except Exception as error:
            on_fault(f"the worker loop failed: {error}")
        on_shutdown()

    threading.Thread(target=serve, name="monarch-worker-loop", daemon=True).start()


def host_without_agent(error: BaseException) -> int | None:
    """Which host's agent did not start or has died: its place in the mesh, where an error of ``AgentMesh`` says so."""
    text = str(error)
    if found := re.search(r"\{'hosts': (\d+)/\d+[^}]*\}> and all its descendants have failed", text):
        return int(found[1])
    if found := re.search(r"error creating proc \(host rank (\d+)\)", text):
        return int(found[1])
    # "error spawning actor mesh: statuses: Timeout(30.05s)=0..1;Running=1..3": names of states, and ranges of hosts.
    for state, first, end in re.findall(r"[ ;](\w+)(?:\([^;]*\))?=(\d+)\.\.(\d+)", text.partition("statuses:")[2]):
        if state != "Running" and int(end) == int(first) + 1:
            return int(first)
    return None


class AgentMesh:
    """One agent actor per host.

    Args:
        addresses: of the hosts, by replica id; the first is that of the calling process.
        agent: the actor class.
        number: distinguishes the meshes that a controller forms one after the other.
        timeout: seconds for attaching and for starting the agents.

    Raises:
        Exception: whatever Monarch raises when a host cannot be attached to or an agent does not start.
    """

    def __init__(self, addresses: Sequence[str], agent: type[actor.Actor], number: int, timeout: float) -> None:
        from monarch import actor

        hosts = actor.attach_to_workers(ca=_CA, workers=list(addresses), name=f"hosts{number}")
        hosts.initialized.get(timeout=timeout)
        self._agents: Any = hosts.spawn_procs(per_host={"agent": 1}, name=f"agents{number}").spawn("agent", agent)
        self._agents.initialized.get(timeout=timeout)

    def stream(self, op: str, args: Mapping[str, Any], first: int) -> Iterator[Any]:
        """Call the agents of the hosts from the one of that number on, of which there must be some.

        Yields the answers as they come, an exception for an agent that gave none.
        """
        for answer in self._agents.slice(hosts=slice(first, None)).call.stream(op, dict(args)):
            try:
                yield answer.get()
            except Exception as error:
                yield error


# -- a user's process, which is a client of hosts that wait for actors -------------------------------------------------


def become_client(url: str, tls: Sequence[str], warn: Callable[[str], None], gateway: str = "") -> None:
    """Have this process listen as Monarch's client where the hosts can reach it, or reach them through one of them.

    Args:
        url: where; empty for Monarch's own choice, which hosts of this machine reach.
        tls: for ``tls://``: files with its certificate, its key, and the authority that it trusts. Monarch reads them
            anew for every connection, so they may be replaced.
        warn: called with a line when other users of this machine can connect to Monarch.
        gateway: address of the host through which everything goes; nobody then dials this process. Monarch has one for
            the life of a process.

    Raises:
        ClientError: it listens elsewhere already, or has another gateway.
    """
    from monarch import actor

    _guard(warn)
    if tls:
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env

        os.environ.update(zip(_TLS_VARIABLES, tls, strict=True))
        reload_config_from_env()  # Monarch has read its environment when it was imported
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


def host_mesh(name: str, addresses: Sequence[str], timeout: float) -> actor.HostMesh:
    """The hosts of these addresses as one mesh, of dimension ``hosts``.

    Raises:
        ClientError: they cannot be reached in time.
    """
    from monarch import actor
    from monarch._src.actor.sync_state import fake_sync_state

    mesh = actor.attach_to_workers(ca=_CA, workers=list(addresses), name=name)
    try:
        with fake_sync_state():  # as JobTrait has it: state() is called from within asyncio as well
            mesh.initialized.get(timeout=timeout)
    except Exception as error:
        raise ClientError(
            f"the hosts of mesh {name!r} cannot be reached ({', '.join(addresses)}): {error!r}"
        ) from error
    return mesh


def stop_mesh(mesh: actor.HostMesh, timeout: float) -> None:
    """End what was started on the hosts of a mesh, so that nothing of it fails when they go."""
    from monarch._src.actor.sync_state import fake_sync_state

    with fake_sync_state():
        mesh.stop().get(timeout=timeout)


def batch_job(job: JobTrait) -> JobTrait:
    """What ``apply(client_script=...)`` leaves for the script: a job that is the one around it."""
    from monarch._src.job.job import BatchJob

    return BatchJob(job)


def in_batch_job() -> bool:
    """Whether this process is the script of a job."""
    return os.environ.get("MONARCH_BATCH_JOB") == "1"
