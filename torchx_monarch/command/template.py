# SPDX-License-Identifier: BSD-3-Clause
"""Apply TorchX's template substitution to the arguments and environment of a role.

TorchX passes both through ``string.Template``: ``$$`` becomes ``$``, and a macro such as ``${app_id}`` becomes its
value. The value is unknown before the job is submitted, and may be a shell variable (Slurm). Any other ``$`` stays.
"""

from __future__ import annotations

from string import Template

from torchx.specs import macros

from torchx_monarch.command.torchrun_options import UNEXPANDED

_MACROS = frozenset(macros.Values("", "", "", "").to_dict())


def substitute(text: str) -> tuple[str, list[int]]:
    """Substitute ``text`` as TorchX does, with UNEXPANDED in place of each macro.

    Returns:
        The substituted text, and for each of its characters the index in ``text``.
    """
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
    """Return a template whose substitution is ``text``."""
    return text.replace("$", "$$")
