# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a client asks a live allocation to run."""

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
    """One run.

    Attributes:
        command: a whole torchrun or Python command; None for the allocation's own.
        program: a script, or ``-m`` and a module, with its arguments, in place of the allocation's own; None for that.
        nproc: processes on each host, as torchrun's ``--nproc-per-node``; empty for what the command says.
        env: variables that the ranks get beside the hosts' own.
        cwd: folder on every host that the ranks start in; empty for the hosts' own.
        code: hash of the code; empty where it is not known.
        synced: whether every host has a copy of it to run in, which ``cwd`` then does not name.
        timeout: seconds from its start after which it is ended; None for none.
        queue: whether it may wait for runs before it.
        by: who wants it, for people.
        shown: the command, for people.
    """

    command: tuple[str, ...] | None
    program: tuple[str, ...] | None
    nproc: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str = ""
    code: str = ""
    synced: bool = False
    timeout: float | None = None
    queue: bool = False
    by: str = ""
    shown: str = ""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RunRequest:
        """What a client sends.

        Raises:
            ValueError: a field is not what it should be; the message says which.
        """
        for name in ("command", "program"):
            words = message.get(name)
            if words is not None and not (
                isinstance(words, list) and words and all(isinstance(word, str) for word in words)
            ):
                raise ValueError(f"{name} of the run is no list of words")
        if message.get("command") is not None and message.get("program") is not None:
            raise ValueError("a run has a command or a program, not both")
        for name in ("nproc", "cwd", "code", "by"):
            if not isinstance(message.get(name) or "", str):
                raise ValueError(f"{name} of the run is no text")
        env = message.get("env") or {}
        if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
            raise ValueError("env of the run is no mapping from names to texts")
        if bad := [name for name in env if not name or "=" in name or "\0" in name + env[name]]:
            raise ValueError(f"env of the run has {bad[0]!r:.60}, which is no variable")
        if ours := sorted(name for name in env if is_for_hosts(name) or name == "MONARCH_JOB"):
            raise ValueError(f"env of the run has {', '.join(ours)}, which are the hosts' own")
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
            timeout=timeout,
            queue=message.get("queue") is True,
            by=(message.get("by") or "")[:200],
        )

    def shown_as(self, held: tuple[str, ...]) -> RunRequest:
        """With ``shown`` filled in, where the allocation's own command is ``held``."""
        text = shlex.join(self.command or self.program or held)
        return dataclasses.replace(self, shown=text if len(text) <= _SHOWN_AT_MOST else f"{text[:_SHOWN_AT_MOST]}…")

    def to_json(self) -> dict[str, Any]:
        """What every host is told."""
        return {
            "command": self.command,
            "program": self.program,
            "nproc": self.nproc,
            "env": dict(self.env),
            "cwd": self.cwd,
            "code": self.code,
            "synced": self.synced,
        }


def _words(words: list[str] | None) -> tuple[str, ...] | None:
    return tuple(words) if words is not None else None
