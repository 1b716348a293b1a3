# SPDX-License-Identifier: BSD-3-Clause
"""A client's request for a run on a live allocation."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

from torchx_monarch.model.env_names import is_for_hosts

_SHOWN_AT_MOST = 500


@dataclasses.dataclass(frozen=True)
class RunRequest:
    """A request for one run.

    Attributes:
        command: a whole torchrun or Python command; None to use the allocation's own.
        program: a script, or ``-m`` and a module, with arguments, that replaces the program of the allocation's own
            command; None to keep it.
        nproc: processes per host, as torchrun's ``--nproc-per-node``; empty to use the command's value.
        env: variables of the ranks, in addition to those of the hosts.
        cwd: absolute path of the ranks' working folder on every host; empty for the hosts' own.
        code: hash of the code; empty if it is not known.
        synced: whether the ranks run in each host's copy of that code; ``cwd`` does not name that copy.
        workspace: names the client's folder of which the code is a copy; runs of other workspaces use other copies.
        timeout: seconds from its start after which the run is ended; None for no limit.
        queue: whether the run may wait for earlier runs.
        by: the user who requests the run, for messages.
        shown: the command as text, for messages.
    """

    command: tuple[str, ...] | None
    program: tuple[str, ...] | None
    nproc: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str = ""
    code: str = ""
    synced: bool = False
    workspace: str = ""
    timeout: float | None = None
    queue: bool = False
    by: str = ""
    shown: str = ""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RunRequest:
        """Parse a client's message.

        Raises:
            ValueError: a field has an invalid value; the message says which.
        """
        for name in ("command", "program"):
            words = message.get(name)
            if words is not None and not (
                isinstance(words, list) and words and all(isinstance(word, str) for word in words)
            ):
                raise ValueError(f"{name} of the run is no list of words")
        if message.get("command") is not None and message.get("program") is not None:
            raise ValueError("a run has a command or a program, not both")
        for name in ("nproc", "cwd", "code", "workspace", "by"):
            if not isinstance(message.get(name) or "", str):
                raise ValueError(f"{name} of the run is no text")
        env = message.get("env") or {}
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ValueError("env of the run is no mapping from names to texts")
        if bad := [name for name in env if not name or "=" in name or "\0" in name + env[name]]:
            raise ValueError(f"env of the run has {bad[0]!r:.60}, which is no variable")
        if reserved := sorted(name for name in env if is_for_hosts(name) or name == "MONARCH_JOB"):
            raise ValueError(f"env of the run has {', '.join(reserved)}, which are the hosts' own")
        if (cwd := message.get("cwd")) and not os.path.isabs(cwd):
            raise ValueError(f"cwd of the run, {cwd!r:.200}, is no absolute path")
        timeout = message.get("timeout")
        if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < float("inf")):
            raise ValueError(f"timeout of the run is {timeout!r:.20}; it is a number of seconds above 0")
        return cls(
            command=_words(message.get("command")),
            program=_words(message.get("program")),
            nproc=message.get("nproc") or "",
            env=env,
            cwd=message.get("cwd") or "",
            code=(message.get("code") or "")[:200],
            synced=message.get("synced") is True,
            workspace=(message.get("workspace") or "")[:5000],
            timeout=timeout,
            queue=message.get("queue") is True,
            by=(message.get("by") or "")[:200],
        )

    def shown_as(self, default_command: tuple[str, ...]) -> RunRequest:
        """Return a copy with ``shown`` set, where ``default_command`` is the allocation's own command."""
        text = shlex.join(self.command or self.program or default_command)
        return dataclasses.replace(self, shown=text if len(text) <= _SHOWN_AT_MOST else f"{text[:_SHOWN_AT_MOST]}…")


def _words(words: list[str] | None) -> tuple[str, ...] | None:
    return tuple(words) if words is not None else None
