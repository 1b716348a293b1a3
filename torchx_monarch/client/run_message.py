# SPDX-License-Identifier: BSD-3-Clause
"""Build the message that asks the hosts of a live allocation for a run."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Sequence
from typing import Any

from torchx_monarch.client.hosts import Hosts
from torchx_monarch.client.run_options import RunOptions
from torchx_monarch.client.workspace_sync import sync_workspace
from torchx_monarch.system.user_name import user_name

_COMMAND = re.compile(r"torchrun|python(3(\.\d+)?)?")


def split_command(command: str | Sequence[str]) -> list[str]:
    """Return the words of a command. A string is split as a shell splits it.

    Raises:
        ValueError: the string has an unclosed quotation.
    """
    if not isinstance(command, str):
        return [str(word) for word in command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ValueError(f"{error} in {command!r}") from None


def run_message(hosts: Hosts, script_args: str | Sequence[str] | None, options: RunOptions) -> dict[str, Any]:
    """Give the hosts the current state of the workspace, and return the ``run`` message that asks them for a run.

    Args:
        script_args: what to run, as for ``SPMDJob.run_spmd``.
        options: the options of the run. Its ``workspace`` is the one to send; None to send none.

    Raises:
        CodeError: the workspace could not be sent to the hosts.
        RefusedError: the hosts refuse this client.
        AllocationError: the hosts have ended, or did not start in time.
        UnreachableError: the hosts cannot be reached, and waiting does not help.
        ValueError: ``script_args`` is empty or has an unclosed quotation.
    """
    words = split_command(script_args) if script_args is not None else None
    if words == []:
        raise ValueError("script_args is empty; None runs the allocation's own command")
    whole = words is not None and _COMMAND.fullmatch(os.path.basename(words[0])) is not None
    message: dict[str, Any] = {
        "type": "run",
        "command": words if whole else None,
        "program": None if whole else words,
        "env": {name: str(value) for name, value in (options.env or {}).items()},
        "nproc": "" if options.nproc is None else str(options.nproc),
        "timeout": options.timeout,
        "cwd": options.cwd or "",
        "queue": options.queue,
        "by": f"{user_name()}@{socket.gethostname()}",
    }
    if options.workspace:
        folder, when = os.path.expanduser(options.workspace), options.sync or "auto"
        sent = hosts.reach(lambda target: sync_workspace(target, folder, when), ready=True)
        workspace = f"{message['by']}:{os.path.realpath(folder)}"
        message.update({"code": sent.code, "cwd": sent.cwd, "synced": sent.synced, "workspace": workspace})
    return message
