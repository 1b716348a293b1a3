# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of the text of a role's arguments and environment before a process sees it.

TorchX passes both through ``string.Template``: ``$$`` becomes ``$`` and a macro such as ``${app_id}`` its value, which
is not known before the job is submitted (and may itself be a variable of a shell, as on Slurm). Any other ``$`` stays.
"""

from __future__ import annotations

from string import Template

from torchx.specs import macros

from torchx_monarch.command.torchrun_options import UNEXPANDED

_MACROS = frozenset(macros.Values("", "", "", "").to_dict())


def substitute(text: str) -> tuple[str, list[int]]:
    """``text`` as the process will see it, with UNEXPANDED for each macro, and where each character comes from."""
    characters: list[str] = []
    offsets: list[int] = []
    position = 0
    for match in Template.pattern.finditer(text):
        escaped = match["escaped"] is not None
        if escaped or (match["named"] or match["braced"]) in _MACROS:
            characters.extend(text[position : match.start()])
            offsets.extend(range(position, match.start()))
            characters.append("$" if escaped else UNEXPANDED)
            offsets.append(match.start())
            position = match.end()
    characters.extend(text[position:])
    offsets.extend(range(position, len(text)))
    return "".join(characters), offsets


def escape(text: str) -> str:
    """The template that stands for ``text`` as it is."""
    return text.replace("$", "$$")


def unescape(template: str) -> str:
    """The inverse of :func:`escape`."""
    return template.replace("$$", "$")
