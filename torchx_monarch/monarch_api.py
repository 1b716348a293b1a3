# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one module that knows how Monarch is driven: 0.7's names, environment variables and habits.

Monarch is imported by ``start_worker`` (0.15 s, nothing of torch): it reads its environment when that happens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchx_monarch.runtime import same_user

if TYPE_CHECKING:
    from monarch import actor

_TUNING = {
    # Env only, no configure() key; the default of 10 s is how long a dead process stays unnoticed.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    # A lost host is otherwise noticed after 69 s. The values are those of facts measured on 0.7.0: 6 s in all.
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_PROC_STOP_MAX_IDLE": "5s",
    # Its log would go to /tmp/USER/monarch_log.log, a name that anybody can foresee, for all jobs of the user together.
    # There is no option for another file; but when the file cannot be made, and no file can have so long a name, the
    # log goes to stderr, which a host process has pointed into the job's own folder.
    "MONARCH_LOG_SUFFIX": "to-stderr" * 32,
    "MONARCH_FILE_LOG": "error",
}

_CA = "trust_all_connections"
"""The only value that 0.7 accepts. It says nothing: an ipc:// address is protected by its folder's mode, a tls:// one
by certificates, which Monarch demands of both ends, and the abstract sockets, which it opens unasked in the process of
the worker loop, by ``same_user``."""


def start_worker(
    client_url: str,
    serve_url: str,
    dial_url: str,
    tls: tuple[str, str, str] | None,
    on_fault: Callable[[str], None],
    warn: Callable[[str], None],
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

    Returns:
        the address by which a controller attaches to it.
    """
    for name, value in _TUNING.items():
        os.environ.setdefault(name, value)
    if tls is not None:
        names = ("HYPERACTOR_TLS_CERT", "HYPERACTOR_TLS_KEY", "HYPERACTOR_TLS_CA")
        os.environ.update(zip(names, tls, strict=True))

    from monarch import _rust_bindings, actor

    try:
        same_user.guard(_rust_bindings.__file__)
    except same_user.NotGuarded as error:
        warn(f"other users of this machine can connect to Monarch and run code here: {error}")
    actor.unhandled_fault_hook = lambda failure: on_fault(str(failure))
    actor.enable_transport(client_url)
    # With a service id the host is known by that, and not by the address it believes it serves. These two lines are
    # monarch.job's new_service_proc_id and service_proc_addr, whose import costs as much as monarch.actor's.
    service = actor.ProcId(actor.Uid.instance("service"))
    actor.start_worker_loop_forever(ca=_CA, address=f"{service}@{serve_url}")
    return f"{service}@{dial_url}"


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

    def stream(self, op: str, args: Mapping[str, Any]) -> Iterator[Any]:
        """Call the agent of every host but the first, of which there must be some.

        Yields the answers as they come, an exception for an agent that gave none.
        """
        for answer in self._agents.slice(hosts=slice(1, None)).call.stream(op, dict(args)):
            try:
                yield answer.get()
            except Exception as error:
                yield error
