# SPDX-License-Identifier: BSD-3-Clause
"""The run options of monarch_ssh, and the names of machines among them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.core.options import NetworkOpts

_NAME = re.compile(
    r"(?:(?P<user>[^@\s/-][^@\s/]*)@)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s@:/\[\]-][^\s@:/\[\]]*))(?::(?P<port>\d+))?"
)


@dataclass
class SshOpts(NetworkOpts):
    """The run options of monarch_ssh."""

    hosts: list[str] = field(default_factory=list)
    """The machines, as ssh names them: `alice@a;b;10.0.0.3:2222`, IPv6 addresses in brackets; or `@FILE`, a file with a
    machine on each line. Replica K of each role runs on the K-th of them."""

    python: str = "python3"
    """The Python interpreter on the machines, in whose environment torchx-monarch is installed."""

    setup: str = ""
    """Shell commands that each machine runs before Python, such as `source env.sh`; what they export is the environment
    of the replicas."""


def ssh_arguments(machine: str) -> list[str]:
    """Return the arguments of ssh that name a machine. (An ``ssh://`` URI may hold no IPv6 address, OpenSSH 9.2.)

    Raises:
        UserError: it is no machine; a name that begins with ``-`` would be an option of ssh.
    """
    found = _NAME.fullmatch(machine)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65536):
        raise UserError(
            f"Run option `hosts`: {machine!r} is no machine; machines are HOST, USER@HOST, HOST:PORT, USER@[IPV6]:PORT"
        )
    port = ["-p", str(int(found["port"]))] if found["port"] else []
    user = ["-l", found["user"]] if found["user"] else []
    return [*port, *user, "--", found["v6"] or found["host"]]


def parse_hosts(hosts: Sequence[str] | None) -> list[str]:
    """Return the names of the machines that the run option ``hosts`` names."""
    names: list[str] = []
    for word in hosts or ():  # TorchX passes None where the option is not given
        if word.startswith("@"):
            try:
                lines = Path(os.path.expanduser(word[1:])).read_text().splitlines()
            except OSError as error:
                raise UserError(f"Run option `hosts`: {word[1:]}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise UserError(f"Run option `hosts`: {word[1:]} is no text, with one machine on each line") from None
            names += [line for line in (line.partition("#")[0].strip() for line in lines) if line]
        else:
            names.append(word.strip())
    for name in names:
        ssh_arguments(name)
        if names.count(name) > 1:
            raise UserError(f"Run option `hosts` names {name} twice; each replica of a role has a machine of its own")
    return names
