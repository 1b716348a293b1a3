# SPDX-License-Identifier: BSD-3-Clause
"""A client's request for a run on a live allocation."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from typing import Any

from torchx_monarch.model.codec import decode
from torchx_monarch.model.env_names import is_for_hosts
from torchx_monarch.system.processes import why_too_large

_MAX_SHOWN = 500


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
        code: hash of the code of which each host has a copy, in which the ranks run; empty without a copy.
        workspace: names the client's folder of which the code is a copy; runs of other workspaces use other copies.
        timeout: seconds from its start after which the run is ended; None for no limit.
        queue: whether the run may wait for earlier runs.
        ends_with_client: whether its client is a job, which takes over the events of the run, and with which it ends.
        function: what the program ``torchx_monarch.function`` calls, as base64 of a pickle; empty for other programs.
        by, shown: the user who requests the run, and the command as text, for messages.
    """

    command: tuple[str, ...] | None
    program: tuple[str, ...] | None
    nproc: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    cwd: str = ""
    code: str = ""
    workspace: str = ""
    timeout: float | None = None
    queue: bool = False
    ends_with_client: bool = False
    function: str = ""
    by: str = ""
    shown: str = ""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RunRequest:
        """Parse a client's message; raise ``ValueError`` that names the field with an invalid value."""
        given = {name: value for name, value in message.items() if value is not None}
        request = decode(cls, {"command": None, "program": None, **given}, "the run")
        request.check()
        # What is shown to others is short, whatever a client sends.
        return dataclasses.replace(
            request, code=request.code[:200], workspace=request.workspace[:5000], by=request.by[:200]
        )

    def to_message(self) -> dict[str, Any]:
        """Return the message with which a client sends the request."""
        return {"type": "run", **vars(self)}

    def check(self) -> None:
        """Raise a ``ValueError`` that names the field with an invalid value."""
        if bad := [word for word in self.command or self.program or () if "\0" in word]:
            raise ValueError(f"the run has the argument {bad[0]!r:.60}: no argument of a process can have a NUL")
        if bad := [name for name, value in self.env.items() if not name or "=" in name or "\0" in name + value]:
            raise ValueError(f"env of the run has {bad[0]!r:.60}, which is no variable")
        if reason := why_too_large(self.command or self.program or (), self.env):
            raise ValueError(f"the run cannot start: {reason}")
        if reserved := sorted(name for name in self.env if is_for_hosts(name) or name == "MONARCH_JOB"):
            raise ValueError(f"env of the run has {', '.join(reserved)}, which are the hosts' own")
        if self.cwd and not os.path.isabs(self.cwd):
            raise ValueError(f"cwd of the run, {self.cwd!r:.200}, is no absolute path")

    def shown_as(self, default_command: tuple[str, ...]) -> RunRequest:
        """Return a copy with ``shown`` set, where ``default_command`` is the allocation's own command."""
        words = self.command or self.program or default_command
        text = f"function {words[-1]}" if self.function else shlex.join(words)
        return dataclasses.replace(self, shown=text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…")
