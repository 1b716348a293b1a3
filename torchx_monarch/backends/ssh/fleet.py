# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Named groups of machines: the sections ``[monarch_ssh:NAME]`` of ``.torchxconfig``."""

from __future__ import annotations

import dataclasses
import re

from torchx.runner import config

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.backends.ssh.options import SshOpts

_PREFIX = "monarch_ssh"
_KEYS = ("hosts", "python", "setup")


def with_fleet(options: SshOpts) -> SshOpts:
    """Return run options in which the values of the fleet's section stand for the fleet.

    Args:
        options: the run options; without ``fleet`` they are returned as they are.

    Raises:
        UserError: there is no such section, or it has no machines or an unknown name.
    """
    if not options.fleet:
        return options
    name = f"[{_PREFIX}:{options.fleet}]"
    section = config.get_configs(_PREFIX, options.fleet)
    if not section.get("hosts"):
        known = ", ".join(sorted(config.load_sections(_PREFIX))) or "none"
        raise UserError(
            f"Run option `fleet` is {options.fleet}: .torchxconfig has no section {name} with `hosts = a;b` (fleets "
            f"there: {known})"
        )
    unknown = sorted(section.keys() - set(_KEYS))
    if unknown:
        raise UserError(f"{name} of .torchxconfig has {unknown[0]!r}; a fleet has {', '.join(_KEYS)}")
    hosts = [one.strip() for one in re.split("[;,\n]", section["hosts"]) if one.strip()]
    more = {key: section[key] for key in ("python", "setup") if section.get(key)}
    return dataclasses.replace(options, fleet="", hosts=hosts, **more)
