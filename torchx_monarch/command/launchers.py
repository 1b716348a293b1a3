# SPDX-License-Identifier: BSD-3-Clause
"""Say which torchrun command does what another launcher of ranks would do, such as ``accelerate launch``.

On one host such a launcher is a command like any other. On several, each host would start the ranks as if it were the
only one, unless the command gives its number.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence

from torchx.specs import Role

from torchx_monarch.command.rank_command import executed_commands

_LAUNCHERS = {
    "accelerate": ("launch", "num_processes"),
    "composer": ("", "n|nproc|world_size"),
    "deepspeed": ("", "num_gpus"),
    "fabric": ("run", "devices"),
    "lightning": ("run", "devices"),
}
"""The verb of each launcher, and its options for the number of ranks."""

_HOST_NUMBER = re.compile("--(machine_rank|node[_-]rank)")


def launcher(words: Sequence[str], replicas: int = 0) -> tuple[str, str] | None:
    """Return the launcher that ``words`` execute, and what to type after ``monarch.spmd`` to do the same.

    Return None if they execute none, or one that is told the number of its host.

    Args:
        replicas: number of hosts; 0 if it is not known.
    """
    verb, count = _LAUNCHERS.get(os.path.basename(words[0]), (None, ""))
    if verb is None or (verb and verb not in words[1:2]) or any(map(_HOST_NUMBER.match, words)):
        return None
    flags = ("-m", "--module")
    start = next((index for index, word in enumerate(words) if word in flags or word.endswith(".py")), len(words))
    program = ["-m" if word in flags and not index else word for index, word in enumerate(words[start:])] or ["PROGRAM"]
    given = re.search(rf"(?:^|\s)--?(?:{count})[ =](\d+)(?=\s|$)", " ".join(words[:start]))
    ranks = int(given[1]) if given else 0
    if words[0].endswith("accelerate") and replicas and ranks % replicas == 0:  # of all hosts
        ranks //= replicas
    shape = f"{replicas or 'NODES'}x{ranks or 'RANKS'}"
    return f"{os.path.basename(words[0])} {verb}".strip(), f"-j {shape} {shlex.join(program)}"


def launchers(role: Role) -> Iterator[tuple[str, str]]:
    """Yield what ``launcher`` finds among the commands of a role, those of a shell string included."""
    for command in executed_commands(role):
        if found := launcher(command.words, role.num_replicas):
            yield found
